"""Which multisets of devices form pipelines, exactly, by dynamic programming over all multisets.

Within a step time T each multiset takes a known number of micro-batches (its capacity), so T can be met if
and only if disjoint multisets have capacities that sum up to all micro-batches: a knapsack over the lattice
of multisets, once per number of pipelines. T is bisected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from malleus_ds.planner.lattice import Lattice
from malleus_ds.planner.micro_batches import IntArray, Options, Shares, share_micro_batches

_IMPOSSIBLE = -(10**9)
# Relative step time below which two groupings count as equal.
TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True)
class Packing:
    """Most micro-batches within a step time. counts: ``[number of pipelines, multiset]``."""

    counts: IntArray
    capacity: IntArray


@dataclass(frozen=True, slots=True)
class Grouping:
    """multisets: of the pipelines; shares: their micro-batches and options."""

    multisets: tuple[int, ...]
    shares: Shares


class Knapsack:
    """The disjoint multisets with the largest total capacity."""

    def __init__(self, lattice: Lattice) -> None:
        self._size = len(lattice)
        self._outer, self._inner = lattice.contained_pairs()
        self._rest = self._outer - self._inner
        self._starts = np.flatnonzero(np.diff(self._outer, prepend=-1))
        self._heads = self._outer[self._starts]

    def pack(self, capacity: IntArray, num_pipelines: int) -> Packing:
        """``capacity``: of each multiset; tables for 0 to ``num_pipelines`` pipelines."""
        capacity = np.where(capacity >= 1, capacity, _IMPOSSIBLE)
        counts = np.full((num_pipelines + 1, self._size), _IMPOSSIBLE, dtype=np.int64)
        counts[0, 0] = 0
        for number in range(1, num_pipelines + 1):
            totals = counts[number - 1][self._rest] + capacity[self._inner]
            counts[number, self._heads] = np.maximum.reduceat(totals, self._starts)
        return Packing(np.maximum(counts, _IMPOSSIBLE), capacity)

    def multisets(self, packing: Packing, num_pipelines: int) -> tuple[int, ...]:
        """The pipelines behind the best entry for this number of pipelines."""
        chosen: list[int] = []
        multiset = int(packing.counts[num_pipelines].argmax())
        for number in range(num_pipelines, 0, -1):
            pairs = slice(*np.searchsorted(self._outer, [multiset, multiset + 1]))
            totals = packing.counts[number - 1][self._rest[pairs]] + packing.capacity[self._inner[pairs]]
            inner = int(self._inner[pairs][totals.argmax()])
            chosen.append(inner)
            multiset -= inner
        return tuple(chosen)


def best_grouping(
    options: Options,
    knapsack: Knapsack,
    numbers: Sequence[int],
    num_micro_batches: int,
    bounds_s: tuple[float, float],
) -> Grouping | None:
    """The grouping with the shortest step; None if none is within the upper bound.

    options: ``[multiset, option]``; numbers: of pipelines allowed; bounds_s: a step time that none can
    beat, and one that the answer must meet.
    """
    low, high = bounds_s
    best = _within(options, knapsack, numbers, num_micro_batches, high)
    if best is None:
        return None
    high = min(high, best.shares.step_s)
    low = min(low, high) * (1 - TOLERANCE)
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        grouping = _within(options, knapsack, numbers, num_micro_batches, middle)
        if grouping is None:
            low = middle
        else:
            best, high = grouping, min(middle, grouping.shares.step_s)
    return best


def _within(
    options: Options, knapsack: Knapsack, numbers: Sequence[int], num_micro_batches: int, step_s: float
) -> Grouping | None:
    capacity, _ = options.capacity(step_s)
    packing = knapsack.pack(np.minimum(capacity, num_micro_batches), max(numbers))
    totals = packing.counts.max(axis=1)
    feasible = [number for number in numbers if totals[number] >= num_micro_batches]
    if not feasible:
        return None
    multisets = knapsack.multisets(packing, max(feasible, key=lambda number: (totals[number], -number)))
    shares = share_micro_batches([options_of(options, multiset) for multiset in multisets], num_micro_batches)
    return None if shares is None else Grouping(multisets, shares)


def options_of(options: Options, multiset: int) -> Options:
    """The row of one multiset."""
    return Options(options.max_s[multiset], options.sum_s[multiset], options.limit[multiset])
