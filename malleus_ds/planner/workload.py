"""The model as arrays: time and memory of every layer range.

Ranges that need the same time and memory are one *kind*: a model of equal layers has a few hundred kinds of
range instead of thousands of ranges, which is what keeps the tables of the search small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from malleus_ds.model_profile import LayerProfile
from malleus_ds.planner.cost_model import CostModel
from malleus_ds.planner.groups import GroupType
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, IntArray
from malleus_ds.planner.types import PlanRequest

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Workload:
    """All layer ranges of a request under one micro-batch size.

    max_update_s: stages whose update takes longer do not fit; is_local: updates use the faster links, between
    the devices of a node or of different ones.
    """

    request: PlanRequest
    micro_batch_size: int
    max_update_s: float = math.inf
    is_local: bool = True

    @cached_property
    def num_layers(self) -> int:
        return len(self.request.profile.layers)

    @cached_property
    def num_micro_batches(self) -> int:
        return self.request.global_batch_size // self.micro_batch_size

    @cached_property
    def cost(self) -> CostModel:
        return CostModel(self.request)

    @cached_property
    def message_s(self) -> float:
        """Per stage boundary."""
        return self.request.message_s * self.cost.size_factor(self.micro_batch_size)

    @cached_property
    def prefix_s(self) -> FloatArray:
        """``[num_layers + 1]`` healthy time of the layers before each, at the largest degree."""
        factor = self.cost.time_factor(self.micro_batch_size)
        return np.cumsum([0.0, *self.request.profile.layer_times_s]) * factor

    @cached_property
    def _layers(self) -> tuple[tuple[LayerProfile, ...], IntArray]:
        """The different layers, and ``[layer]`` which of them it is."""
        plain = [replace(layer, name="") for layer in self.request.profile.layers]
        different = tuple(dict.fromkeys(plain))
        index = {layer: position for position, layer in enumerate(different)}
        return different, np.array([index[layer] for layer in plain], dtype=np.int64)

    @cached_property
    def _kinds(self) -> tuple[IntArray, IntArray]:
        """``[start, stop]`` kind of a range, and ``[kind, different layer]`` how many it has of each."""
        different, ids = self._layers
        prefix = np.zeros((self.num_layers + 1, len(different)), dtype=np.int64)
        prefix[1:] = np.cumsum(ids[:, None] == np.arange(len(different)), axis=0)
        start, stop = np.triu_indices(self.num_layers + 1, k=1)
        counts, inverse = np.unique(prefix[stop] - prefix[start], axis=0, return_inverse=True)
        kind_of = np.zeros((self.num_layers + 1, self.num_layers + 1), dtype=np.int64)
        kind_of[start, stop] = inverse.reshape(-1)
        return kind_of, counts

    @property
    def kind_of(self) -> IntArray:
        """``[start, stop]`` kind of each layer range (0 where it is empty)."""
        return self._kinds[0]

    def _sum(self, value: Callable[[LayerProfile], float]) -> FloatArray:
        """``[kind]`` sum of a value over the layers."""
        return np.asarray(self._kinds[1] @ np.array([value(layer) for layer in self._layers[0]], dtype=float))

    @cached_property
    def time_s(self) -> FloatArray:
        """``[kind]`` healthy time of one micro-batch at the largest degree."""
        return self._sum(lambda layer: layer.time_s) * self.cost.time_factor(self.micro_batch_size)

    @cached_property
    def num_layers_of_kind(self) -> IntArray:
        """``[kind]`` length of the range."""
        return np.asarray(self._kinds[1].sum(axis=1))

    @cached_property
    def kinds_of_width(self) -> tuple[IntArray, ...]:
        """Per length from 1, ``[start]`` kind of the range."""
        starts = np.arange(self.num_layers)
        return tuple(
            self.kind_of[starts[: self.num_layers + 1 - width], starts[: self.num_layers + 1 - width] + width]
            for width in range(1, self.num_layers + 1)
        )

    @cached_property
    def kinds_by_width(self) -> IntArray:
        """``[length - 1, start]`` kind of the range, any where it would end behind the last layer."""
        starts, lengths = np.arange(self.num_layers), np.arange(1, self.num_layers + 1)
        return np.asarray(self.kind_of[starts, np.minimum(starts + lengths[:, None], self.num_layers)])

    @cached_property
    def least_time_s(self) -> FloatArray:
        """``[length - 1]`` the least time of a range of so many layers."""
        return np.array([self.time_s[kinds].min() for kinds in self.kinds_of_width])

    def needed_bytes(self, num_pipelines: int, in_flight: int) -> FloatArray:
        """``[kind]`` memory of a stage of these layers at the largest degree, without the device's own."""
        optimizer_bytes = self._sum(lambda layer: layer.optimizer_bytes)
        activation_bytes = self._sum(lambda layer: layer.activations(in_flight))
        return np.asarray(
            self._sum(lambda layer: layer.state_bytes)
            - (-optimizer_bytes // num_pipelines)
            + np.rint(activation_bytes * self.cost.size_factor(self.micro_batch_size))
        )

    def fits(self, types: Sequence[GroupType], num_pipelines: int, in_flight: int) -> BoolArray:
        """``[type, kind]``: whether a stage of these layers fits into the memory of a group's devices."""
        profile = self.request.profile
        needed = self.needed_bytes(num_pipelines, in_flight)
        rows = {
            (kind.degree, kind.memory_bytes): np.ones(len(needed), dtype=np.bool_)
            if kind.memory_bytes is None
            else needed * profile.max_degree // kind.degree <= kind.memory_bytes - profile.device_bytes
            for kind in types
        }
        fitting = np.stack([rows[kind.degree, kind.memory_bytes] for kind in types])
        if self.max_update_s < math.inf:
            degrees = np.array([kind.degree for kind in types])
            updates_s = self.updates_s(num_pipelines) * (profile.max_degree / degrees)[:, None]
            fitting &= updates_s <= self.max_update_s * (1 + RELATIVE_SLACK)
        return fitting

    def updates_s(self, num_pipelines: int) -> FloatArray:
        """``[kind]`` gradient reduction and optimizer step, at the largest degree."""
        links = self.request.links
        updates_s = self._sum(lambda layer: layer.optimizer_s) / num_pipelines
        if links is not None:
            choose = max if self.is_local else min
            bandwidth = choose(links.intra_bytes_per_s, links.inter_bytes_per_s)
            gradient_bytes = self._sum(lambda layer: layer.gradient_bytes)
            updates_s = updates_s + 2 * (num_pipelines - 1) / num_pipelines * gradient_bytes / bandwidth
        return np.asarray(updates_s)

    @property
    def has_updates(self) -> bool:
        """Whether updates take time."""
        return bool(self.updates_s(2).any())

    def stage_times_s(self, rates: Sequence[float], upper_s: float) -> FloatArray:
        """Different times that a stage can take on groups of these rates, up to ``upper_s``, ascending."""
        kinds = np.unique(self.time_s)
        times = np.unique(np.concatenate([rate * kinds for rate in sorted(set(rates))]))
        return np.asarray(times[(times > 0) & (times <= upper_s)])
