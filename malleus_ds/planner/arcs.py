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
    kind_of = table.workload.kind_of
    totals_s, arcs = [np.empty(0)], [np.empty((5, 0), dtype=np.int64)]
    for row, bottleneck_s in enumerate(bottlenecks_s.tolist()):
        stages_s = _stage_costs(table, prices, bottleneck_s)
        others_s = _other_costs(table, stages_s) + (prices.pipeline - 1) * bottleneck_s
        least_s = others_s + stages_s.min(axis=1, initial=np.inf)[:, kind_of]
        enough_s = min(limit_s, np.sort(least_s, axis=None)[:most].max(initial=0.0))
        behinds, starts, stops = np.nonzero(np.isfinite(least_s) & (least_s <= enough_s))
        found_s = stages_s[behinds, :, kind_of[starts, stops]] + others_s[behinds, starts, stops][:, None]
        places, type_ids = np.nonzero(np.isfinite(found_s) & (found_s <= enough_s))
        totals_s.append(found_s[places, type_ids])
        rows = np.full(len(places), row)
        arcs.append(np.stack([rows, behinds[places] + 1, starts[places], stops[places], type_ids]))
    fields, total_s = np.concatenate(arcs, axis=1), np.concatenate(totals_s)
    # The best of each bottleneck, so that all have pipelines.
    rank = np.empty(len(total_s), dtype=np.int64)
    for row in range(len(bottlenecks_s)):
        places = np.flatnonzero(fields[0] == row)
        rank[places[np.argsort(total_s[places], kind="stable")]] = np.arange(len(places))
    rows, behinds, first, last, types = fields[:, np.sort(np.argsort(rank, kind="stable")[:most])]
    times_s = table.rates[types] * table.workload.time_s[kind_of[first, last]]
    times_s = times_s + np.where(behinds > 1, table.workload.message_s, 0.0)
    return Arcs(bottlenecks_s, rows, behinds, first, last, types, times_s)


def _stage_costs(table: PipelineTable, prices: Prices, bottleneck_s: float) -> FloatArray:
    """``[stages behind, type, kind]`` cost of a stage, inf where it is too slow or does not fit.

    Far more stages than the fastest groups need are not worth their fill.
    """
    fewest = float(table.workload.prefix_s[-1] * table.rates.min()) / bottleneck_s
    max_stages = min(table.max_stages, math.ceil(_MANY * fewest) + 4)
    shape_of, time_s = table.shape_of_type, table.rates[:, None] * table.workload.time_s
    costs = prices.groups[:, None] * bottleneck_s + time_s
    costs = np.where(time_s <= bottleneck_s * (1 + RELATIVE_SLACK), costs, np.inf)
    fits = np.stack([table.fits(behind)[shape_of] for behind in range(1, max_stages + 1)])
    fitting = np.where(fits, costs, np.inf)
    fitting[1:] += table.workload.message_s
    return fitting


def _other_costs(table: PipelineTable, stages_s: FloatArray) -> FloatArray:
    """``[stages behind, start, stop]``: cost of the other stages of the cheapest pipeline with this one."""
    num_layers = table.workload.num_layers
    is_range = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=np.bool_), k=1)
    ranges_s = np.where(is_range, stages_s.min(axis=1)[:, table.workload.kind_of], np.inf)
    tails, heads = np.full((2, len(stages_s), num_layers + 1), np.inf)
    tails[0, num_layers], heads[:, 0] = 0.0, 0.0
    for behind in range(1, len(stages_s)):
        tails[behind] = (ranges_s[behind - 1] + tails[behind - 1]).min(axis=1)
    for behind in range(len(stages_s) - 1, 0, -1):
        further = (ranges_s[behind] + heads[behind][:, None]).min(axis=0)
        heads[behind - 1] = np.minimum(heads[behind - 1], further)
    return np.where(is_range, tails[:, None, :] + heads[:, :, None], np.inf)


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
