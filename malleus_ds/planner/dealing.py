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

from malleus_ds.planner.estimate import NUM_BOTTLENECKS, Estimator
from malleus_ds.planner.kinds import Kind, kinds_near, vectors_of
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, IntArray
from malleus_ds.planner.node_groups import STANDBY, Group, NodeGroups, State, Way
from malleus_ds.planner.workload import BoolArray

_BATCH = 2048  # Vectors between two looks at the clock.
# Of equal shares, micro-batches that a likely pipeline would take without fill.
_LEAST_SHARE, _MOST_SHARE = 0.5, 1.8
_CLOSE = 0.0005  # Relative step that is not worth another try.
_NEVER = -(2**20)
_Amounts = NDArray[np.int32]
_Vector = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dealer:
    """For plans with ``estimator.num_pipelines`` pipelines; deadline_s: on the monotonic clock."""

    groups: NodeGroups
    estimator: Estimator
    deadline_s: float
    _known: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def deal(self, near: State, low_s: float, high_s: float, most_rows: int) -> State | None:
        """The state of the shortest step from ``low_s`` to ``high_s``, None if there is none or no time.

        near: whose groups are looked at, and some more; most_rows: vectors listed.
        """
        kinds = sorted(kinds_near(self.groups, near, most_rows), key=lambda kind: kind.most)
        table = self._table(kinds, (low_s, high_s))
        if table is None:
            return None
        formed = list(_formed(table, [vectors_of(ways, kinds) for ways in self.groups.ways]))
        number, wanted = self.estimator.num_pipelines, self.estimator.workload.num_micro_batches
        best = None
        tried_s = high_s
        while best is None or (high_s > low_s * (1 + _CLOSE) and time.monotonic() < self.deadline_s):
            dealt = _Dealt(table, table.amounts(tried_s, wanted))
            found = dealt.best(number, formed[-1].is_formed)
            if found is not None and dealt.value(number, found) >= wanted:
                best, high_s = (dealt, found), tried_s
            elif best is None:
                return None
            else:
                low_s = tried_s
            tried_s = (low_s + high_s) / 2
        return self._state(kinds, formed, best[1], list(best[0].parts(number, best[1])))

    def _table(self, kinds: Sequence[Kind], steps_s: tuple[float, float]) -> _Table | None:
        """None if there is no time for it."""
        shape = tuple(kind.most + 1 for kind in kinds)
        vectors = np.indices(shape).reshape(len(shape), -1).T
        slowest = [kind.types[-1] for kind in kinds]
        max_s = np.ones((len(vectors), NUM_BOTTLENECKS))
        sum_s = np.full_like(max_s, np.inf)
        wanted = self._likely(vectors, slowest, steps_s)
        keys = (vectors[wanted].astype(np.uint64) * self.estimator.keys[slowest]).sum(axis=1, dtype=np.uint64)
        rows = dict(zip(keys.tolist(), wanted.tolist(), strict=True))
        new = [(key, row) for key, row in rows.items() if key not in self._known]
        for start in range(0, len(new), _BATCH):
            if time.monotonic() > self.deadline_s:
                return None
            batch = new[start : start + _BATCH]
            pipelines = [
                sorted(type_id for type_id, count in zip(slowest, vector, strict=True) for _ in range(count))
                for vector in vectors[[row for _, row in batch]].tolist()
            ]
            found = zip(*self.estimator.choices(pipelines), strict=True)
            self._known.update(zip((key for key, _ in batch), found, strict=True))
        for key, row in rows.items():
            max_s[row], sum_s[row] = self._known[key]
        return _Table(shape, vectors, max_s, sum_s)

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

    def _state(
        self, kinds: Sequence[Kind], formed: Sequence[_Formed], total: _Vector, parts: Sequence[_Vector]
    ) -> State:
        """Nodes grouped so that the numbers of all kinds are the total, the groups owned as in the parts."""
        places = {type_id: place for place, kind in enumerate(kinds) for type_id in kind.types}
        owners = [
            [owner for owner, part in enumerate(parts) for _ in range(part[place])]
            for place in range(len(kinds))
        ]
        state = []
        for way in reversed(list(_ways(formed, total))):
            groups = []
            for type_id, ranks in way:
                free = owners[places[type_id]] if type_id in places else []
                groups.append(Group(type_id, ranks, free.pop() if free else STANDBY))
            state.append(tuple(groups))
        return tuple(state)


