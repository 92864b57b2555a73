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
    """shape: one more than the most of each kind; vectors: ``[vector, kind]``, in the order of the shape, so
    that rows add up like vectors; codes: per vector, which also add up, and tell whether the sum `fits`;
    ways: of each node, by vector; node_vectors: the same as arrays ``[way, kind]``; is_formed: whether no
    node, the first, the first two, ... form all groups of a vector, and maybe others; is_enough: per vector,
    whether all nodes do.
    """

    kinds: tuple[Kind, ...]
    shape: tuple[int, ...]
    vectors: IntArray
    codes: IntArray
    ways: tuple[dict[Vector, Way], ...]
    node_vectors: tuple[IntArray, ...]
    is_formed: tuple[BoolArray, ...]
    is_enough: BoolArray

    @staticmethod
    def near(groups: NodeGroups, state: State, most_rows: int) -> Deck:
        """At most so many vectors of the groups that the state has, and some more."""
        kinds = tuple(sorted(kinds_near(groups, state, most_rows), key=lambda kind: kind.most))
        shape = tuple(kind.most + 1 for kind in kinds)
        vectors = np.indices(shape).reshape(len(shape), -1).T
        ways = tuple(vectors_of(ways, kinds) for ways in groups.ways)
        is_formed = tuple(_is_formed(shape, ways))
        return Deck(
            kinds,
            shape,
            vectors,
            vectors @ (1 << _places(shape)),
            ways,
            tuple(np.array([*found], dtype=np.int64) for found in ways),
            is_formed,
            is_formed[-1].ravel(),
        )

    def fits(self, codes: IntArray) -> BoolArray:
        """Whether sums of two vectors' codes are vectors of the deck."""
        places, sizes = _places(self.shape), np.array(self.shape)
        # One bit more than a number needs is set where it is too large.
        bits = np.diff(places, append=_num_bits(self.shape).sum()) - 1
        missing = int((((1 << bits) - sizes) << places).sum())
        return np.asarray(((codes + missing) & int((1 << (places + bits)).sum())) == 0)

    def without_copies(self, amounts: IntArray) -> IntArray:
        """0 for vectors that take no more than those with one group less."""
        shaped = amounts.reshape(self.shape)
        is_more = shaped > 0
        for axis in range(shaped.ndim):
            less, more = [slice(None)] * shaped.ndim, [slice(None)] * shaped.ndim
            less[axis], more[axis] = slice(None, -1), slice(1, None)
            is_more[tuple(more)] &= shaped[tuple(more)] > shaped[tuple(less)]
        return np.where(is_more.ravel(), amounts, 0)

    def state(self, parts: Sequence[Vector]) -> State:
        """Nodes grouped so that they have the groups of all parts, and maybe others; owned as in these."""
        places = {type_id: place for place, kind in enumerate(self.kinds) for type_id in kind.types}
        owners = [
            [owner for owner, part in enumerate(parts) for _ in range(part[place])]
            for place in range(len(self.kinds))
        ]
        state = []
        for way in reversed(list(self._chosen(tuple(map(sum, zip(*parts, strict=True)))))):
            groups = []
            for type_id, ranks in way:
                free = owners[places[type_id]] if type_id in places else []
                groups.append(Group(type_id, ranks, free.pop() if free else STANDBY))
            state.append(tuple(groups))
        return tuple(state)

    def _chosen(self, total: Vector) -> Iterator[Way]:
        """Ways of the nodes that form the total and maybe more, the last node first."""
        for ways, before in zip(reversed(self.ways), reversed(self.is_formed[:-1]), strict=True):
            for vector, way in ways.items():
                rest = tuple(max(0, left - count) for left, count in zip(total, vector, strict=True))
                if before[rest]:
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
            more = tuple(slice(count, None) for count in vector)
            rest = tuple(slice(0, size - count) for size, count in zip(shape, vector, strict=True))
            is_formed[more] |= before[rest]
        for axis in range(len(shape)):  # What others exceed is formed, too.
            is_formed = np.flip(np.logical_or.accumulate(np.flip(is_formed, axis), axis=axis), axis)
        yield is_formed


def _num_bits(shape: Sequence[int]) -> IntArray:
    """Of the numbers of each kind, and one more."""
    return np.array([(size - 1).bit_length() + 1 for size in shape])


def _places(shape: Sequence[int]) -> IntArray:
    """First bit of each kind's number in a code."""
    bits = _num_bits(shape)
    return np.cumsum(bits) - bits
