"""The best way to deal the groups of all nodes out to the pipelines, exact for a few kinds of groups.

What a pipeline takes within a step depends on how many groups of each kind it has: a vector. All vectors up
to some numbers are listed, with the micro-batches that such a pipeline takes (`estimate`). What k pipelines
take together follows from what their halves take (a max-plus convolution), and which vectors all nodes can
form together from those of each node. So each step is tried for all groupings and all ways to deal at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from malleus_ds.planner.deck import Deck, from_vector, up_to_rest
from malleus_ds.planner.division import NUM_BOTTLENECKS
from malleus_ds.planner.estimate import Estimator
from malleus_ds.planner.kinds import Vector
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, IntArray
from malleus_ds.planner.node_groups import NodeGroups, State

_BATCH = 2048  # Vectors between two looks at the clock.
# Of equal shares, micro-batches that a likely pipeline would take without fill.
_LEAST_SHARE, _MOST_SHARE = 0.5, 1.8
_CLOSE = 0.0005  # Relative step that is not worth another try.
_NEVER = -(2**20)
_Amounts = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Dealer:
    """For plans with ``estimator.num_pipelines`` pipelines; deadline_s: on the monotonic clock."""

    groups: NodeGroups
    estimator: Estimator
    deadline_s: float
    _known: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def deal(self, deck: Deck, low_s: float, high_s: float) -> State | None:
        """The state of the shortest step from ``low_s`` to ``high_s``, None if there is none or no time."""
        table = self._table(deck, (low_s, high_s))
        if table is None:
            return None
        number, wanted = self.estimator.num_pipelines, self.estimator.workload.num_micro_batches
        best = None
        tried_s = high_s
        while best is None or (high_s > low_s * (1 + _CLOSE) and time.monotonic() < self.deadline_s):
            dealt = _Dealt(deck, table.amounts(tried_s, wanted))
            found = dealt.best(number)
            if found is not None and dealt.value(number, found) >= wanted:
                best, high_s = (dealt, found), tried_s
            elif best is None:
                return None
            else:
                low_s = tried_s
            tried_s = (low_s + high_s) / 2
        return deck.state(best[1], list(best[0].parts(number, best[1])))

    def _table(self, deck: Deck, steps_s: tuple[float, float]) -> _Table | None:
        """None if there is no time for it."""
        slowest = [kind.types[-1] for kind in deck.kinds]
        max_s = np.ones((len(deck.vectors), NUM_BOTTLENECKS))
        sum_s = np.full_like(max_s, np.inf)
        wanted = self._likely(deck.vectors, slowest, steps_s)
        numbers = deck.vectors[wanted]
        keys = (
            (numbers.astype(np.uint64) * self.estimator.keys[slowest]).sum(axis=1, dtype=np.uint64).tolist()
        )
        new = [place for place, key in enumerate(keys) if key not in self._known]
        for start in range(0, len(new), _BATCH):
            if time.monotonic() > self.deadline_s:
                return None
            batch = new[start : start + _BATCH]
            pipelines = [
                sorted(type_id for type_id, count in zip(slowest, vector, strict=True) for _ in range(count))
                for vector in numbers[batch].tolist()
            ]
            found = zip(*self.estimator.divider.choices(pipelines), strict=True)
            self._known.update(zip(map(keys.__getitem__, batch), found, strict=True))
        for row, key in zip(wanted.tolist(), keys, strict=True):
            max_s[row], sum_s[row] = self._known[key]
        return _Table(deck.shape, max_s, sum_s)

    def _likely(self, vectors: IntArray, types: Sequence[int], steps_s: tuple[float, float]) -> IntArray:
        """Rows of pipelines that take neither far less nor far more micro-batches than others.

        steps_s: least and most.
        """
        workload, number = self.estimator.workload, self.estimator.num_pipelines
        speeds = np.array([1 / self.groups.types[type_id].rate for type_id in types])
        passes = vectors @ speeds / workload.prefix_s[-1]  # Of all layers per second, without fill.
        share = workload.num_micro_batches / number
        least, most = (_LEAST_SHARE, _MOST_SHARE) if number > 1 else (0.0, np.inf)
        return np.flatnonzero((passes * steps_s[1] >= least * share) & (passes * steps_s[0] <= most * share))


@dataclass(frozen=True, slots=True)
class _Table:
    """shape: of the vectors; max_s, sum_s: ``[vector, bottleneck]``."""

    shape: tuple[int, ...]
    max_s: FloatArray
    sum_s: FloatArray

    def amounts(self, step_s: float, most: int) -> _Amounts:
        """Micro-batches within a step, by vector; without those that one group less takes as well."""
        steps = (step_s * (1 + RELATIVE_SLACK) - self.sum_s) / self.max_s
        amounts = np.floor(np.clip(steps.max(axis=1), -1, most - 1)).astype(np.int32) + 1
        return _without_copies(np.where(amounts > 0, amounts, _NEVER).reshape(self.shape))


@dataclass(frozen=True, slots=True)
class _Dealt:
    """single: micro-batches that a pipeline takes, by vector."""

    deck: Deck
    single: _Amounts
    _sums: dict[int, _Amounts] = field(default_factory=dict)

    def sums(self, number: int) -> _Amounts:
        """Most micro-batches that so many pipelines take that have these groups together."""
        if number == 1:
            return self.single
        if number not in self._sums:
            self._sums[number] = self._convolution(self.sums(number // 2), self.sums(number - number // 2))
        return self._sums[number]

    def _convolution(self, one: _Amounts, other: _Amounts) -> _Amounts:
        shape, sums = self.deck.shape, np.full(self.deck.shape, _NEVER, dtype=np.int32)
        amounts = one.ravel()
        rows = np.flatnonzero(amounts > 0)
        for vector, amount in zip(self.deck.vectors[rows].tolist(), amounts[rows].tolist(), strict=True):
            part = sums[from_vector(vector)]
            np.maximum(part, other[up_to_rest(shape, vector)] + amount, out=part)
        return _without_copies(sums)

    def best(self, number: int) -> Vector | None:
        """Of the vectors that all nodes form that which takes most; groups may be left over."""
        most = self.sums(number)
        for axis in range(most.ndim):
            most = np.maximum.accumulate(most, axis=axis)
        most = np.where(self.deck.is_formed[-1], most, _NEVER)
        place = int(most.argmax())
        return tuple(self.deck.vectors[place].tolist()) if most.flat[place] > 0 else None

    def value(self, number: int, total: Vector) -> int:
        return int(self.sums(number)[_within(total)].max())

    def parts(self, number: int, total: Vector) -> Iterator[Vector]:
        """Vectors of the pipelines that take most, with groups of the total."""
        sums = self.sums(number)[_within(total)]
        exact = tuple(map(int, np.unravel_index(int(sums.argmax()), sums.shape)))
        if number == 1:
            yield exact
            return
        half = self.sums(number // 2)[_within(exact)]
        rest = self.sums(number - number // 2)[_within(exact)]
        both = half + np.flip(rest)
        first = tuple(map(int, np.unravel_index(int(both.argmax()), both.shape)))
        yield from self.parts(number // 2, first)
        yield from self.parts(number - number // 2, tuple(map(int.__sub__, exact, first)))


def _within(total: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, count + 1) for count in total)


def _without_copies(amounts: _Amounts) -> _Amounts:
    """Only vectors that take more than those with one group less."""
    is_more = np.ones(amounts.shape, dtype=bool)
    for axis in range(amounts.ndim):
        less, more = [slice(None)] * amounts.ndim, [slice(None)] * amounts.ndim
        less[axis], more[axis] = slice(None, -1), slice(1, None)
        is_more[tuple(more)] &= amounts[tuple(more)] > amounts[tuple(less)]
    return np.where(is_more, amounts, _NEVER)
