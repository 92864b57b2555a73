"""From pipelines of typed groups to a plan of ranks, close to the current plan.

Groups of one type are interchangeable, so each slot of a pipeline can take any of them: an assignment problem
per type, whose costs are what the group must receive to hold the slot's layers. Without a current plan, slots
are filled in the order of their layers from node to node, so that the replicas of a layer meet on a node.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.planner.movement import Movement

# The levels of a group's devices, ascending: devices of one level are alike.
Block = tuple[float, ...]
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Slot:
    """A stage to be filled: its type of group (anything hashable) and its layers."""

    kind: object
    layers: Range


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan by types of group. pipelines: slots and number of micro-batches; groups: by type, those that
    the nodes form (at least as many as there are slots)."""

    pipelines: tuple[tuple[tuple[Slot, ...], int], ...]
    groups: dict[object, list[tuple[int, ...]]]


def form_groups(
    devices: Sequence[int],
    blocks: Sequence[Block],
    levels: Mapping[int, float],
    movement: Movement,
) -> list[tuple[int, ...]]:
    """Ranks for each block of one node: ranks that form such a group now, else any of the right levels.

    devices: usable ranks of the node; levels: of these, as in the blocks.
    """
    free = {rank: levels[rank] for rank in devices}
    groups: dict[int, tuple[int, ...]] = {}
    order = sorted(range(len(blocks)), key=lambda index: -len(blocks[index]))
    current = movement.request.current
    held = {} if current is None else {stage.ranks: stage for _, _, stage in current.stages()}
    for ranks in held:
        if not all(rank in free for rank in ranks):
            continue
        block = tuple(sorted(free[rank] for rank in ranks))
        match = next((index for index in order if index not in groups and blocks[index] == block), None)
        if match is not None:
            groups[match] = ranks
            for rank in ranks:
                del free[rank]
    for index in order:
        if index in groups:
            continue
        chosen = []
        for level, count in Counter(blocks[index]).items():
            fitting = sorted((rank for rank in free if free[rank] == level), key=_place(movement))
            chosen.extend(fitting[:count])
            for rank in fitting[:count]:
                del free[rank]
        groups[index] = movement.in_slice_order(chosen)
    return [groups[index] for index in range(len(blocks))]


def _place(movement: Movement) -> Callable[[int], tuple[Any, ...]]:
    """Ranks that are together now stay together."""
    return lambda rank: (*movement.held.get(rank, ((-1, -1), 0.0, 0.0)), rank)


def place(draft: Draft, movement: Movement, micro_batch_size: int, world_size: int) -> ParallelPlan:
    """The plan with the groups assigned to the slots."""
    slots = [
        (index, position, slot)
        for index, (stages, _) in enumerate(draft.pipelines)
        for position, slot in enumerate(stages)
    ]
    by_kind: dict[object, list[tuple[int, int, Slot]]] = defaultdict(list)
    for entry in slots:
        by_kind[entry[2].kind].append(entry)
    ranks: dict[tuple[int, int], tuple[int, ...]] = {}
    for kind, entries in by_kind.items():
        entries.sort(key=lambda entry: (sum(entry[2].layers), entry[0]))
        groups = draft.groups[kind]
        for (index, position, _), group in zip(entries, _assign(entries, groups, movement), strict=True):
            ranks[index, position] = group
    used = {rank for group in ranks.values() for rank in group}
    pipelines = tuple(
        Pipeline(
            tuple(Stage(ranks[index, position], slot.layers) for position, slot in enumerate(stages)), count
        )
        for index, (stages, count) in enumerate(draft.pipelines)
    )
    standby = tuple(rank for rank in range(world_size) if rank not in used)
    return ParallelPlan(pipelines, micro_batch_size, standby)


def _assign(
    entries: Sequence[tuple[int, int, Slot]], groups: Sequence[tuple[int, ...]], movement: Movement
) -> list[tuple[int, ...]]:
    """A group for each slot; those at the front of the list where nothing depends on it."""
    if not movement.held:
        return list(groups[: len(entries)])
    from scipy.optimize import linear_sum_assignment

    prefixes = np.stack([movement.prefix(group) for group in groups])
    starts = np.array([slot.layers[0] for _, _, slot in entries])
    stops = np.array([slot.layers[1] for _, _, slot in entries])
    costs = (prefixes[:, stops] - prefixes[:, starts]).T
    _, columns = linear_sum_assignment(costs)
    return [groups[column] for column in columns.tolist()]


def in_current_order(plan: ParallelPlan, current: ParallelPlan | None) -> ParallelPlan:
    """The same plan with each pipeline at the place of the current one that it keeps most layers of.

    Nothing depends on the order; a reader of two plans does not see moves that are none.
    """
    if current is None:
        return plan
    from scipy.optimize import linear_sum_assignment

    held = {rank: index for index, pipeline in enumerate(current.pipelines) for rank in pipeline.ranks}
    kept = np.zeros((len(plan.pipelines), len(current.pipelines)))
    for index, pipeline in enumerate(plan.pipelines):
        for stage in pipeline.stages:
            for rank in stage.ranks:
                if rank in held:
                    start, stop = current_layers(current, held[rank], rank)
                    shared = min(stop, stage.layers[1]) - max(start, stage.layers[0])
                    kept[index, held[rank]] += max(0, shared)
    rows, columns = linear_sum_assignment(kept, maximize=True)
    place_of = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    order = sorted(range(len(plan.pipelines)), key=lambda index: place_of.get(index, len(current.pipelines)))
    return replace(plan, pipelines=tuple(plan.pipelines[index] for index in order))


def current_layers(current: ParallelPlan, pipeline_id: int, rank: int) -> Range:
    """Layers of a rank of a pipeline."""
    return next(stage.layers for stage in current.pipelines[pipeline_id].stages if rank in stage.ranks)
