"""Column generation for whole micro-batches: what it promises, and plans of many nodes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from planner_cases import random_cluster

from malleus_ds.planner import make_plan
from malleus_ds.planner.arcs import find_arcs
from malleus_ds.planner.checker import check_answer
from malleus_ds.planner.feasibility import most_pipelines
from malleus_ds.planner.generation import Generated, Generator
from malleus_ds.planner.groups import Cluster, build_cluster
from malleus_ds.planner.micro_batches import RELATIVE_SLACK
from malleus_ds.planner.selection import Selection, Selector
from malleus_ds.planner.whole import WholePipelines
from malleus_ds.planner.workload import Workload


def pipelines_of(seed: int) -> tuple[WholePipelines, Generated, Cluster]:
    """16 nodes, of which a third has a slow device; any number of pipelines."""
    request = random_cluster(128, 6, seed, time_limit_s=10.0)
    workload, cluster = Workload(request, request.micro_batch_size), build_cluster(request)
    most = most_pipelines(workload, cluster)
    generator = Generator(workload, cluster, most, math.inf)
    generated = generator.run(most)
    assert generated is not None
    least = round(0.8 * generated.num_pipelines)
    table = generator.table(cluster.rates, least, 32)
    longest_s = np.unique([column.max_s for column in generated.columns])
    whole = WholePipelines(cluster, (least, most), table, generated.prices, longest_s, math.inf)
    whole.add(generated.columns)
    return whole, generated, cluster


def formed_groups(cluster: Cluster, selection: Selection) -> np.ndarray:
    formed = np.zeros(len(cluster.types))
    for node, flows in zip(cluster.classes, selection.flows, strict=True):
        for (_, _, type_id), number in zip(node.links, flows, strict=True):
            if type_id >= 0:
                formed[type_id] += number
    return formed


@pytest.mark.parametrize("seed", range(3))
def test_what_is_chosen_is_never_more_than_promised(seed: int) -> None:
    whole, generated, cluster = pipelines_of(seed)
    ideal_s, number = generated.prices.step_s, whole.table.workload.num_micro_batches
    assert whole.generate(0.97 * ideal_s) < number  # Below the ideal there is no plan at all.
    assert len(whole.pool) > len([*filter(whole.table.holds, generated.columns)])
    step_s = 1.05 * ideal_s
    promised = whole.generate(step_s)
    assert promised >= number
    assert all(map(whole.table.holds, whole.pool))
    selection = Selector(cluster, whole.numbers, number).select(list(whole.pool), step_s, 10.0)
    assert selection is not None
    taken = sum(column.capacity(step_s) for column in selection.columns)
    assert number <= taken <= promised + number * 0.05  # It stops once the promise is enough.
    used = np.zeros(len(cluster.types))
    for column in selection.columns:
        for type_id, count in column.counts().items():
            used[type_id] += count
    assert (used <= formed_groups(cluster, selection)).all()
    assert whole.numbers[0] <= len(selection.columns) <= whole.numbers[1]


def test_no_pool_no_promise() -> None:
    whole, _, _ = pipelines_of(0)
    whole.pool.clear()
    assert whole.generate(1e-6) == -math.inf


def test_stages_of_the_cheapest_pipelines_are_kept() -> None:
    whole, generated, _ = pipelines_of(0)
    table, prices, longest_s = whole.table, generated.prices, whole.bottlenecks_s
    solution = table.solve(prices.groups, longest_s, longest_s, table.workload.num_micro_batches)
    fixed_s = (prices.pipeline - 1) * longest_s
    limit_s = float(np.quantile(solution.best_costs() + fixed_s, 0.3)) * (1 + RELATIVE_SLACK)
    arcs = find_arcs(table, prices, longest_s, limit_s, 10**6)
    fields = np.stack([arcs.behind, arcs.type_id, arcs.start, arcs.stop], axis=1)
    found = {tuple(stage) for stage in fields.tolist()}
    for column in solution.columns(limit_s - fixed_s, 1):
        behind = range(len(column.stages), 0, -1)
        assert found.issuperset((place, *stage) for place, stage in zip(behind, column.stages, strict=True))
    is_cheap = solution.best_costs() + fixed_s <= limit_s
    assert set(arcs.row.tolist()) == set(np.flatnonzero(is_cheap).tolist())
    few = find_arcs(table, prices, longest_s, limit_s, 100)
    assert len(few.row) == 100
    assert set(few.row.tolist()) == set(np.flatnonzero(is_cheap).tolist())


def test_many_nodes_come_close_to_their_bound() -> None:
    """32 nodes with 16 slow devices: 3.1 %, of which part is what the bound does not know."""
    request = random_cluster(256, 16, seed=0, time_limit_s=8.0)
    result = make_plan(request)
    assert check_answer(result.plan, request) == pytest.approx(result.step_s)
    assert result.gap <= 0.033
