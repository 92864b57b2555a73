"""All good pipelines at once, as paths; an integer program picks paths and groupings together.

Under one bottleneck a pipeline is a path through states (number of stages so far, first layer that they
hold), from the end of the model to its front; an arc is a stage. A plan is a flow of one unit per pipeline,
its arcs use groups that the nodes must form (`selection`). Arcs are kept only if some pipeline through them
is cheap under the prices of `prices`: what good plans consist of is there, in all combinations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from malleus_ds.planner.groups import Cluster
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, IntArray
from malleus_ds.planner.pipelines import Column, PipelineTable
from malleus_ds.planner.prices import Prices
from malleus_ds.planner.selection import Selection, flows_of_classes, groupings, matrix
from malleus_ds.planner.solver import cvxpy, solved

_MANY = 2.2


@dataclass(frozen=True, slots=True)
class Arcs:
    """Stages of good pipelines, one entry per arc.

    row: index of the bottleneck; behind: number of stages from this one to the last; start, stop: layers;
    type_id: group; time_s: of the stage, and a message if there are stages behind.
    """

    bottlenecks_s: FloatArray
    row: IntArray
    behind: IntArray
    start: IntArray
    stop: IntArray
    type_id: IntArray
    time_s: FloatArray


def find_arcs(
    table: PipelineTable, prices: Prices, bottlenecks_s: FloatArray, limit_s: float, most: int
) -> Arcs:
    """The ``most`` arcs whose cheapest pipelines are worth least beside their time, up to ``limit_s``."""
    workload, num_layers = table.workload, table.workload.num_layers
    starts, stops = np.nonzero(np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=np.bool_), k=1))
    kinds = workload.kind_of[starts, stops]
    totals_s, arcs = [np.empty(0)], [np.empty((5, 0), dtype=np.int64)]
    for row, bottleneck_s in enumerate(bottlenecks_s.tolist()):
        costs = _type_costs(table, prices, bottleneck_s)
        possible = np.any(np.isfinite(costs)[:, kinds], axis=0)
        ranges = (starts[possible], stops[possible], kinds[possible])
        # Far more stages than the fastest groups need are not worth their fill.
        fewest = float(workload.prefix_s[-1] * table.rates.min()) / bottleneck_s
        max_stages = min(table.max_stages, math.ceil(_MANY * fewest) + 4)
        for behind, found_s in enumerate(_totals(table, costs, max_stages, *ranges), start=1):
            found_s = found_s + (prices.pipeline - 1) * bottleneck_s
            type_ids, places = np.nonzero(np.isfinite(found_s) & (found_s <= limit_s))
            same = np.ones(len(places), dtype=np.int64)
            totals_s.append(found_s[type_ids, places])
            arcs.append(np.stack([same * row, same * behind, ranges[0][places], ranges[1][places], type_ids]))
    fields, total_s = np.concatenate(arcs, axis=1), np.concatenate(totals_s)
    # The best of each bottleneck, so that all have pipelines.
    rank = np.empty(len(total_s), dtype=np.int64)
    for row in range(len(bottlenecks_s)):
        places = np.flatnonzero(fields[0] == row)
        rank[places[np.argsort(total_s[places], kind="stable")]] = np.arange(len(places))
    rows, behinds, first, last, types = fields[:, np.sort(np.argsort(rank, kind="stable")[:most])]
    times_s = table.rates[types] * workload.time_s[workload.kind_of[first, last]]
    times_s = times_s + np.where(behinds > 1, workload.message_s, 0.0)
    return Arcs(bottlenecks_s, rows, behinds, first, last, types, times_s)


def _type_costs(table: PipelineTable, prices: Prices, bottleneck_s: float) -> FloatArray:
    """``[type, kind]`` cost of a stage, inf where it is too slow."""
    stage_s = table.rates[:, None] * table.workload.time_s
    costs = prices.groups[:, None] * bottleneck_s + stage_s
    return np.where(stage_s <= bottleneck_s * (1 + RELATIVE_SLACK), costs, np.inf)


def _totals(
    table: PipelineTable,
    costs: FloatArray,
    max_stages: int,
    starts: IntArray,
    stops: IntArray,
    kinds: IntArray,
) -> list[FloatArray]:
    """Per number of stages behind (from 1), ``[type, range]``: the cheapest pipeline with this stage."""
    workload, num_layers = table.workload, table.workload.num_layers
    shape_of = table.shape_of_type
    stages: list[FloatArray] = []
    tails = [np.where(np.arange(num_layers + 1) == num_layers, 0.0, np.inf)]
    for behind in range(1, max_stages + 1):
        fitting = np.where(table.fits(behind)[shape_of], costs, np.inf)[:, kinds]
        if behind > 1:
            fitting += workload.message_s
        tail = np.full(num_layers + 1, np.inf)
        np.minimum.at(tail, starts, fitting.min(axis=0) + tails[-1][stops])
        if not np.isfinite(tail).any():
            break
        stages.append(fitting)
        tails.append(tail)
    head = np.where(np.arange(num_layers + 1) == 0, 0.0, np.inf)
    totals = []
    for behind in range(len(stages), 0, -1):
        totals.append(tails[behind - 1][stops] + stages[behind - 1] + head[starts])
        before = np.where(np.arange(num_layers + 1) == 0, 0.0, np.inf)
        np.minimum.at(before, stops, stages[behind - 1].min(axis=0) + head[starts])
        head = before
    return totals[::-1]


def choose_paths(
    arcs: Arcs,
    table: PipelineTable,
    cluster: Cluster,
    numbers: tuple[int, int],
    step_s: float,
    time_limit_s: float,
) -> Selection | None:
    """Pipelines with about the largest capacity within ``step_s``; None if none are found in time.

    numbers: fewest and most pipelines. A pipeline counts with the whole micro-batches that it takes if it
    fills as fast as any, less what its own fill takes in fractions of one.
    """
    cp = cvxpy()
    formed, balance, supply = groupings(cluster)
    workload, num_arcs = table.workload, len(arcs.row)
    used = matrix(
        [(type_id, arc, 1.0) for arc, type_id in enumerate(arcs.type_id)], (len(table.types), num_arcs)
    )
    pace_s = arcs.bottlenecks_s[arcs.row]
    begins = (arcs.stop == workload.num_layers).astype(float)
    least_s = workload.message_s + float(workload.prefix_s[-1] * table.rates.min())
    whole = np.floor((step_s - least_s) / pace_s + RELATIVE_SLACK) + 1
    gains = begins * (whole + least_s / pace_s) - arcs.time_s / pace_s
    amount = cp.Variable(num_arcs, integer=True)
    flow = cp.Variable(formed.shape[1], integer=True)
    constraints = [
        amount >= 0,
        flow >= 0,
        used @ amount <= formed @ flow,
        balance @ flow == supply,
        begins @ amount >= numbers[0],
        begins @ amount <= numbers[1],
    ]
    kept = _conservation(arcs, workload.num_layers)
    if kept is not None:
        constraints.append(kept @ amount == 0)
    problem = cp.Problem(cp.Maximize(gains @ amount), constraints)
    values = solved(problem, time_limit_s, amount, flow)
    if values is None:
        return None
    columns = _paths(arcs, table, values[0])
    if not numbers[0] <= len(columns) <= numbers[1]:
        return None  # What is there when the time is over need not be a solution.
    return Selection(tuple(columns), flows_of_classes(cluster, values[1]))


def _conservation(arcs: Arcs, num_layers: int) -> Any:
    """``[state, arc]``: what arrives at a state leaves it; None where every pipeline is one stage."""
    states: dict[tuple[int, int, int], int] = {}
    entries: list[tuple[int, int, float]] = []
    fields = zip(
        arcs.row.tolist(), arcs.behind.tolist(), arcs.start.tolist(), arcs.stop.tolist(), strict=True
    )
    for arc, (row, behind, start, stop) in enumerate(fields):
        if stop < num_layers:
            entries.append((states.setdefault((row, behind - 1, stop), len(states)), arc, -1.0))
        if start > 0:
            entries.append((states.setdefault((row, behind, start), len(states)), arc, 1.0))
    return matrix(entries, (len(states), len(arcs.row))) if entries else None


def _paths(arcs: Arcs, table: PipelineTable, amounts: IntArray) -> list[Column]:
    """Decompose the flow into pipelines."""
    num_layers = table.workload.num_layers
    left = amounts.copy()
    leaving: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for arc in np.flatnonzero(left).tolist():
        leaving[int(arcs.row[arc]), int(arcs.behind[arc]) - 1, int(arcs.stop[arc])].append(arc)
    found = []
    for row in range(len(arcs.bottlenecks_s)):
        while any(left[arc] for arc in leaving[row, 0, num_layers]):
            state, stages = (row, 0, num_layers), []
            while state[2] > 0:
                arc = next(arc for arc in leaving[state] if left[arc])
                left[arc] -= 1
                stages.append((int(arcs.type_id[arc]), int(arcs.start[arc]), int(arcs.stop[arc])))
                state = (row, state[1] + 1, int(arcs.start[arc]))
            found.append(table.column(stages[::-1]))
    return found
