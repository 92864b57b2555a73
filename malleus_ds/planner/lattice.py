"""Multisets of devices: devices of one class are interchangeable, so they are counted, not listed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement

import numpy as np

from malleus_ds.planner.groups import planning_nodes
from malleus_ds.planner.micro_batches import IntArray
from malleus_ds.planner.types import PlanRequest


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Usable ranks with one straggling rate, of one node where tensor parallelism is possible."""

    node_id: int
    rate: float
    memory_bytes: int | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClassGroup:
    """A TP group by classes. counts: devices of each class; rate: ``y``."""

    counts: tuple[int, ...]
    degree: int
    rate: float
    memory_bytes: int | None


@dataclass(frozen=True)
class DeviceClasses:
    """All classes, slowest first within a node."""

    classes: tuple[DeviceClass, ...]
    rho: tuple[tuple[int, float], ...]

    @cached_property
    def groups(self) -> tuple[ClassGroup, ...]:
        """All that the classes can form; very many for large clusters."""
        return tuple(_groups(self.classes, self.rho))

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(members.ranks) for members in self.classes)

    @property
    def num_multisets(self) -> int:
        return math.prod(count + 1 for count in self.counts)

    @classmethod
    def of(cls, request: PlanRequest, ranks: Sequence[int]) -> DeviceClasses:
        """Classes of ``ranks``; devices of different nodes are alike where no group can join two anyway."""
        chosen = set(ranks)
        is_parallel = request.profile.max_degree > 1
        members: dict[tuple[int, int | None, float], list[int]] = {}
        for node_id, (memory_bytes, node) in enumerate(planning_nodes(request)):
            for rank in sorted(chosen.intersection(node)):
                key = (node_id if is_parallel else 0, memory_bytes, request.rates[rank])
                members.setdefault(key, []).append(rank)
        order = sorted(members, key=lambda key: (key[0], key[1] or 0, -key[2]))
        classes = tuple(DeviceClass(key[0], key[2], key[1], tuple(members[key])) for key in order)
        return cls(classes, request.profile.rho)

    def counts_of(self, ranks: Sequence[int]) -> IntArray:
        """How many of ``ranks`` each class has."""
        chosen = set(ranks)
        return np.array([len(chosen.intersection(members.ranks)) for members in self.classes], dtype=np.int64)


def _groups(classes: Sequence[DeviceClass], rho: Sequence[tuple[int, float]]) -> Iterator[ClassGroup]:
    """Groups of devices that are neighbours in the order of rates, see `groups`."""
    for node_id in sorted({members.node_id for members in classes}):
        ids = [index for index, members in enumerate(classes) if members.node_id == node_id]
        for degree, relative in sorted(rho):
            if degree == 1:
                choices: Iterator[tuple[int, ...]] = ((index,) for index in ids)
            else:
                choices = combinations_with_replacement(ids, degree)
            for choice in choices:
                counts = tuple(choice.count(index) for index in range(len(classes)))
                if _is_block(choice, counts, classes):
                    first = classes[choice[0]]
                    yield ClassGroup(counts, degree, relative * first.rate, first.memory_bytes)


def _is_block(choice: Sequence[int], counts: Sequence[int], classes: Sequence[DeviceClass]) -> bool:
    """Whether such neighbours exist: classes between the first and the last are used up."""
    return all(
        counts[index] <= len(classes[index].ranks)
        and (index in (choice[0], choice[-1]) or counts[index] == len(classes[index].ranks))
        for index in range(choice[0], choice[-1] + 1)
    )


@dataclass(frozen=True, slots=True)
class Lattice:
    """All multisets within the given counts, numbered in mixed radix.

    vectors: ``[multiset, class]`` counts; sizes: ``[multiset]``; strides: ``[class]``. The number of a
    difference of two multisets is the difference of their numbers.
    """

    vectors: IntArray
    sizes: IntArray
    strides: IntArray

    @classmethod
    def of(cls, counts: Sequence[int]) -> Lattice:
        shape = tuple(count + 1 for count in counts)
        vectors = np.indices(shape).reshape(len(shape), -1).T.astype(np.int64)
        strides = np.array([int(np.prod(shape[index + 1 :])) for index in range(len(shape))], dtype=np.int64)
        return cls(vectors, vectors.sum(axis=1), strides)

    def __len__(self) -> int:
        return len(self.sizes)

    def number(self, counts: Sequence[int]) -> int:
        """The number of a multiset."""
        return int(np.array(counts) @ self.strides)

    def contained_pairs(self) -> tuple[IntArray, IntArray]:
        """All (multiset, multiset within it that is not empty), sorted by the first."""
        contained = np.all(self.vectors[:, None, :] >= self.vectors[None, :, :], axis=2)
        contained[:, 0] = False
        outer, inner = np.nonzero(contained)
        return outer.astype(np.int64), inner.astype(np.int64)
