"""The simulator against an independent solver, the formula and bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.plan import ParallelPlan
from malleus_ds.planner.cost_model import CostModel, num_in_flight, pipeline_time_s
from malleus_ds.planner.search import make_plan
from malleus_ds.planner.types import PlanRequest
from malleus_ds.simulate.engine import simulate
from malleus_ds.simulate.pipeline import run_pipeline
from tests.strategies import legal_plans

SETTINGS = settings(deadline=None, derandomize=True, database=None)
STAGE_TIMES = st.lists(st.floats(0.05, 3.0), min_size=1, max_size=7)
COUNTS = st.integers(1, 24)
RATIOS = st.sampled_from([0.5, 1.0, 2.0, 3.0])


def fixed_point_s(times_s: list[float], count: int, message_s: float, ratio: float) -> float:
    """End of the step as the least solution of all "not before" constraints, by iteration."""
    num_stages = len(times_s)
    ends: dict[tuple[int, str, int], float] = {}
    chains = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, count)
        order = [("f", index) for index in range(ahead)]
        for index in range(count):
            if ahead + index < count:
                order.append(("f", ahead + index))
            order.append(("b", index))
        chains.append([(stage, *item) for item in order])
        ends.update(dict.fromkeys(chains[-1], 0.0))
    is_stable = False
    while not is_stable:
        is_stable = True
        for chain in chains:
            for before, (stage, kind, index) in pairwise([None, *chain]):
                start = 0.0 if before is None else ends[before]
                source = (stage + (1 if kind == "b" else -1), kind, index)
                if source in ends:
                    start = max(start, ends[source] + message_s / 2)
                end = start + times_s[stage] / (1 + ratio) * (ratio if kind == "b" else 1)
                if end > ends[stage, kind, index]:
                    ends[stage, kind, index], is_stable = end, False
    return max(ends.values())


@settings(SETTINGS, max_examples=150)
@given(STAGE_TIMES, st.integers(1, 12), st.sampled_from([0.0, 0.1, 1.0]), RATIOS)
def test_solves_the_constraints(times_s: list[float], count: int, message_s: float, ratio: float) -> None:
    assert run_pipeline(times_s, count, message_s, ratio).makespan_s == pytest.approx(
        fixed_point_s(times_s, count, message_s, ratio), rel=1e-12
    )


@settings(SETTINGS, max_examples=300)
@given(STAGE_TIMES, COUNTS, RATIOS)
def test_formula_is_exact_with_a_slowest_stage_at_the_end(
    times_s: list[float], count: int, ratio: float
) -> None:
    times_s = [*times_s, max(times_s)]
    assert run_pipeline(times_s, count, 0.0, ratio).makespan_s == pytest.approx(
        pipeline_time_s(times_s, count), rel=1e-9
    )


@settings(SETTINGS, max_examples=600)
@given(STAGE_TIMES, COUNTS, RATIOS)
def test_formula_elsewhere_is_too_high_by_at_most_the_slack_at_the_end(
    times_s: list[float], count: int, ratio: float
) -> None:
    makespan_s = run_pipeline(times_s, count, 0.0, ratio).makespan_s
    slowest = max(range(len(times_s)), key=lambda stage: (times_s[stage], stage))
    slack_s = sum(times_s[slowest] - time_s for time_s in times_s[slowest + 1 :])
    formula_s = pipeline_time_s(times_s, count)
    assert formula_s - slack_s <= makespan_s * (1 + 1e-9)
    assert makespan_s <= formula_s * (1 + 1e-9)


@settings(SETTINGS, max_examples=100)
@given(st.integers(1, 6), COUNTS, st.floats(0.0, 0.5))
def test_pace_of_equal_stages_with_messages(num_stages: int, count: int, message_s: float) -> None:
    times_s = [1.0] * num_stages
    more = num_stages * count  # Whole periods apart, and far from the ends.
    period_s = (
        run_pipeline(times_s, 2 * more + 20, message_s).makespan_s
        - run_pipeline(times_s, more + 20, message_s).makespan_s
    ) / more
    assert period_s == pytest.approx(1 + message_s * (num_stages - 1) / num_stages, rel=1e-9)


@settings(SETTINGS, max_examples=100)
@given(STAGE_TIMES, COUNTS, st.sampled_from([0.0, 0.2]))
def test_activations_in_flight_are_those_of_the_cost_model(
    times_s: list[float], count: int, message_s: float
) -> None:
    for stage_id, work in enumerate(run_pipeline(times_s, count, message_s).stages):
        kept, most = 0, 0
        for each in work:
            kept += 1 if each.direction == "forward" else -1
            most = max(most, kept)
        assert most == num_in_flight(len(times_s), stage_id, count)


@st.composite
def problems(draw: st.DrawFn) -> tuple[ParallelPlan, PlanRequest]:
    num_layers, world_size = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    plan = draw(legal_plans(num_layers, world_size))
    rates = draw(st.lists(st.sampled_from([1.0, 1.1, 2.57, 5.42]), min_size=world_size, max_size=world_size))
    layers = tuple(
        LayerProfile("block", draw(st.floats(0.05, 3.0)), optimizer_s=draw(st.sampled_from([0.0, 0.3])))
        for _ in range(num_layers)
    )
    request = PlanRequest(
        ModelProfile(layers, tau=tuple((size, float(size)) for size in (1, 2, 3))),
        tuple(rates),
        plan.num_micro_batches,
        micro_batch_size=1,
        message_s=draw(st.sampled_from([0.0, 0.1])),
    )
    return plan, request


@settings(SETTINGS, max_examples=200)
@given(problems())
def test_step_is_bounded_by_its_parts(problem: tuple[ParallelPlan, PlanRequest]) -> None:
    plan, request = problem
    result, cost = simulate(plan, request), CostModel(request)
    for pipeline, run in zip(plan.pipelines, result.runs, strict=True):
        times_s = [cost.stage_time_s(stage, plan.micro_batch_size) for stage in pipeline.stages]
        message_s = request.message_s * plan.micro_batch_size
        assert run.makespan_s >= (sum(times_s) + message_s * (len(times_s) - 1)) * (1 - 1e-9)
        for stage_id, time_s in enumerate(times_s):
            least_s = sum(times_s[:stage_id]) + pipeline.num_micro_batches * time_s
            assert run.makespan_s >= (least_s + message_s * stage_id) * (1 - 1e-9)
    assert result.compute_s == max(run.makespan_s for run in result.runs)
    assert result.compute_s <= result.makespan_s
    assert result.makespan_s <= result.compute_s + max(cost.rank_updates_s(plan).values()) + 1e-9
    if not request.message_s:
        assert result.makespan_s <= cost.step_time_s(plan) * (1 + 1e-9)


@settings(SETTINGS, max_examples=100)
@given(problems())
def test_spans_of_a_rank_follow_each_other(problem: tuple[ParallelPlan, PlanRequest]) -> None:
    plan, request = problem
    cost, spans = CostModel(request), simulate(plan, request).spans()
    assert sorted(spans) == list(range(request.world_size))
    for rank, own in spans.items():
        assert all(span.end_s <= later.start_s + 1e-9 for span, later in pairwise(own))
        position = plan.position(rank)
        if position is None:
            assert own == ()
            continue
        pipeline = plan.pipelines[position.pipeline_id]
        time_s = cost.stage_time_s(pipeline.stages[position.stage_id], plan.micro_batch_size)
        busy_s = sum(span.end_s - span.start_s for span in own if span.micro_batch is not None)
        assert busy_s == pytest.approx(pipeline.num_micro_batches * time_s)


@settings(SETTINGS, max_examples=50)
@given(problems(), st.floats(0.1, 10.0))
def test_time_scales(problem: tuple[ParallelPlan, PlanRequest], factor: float) -> None:
    plan, request = problem
    layers = tuple(
        replace(layer, time_s=factor * layer.time_s, optimizer_s=factor * layer.optimizer_s)
        for layer in request.profile.layers
    )
    scaled = replace(
        request, profile=replace(request.profile, layers=layers), message_s=factor * request.message_s
    )
    assert simulate(plan, scaled).makespan_s == pytest.approx(factor * simulate(plan, request).makespan_s)


@settings(SETTINGS, max_examples=60)
@given(problems())
def test_no_plan_is_faster_than_the_planners_bound(problem: tuple[ParallelPlan, PlanRequest]) -> None:
    plan, request = problem
    batch = plan.global_batch_size
    sizes = tuple(size for size in (1, 2, 3) if batch % size == 0)
    request = replace(request, num_micro_batches=batch, micro_batch_sizes=sizes)
    result = make_plan(request)
    for each in (plan, result.plan):
        assert simulate(each, request).makespan_s >= result.lower_bound_s * (1 - 1e-9)
