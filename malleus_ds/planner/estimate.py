"""How many micro-batches pipelines take within a step, for many pipelines at once.

Equal layers are assumed, and stages in order of their layers per memory, the fewest in front, where most
micro-batches are in flight: good enough to choose among groups, and exact for most models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from malleus_ds.planner.groups import GroupType
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, IntArray, Options
from malleus_ds.planner.workload import BoolArray, Workload

# Longer pipelines are taken for impossible.
MAX_STAGES = 24
# Bottlenecks tried per group: the least number of layers for it, and more.
_NUM_LENGTHS = 3
NUM_BOTTLENECKS = 12
_NUM_ROUNDS = 4
_BATCH = 256
_NEVER_S = 1e15
# Micro-batches that no step takes, and no plan misses.
_MANY = 1e7


@dataclass(frozen=True, slots=True)
class _Divisions:
    """stages: ``[pipeline, bottleneck, stage]`` places of the groups; layers: likewise; the others
    ``[pipeline, bottleneck]``."""

    stages: IntArray
    layers: FloatArray
    is_legal: BoolArray
    max_s: FloatArray
    sum_s: FloatArray


class Estimator:
    """For plans with ``num_pipelines`` pipelines. types: by load, lightest first; steps_s: to judge by.

    keys: ``[type]`` numbers whose sums identify pipelines; the last is that of no group.
    """

    def __init__(
        self, workload: Workload, types: Sequence[GroupType], num_pipelines: int, steps_s: FloatArray
    ) -> None:
        self.workload, self.types, self.num_pipelines = workload, tuple(types), num_pipelines
        self.steps_s = steps_s
        random = np.random.default_rng(0)
        self.keys = np.append(random.integers(2**63, size=len(types), dtype=np.uint64), np.uint64(0))
        self._known: dict[int, int] = {}
        self._amounts = np.zeros((1, 2, len(steps_s)))
        self._longest = self._longest_stages()
        self._layer_s = np.array([kind.rate for kind in types]) * workload.prefix_s[-1] / workload.num_layers
        self._memory = np.array([kind.degree * (kind.memory_bytes or 1) for kind in types], dtype=float)

    def key(self, types: Sequence[int]) -> int:
        """Of a pipeline."""
        return int(self.keys[list(types)].sum()) if types else 0

    def rows(self, keys: NDArray[np.uint64], types: Callable[[int], Sequence[int]]) -> IntArray:
        """Rows of pipelines for `amounts`; types: the types of one, ascending, asked for when it is new."""
        different, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
        wanted = different.tolist()
        new = [place for place, key in enumerate(wanted) if key not in self._known]
        if new:
            start = len(self._known) + 1
            found = self._evaluate([types(int(firsts[place])) for place in new])
            stop = start + len(new)
            if stop > len(self._amounts):
                self._amounts = np.resize(self._amounts, (2 * stop, *self._amounts.shape[1:]))
            self._amounts[start:stop] = found
            self._known.update((wanted[place], start + index) for index, place in enumerate(new))
        return np.array([self._known[key] for key in wanted], dtype=np.int64)[inverse]

    def amounts(self, rows: IntArray) -> FloatArray:
        """``[pipeline, 2, step]`` micro-batches that it takes, whole and in fractions."""
        return self._amounts[rows]

    def judged(self, totals: FloatArray) -> FloatArray:
        """Values of plans that take ``totals[plan, 2, step]``; see `exchange`."""
        number = self.workload.num_micro_batches
        suffices = totals[:, 0] >= number
        first = np.where(suffices.any(axis=1), suffices.argmax(axis=1), len(self.steps_s))
        near = np.take_along_axis(totals, np.maximum(first - 1, 0)[:, None, None], axis=2)[:, :, 0]
        return np.asarray(first - np.clip(near.sum(axis=1) / _MANY, -0.5, 0.5))

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

    def _evaluate(self, pipelines: Sequence[Sequence[int]]) -> FloatArray:
        """``[pipeline, 2, step]``; far below 0 where one is impossible."""
        worst = -2.0 * self.workload.num_micro_batches
        found = np.full((len(pipelines), len(self.steps_s)), worst)
        for batch in _batches(pipelines):
            found[batch] = self._fractions([pipelines[place] for place in batch])
        return np.stack([np.floor(found + RELATIVE_SLACK), found], axis=1)

    def choices(self, pipelines: Sequence[Sequence[int]]) -> tuple[FloatArray, FloatArray]:
        """``[pipeline, bottleneck]`` longest stages, and sums of stages, inf where one is impossible."""
        max_s = np.ones((len(pipelines), NUM_BOTTLENECKS))
        sum_s = np.full_like(max_s, np.inf)
        for batch in _batches(pipelines):
            found = self._divide([pipelines[place] for place in batch])
            size = found.max_s.shape[1]
            max_s[batch, :size] = found.max_s
            sum_s[batch, :size] = np.where(found.is_legal, found.sum_s, np.inf)
        return max_s, sum_s

    def _fractions(self, pipelines: Sequence[Sequence[int]]) -> FloatArray:
        """``[pipeline, step]``."""
        found, number = self._divide(pipelines), self.workload.num_micro_batches
        rest = (self.steps_s * (1 + RELATIVE_SLACK) - found.sum_s[:, :, None]) / found.max_s[:, :, None]
        fractions = np.where(found.is_legal[:, :, None], rest + 1, -number).max(axis=1)
        # The better the fewer layers (or groups too many) or the less time is missing, but no other pipelines
        # make up for it.
        missing = np.abs(1 - found.layers.sum(axis=2).max(axis=1) / self.workload.num_layers)
        impossible = np.maximum(fractions - 1, -number) / 2 - number * (1 + missing[:, None])
        return np.asarray(np.where(fractions < 1, impossible, np.minimum(fractions, number)))

    def _divide(self, pipelines: Sequence[Sequence[int]]) -> _Divisions:
        """For each bottleneck the shortest pipeline."""
        num_layers = self.workload.num_layers
        length = max(map(len, pipelines))
        ids = np.array([[-1] * (length - len(pipeline)) + list(pipeline) for pipeline in pipelines])
        numbers = (ids >= 0).sum(axis=1)
        pace_s = np.where(ids >= 0, self._layer_s[ids], _NEVER_S)
        longest = np.where(ids >= 0, self._longest[ids, 1].max(axis=2), 0)
        bottlenecks_s = self._bottlenecks_s(pace_s, longest)
        order = np.argsort(pace_s, axis=1, kind="stable")
        pace_s, ids, longest = (np.take_along_axis(of, order, 1)[:, None, :] for of in (pace_s, ids, longest))
        most = np.minimum(np.floor(bottlenecks_s[:, :, None] / pace_s + 1e-9), longest)
        # Groups with few layers for their memory have room for many micro-batches in flight.
        density = np.where(ids >= 0, self._filled(most, numbers) / self._memory[ids], -1.0)
        places = np.argsort(density, axis=2, kind="stable")
        behind = np.empty_like(places)
        np.put_along_axis(behind, places, np.broadcast_to(length - np.arange(length), places.shape), axis=2)
        layers = self._filled(np.minimum(most, self._fitting(ids, behind, numbers[:, None, None])), numbers)
        is_legal = (layers.sum(axis=2) == num_layers) & ((layers > 0).sum(axis=2) == numbers[:, None])
        times_s = layers * np.where(pace_s < _NEVER_S, pace_s, 0.0)
        sum_s = times_s.sum(axis=2) + self.workload.message_s * (numbers - 1)[:, None]
        max_s = np.maximum(times_s.max(axis=2), 1 / _NEVER_S)
        stages = np.take_along_axis(np.broadcast_to(order[:, None, :], places.shape), places, 2)
        return _Divisions(stages, np.take_along_axis(layers, places, 2), is_legal, max_s, sum_s)

    def _filled(self, most: FloatArray, numbers: IntArray) -> FloatArray:
        """Layers of each group, the fastest first as many as it can take, but one left for each."""
        least = np.minimum(most, 1)
        extra = most - least
        before = np.cumsum(extra, axis=2) - extra
        return least + np.clip((self.workload.num_layers - numbers)[:, None, None] - before, 0, extra)

    def _fitting(self, ids: IntArray, behind: IntArray, numbers: IntArray) -> IntArray:
        """Most layers of groups in stages with so many to the last; 0 for no group."""
        place = (behind == numbers) + 2 * (behind == 1)
        return np.where(ids >= 0, self._longest[ids, behind, place], 0)

    def divisions(self, types: Sequence[int]) -> tuple[Options, IntArray, IntArray]:
        """Ways to divide the layers over a pipeline, and ``[way, stage]`` places in ``types`` and numbers of
        layers."""
        if len(types) > MAX_STAGES:
            nothing = np.empty((0, 0), np.int64)
            return Options(np.empty(0), np.empty(0), np.empty(0, np.int64)), nothing, nothing
        found = self._divide([types])
        legal = np.flatnonzero(found.is_legal[0])
        limit = np.full(len(legal), self.workload.num_micro_batches)
        options = Options(found.max_s[0, legal], found.sum_s[0, legal], limit)
        return options, found.stages[0, legal], found.layers[0, legal].astype(np.int64)

    def _bottlenecks_s(self, pace_s: FloatArray, longest: IntArray) -> FloatArray:
        """``[pipeline, bottleneck]``: whole layers on one of the groups, about as long as all need."""
        even_s = np.zeros((len(pace_s), 1))
        for _ in range(_NUM_ROUNDS):  # Where memory limits some groups, the others take more.
            is_limited = even_s > longest * pace_s
            rest = self.workload.num_layers - np.where(is_limited, longest, 0).sum(axis=1, keepdims=True)
            speed = np.where(is_limited, 0.0, 1 / pace_s).sum(axis=1, keepdims=True)
            even_s = np.maximum(even_s, rest / np.maximum(speed, 1 / _NEVER_S))
        finite_s = np.where(pace_s < _NEVER_S, pace_s, even_s)
        lengths = np.ceil(even_s / finite_s - 1e-9)
        lengths = lengths[:, :, None] + np.arange(_NUM_LENGTHS)
        found = np.sort((lengths * finite_s[:, :, None]).reshape(len(pace_s), -1), axis=1)
        is_copy = np.diff(found, axis=1, prepend=0.0) <= RELATIVE_SLACK * found
        return np.sort(np.where(is_copy, _NEVER_S, found), axis=1)[:, :NUM_BOTTLENECKS]


def _batches(pipelines: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Places of the pipelines that may be possible, those of about as many stages together."""
    places = [place for place, types in enumerate(pipelines) if 0 < len(types) <= MAX_STAGES]
    places.sort(key=lambda place: len(pipelines[place]))
    for start in range(0, len(places), _BATCH):
        yield places[start : start + _BATCH]
