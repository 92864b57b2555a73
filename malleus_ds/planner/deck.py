"""The groups to be dealt out: all numbers of them by kind, and which of these the nodes form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from malleus_ds.planner.kinds import Kind, Vector, kinds_near, vectors_of
from malleus_ds.planner.micro_batches import IntArray
from malleus_ds.planner.node_groups import STANDBY, Group, NodeGroups, State, Way
from malleus_ds.planner.workload import BoolArray


@dataclass(frozen=True, slots=True)
class Deck:
    """shape: one more than the most of each kind; vectors: ``[vector, kind]``, in the order of the shape;
    ways: of each node, by vector; is_formed: whether no node, the first, the first two, ... form a vector.
    """

    kinds: tuple[Kind, ...]
    shape: tuple[int, ...]
    vectors: IntArray
    ways: tuple[dict[Vector, Way], ...]
    is_formed: tuple[BoolArray, ...]

    @staticmethod
    def near(groups: NodeGroups, state: State, most_rows: int) -> Deck:
        """At most so many vectors of the groups that the state has, and some more."""
        kinds = tuple(sorted(kinds_near(groups, state, most_rows), key=lambda kind: kind.most))
        shape = tuple(kind.most + 1 for kind in kinds)
        vectors = np.indices(shape).reshape(len(shape), -1).T
        ways = tuple(vectors_of(ways, kinds) for ways in groups.ways)
        return Deck(kinds, shape, vectors, ways, tuple(_is_formed(shape, ways)))

    def state(self, total: Vector, parts: Sequence[Vector]) -> State:
        """Nodes grouped so that the numbers of all kinds are the total, and owned as in the parts."""
        places = {type_id: place for place, kind in enumerate(self.kinds) for type_id in kind.types}
        owners = [
            [owner for owner, part in enumerate(parts) for _ in range(part[place])]
            for place in range(len(self.kinds))
        ]
        state = []
        for way in reversed(list(self._chosen(total))):
            groups = []
            for type_id, ranks in way:
                free = owners[places[type_id]] if type_id in places else []
                groups.append(Group(type_id, ranks, free.pop() if free else STANDBY))
            state.append(tuple(groups))
        return tuple(state)

    def _chosen(self, total: Vector) -> Iterator[Way]:
        """Ways of the nodes that make up the total, the last node first."""
        for ways, before in zip(reversed(self.ways), reversed(self.is_formed[:-1]), strict=True):
            for vector, way in ways.items():
                rest = tuple(map(int.__sub__, total, vector))
                if min(rest) >= 0 and before[rest]:
                    yield way
                    total = rest
                    break


def _is_formed(shape: tuple[int, ...], nodes: Sequence[dict[Vector, Way]]) -> Iterator[BoolArray]:
    """First of no node, then of one more each."""
    is_formed = np.zeros(shape, dtype=bool)
    is_formed[(0,) * len(shape)] = True
    yield is_formed
    for vectors in nodes:
        before, is_formed = is_formed, np.zeros(shape, dtype=bool)
        for vector in vectors:
            is_formed[from_vector(vector)] |= before[up_to_rest(shape, vector)]
        yield is_formed


def from_vector(vector: Sequence[int]) -> tuple[slice, ...]:
    """Vectors that exceed this one or equal it."""
    return tuple([slice(count, None) for count in vector])


def up_to_rest(shape: Sequence[int], vector: Sequence[int]) -> tuple[slice, ...]:
    """Vectors to which this one can be added."""
    return tuple([slice(0, size - count) for size, count in zip(shape, vector, strict=True)])
