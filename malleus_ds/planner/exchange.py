"""Better plans by exchanging groups between pipelines: local search for clusters of a few nodes.

A plan is seen as the groups of each node, each in one pipeline or standby. It is improved, best change first,
by moving a group, by swapping two, and by grouping a node in another way; then shaken and improved again.
Steps are estimated (`estimate`); what is found becomes a plan by exact division of the layers (`drafts`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from malleus_ds.planner.dealing import Dealer
from malleus_ds.planner.estimate import Estimator
from malleus_ds.planner.layout import Draft, Slot
from malleus_ds.planner.micro_batches import FloatArray, IntArray, share_micro_batches
from malleus_ds.planner.movement import Movement
from malleus_ds.planner.node_groups import STANDBY, Group, NodeGroups, Ranks, State, Way

_NUM_CHANGES = 5  # Of a shake.
_LEAST_GAIN = 1e-10
# Owner, types it loses, types it gets.
_Part = tuple[int, Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Moves:
    """One group to another pipeline, or two swapped; arrays ``[move]``. givers, takers: pipelines; given,
    taken: types, the number of types for none. Standby is the last pipeline."""

    givers: IntArray
    given: IntArray
    takers: IntArray
    taken: IntArray


class Exchange:
    """For plans with ``num_pipelines`` pipelines; deadline_s: on the monotonic clock.

    dealer: for the same plans.
    """

    def __init__(self, groups: NodeGroups, estimator: Estimator, deadline_s: float) -> None:
        self._groups, self._estimator, self._deadline_s = groups, estimator, deadline_s
        self._num_pipelines = estimator.num_pipelines
        self.dealer = Dealer(groups, estimator, deadline_s)
        self._random = np.random.default_rng(0)

    def start(self, worths: Sequence[float]) -> State:
        """The groups of each node that are worth most, dealt out so that all pipelines are worth as much."""
        chosen = [max(ways, key=lambda way: sum(worths[g] for g, _ in way)) for ways in self._groups.ways]
        sums = [0.0] * self._num_pipelines
        owners: dict[Ranks, int] = {}
        for type_id, ranks in sorted((group for way in chosen for group in way), key=lambda g: -worths[g[0]]):
            owner = sums.index(min(sums))
            owners[ranks] = owner
            sums[owner] += worths[type_id]
        return tuple(tuple(Group(g, ranks, owners[ranks]) for g, ranks in way) for way in chosen)

    def draft(self, state: State, movement: Movement) -> Draft | None:
        """The plan of a state by types of group, None if it is none.

        It is legal where the estimator's assumptions hold.
        """
        workload, pipelines = self._estimator.workload, self.pipelines(state)
        if not all(pipelines):
            return None
        ways = [self._estimator.divider.options([group.type_id for group in groups]) for groups in pipelines]
        if not all(len(layers) for _, _, layers in ways):
            return None
        shares = share_micro_batches([options for options, _, _ in ways], workload.num_micro_batches)
        if shares is None:
            return None
        drafted = []
        for groups, (_, stages, layers), choice, count in zip(
            pipelines, ways, shares.choices, shares.counts, strict=True
        ):
            edges = pairwise(np.cumsum([0, *layers[choice]]).tolist())
            ordered = [groups[place].type_id for place in stages[choice]]
            slots = tuple(map(Slot, ordered, edges))
            drafted.append((slots, count))
        return Draft(tuple(drafted), self._groups.formed(state, movement))

    def pipelines(self, state: State) -> list[list[Group]]:
        """The groups of each pipeline in stage order."""
        groups = sorted((group for groups in state for group in groups), key=lambda group: group.type_id)
        return [[group for group in groups if group.owner == owner] for owner in range(self._num_pipelines)]

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline_s

    def value(self, state: State) -> float:
        """Lower is better."""
        return self.judge(state).value

    def judge(self, state: State) -> Judge:
        return Judge(self._estimator, state)

    def climb(self, state: State) -> tuple[State, float]:
        """The best state by changes that each help, and its value."""
        judge, node, num_tried = self.judge(state), 0, 0
        while num_tried < len(state) and not self._is_late():
            after = judge.best_move() if num_tried == 0 else None
            if after is None:
                after = judge.best_regrouping(node, self._groups.ways[node])
                node, num_tried = (node + 1) % len(state), num_tried + 1
            if after is not None:
                judge, num_tried = self.judge(after), 0
        return judge.state, judge.value

    def shaken(self, state: State) -> State:
        """A state some random moves away."""
        for _ in range(_NUM_CHANGES):
            judge = self.judge(state)
            moves = judge.moves()
            if not moves.givers.size:
                break
            state = judge.moved(moves, int(self._random.integers(len(moves.givers))))
        return state


class Judge:
    """Values of a state and of those near it.

    A value is the index of the first step that suffices, and a fraction that is less the more the step
    before it takes. Pipelines are known by keys, sums of their groups' keys, so that those of many changes
    are computed at once.
    """

    def __init__(self, estimator: Estimator, state: State) -> None:
        self._estimator, self.state = estimator, state
        number = estimator.num_pipelines
        members: list[list[int]] = [[] for _ in range(number + 1)]
        for groups in state:
            for group in groups:
                members[group.owner].append(group.type_id)  # Standby is the last.
        self._members = [sorted(types) for types in members]
        self._keys = np.array([estimator.key(types) for types in members], dtype=np.uint64)
        self._rows = self._find(np.arange(number + 1), self._keys, lambda index: self._members[index])
        self._total = estimator.amounts(self._rows).sum(axis=0)
        self.value = float(estimator.judged(self._total[None])[0])

    def _find(
        self, owners: IntArray, keys: NDArray[np.uint64], types: Callable[[int], Sequence[int]]
    ) -> IntArray:
        """The estimator's rows; standby has the one that takes nothing."""
        is_real = owners != self._estimator.num_pipelines
        places = np.flatnonzero(is_real)
        rows = np.zeros(len(owners), dtype=np.int64)
        rows[places] = self._estimator.rows(keys[places], lambda index: types(int(places[index])))
        return rows

    def moves(self) -> Moves:
        """One of each kind: groups of one type in one pipeline are alike."""
        nothing, number = len(self._estimator.types), self._estimator.num_pipelines
        slots = [
            (owner, type_id) for owner, types in enumerate(self._members) for type_id in sorted({*types})
        ]
        owners, types = np.array(slots, dtype=np.int64).reshape(-1, 2).T
        one, to = np.nonzero(owners[:, None] != np.arange(number + 1))
        first, second = np.nonzero((owners[:, None] < owners) & (types[:, None] != types))
        return Moves(
            np.concatenate([owners[one], owners[first]]),
            np.concatenate([types[one], types[first]]),
            np.concatenate([to, owners[second]]),
            np.concatenate([np.full_like(one, nothing), types[second]]),
        )

    def best_move(self) -> State | None:
        """The state after the best move, if it is better."""
        moves = self.moves()
        values = self.values(moves) if moves.givers.size else np.array([np.inf])
        best = int(np.argmin(values))
        return self.moved(moves, best) if values[best] < self.value - _LEAST_GAIN else None

    def moved(self, moves: Moves, index: int) -> State:
        """The state after a move of any groups of those types."""
        standby = self._estimator.num_pipelines
        giver, taker = (
            STANDBY if owner == standby else int(owner)
            for owner in (moves.givers[index], moves.takers[index])
        )
        wanted = [(giver, int(moves.given[index]), taker), (taker, int(moves.taken[index]), giver)]
        nodes = []
        for groups in self.state:
            changed = []
            for group in groups:
                to = next((entry for entry in wanted if entry[:2] == (group.owner, group.type_id)), None)
                if to is not None:
                    wanted.remove(to)
                    group = replace(group, owner=to[2])
                changed.append(group)
            nodes.append(tuple(changed))
        return tuple(nodes)

    def values(self, moves: Moves) -> FloatArray:
        keys = self._estimator.keys
        delta = keys[moves.taken] - keys[moves.given]
        new = []
        for owners, delta_of, removed, added in (
            (moves.givers, delta, moves.given, moves.taken),
            (moves.takers, np.uint64(0) - delta, moves.taken, moves.given),
        ):
            new.append(
                self._find(owners, self._keys[owners] + delta_of, self._changed(owners, removed, added))
            )
        amounts = self._estimator.amounts
        change = amounts(new[0]) + amounts(new[1])
        change -= amounts(self._rows[moves.givers]) + amounts(self._rows[moves.takers])
        return self._estimator.judged(self._total + change)

    def _changed(
        self, owners: IntArray, removed: IntArray, added: IntArray
    ) -> Callable[[int], Sequence[int]]:
        nothing = len(self._estimator.types)

        def types(index: int) -> Sequence[int]:
            found = list(self._members[owners[index]])
            if removed[index] != nothing:
                found.remove(removed[index])
            if added[index] != nothing:
                found.append(int(added[index]))
            return sorted(found)

        return types

    def best_regrouping(self, node: int, ways: Sequence[Way]) -> State | None:
        """The state after the best other grouping of a node, if it is better."""
        changes, values = self.regroupings(node, ways)
        best = int(np.argmin(values)) if changes else -1
        if best < 0 or values[best] >= self.value - _LEAST_GAIN:
            return None
        return self.regrouped(node, *changes[best])

    def regroupings(self, node: int, ways: Sequence[Way]) -> tuple[list[tuple[Way, int]], FloatArray]:
        """A node in other ways, and the values.

        Groups that are there already stay in their pipelines, one pipeline takes the new ones.
        """
        changes: list[tuple[Way, int]] = []
        firsts: list[int] = []
        parts: list[_Part] = []
        for way in ways:
            _, new, left = _matched(self.state[node], way)
            if not new:
                continue
            removed: dict[int, list[int]] = defaultdict(list)
            for group in left:
                if group.owner != STANDBY:
                    removed[group.owner].append(group.type_id)
            added = [type_id for type_id, _ in new]
            for taker in range(self._estimator.num_pipelines):
                changes.append((way, taker))
                firsts.append(len(parts))
                parts += [(owner, types, ()) for owner, types in removed.items() if owner != taker]
                parts.append((taker, removed.get(taker, ()), added))
        if not changes:
            return changes, np.empty(0)
        amounts = self._estimator.amounts
        owners = np.array([owner for owner, _, _ in parts], dtype=np.int64)
        rows = self._find(owners, self._keys_of(parts), lambda index: self._types_of(parts[index]))
        change = np.add.reduceat(amounts(rows) - amounts(self._rows[owners]), firsts)
        return changes, self._estimator.judged(self._total + change)

    def regrouped(self, node: int, way: Way, taker: int) -> State:
        kept, new, _ = _matched(self.state[node], way)
        groups = (*kept, *(Group(type_id, ranks, taker) for type_id, ranks in new))
        return (*self.state[:node], groups, *self.state[node + 1 :])

    def _keys_of(self, parts: Sequence[_Part]) -> NDArray[np.uint64]:
        keys, own = self._estimator.keys.tolist(), self._keys.tolist()
        sums = [
            own[owner] - sum(map(keys.__getitem__, removed)) + sum(map(keys.__getitem__, added))
            for owner, removed, added in parts
        ]
        return np.array([value % 2**64 for value in sums], dtype=np.uint64)

    def _types_of(self, part: _Part) -> list[int]:
        owner, removed, added = part
        types = list(self._members[owner])
        for type_id in removed:
            types.remove(type_id)
        return sorted([*types, *added])


def _matched(present: Sequence[Group], way: Way) -> tuple[list[Group], list[tuple[int, Ranks]], list[Group]]:
    """Groups of the way that are there already, those that are new, and the present ones that go."""
    left = list(present)
    kept, new = [], []
    for type_id, ranks in way:
        same = next((group for group in left if group.type_id == type_id), None)
        if same is None:
            new.append((type_id, ranks))
        else:
            left.remove(same)
            kept.append(Group(type_id, ranks, same.owner))
    return kept, new, left
