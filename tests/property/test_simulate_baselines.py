"""Baselines against brute force: each is the best of its kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage
from malleus_ds.planner.checker import check_answer
from malleus_ds.planner.cost_model import CostModel, num_in_flight, pipeline_time_s
from malleus_ds.planner.types import PlanRequest
from malleus_ds.simulate.baselines import rebalance_data, rebalance_layers
from malleus_ds.simulate.division import divide_layers, stage_fits
from malleus_ds.simulate.engine import simulate
from malleus_ds.simulate.equal_plan import best_equal_plan, healthy

SETTINGS = settings(deadline=None, derandomize=True, database=None)
RATES = st.sampled_from([1.0, 1.0, 1.3, 2.57, 5.42])


def compositions(total: int, num_parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, total), num_parts - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *cuts, total)))


def boundaries_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sum(sizes[:index]) for index in range(len(sizes) + 1))


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    """Two nodes of four devices, TP up to 2."""
    is_equal = draw(st.booleans())
    layers = tuple(
        LayerProfile(
            "block",
            1.0 if is_equal else draw(st.floats(0.1, 3.0)),
            state_bytes=draw(st.integers(0, 10)),
            optimizer_bytes=draw(st.integers(0, 30)),
            activation_table=draw(st.sampled_from([(), (3,), (2, 5, 7)])),
        )
        for _ in range(draw(st.integers(2, 7)))
    )
    memory = draw(st.sampled_from([None, 60, 100, (50, 90)]))
    return PlanRequest(
        ModelProfile(layers, rho=((1, 1.9), (2, 1.0)), device_bytes=2, tau=((1, 1.0), (2, 1.8))),
        tuple(draw(st.lists(RATES, min_size=8, max_size=8))),
        num_micro_batches=draw(st.sampled_from([4, 6, 12])),
        nodes=((0, 1, 2, 3), (4, 5, 6, 7)),
        memory_bytes=memory,
        micro_batch_sizes=draw(st.sampled_from([(), (1, 2)])),
        max_pipelines=draw(st.sampled_from([None, 2])),
    )


@settings(SETTINGS, max_examples=100)
@given(requests(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.sampled_from([1, 2]))
def test_division_is_the_best_that_fits(
    request: PlanRequest, num_stages: int, count: int, num_pipelines: int, size: int
) -> None:
    groups = [(2 * stage, 2 * stage + 1) if stage % 2 else (2 * stage,) for stage in range(num_stages)]
    rates = list(request.rates[:num_stages])
    tables = [
        stage_fits(request, group, num_pipelines, num_in_flight(num_stages, stage, count), size)
        for stage, group in enumerate(groups)
    ]

    def time_s(boundaries: tuple[int, ...]) -> float:
        ranges = list(pairwise(boundaries))
        if not all(table[layers] for table, layers in zip(tables, ranges, strict=True)):
            return math.inf
        times_s = [
            request.profile.relative_time(len(group)) * rate * request.profile.time_s(layers)
            for group, rate, layers in zip(groups, rates, ranges, strict=True)
        ]
        return pipeline_time_s(times_s, count)

    options = [boundaries_of(sizes) for sizes in compositions(len(request.profile.layers), num_stages)]
    best_s = min(map(time_s, options), default=math.inf)
    found = divide_layers(request, groups, rates, num_pipelines, count, size)
    if found is None:
        assert best_s == math.inf
    else:
        assert time_s(found) == pytest.approx(best_s, rel=1e-8)


@settings(SETTINGS, max_examples=60)
@given(requests(), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_what_fits_is_what_the_checker_accepts(
    request: PlanRequest, count: int, num_pipelines: int, size: int, degree: int
) -> None:
    num_layers = len(request.profile.layers)
    group = tuple(range(degree))
    table = stage_fits(request, group, num_pipelines, num_in_flight(2, 0, count), size)
    cost = CostModel(request)
    for stop in range(1, num_layers):
        stages = (Stage(group, (0, stop)), Stage((4,), (stop, num_layers)))
        plan = ParallelPlan((Pipeline(stages, count),) * num_pipelines, size)
        memory_bytes = request.node_memory_bytes(0)
        fits = memory_bytes is None or cost.stage_bytes(plan, 0, 0) <= memory_bytes
        assert table[0, stop] == fits


def equal_plans(request: PlanRequest) -> Iterator[ParallelPlan]:
    """All plans of equal pipelines of consecutive ranks, with any division of the layers."""
    for degree in (1, 2):
        groups = [tuple(range(start, start + degree)) for start in range(0, 8, degree)]
        for size in request.micro_batch_sizes or (1,):
            for number in range(1, min(len(groups), request.max_pipelines or 8) + 1):
                count, rest = divmod(request.num_micro_batches, size * number)
                for num_stages in range(1, len(groups) // number + 1):
                    if rest or not count:
                        continue
                    for sizes in compositions(len(request.profile.layers), num_stages):
                        layers = list(pairwise(boundaries_of(sizes)))
                        pipelines = tuple(
                            Pipeline(
                                tuple(
                                    Stage(groups[index * num_stages + stage], layers[stage])
                                    for stage in range(num_stages)
                                ),
                                count,
                            )
                            for index in range(number)
                        )
                        used = range(degree * number * num_stages)
                        yield ParallelPlan(pipelines, size, tuple(sorted(set(range(8)) - set(used))))


@settings(SETTINGS, max_examples=40)
@given(requests())
def test_equal_plan_is_the_best_of_its_kind(request: PlanRequest) -> None:
    request = healthy(request)
    if isinstance(request.memory_bytes, tuple):
        request = replace(request, memory_bytes=min(request.memory_bytes))
    best_s = math.inf
    for plan in equal_plans(request):
        try:
            best_s = min(best_s, check_answer(plan, request))
        except PlanError:
            continue
    if best_s == math.inf:
        with pytest.raises(PlanError, match="no equal plan"):
            best_equal_plan(request)
    else:
        found = best_equal_plan(request)
        # The simulated step may be shorter than the formula's, never longer.
        assert simulate(found, request).makespan_s <= best_s * (1 + 1e-9)
        for layout in ("pipelines", "stages"):
            check_answer(best_equal_plan(request, layout), request)


@settings(SETTINGS, max_examples=60)
@given(requests())
def test_shares_are_the_best(request: PlanRequest) -> None:
    request = replace(request, memory_bytes=None)
    static = best_equal_plan(request)
    found = rebalance_data(static, request)
    assert [pipeline.stages for pipeline in found.pipelines] == [each.stages for each in static.pipelines]
    best_s = min(
        check_answer(static.with_micro_batches(counts), request)
        for counts in compositions(static.num_micro_batches, len(static.pipelines))
    )
    assert check_answer(found, request) == pytest.approx(best_s)


@settings(SETTINGS, max_examples=60)
@given(requests())
def test_layers_move_within_their_pipelines(request: PlanRequest) -> None:
    try:
        static = best_equal_plan(request)
    except PlanError:
        return
    found = rebalance_layers(static, request)
    assert [
        ([stage.ranks for stage in pipeline.stages], pipeline.num_micro_batches)
        for pipeline in found.pipelines
    ] == [
        ([stage.ranks for stage in pipeline.stages], pipeline.num_micro_batches)
        for pipeline in static.pipelines
    ]
    assert check_answer(found, request) <= check_answer(static, request) * (1 + 1e-8)
