"""The built-in models against the published planner's inputs and plans."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from malleus_ds.files import BUILT_IN_MODELS, load_model, make_request, parse_rates
from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage
from malleus_ds.planner.checker import check_answer
from malleus_ds.planner.cost_model import CostModel
from malleus_ds.planner.types import PlanRequest
from tests.harness import REPOSITORY

MIB = 2**20
CASES = [
    f"{model}/{situation}"
    for model in BUILT_IN_MODELS
    for situation in ("healthy", "S1", "S2", "S3", "S4", "S5", "S6")
]


@cache
def published() -> dict[str, Any]:
    text = (REPOSITORY / "tests/cases/planner_reference.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def reference_plan(case: str) -> ParallelPlan:
    """The published plan of "110b/S1"; ranks of a stage that no other names are in the published order."""
    reference = published()["reference"][case]
    pipelines = []
    for pipeline in reference["pipelines"]:
        stages, start = [], 0
        for stage in pipeline["stages"]:
            stages.append(Stage(tuple(stage["devices"]), (start, start + stage["layers"])))
            start += stage["layers"]
        pipelines.append(Pipeline(tuple(stages), pipeline["micro_batches"]))
    return ParallelPlan(tuple(pipelines), standby=tuple(reference["standby"]))


def reference_request(case: str) -> PlanRequest:
    name, situation = case.split("/")
    model = load_model(name)
    world_size = model.num_nodes * model.devices_per_node
    return make_request(model, rates=parse_rates(published()["scenarios"][situation], world_size))


def test_all_published_plans_are_compared() -> None:
    assert sorted(published()["reference"]) == sorted(CASES)


@pytest.mark.parametrize("case", CASES)
def test_published_plans_take_the_published_time(case: str) -> None:
    request = reference_request(case)
    layer_s = request.profile.layers[0].time_s
    step_s = check_answer(reference_plan(case), request)
    assert step_s / layer_s == pytest.approx(published()["reference"][case]["step"], rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_stages_of_published_plans_need_the_published_memory(case: str) -> None:
    constants = published()["models"][case.split("/")[0]]
    plan, request = reference_plan(case), reference_request(case)
    assert len(plan.pipelines) == constants["dp"]
    cost = CostModel(request)
    for pipeline_id, stage_id, stage in plan.stages():
        num_stages = len(plan.pipelines[pipeline_id].stages)
        per_layer = constants["memory_k_mib"][-(num_stages - stage_id)]
        ends = constants["memory_embedding_mib"] if stage_id in (0, num_stages - 1) else 0
        layers_mib = (per_layer * stage.num_layers + ends) * constants["tp_max"] / stage.degree
        expected = layers_mib + constants["memory_extra_mib"]
        assert cost.stage_bytes(plan, pipeline_id, stage_id) / MIB == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("name", BUILT_IN_MODELS)
def test_shape_and_limits_of_built_in_models(name: str) -> None:
    model, constants = load_model(name), published()["models"][name]
    assert model.name == name
    assert (model.num_nodes, model.devices_per_node) == (
        constants["num_nodes"],
        constants["devices_per_node"],
    )
    assert (model.num_micro_batches, model.micro_batch_size) == (constants["num_micro_batches"], 1)
    assert len(model.profile.layers) == constants["num_layers"]
    assert model.memory_bytes == (constants["memory_bound_mib"] - constants["memory_gap_mib"]) * MIB
    degrees = [degree for degree in (8, 4, 2, 1) if degree <= constants["tp_max"]]
    assert model.profile.rho == tuple(zip(degrees, constants["rho"], strict=False))


@pytest.mark.parametrize("name", BUILT_IN_MODELS)
def test_a_layer_too_many_does_not_fit(name: str) -> None:
    """The published limit binds: one whole pipeline on one node is refused."""
    model = load_model(name)
    request = make_request(model)
    num_layers, degree = len(model.profile.layers), model.profile.max_degree
    stages = (Stage(tuple(range(degree)), (0, num_layers)),)
    plan = ParallelPlan(
        (Pipeline(stages, model.num_micro_batches),), standby=tuple(range(degree, request.world_size))
    )
    with pytest.raises(PlanError, match="memory_bytes"):
        check_answer(plan, request)
