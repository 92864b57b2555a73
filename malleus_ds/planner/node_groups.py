"""The groups that the nodes of a cluster can form, device by device; small clusters only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from malleus_ds.plan import ParallelPlan
from malleus_ds.planner.groups import GroupType, planning_nodes
from malleus_ds.planner.layout import form_groups
from malleus_ds.planner.movement import Movement
from malleus_ds.planner.types import PlanRequest

STANDBY = -1
# Devices slower than this times the fastest of their node may be left over.
_SLOW = 1.02
Ranks = tuple[int, ...]
Way = tuple[tuple[int, Ranks], ...]  # Types and ranks of a node's groups.


@dataclass(frozen=True, slots=True)
class Group:
    """type_id: index into the nodes' types; owner: pipeline, or standby."""

    type_id: int
    ranks: tuple[int, ...]
    owner: int


State = tuple[tuple[Group, ...], ...]  # The groups of each node.


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """All groups that the nodes can form. types: by load, lightest first; nodes: usable ranks of each,
    fastest first; ways: per node, the groupings that differ in their types."""

    request: PlanRequest
    types: tuple[GroupType, ...]
    nodes: tuple[Ranks, ...]
    memories: tuple[int | None, ...]
    ways: tuple[tuple[Way, ...], ...]

    @staticmethod
    def of(request: PlanRequest) -> NodeGroups:
        usable, rates, rho = set(request.usable_ranks), request.rates, dict(request.profile.rho)
        usable_nodes = [
            (memory_bytes, tuple(sorted(usable.intersection(node), key=lambda rank: (rates[rank], rank))))
            for memory_bytes, node in planning_nodes(request)
            if usable.intersection(node)
        ]
        kinds = {
            _type(request, ranks[place + 1 - degree : place + 1], memory_bytes)
            for memory_bytes, ranks in usable_nodes
            for degree in rho
            for place in range(degree - 1, len(ranks))
        }
        types = sorted(kinds, key=lambda kind: (-_load(kind), -kind.degree))
        ids = {kind: index for index, kind in enumerate(types)}
        ways = []
        for memory_bytes, ranks in usable_nodes:
            found: dict[Ranks, Way] = {}
            spare = sum(rates[rank] > _SLOW * rates[ranks[0]] for rank in ranks)
            spare = max(spare, len(ranks) % min(rho))
            for way in _ways(ranks, sorted(rho), spare):
                typed = tuple((ids[_type(request, group, memory_bytes)], group) for group in way)
                found.setdefault(tuple(sorted(type_id for type_id, _ in typed)), typed)
            ways.append(tuple(found.values()))
        memories, nodes = zip(*usable_nodes, strict=True)
        return NodeGroups(request, tuple(types), nodes, memories, tuple(ways))

    def state_of(self, plan: ParallelPlan) -> State:
        """The plan's groups, but for those that no node can form any more."""
        node_of = {rank: index for index, ranks in enumerate(self.nodes) for rank in ranks}
        ids = {kind: index for index, kind in enumerate(self.types)}
        groups: list[list[Group]] = [[] for _ in self.nodes]
        for owner, _, stage in plan.stages():
            node = node_of.get(stage.ranks[0])
            if node is not None and {*stage.ranks} <= {*self.nodes[node]}:
                type_id = ids[_type(self.request, stage.ranks, self.memories[node])]
                groups[node].append(Group(type_id, stage.ranks, owner))
        return tuple(map(tuple, groups))

    def formed(self, state: State, movement: Movement) -> dict[object, list[Ranks]]:
        """Ranks of the groups of each type: those that are together now stay so."""
        formed: dict[object, list[Ranks]] = defaultdict(list)
        for node, groups in zip(self.nodes, state, strict=True):
            rates = {rank: self.request.rates[rank] for rank in node}
            blocks = [tuple(sorted(rates[rank] for rank in group.ranks)) for group in groups]
            for group, ranks in zip(groups, form_groups(node, blocks, rates, movement), strict=True):
                formed[group.type_id].append(ranks)
        return formed


def _type(request: PlanRequest, ranks: Ranks, memory_bytes: int | None) -> GroupType:
    rate = request.profile.relative_time(len(ranks)) * max(request.rates[rank] for rank in ranks)
    return GroupType(len(ranks), rate, rate, memory_bytes)


def _load(kind: GroupType) -> float:
    """Inverse of the layers per memory that a group has in plans whose stages take as long."""
    return kind.rate * kind.degree * (kind.memory_bytes or 1)


def _ways(ranks: Ranks, degrees: Sequence[int], spare: int) -> Iterator[tuple[Ranks, ...]]:
    """Contiguous groups of the fastest devices, up to ``spare`` of the slowest left over; see `groups`."""
    if len(ranks) <= spare:
        yield ()
    for degree in degrees:
        if degree <= len(ranks):
            for rest in _ways(ranks[degree:], degrees, spare):
                yield (ranks[:degree], *rest)
