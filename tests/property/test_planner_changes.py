"""The planner with a current plan, against brute force, and against itself on changed problems."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage
from malleus_ds.planner import PlanRequest, make_plan
from malleus_ds.planner.checker import check_answer
from tests.brute_force import brute_force, device_groups
from tests.planner_instances import every_plan, random_request

EXACT = 1e-6
SIMILAR = 1.01  # The planner may take 1 % more for less movement.
MISSED = 0.03  # What the search of larger clusters, which ends by time, may miss.


def held(plan: ParallelPlan, max_degree: int) -> set[tuple[int, int, int]]:
    """Which rank holds which slice of which layer, in slices of the largest degree."""
    return {
        (rank, layer, part)
        for _, _, stage in plan.stages()
        for layer in range(*stage.layers)
        for slice_id, rank in enumerate(stage.ranks)
        for part in range(slice_id * max_degree // stage.degree, (slice_id + 1) * max_degree // stage.degree)
    }


def random_plan(request: PlanRequest, seed: int) -> ParallelPlan:
    """Some plan of all ranks, failed or not, without regard to memory."""
    rng = np.random.default_rng(seed)
    degrees = [degree for degree, _ in request.profile.rho]
    choices = [list(device_groups(node, degrees)) for node in request.node_ranks]
    groups = [group for node in choices for group in node[rng.integers(len(node))]] or [(0,)]
    groups = [groups[index] for index in rng.permutation(len(groups))]
    most = min(len(groups), request.num_micro_batches, request.max_pipelines or len(groups))
    number = int(rng.integers(1, most, endpoint=True))
    num_layers = len(request.profile.layers)
    parts = [groups[index::number][:num_layers] for index in range(number)]
    shares = rng.multinomial(request.num_micro_batches - number, [1 / number] * number) + 1
    pipelines = []
    for part, count in zip(parts, shares, strict=True):
        cuts = sorted(rng.choice(np.arange(1, num_layers), len(part) - 1, replace=False)) if part[1:] else []
        edges = [0, *(int(cut) for cut in cuts), num_layers]
        pipelines.append(Pipeline(tuple(map(Stage, part, pairwise(edges))), int(count)))
    used = {rank for pipeline in pipelines for rank in pipeline.ranks}
    standby = tuple(rank for rank in range(request.world_size) if rank not in used)
    return ParallelPlan(tuple(pipelines), request.micro_batch_size, standby)


def test_current_plan_is_changed_only_for_a_gain() -> None:
    num_kept = 0
    for seed in range(60):
        request = replace(random_request(seed + 2000), memory_bytes=None)
        optimum = brute_force(request)
        if optimum is None:
            continue
        optimum_s = check_answer(optimum, request)
        # Half of the current plans are random and mostly slow; the others are (nearly) the best.
        current = optimum if seed % 2 else random_plan(request, seed)
        result = make_plan(replace(request, current=current))
        assert result.current_step_s is not None, seed
        assert result.step_s <= optimum_s * SIMILAR * (1 + EXACT), seed
        if result.current_step_s <= optimum_s * SIMILAR * (1 - EXACT):
            max_degree = request.profile.max_degree
            assert held(result.plan, max_degree) <= held(current, max_degree), seed
            assert result.moved_bytes == 0, seed
            num_kept += 1
    assert num_kept >= 25


def test_moves_least_among_plans_of_similar_speed() -> None:
    """Equal slices of equal layers: bytes are proportional to the slices that a rank has to receive."""
    excess = {}
    for seed in range(60):
        request = random_request(seed + 3000, max_devices=4, max_layers=4, max_micro_batches=4)
        layer = replace(request.profile.layers[0], optimizer_bytes=0)
        layers = (layer,) * len(request.profile.layers)
        profile = replace(request.profile, layers=layers)
        # Few rates, so that many plans are equally fast.
        rates = tuple(1.0 if rate < 2 else 2.57 for rate in request.rates)
        request = replace(request, profile=profile, rates=rates, memory_bytes=None)
        current = random_plan(request, seed)
        try:
            result = make_plan(replace(request, current=current))
        except PlanError:
            continue
        before = held(current, profile.max_degree)
        steps = [
            (check_answer(plan, request), plan)
            for plan in every_plan(request)
            if plan.num_micro_batches == request.num_micro_batches
            and len(plan.pipelines) <= (request.max_pipelines or len(plan.pipelines))
        ]
        best_s = min(step_s for step_s, _ in steps)
        least = min(
            moved_slices(plan, before, profile.max_degree)
            for step_s, plan in steps
            if step_s <= best_s * SIMILAR * (1 - EXACT)
        )
        moved = moved_slices(result.plan, before, profile.max_degree)
        if moved > least:
            excess[seed] = (moved, least)
    print(f"slices moved beyond the least: {excess}")
    # The search for it is a heuristic: some plans keep more of their pipelines, none moves without reason.
    assert len(excess) <= 9, excess


def moved_slices(plan: ParallelPlan, before: set[tuple[int, int, int]], max_degree: int) -> int:
    return len(held(plan, max_degree) - before)


def larger_request(seed: int) -> PlanRequest:
    """4 nodes of 4 devices, up to 4 slow or failed; TP up to 4, 16 layers."""
    rng = np.random.default_rng(seed)
    rates = np.ones(16)
    slow = rng.choice(16, int(rng.integers(0, 5)), replace=False)
    rates[slow] = [math.inf if rng.random() < 0.2 else round(rng.uniform(1.1, 6.0), 2) for _ in slow]
    small = random_request(seed, max_layers=1)
    layer = replace(small.profile.layers[0], time_s=1.0)
    profile = replace(small.profile, layers=(layer,) * 16, rho=((1, 3.7), (2, 1.9), (4, 1.0)))
    return PlanRequest(
        profile,
        tuple(rates.tolist()),
        num_micro_batches=int(rng.integers(16, 33)),
        nodes=tuple(tuple(range(start, start + 4)) for start in range(0, 16, 4)),
        memory_bytes=None if seed % 2 else profile.device_bytes + 4 * int(rng.integers(600, 1500)),
        time_limit_s=5.0,
    )


@pytest.mark.parametrize("seed", range(6))
def test_order_of_nodes_does_not_matter(seed: int) -> None:
    request = larger_request(seed)
    order = np.random.default_rng(seed).permutation(4)
    rates = tuple(request.rates[4 * node + slot] for node in order for slot in range(4))
    permuted = make_plan(replace(request, rates=rates))
    assert permuted.step_s == pytest.approx(make_plan(request).step_s, rel=MISSED)


@pytest.mark.parametrize("seed", range(6))
def test_rates_twice_as_high_take_twice_as_long(seed: int) -> None:
    request = larger_request(seed)
    doubled = make_plan(replace(request, rates=tuple(2 * rate for rate in request.rates)))
    assert doubled.step_s == pytest.approx(2 * make_plan(request).step_s, rel=MISSED)


@pytest.mark.parametrize("seed", range(6))
def test_a_slower_device_gives_no_faster_step(seed: int) -> None:
    """But for what the search may miss."""
    request = larger_request(seed)
    step_s = make_plan(request).step_s
    for rank in (0, 5):
        rates = [3.0 * rate if index == rank else rate for index, rate in enumerate(request.rates)]
        assert make_plan(replace(request, rates=tuple(rates))).step_s >= (1 - MISSED) * step_s
