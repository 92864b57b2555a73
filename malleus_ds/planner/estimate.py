"""How many micro-batches pipelines take within each of some steps, for many pipelines at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from malleus_ds.planner.division import Divider, batches
from malleus_ds.planner.groups import GroupType
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, IntArray
from malleus_ds.planner.workload import Workload

# Micro-batches that no step takes, and no plan misses.
_MANY = 1e7


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
        self.divider = Divider(workload, types, num_pipelines)

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

    def _evaluate(self, pipelines: Sequence[Sequence[int]]) -> FloatArray:
        """``[pipeline, 2, step]``; far below 0 where one is impossible."""
        worst = -2.0 * self.workload.num_micro_batches
        found = np.full((len(pipelines), len(self.steps_s)), worst)
        for batch in batches(pipelines):
            found[batch] = self._fractions([pipelines[place] for place in batch])
        return np.stack([np.floor(found + RELATIVE_SLACK), found], axis=1)

    def _fractions(self, pipelines: Sequence[Sequence[int]]) -> FloatArray:
        """``[pipeline, step]``."""
        found, number = self.divider.divide(pipelines), self.workload.num_micro_batches
        rest = (self.steps_s * (1 + RELATIVE_SLACK) - found.sum_s[:, None]) / found.max_s[:, None]
        fractions = np.full((len(pipelines), len(self.steps_s)), -float(number))
        firsts = np.flatnonzero(np.diff(found.pipeline, prepend=-1))
        if firsts.size:
            fractions[found.pipeline[firsts]] = np.maximum(np.maximum.reduceat(rest + 1, firsts), -number)
        # The better the fewer layers (or groups too many) or the less time is missing, but no other pipelines
        # make up for it.
        missing = np.abs(1 - found.placed / self.workload.num_layers)
        impossible = np.maximum(fractions - 1, -number) / 2 - number * (1 + missing[:, None])
        return np.asarray(np.where(fractions < 1, impossible, np.minimum(fractions, number)))