@dataclass(frozen=True, slots=True)
class _Table:
    """shape: of the vectors; vectors: ``[row, kind]``; max_s, sum_s: ``[row, bottleneck]``."""

    shape: tuple[int, ...]
    vectors: IntArray
    max_s: FloatArray
    sum_s: FloatArray

    def amounts(self, step_s: float, most: int) -> _Amounts:
        """Micro-batches within a step, by vector; without those that one group less takes as well."""
        steps = (step_s * (1 + RELATIVE_SLACK) - self.sum_s) / self.max_s
        amounts = np.floor(np.clip(steps.max(axis=1), -1, most - 1)).astype(np.int32) + 1
        return _without_copies(np.where(amounts > 0, amounts, _NEVER).reshape(self.shape))


@dataclass(frozen=True, slots=True)
class _Formed:
    """Vectors that the nodes so far can form, by those of the last of them."""

    is_formed: BoolArray
    vectors: dict[_Vector, Way]


def _formed(table: _Table, nodes: Sequence[dict[_Vector, Way]]) -> Iterator[_Formed]:
    """First of no node, then of one more each."""
    is_formed = np.zeros(table.shape, dtype=bool)
    is_formed[(0,) * len(table.shape)] = True
    yield _Formed(is_formed, {})
    for vectors in nodes:
        before, is_formed = is_formed, np.zeros(table.shape, dtype=bool)
        for vector in vectors:
            is_formed[_from(vector)] |= before[_up_to(table.shape, vector)]
        yield _Formed(is_formed, vectors)


def _ways(formed: Sequence[_Formed], total: _Vector) -> Iterator[Way]:
    """Ways of the nodes that make up the total, the last node first."""
    for index in range(len(formed) - 1, 0, -1):
        for vector, way in formed[index].vectors.items():
            rest = tuple(map(int.__sub__, total, vector))
            if min(rest) >= 0 and formed[index - 1].is_formed[rest]:
                yield way
                total = rest
                break


@dataclass(frozen=True, slots=True)
class _Dealt:
    """single: micro-batches that a pipeline takes, by vector."""

    table: _Table
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
        shape, sums = self.table.shape, np.full(self.table.shape, _NEVER, dtype=np.int32)
        amounts = one.ravel()
        rows = np.flatnonzero(amounts > 0)
        for vector, amount in zip(self.table.vectors[rows].tolist(), amounts[rows].tolist(), strict=True):
            part = sums[_from(vector)]
            np.maximum(part, other[_up_to(shape, vector)] + amount, out=part)
        return _without_copies(sums)

    def best(self, number: int, is_formed: BoolArray) -> _Vector | None:
        """Of the vectors formed that which takes most; others may be left over."""
        most = self.sums(number)
        for axis in range(most.ndim):
            most = np.maximum.accumulate(most, axis=axis)
        most = np.where(is_formed, most, _NEVER)
        place = int(most.argmax())
        return tuple(self.table.vectors[place].tolist()) if most.flat[place] > 0 else None

    def value(self, number: int, total: _Vector) -> int:
        return int(self.sums(number)[_within(total)].max())

    def parts(self, number: int, total: _Vector) -> Iterator[_Vector]:
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


def _from(vector: Sequence[int]) -> tuple[slice, ...]:
    return tuple([slice(count, None) for count in vector])


def _up_to(shape: Sequence[int], vector: Sequence[int]) -> tuple[slice, ...]:
    """Vectors to which this one can be added."""
    return tuple([slice(0, size - count) for size, count in zip(shape, vector, strict=True)])


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
