"""TP groups as types, nodes as classes: what is equal is counted, not listed.

Within a node only *blocks* matter: with the devices sorted by rate, some optimal grouping consists of
groups that are contiguous in this order, the standby devices last. (Given two groups, let the one with the
smaller maximum take the smallest rates of both; given a group and a faster standby device, exchange them.
No group's rate grows.) So a grouping of a node is a path through positions ``0 .. num_devices``, where the
edge ``(i, i + t)`` is a group of degree t with the rate of device ``i + t - 1``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from malleus_ds.planner.micro_batches import FloatArray
from malleus_ds.planner.types import PlanRequest


@dataclass(frozen=True, slots=True)
class GroupType:
    """Interchangeable TP groups.

    rate: the largest ``y = rho(t) * max rate`` among them; least_rate: the smallest; memory_bytes: of each
    device, None without a limit.
    """

    degree: int
    rate: float
    least_rate: float
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Edge:
    """One possible group of a node class: devices ``[start, stop)`` in order of their rates."""

    start: int
    stop: int
    type_id: int


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes with equal devices.

    nodes: usable ranks of each, fastest first; levels: of each position, equal for devices of equal rate;
    edges: see the module.
    """

    nodes: tuple[tuple[int, ...], ...]
    levels: tuple[int, ...]
    edges: tuple[Edge, ...]

    @property
    def num_devices(self) -> int:
        return len(self.nodes[0])

    @property
    def links(self) -> tuple[tuple[int, int, int], ...]:
        """``(start, stop, type)`` of the edges, then of a skip past each device, which has type -1."""
        skips = ((position, position + 1, -1) for position in range(self.num_devices))
        return (*((edge.start, edge.stop, edge.type_id) for edge in self.edges), *skips)


@dataclass(frozen=True, slots=True)
class Cluster:
    """All node classes and the types of group that they can form."""

    types: tuple[GroupType, ...]
    classes: tuple[NodeClass, ...]

    @property
    def num_devices(self) -> int:
        return sum(node.num_devices * len(node.nodes) for node in self.classes)

    @property
    def rates(self) -> FloatArray:
        """``[type]`` the rate of each."""
        return np.array([kind.rate for kind in self.types])

    def worth(self, prices: FloatArray) -> float:
        """The largest sum of prices, one per type, that a grouping of all nodes can have."""
        total = 0.0
        for node in self.classes:
            best = np.zeros(node.num_devices + 1)
            for start, stop, type_id in sorted(node.links):
                best[stop] = max(best[stop], best[start] + (prices[type_id] if type_id >= 0 else 0.0))
            total += len(node.nodes) * float(best[-1])
        return total


def build_cluster(request: PlanRequest, ratio: float = 1.0) -> Cluster:
    """Classes of the usable ranks; rates between the same two powers of ``ratio`` count as equal."""
    rho = sorted(request.profile.rho)
    members: dict[tuple[int | None, tuple[float, ...]], list[tuple[int, ...]]] = defaultdict(list)
    usable = set(request.usable_ranks)
    for memory_bytes, node in planning_nodes(request):
        devices = sorted(usable.intersection(node), key=lambda rank: (request.rates[rank], rank))
        if devices:
            buckets = tuple(_bucket(request.rates[rank], ratio) for rank in devices)
            members[memory_bytes, buckets].append(tuple(devices))
    rates: dict[tuple[int, float, int | None], list[float]] = {}
    ordered = sorted(members.items(), key=lambda item: (item[0][0] or 0, item[0][1]))
    for (memory_bytes, buckets), nodes in ordered:
        for degree, relative in rho:
            for start in range(len(buckets) - degree + 1):
                key = (degree, buckets[start + degree - 1], memory_bytes)
                slowest = (request.rates[node[start + degree - 1]] for node in nodes)
                rates.setdefault(key, []).extend(relative * rate for rate in slowest)
    ids = {key: index for index, key in enumerate(rates)}
    classes = tuple(
        NodeClass(
            tuple(nodes),
            tuple(buckets.index(bucket) for bucket in buckets),
            tuple(
                Edge(start, start + degree, ids[degree, buckets[start + degree - 1], memory_bytes])
                for degree, _ in rho
                for start in range(len(buckets) - degree + 1)
            ),
        )
        for (memory_bytes, buckets), nodes in ordered
    )
    types = tuple(
        GroupType(degree, max(values), min(values), memory) for (degree, _, memory), values in rates.items()
    )
    return Cluster(types, classes)


def planning_nodes(request: PlanRequest) -> list[tuple[int | None, tuple[int, ...]]]:
    """``(memory of each device, ranks)``; without tensor parallelism each device is a node of its own."""
    nodes = [(request.node_memory_bytes(index), node) for index, node in enumerate(request.node_ranks)]
    if request.profile.max_degree > 1:
        return nodes
    return [(memory_bytes, (rank,)) for memory_bytes, node in nodes for rank in node]


def _bucket(rate: float, ratio: float) -> float:
    """Equal for rates that count as equal; 1.0 stays alone."""
    return rate if ratio == 1.0 else float(math.ceil(math.log(rate) / math.log(ratio) - 1e-9))


def rate_ratio(rates: Sequence[float], most: int) -> float:
    """The least ratio of 1.0, 1.02, 1.04, ... under which at most so many different rates remain."""
    ratio = 1.0
    while len({_bucket(rate, ratio) for rate in rates}) > most:
        ratio += 0.02
    return ratio
