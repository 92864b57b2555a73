"""Laws that every legal plan, and every pair of them, obeys."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_ds.plan import ParallelPlan, PlanError, Stage, diff_plans
from tests.strategies import legal_plans

NUM_LAYERS = 9
WORLD_SIZE = 7
PLANS = legal_plans(NUM_LAYERS, WORLD_SIZE)


@given(PLANS)
def test_legal_plans_pass_and_round_trip(plan: ParallelPlan) -> None:
    plan.validate(NUM_LAYERS, WORLD_SIZE)
    assert ParallelPlan.from_json(plan.to_json()) == plan
    for pipeline in plan.pipelines:
        covered = [layer for stage in pipeline.stages for layer in range(*stage.layers)]
        assert covered == list(range(NUM_LAYERS))
    assert sorted((*plan.ranks, *plan.standby)) == list(range(WORLD_SIZE))


@given(legal_plans(NUM_LAYERS, WORLD_SIZE, max_pipelines=3, num_micro_batches=8))
def test_strategy_keeps_the_batch(plan: ParallelPlan) -> None:
    plan.validate(NUM_LAYERS, WORLD_SIZE)
    assert plan.global_batch_size == 8
    assert len(plan.pipelines) <= 3


def with_stage(plan: ParallelPlan, pipeline_id: int, stage_id: int, stage: Stage) -> ParallelPlan:
    pipelines = list(plan.pipelines)
    stages = list(pipelines[pipeline_id].stages)
    stages[stage_id] = stage
    pipelines[pipeline_id] = replace(pipelines[pipeline_id], stages=tuple(stages))
    return replace(plan, pipelines=tuple(pipelines))


Mutation = Callable[[ParallelPlan, int, int, Stage], ParallelPlan]
# Each breaks any legal plan at any stage: at degree 1 a rank has no other place to go.
MUTATIONS: dict[str, Mutation] = {
    "start later": lambda plan, p, s, old: with_stage(
        plan, p, s, replace(old, layers=(old.layers[0] + 1, old.layers[1]))
    ),
    "start earlier": lambda plan, p, s, old: with_stage(
        plan, p, s, replace(old, layers=(old.layers[0] - 1, old.layers[1]))
    ),
    "stop later": lambda plan, p, s, old: with_stage(
        plan, p, s, replace(old, layers=(old.layers[0], old.layers[1] + 1))
    ),
    "empty": lambda plan, p, s, old: with_stage(plan, p, s, replace(old, layers=(old.layers[0],) * 2)),
    "next rank": lambda plan, p, s, old: with_stage(
        plan, p, s, replace(old, ranks=((old.ranks[0] + 1) % WORLD_SIZE,))
    ),
    "rank outside": lambda plan, p, s, old: with_stage(plan, p, s, replace(old, ranks=(WORLD_SIZE,))),
    "rank also standby": lambda plan, p, s, old: replace(plan, standby=(*plan.standby, *old.ranks)),
    "no data": lambda plan, p, s, old: plan.with_micro_batches(
        [0 if index == p else pipeline.num_micro_batches for index, pipeline in enumerate(plan.pipelines)]
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
@given(plan=PLANS, data=st.data())
def test_broken_plans_are_refused_and_drawn(
    mutation: Mutation, plan: ParallelPlan, data: st.DataObject
) -> None:
    pipeline_id, stage_id, stage = data.draw(st.sampled_from(list(plan.stages())))
    with pytest.raises(PlanError) as caught:
        mutation(plan, pipeline_id, stage_id, stage).validate(NUM_LAYERS, WORLD_SIZE)
    assert "^" in str(caught.value)


@given(PLANS)
def test_drawing_shows_each_stage_within_100_columns(plan: ParallelPlan) -> None:
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 100
    drawn = [box.strip() for line in lines if " ranks " in line for box in line.split("|")[1:-1]]
    assert drawn == [str(rank) for rank in plan.ranks]


@given(PLANS, PLANS)
def test_diff_is_empty_only_for_plans_that_do_the_same(old: ParallelPlan, new: ParallelPlan) -> None:
    assert not diff_plans(old, old)
    same_work = (old.pipelines, old.micro_batch_size) == (new.pipelines, new.micro_batch_size)
    assert bool(diff_plans(old, new)) is not same_work


@given(PLANS, PLANS)
def test_diff_names_every_layer_that_gets_other_ranks(old: ParallelPlan, new: ParallelPlan) -> None:
    told = set()
    for line in diff_plans(old, new).lines():
        match = re.match(r"pipeline (\d+).*layers? (\d+)(?:-(\d+))?", line)
        if match:
            first, last = int(match[2]), int(match[3] or match[2])
            told |= {(int(match[1]), layer) for layer in range(first, last + 1)}

    def holder(plan: ParallelPlan, pipeline_id: int, layer: int) -> tuple[int, ...] | None:
        if pipeline_id >= len(plan.pipelines):
            return None
        stages = plan.pipelines[pipeline_id].stages
        return next(stage.ranks for stage in stages if layer in range(*stage.layers))

    assert told == {
        (pipeline_id, layer)
        for pipeline_id in range(WORLD_SIZE)
        for layer in range(NUM_LAYERS)
        if holder(old, pipeline_id, layer) != holder(new, pipeline_id, layer)
    }
