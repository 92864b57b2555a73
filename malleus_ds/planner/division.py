"""Dividing the layers over the groups of many pipelines at once, in nearly the best order of stages.

Equal layers are assumed. Under each of some bottlenecks the fastest groups take what they can; what fits
into a stage depends on its place, as more micro-batches are in flight in front. So stages with few layers for
their memory come first, or, where that leaves layers over, those with little memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from malleus_ds.planner.groups import GroupType
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, IntArray, Options
from malleus_ds.planner.workload import BoolArray, Workload

# Longer pipelines are taken for impossible.
MAX_STAGES = 24
# Bottlenecks: the least number of layers for it on each group, and more; as if all had the best place, and
# in order of their memory.
_NUM_LENGTHS = (3, 2)
_NUM_EACH = (12, 5)
NUM_BOTTLENECKS = sum(_NUM_EACH)
_NUM_ROUNDS = 4
_BATCH = 256
_NEVER_S = 1e15


@dataclass(frozen=True, slots=True)
class Divisions:
    """Ways to divide the layers.

    pipeline, column: of each way, the latter its place among those of its pipeline; groups: ``[way, stage]``
    places in the pipeline's list, and layers: that they hold, those of no group in front; max_s, sum_s: of
    the stages; placed: per pipeline, the most layers that any bottleneck lets its groups hold, or its groups
    if they are more.
    """

    pipeline: IntArray
    column: IntArray
    groups: IntArray
    layers: IntArray
    max_s: FloatArray
    sum_s: FloatArray
    placed: FloatArray


class Divider:
    """For plans with ``num_pipelines`` pipelines of groups of these types."""

    def __init__(self, workload: Workload, types: Sequence[GroupType], num_pipelines: int) -> None:
        self.workload, self.types, self.num_pipelines = workload, tuple(types), num_pipelines
        rates = np.array([kind.rate for kind in types])
        self._layer_s = np.append(rates * workload.prefix_s[-1] / workload.num_layers, _NEVER_S)
        memory = np.array([float(kind.degree * (kind.memory_bytes or 1)) for kind in types])
        self._memory = np.append(memory / memory.max(), 0.0)
        # No group holds no layer.
        self._longest = np.pad(self._longest_stages(), ((0, 1), (0, 0), (0, 0)))

    def _longest_stages(self) -> IntArray:
        """``[type, stages behind, place]`` most layers that fit; places: inside, first, last, only."""
        workload, num_layers = self.workload, self.workload.num_layers
        shapes = {(kind.degree, kind.memory_bytes): kind for kind in self.types}
        lengths = np.arange(1, num_layers + 1)
        inside = workload.kind_of[np.minimum(1, num_layers - lengths), np.minimum(1 + lengths, num_layers)]
        kinds = (inside, workload.kind_of[0, lengths], workload.kind_of[num_layers - lengths, num_layers])
        longest = np.zeros((len(shapes), MAX_STAGES + 1, 4), dtype=np.int64)
        for behind in range(1, MAX_STAGES + 1):
            in_flight = min(behind, workload.num_micro_batches)
            fits = workload.fits([*shapes.values()], self.num_pipelines, in_flight)
            for place, of_length in enumerate(kinds):
                longest[:, behind, place] = np.logical_and.accumulate(fits[:, of_length], axis=1).sum(axis=1)
        longest[:, :, 3] = np.minimum(longest[:, :, 1], longest[:, :, 2])
        places = {shape: place for place, shape in enumerate(shapes)}
        return longest[[places[kind.degree, kind.memory_bytes] for kind in self.types]]

    def divide(self, pipelines: Sequence[Sequence[int]]) -> Divisions:
        """Legal ways for each pipeline of 1 to ``MAX_STAGES`` groups, given by their types."""
        num_layers, length = self.workload.num_layers, max(map(len, pipelines))
        nothing = len(self.types)
        ids = np.array([[nothing] * (length - len(pipeline)) + list(pipeline) for pipeline in pipelines])
        order = np.argsort(self._layer_s[ids], axis=1, kind="stable")  # The fastest in front.
        ids = np.take_along_axis(ids, order, 1)
        numbers = (ids < nothing).sum(axis=1)
        bottlenecks_s = self._bottlenecks_s(ids, numbers)
        pipeline, column = np.nonzero(bottlenecks_s < _NEVER_S)
        wide = ids[pipeline]
        most = np.floor(bottlenecks_s[pipeline, column, None] / self._layer_s[wide] + 1e-9)
        most = np.minimum(most.astype(np.int64), self._longest[wide, 1].max(axis=2))
        placed = numbers.astype(float)
        np.maximum.at(placed, pipeline, np.minimum(most.sum(axis=1), num_layers))
        rows = np.flatnonzero((most.sum(axis=1) >= num_layers) & (numbers[pipeline] <= num_layers))
        pipeline, column, most, wide = pipeline[rows], column[rows], most[rows], wide[rows]
        places, layers = self._placed(most, wide, numbers[pipeline])
        is_legal = (layers.sum(axis=1) == num_layers) & ((layers > 0) == (wide < nothing)).all(axis=1)
        pipeline, column, wide = pipeline[is_legal], column[is_legal], wide[is_legal]
        places, layers = places[is_legal], layers[is_legal]
        times_s = layers * np.where(wide < nothing, self._layer_s[wide], 0.0)
        sum_s = times_s.sum(axis=1) + self.workload.message_s * (numbers[pipeline] - 1)
        return Divisions(
            pipeline,
            column,
            np.take_along_axis(order[pipeline], places, 1) - (length - numbers[pipeline])[:, None],
            np.take_along_axis(layers, places, 1),
            np.maximum(times_s.max(axis=1, initial=0.0), 1 / _NEVER_S),
            sum_s,
            placed,
        )

    def _placed(self, most: IntArray, ids: IntArray, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """``[way, stage]`` places of the groups, and ``[way, group]`` layers that they hold there."""
        wanted = self._filled(most, numbers)
        memory, is_group = self._memory[ids], ids < len(self.types)
        density = np.where(is_group, wanted / np.maximum(memory, 1 / _NEVER_S), -1.0)
        places, layers = self._fitted(density, most, ids, numbers)
        again = np.flatnonzero(layers.sum(axis=1) < self.workload.num_layers)
        if again.size:
            # Equal memory: the fewest layers in front.
            size = np.where(is_group, memory + 1e-3 * wanted / self.workload.num_layers, -1.0)[again]
            places[again], layers[again] = self._fitted(size, most[again], ids[again], numbers[again])
        return places, layers

    def _fitted(
        self, key: FloatArray, most: IntArray, ids: IntArray, numbers: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Stages in order of the key."""
        places, longest = self._ordered(key, ids, numbers)
        return places, self._filled(np.minimum(most, longest), numbers)

    def _ordered(self, key: FloatArray, ids: IntArray, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """``[way, stage]`` places of the groups in order of the key; ``[way, group]`` most layers there."""
        places = np.argsort(key, axis=1, kind="stable")
        behind = np.empty_like(places)
        np.put_along_axis(behind, places, np.arange(key.shape[1], 0, -1)[None, :], axis=1)
        place = (behind == numbers[:, None]) + 2 * (behind == 1)
        return places, np.asarray(self._longest[ids, behind, place])

    def _filled(self, most: IntArray, numbers: IntArray) -> IntArray:
        """Layers of each group, the fastest first as many as it can take, but one left for each."""
        least = np.minimum(most, 1)
        extra = most - least
        before = np.cumsum(extra, axis=1) - extra
        return np.asarray(least + np.clip((self.workload.num_layers - numbers)[:, None] - before, 0, extra))

    def _bottlenecks_s(self, ids: IntArray, numbers: IntArray) -> FloatArray:
        """``[pipeline, bottleneck]``: whole layers on one of the groups, about as long as all need."""
        memory = np.where(ids < len(self.types), self._memory[ids], -1.0)
        _, limited = self._ordered(memory, ids, numbers)
        parts = []
        for longest, num_lengths, most in zip(
            (self._longest[ids, 1].max(axis=2), limited),
            _NUM_LENGTHS,
            _NUM_EACH,
            strict=True,
        ):
            even_s, pace_s = self._even_s(ids, longest), self._layer_s[ids]
            pace_s = np.where(pace_s < _NEVER_S, pace_s, even_s)
            lengths = np.ceil(even_s / pace_s - 1e-9)[:, :, None] + np.arange(num_lengths)
            found = (lengths * pace_s[:, :, None]).reshape(len(ids), -1)
            parts.append(_different(np.where(even_s < _NEVER_S, found, _NEVER_S))[:, :most])
        return _different(np.concatenate(parts, axis=1))

    def _even_s(self, ids: IntArray, longest: IntArray) -> FloatArray:
        """``[pipeline, 1]`` bottleneck if layers could be split; where memory limits some groups, the others
        take more."""
        pace_s, even_s = self._layer_s[ids], np.zeros((len(ids), 1))
        for _ in range(_NUM_ROUNDS):
            is_limited = even_s > longest * pace_s
            rest = self.workload.num_layers - np.where(is_limited, longest, 0).sum(axis=1, keepdims=True)
            speed = np.where(is_limited, 0.0, 1 / pace_s).sum(axis=1, keepdims=True)
            even_s = np.maximum(even_s, rest / np.maximum(speed, 1 / _NEVER_S))
        return even_s

    def choices(self, pipelines: Sequence[Sequence[int]]) -> tuple[FloatArray, FloatArray]:
        """``[pipeline, bottleneck]`` longest stages, and sums of stages, inf where one is impossible."""
        max_s = np.ones((len(pipelines), NUM_BOTTLENECKS))
        sum_s = np.full_like(max_s, np.inf)
        for batch in batches(pipelines):
            found = self.divide([pipelines[place] for place in batch])
            places = np.array(batch)[found.pipeline], found.column
            max_s[places], sum_s[places] = found.max_s, found.sum_s
        return max_s, sum_s

    def options(self, types: Sequence[int]) -> tuple[Options, IntArray, IntArray]:
        """Ways to divide the layers over a pipeline, and ``[way, stage]`` places in ``types`` and numbers of
        layers."""
        if not 0 < len(types) <= MAX_STAGES:
            nothing = np.empty((0, 0), np.int64)
            return Options(np.empty(0), np.empty(0), np.empty(0, np.int64)), nothing, nothing
        found = self.divide([types])
        limit = np.full(len(found.max_s), self.workload.num_micro_batches)
        return Options(found.max_s, found.sum_s, limit), found.groups, found.layers


def batches(pipelines: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Places of the pipelines that may be possible, those of about as many stages together."""
    places = [place for place, types in enumerate(pipelines) if 0 < len(types) <= MAX_STAGES]
    places.sort(key=lambda place: len(pipelines[place]))
    for start in range(0, len(places), _BATCH):
        yield places[start : start + _BATCH]


def _different(times_s: FloatArray) -> FloatArray:
    """Ascending, each once."""
    found = np.sort(times_s, axis=1)
    is_copy: BoolArray = np.diff(found, axis=1, prepend=0.0) <= RELATIVE_SLACK * found
    return np.sort(np.where(is_copy, _NEVER_S, found), axis=1)
