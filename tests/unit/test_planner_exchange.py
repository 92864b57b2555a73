"""Local search on clusters of a few nodes."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.planner import PlanRequest, make_plan
from malleus_ds.planner.candidates import Candidates
from malleus_ds.planner.checker import check_answer
from malleus_ds.planner.drafts import Realiser
from malleus_ds.planner.estimate import Estimator
from malleus_ds.planner.exchange import Exchange
from malleus_ds.planner.generation import Generator
from malleus_ds.planner.groups import build_cluster
from malleus_ds.planner.local_search import LocalSearch
from malleus_ds.planner.movement import Movement
from malleus_ds.planner.node_groups import NodeGroups, State
from malleus_ds.planner.workload import Workload
from tests.brute_force import brute_force
from tests.planner_instances import random_request


def cluster_of_nodes(seed: int = 0, **changes: object) -> PlanRequest:
    """Four nodes of four devices, some of them slow, and TP up to 4."""
    rng = np.random.default_rng(seed)
    rates = np.where(rng.random(16) < 0.3, rng.uniform(1.1, 6.0, 16), 1.0)
    request = PlanRequest(
        ModelProfile(
            tuple(LayerProfile("layer", time_s=1.0) for _ in range(24)), rho=((4, 1.0), (2, 1.9), (1, 3.7))
        ),
        tuple(rates.tolist()),
        num_micro_batches=16,
        nodes=tuple(tuple(range(start, start + 4)) for start in range(0, 16, 4)),
        time_limit_s=20.0,
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def exchange_of(request: PlanRequest, num_pipelines: int, steps_s: np.ndarray) -> tuple[Exchange, State]:
    """And a state to start from."""
    groups = NodeGroups.of(request)
    estimator = Estimator(Workload(request, 1), groups.types, num_pipelines, steps_s)
    exchange = Exchange(groups, estimator, math.inf)
    return exchange, exchange.start([1 / kind.rate for kind in groups.types])


@pytest.mark.parametrize("seed", range(4))
def test_changes_are_valued_as_if_they_were_made(seed: int) -> None:
    exchange, state = exchange_of(cluster_of_nodes(seed), 3, np.geomspace(100, 300, 40))
    for _ in range(3):
        judge = exchange.judge(state)
        moves = judge.moves()
        values = judge.values(moves)
        for index in range(0, len(values), 7):
            assert values[index] == pytest.approx(exchange.value(judge.moved(moves, index)), abs=1e-9)
        for node, ways in enumerate(NodeGroups.of(cluster_of_nodes(seed)).ways):
            changes, values = judge.regroupings(node, ways)
            for index in range(0, len(values), 5):
                after = judge.regrouped(node, *changes[index])
                assert values[index] == pytest.approx(exchange.value(after), abs=1e-9)
        state = exchange.shaken(state)


@pytest.mark.parametrize("seed", range(6))
def test_the_estimate_is_what_the_cost_model_says(seed: int) -> None:
    """For equal layers, and memory that is enough."""
    request, steps_s = cluster_of_nodes(seed), np.geomspace(100, 300, 40)
    exchange, state = exchange_of(request, 3, steps_s)
    state, value = exchange.climb(state)
    candidates = Candidates(request, Movement(request), math.inf)
    draft = exchange.draft(state, candidates.movement)
    assert draft is not None
    plan = Realiser(Workload(request, 1), candidates).offer(draft)
    first = math.ceil(value - 0.5)
    assert steps_s[first - 1] < check_answer(plan, request) <= steps_s[first] * (1 + 1e-9)


def test_close_to_the_optimum_of_small_problems() -> None:
    """Of equal layers; they have far fewer choices than the search is made for."""
    gaps = []
    for seed in range(60):
        request = random_request(seed)
        is_equal = len({layer.time_s for layer in request.profile.layers}) == 1
        if not is_equal or request.num_micro_batches < 4:
            continue
        optimum = brute_force(request)
        if optimum is not None:
            search = local_search(request)
            search.run()
            search.refine()
            gaps.append(search.candidates.best_s / check_answer(optimum, request) - 1)
    assert len(gaps) >= 15
    assert np.mean(np.array(gaps) <= 0.01) >= 0.75
    assert max(gaps) <= 0.2
    assert min(gaps) >= -1e-9


def local_search(request: PlanRequest) -> LocalSearch:
    workload, cluster = Workload(request, 1), build_cluster(request)
    deadline_s = time.monotonic() + request.time_limit_s
    most = request.largest_num_pipelines
    relaxed = Generator(workload, cluster, most, deadline_s).run(most)
    assert relaxed is not None
    candidates = Candidates(request, Movement(request), deadline_s)
    return LocalSearch(workload, cluster, NodeGroups.of(request), candidates, most, relaxed, deadline_s)


def test_a_cluster_of_nodes_keeps_its_plan() -> None:
    request = cluster_of_nodes(3)
    first = make_plan(request)
    again = make_plan(replace(request, current=first.plan))
    assert again.moved_bytes == 0
    assert again.step_s <= first.step_s * 1.01


def test_a_lost_device_moves_little() -> None:
    """Every other device keeps what it holds, as far as the step allows: at most half of the model moves."""
    layers = tuple(LayerProfile("layer", time_s=1.0, state_bytes=100) for _ in range(24))
    request = cluster_of_nodes(3, profile=replace(cluster_of_nodes().profile, layers=layers))
    first = make_plan(request)
    rates = (math.inf, *request.rates[1:])
    again = make_plan(replace(request, rates=rates, current=first.plan))
    assert all(0 not in stage.ranks for _, _, stage in again.plan.stages())
    model_bytes = sum(layer.state_bytes for layer in layers) * request.profile.max_degree
    assert again.moved_bytes <= model_bytes * len(first.plan.pipelines) / 2


def test_nodes_that_cannot_use_all_devices() -> None:
    """Without groups of one, the odd device of a node that lost one stays out."""
    request = cluster_of_nodes(
        nodes=tuple(tuple(range(start, start + 4)) for start in range(0, 24, 4)),
        rates=(math.inf, 3.0, 1.0, 1.0, 1.7, *(1.0 + 0.01 * index for index in range(19))),
        profile=replace(cluster_of_nodes().profile, rho=((4, 1.0), (2, 1.9))),
        time_limit_s=1.0,
    )
    plan = make_plan(request).plan
    assert all(stage.degree in (2, 4) for _, _, stage in plan.stages())
    assert 0 in plan.standby


def test_a_group_across_nodes_is_given_up() -> None:
    """The current plan's, from before nodes changed; per-node memory makes such a group of no known type."""
    request = cluster_of_nodes(
        nodes=tuple(tuple(range(start, start + 4)) for start in range(0, 24, 4)),
        rates=tuple(1.0 + 0.1 * (index % 5) for index in range(24)),
        memory_bytes=tuple(range(100, 106)),
        time_limit_s=1.0,
    )
    stages = (Stage((0, 23), (0, 12)), Stage((4, 5, 6, 7), (12, 24)))
    standby = tuple(rank for rank in range(24) if rank not in (0, 23, 4, 5, 6, 7))
    current = ParallelPlan((Pipeline(stages, 16),), 1, standby)
    nodes = request.nodes or ()
    for _, _, stage in make_plan(replace(request, current=current)).plan.stages():
        assert any(set(stage.ranks) <= set(node) for node in nodes)


@pytest.mark.parametrize(("node_size", "num_micro_batches"), [(8, 128), (16, 32)])
def test_the_time_limit_is_kept_without_memory_limits(node_size: int, num_micro_batches: int) -> None:
    """Any number of pipelines is possible; nodes of 16 different devices form thousands of groupings."""
    request = cluster_of_nodes(
        nodes=tuple(tuple(range(start, start + node_size)) for start in range(0, 64, node_size)),
        rates=tuple(1.0 + 0.05 * (index % node_size) for index in range(64)),
        num_micro_batches=num_micro_batches,
        time_limit_s=2.0,
    )
    result = make_plan(request)
    assert result.lower_bound_s <= result.step_s
    assert result.planning_s < 10  # Machines of the tests may be slow.
