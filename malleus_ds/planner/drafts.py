"""From what a search finds to plans of ranks: as it is, and varied to stay close to the current plan."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.planner.candidates import Candidates
from malleus_ds.planner.groups import Cluster, GroupType
from malleus_ds.planner.lattice import DeviceClass, DeviceClasses
from malleus_ds.planner.layout import Block, Draft, Slot, form_groups, place
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, Options, share_micro_batches
from malleus_ds.planner.movement import Movement
from malleus_ds.planner.ordered import Division, OrderedGroups
from malleus_ds.planner.selection import Selection, paths
from malleus_ds.planner.stages import Division as ClassDivision
from malleus_ds.planner.types import PlanRequest
from malleus_ds.planner.workload import Workload

# Price of moving the whole model once, in healthy passes of a micro-batch over all layers: staying put
# first, then speed first.
_PRICES = (1e3, 1.0, 0.1, 0.01)


def draft_of_selection(
    cluster: Cluster, selection: Selection, counts: Sequence[int], movement: Movement
) -> Draft:
    """The draft of pipelines with so many micro-batches each."""
    groups: dict[object, list[tuple[int, ...]]] = defaultdict(list)
    for node_class, flows in zip(cluster.classes, selection.flows, strict=True):
        found = paths(node_class.links, flows)
        for node, path in _matched(node_class.nodes, found, movement):
            # Devices of one level are alike, whatever their exact rates.
            rates = dict(zip(node, map(float, node_class.levels), strict=True))
            links = [link for link in path if link[2] >= 0]
            blocks = [
                tuple(rates[node[position]] for position in range(start, stop)) for start, stop, _ in links
            ]
            formed = form_groups(node, blocks, rates, movement)
            for (_, _, type_id), ranks in zip(links, formed, strict=True):
                groups[type_id].append(ranks)
    pipelines = tuple(
        (tuple(Slot(type_id, (start, stop)) for type_id, start, stop in column.stages), count)
        for column, count in zip(selection.columns, counts, strict=True)
    )
    return Draft(pipelines, groups)


def _matched(
    nodes: Sequence[tuple[int, ...]], found: Sequence[list[tuple[int, int, int]]], movement: Movement
) -> list[tuple[tuple[int, ...], list[tuple[int, int, int]]]]:
    """A grouping for each node, so that as many groups as possible are there already."""
    if not movement.held or len(nodes) == 1:
        return list(zip(nodes, found, strict=True))
    from scipy.optimize import linear_sum_assignment

    current = movement.request.current
    assert current is not None
    degrees: dict[int, int] = {rank: stage.degree for _, _, stage in current.stages() for rank in stage.ranks}
    wanted = [tuple(stop - start for start, stop, _ in path for _ in range(start, stop)) for path in found]
    present = [tuple(degrees.get(rank, 0) for rank in node) for node in nodes]
    equal = {(have, want): sum(map(int.__eq__, have, want)) for have in set(present) for want in set(wanted)}
    shared = np.array([[equal[have, want] for want in wanted] for have in present])
    rows, columns = linear_sum_assignment(shared, maximize=True)
    return [(nodes[row], found[column]) for row, column in zip(rows.tolist(), columns.tolist(), strict=True)]


def draft_of_divisions(
    classes: DeviceClasses,
    divisions: Sequence[ClassDivision],
    counts: Sequence[int],
    movement: Movement,
    request: PlanRequest,
) -> Draft:
    """The draft of pipelines that are given by classes of devices."""
    blocks: dict[int, list[tuple[object, Block]]] = defaultdict(list)
    pipelines = []
    for division, count in zip(divisions, counts, strict=True):
        slots = []
        for group, layers in division:
            kind = (group.degree, group.rate, group.memory_bytes)
            block = tuple(float(index) for index, number in enumerate(group.counts) for _ in range(number))
            blocks[classes.classes[int(block[0])].node_id].append((kind, block))
            slots.append(Slot(kind, layers))
        pipelines.append((tuple(slots), count))
    groups: dict[object, list[tuple[int, ...]]] = defaultdict(list)
    for node_id, entries in sorted(blocks.items()):
        members = [item for item in enumerate(classes.classes) if item[1].node_id == node_id]
        levels = {rank: float(index) for index, device_class in members for rank in device_class.ranks}
        all_entries = [*entries, *_spare_blocks(members, entries, request)]
        formed = form_groups(list(levels), [block for _, block in all_entries], levels, movement)
        for (place_kind, _), ranks in zip(all_entries, formed, strict=True):
            groups[place_kind].append(ranks)
    return Draft(tuple(pipelines), groups)


def _spare_blocks(
    members: Sequence[tuple[int, DeviceClass]], entries: Sequence[tuple[object, Block]], request: PlanRequest
) -> Iterator[tuple[object, Block]]:
    """Devices that are left over, as groups of degree 1: they may stand in for others of their kind."""
    relative = dict(request.profile.rho)
    if 1 not in relative:
        return
    for index, device_class in members:
        num_used = sum(block.count(float(index)) for _, block in entries)
        for _ in range(len(device_class.ranks) - num_used):
            yield (1, relative[1] * device_class.rate, device_class.memory_bytes), (float(index),)


@dataclass(frozen=True, slots=True)
class Realiser:
    """Offers plans of drafts, and with a current plan variations that move less."""

    workload: Workload
    candidates: Candidates

    @property
    def request(self) -> PlanRequest:
        return self.workload.request

    def offer(self, draft: Draft) -> ParallelPlan:
        """Offer the draft's plan, and close ones if it is fast enough; returns the first."""
        movement = self.candidates.movement
        plan = place(draft, movement, self.workload.micro_batch_size, self.request.world_size)
        step_s = self.candidates.offer(plan)
        self.offer_close(plan, step_s)
        return plan

    def offer_close(self, plan: ParallelPlan, step_s: float) -> None:
        """Divide the layers of each pipeline again so that less moves, as far as the step allows."""
        if self.request.current is None or math.isinf(step_s) or step_s > self.candidates.equal_s:
            return
        pipelines = tuple(self._close(pipeline, len(plan.pipelines)) for pipeline in plan.pipelines)
        self.candidates.offer(replace(plan, pipelines=pipelines))

    def _close(self, pipeline: Pipeline, num_pipelines: int) -> Pipeline:
        """The pipeline in the order of the layers that its groups hold now, with few of them moved."""
        movement, total_s = self.candidates.movement, float(self.workload.prefix_s[-1])
        groups = sorted((stage.ranks for stage in pipeline.stages), key=self._middle)
        ordered = self._ordered(groups, num_pipelines)
        as_it_is = [stage.layers for stage in pipeline.stages]
        moved = sum(
            float(prefix[stop] - prefix[start])
            for prefix, (start, stop) in zip(
                [movement.prefix(stage.ranks) for stage in pipeline.stages], as_it_is, strict=True
            )
        )
        count, limit_s = pipeline.num_micro_batches, self.candidates.equal_s * (1 + RELATIVE_SLACK)
        upper_s = limit_s / (count - 1) if count > 1 else limit_s
        for price in _PRICES:
            price_s = price * total_s / float(movement.weights.sum())
            timely = [
                division
                for division in ordered.divisions(count, upper_s, price_s)
                if division.time_s(count) <= limit_s
            ]
            if timely:
                best = min(timely, key=lambda division: division.moved)
                if best.moved >= moved:
                    return pipeline
                return replace(pipeline, stages=tuple(map(Stage, groups, best.layers)))
        return pipeline

    def _middle(self, ranks: Sequence[int]) -> float:
        """Where a group stands now; one that holds nothing joins in the middle."""
        held = [
            self.candidates.movement.held[rank][0] for rank in ranks if rank in self.candidates.movement.held
        ]
        return (
            sum(start + stop for start, stop in held) / len(held) if held else float(self.workload.num_layers)
        )

    def _ordered(self, groups: Sequence[tuple[int, ...]], num_pipelines: int) -> OrderedGroups:
        movement, request = self.candidates.movement, self.request
        node_of = {rank: index for index, ranks in enumerate(request.node_ranks) for rank in ranks}
        relative = dict(request.profile.rho)
        kinds = []
        for ranks in groups:
            rate = relative[len(ranks)] * max(request.rates[rank] for rank in ranks)
            memory_bytes = request.node_memory_bytes(node_of[ranks[0]])
            kinds.append(GroupType(len(ranks), rate, rate, memory_bytes))
        moved = np.stack([movement.prefix(ranks) for ranks in groups])
        return OrderedGroups(self.workload, tuple(kinds), num_pipelines, moved)

    def offer_current(self) -> None:
        """The current plan; its pipelines with other layers and data, without the ranks that failed."""
        current, request = self.request.current, self.request
        if current is None:
            return
        if current.micro_batch_size == self.workload.micro_batch_size:
            self.offer_close(current, self.candidates.offer(current))
        usable = set(request.usable_ranks)
        kept = [
            [stage.ranks for stage in pipeline.stages if usable.issuperset(stage.ranks)]
            for pipeline in current.pipelines
        ]
        self.offer_groups([groups for groups in kept if groups])

    def offer_groups(self, pipelines: Sequence[Sequence[tuple[int, ...]]]) -> float:
        """These pipelines in this order of groups, with the layers and micro-batches that suit them best.

        Returns the step time, inf if there is no such plan.
        """
        found: list[list[Division]] = []
        options = []
        for groups in pipelines:
            if not groups:
                return math.inf
            ordered = self._ordered(groups[: self.workload.num_layers], len(pipelines))
            divisions = list(ordered.divisions(self.workload.num_micro_batches, math.inf, 0.0))
            if not divisions:
                return math.inf
            found.append(divisions)
            options.append(options_of_divisions(divisions, self.workload.num_micro_batches))
        shares = share_micro_batches(options, self.workload.num_micro_batches) if pipelines else None
        if shares is None:
            return math.inf
        chosen = tuple(
            Pipeline(tuple(map(Stage, groups, divisions[choice].layers)), count)
            for groups, divisions, choice, count in zip(
                pipelines, found, shares.choices, shares.counts, strict=True
            )
        )
        used = {rank for pipeline in chosen for rank in pipeline.ranks}
        standby = tuple(rank for rank in range(self.request.world_size) if rank not in used)
        plan = ParallelPlan(chosen, self.workload.micro_batch_size, standby)
        step_s = self.candidates.offer(plan)
        self.offer_close(plan, step_s)
        return step_s


def options_of_divisions(divisions: Sequence[Division], num_micro_batches: int) -> Options:
    """The divisions of one pipeline as arrays."""
    return Options(
        np.array([division.max_s for division in divisions]),
        np.array([division.sum_s for division in divisions]),
        np.full(len(divisions), num_micro_batches, dtype=np.int64),
    )
