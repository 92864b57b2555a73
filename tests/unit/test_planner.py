"""Known values and edges of the search; its optimality is tested in tests/property."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest

from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.plan import ParallelPlan, PlanError
from malleus_ds.planner import PlanRequest, PlanResult, make_plan
from malleus_ds.planner.cost_model import CostModel, pipeline_time_s
from malleus_ds.planner.movement import Movement


def equal_layers(num_layers: int, **sizes: int) -> ModelProfile:
    return ModelProfile(tuple(LayerProfile("block", 1.0, **sizes) for _ in range(num_layers)))


def num_moved_layers(plan: ParallelPlan, request: PlanRequest) -> float:
    """Layers of equal weight that ranks receive."""
    return Movement(request).of(plan)


def eight_ranks(slow: float, **changes: object) -> PlanRequest:
    rates = (1.0, 1.0, 1.0, slow, 1.0, 1.0, 1.0, 1.0)
    request = PlanRequest(equal_layers(16), rates, num_micro_batches=32, max_pipelines=2)
    return replace(request, **changes)


def test_pipeline_time_is_fill_plus_pace() -> None:
    assert pipeline_time_s([2.0, 3.0, 1.0], 4) == 3 * 3.0 + 6.0
    assert pipeline_time_s([2.0, 3.0, 1.0], 4, message_s=0.5) == 3 * 3.0 + 6.0 + 2 * 0.5


@pytest.mark.parametrize(("slow", "limit_s"), [(1.0, 76.0), (2.57, 86.0), (3.75, 84.0), (5.42, 88.0)])
def test_one_slow_device_of_eight(slow: float, limit_s: float) -> None:
    current = ParallelPlan.homogeneous(16, 8, 4, 16)
    for request in (eight_ranks(slow), eight_ranks(slow, current=current)):
        result = make_plan(request)
        assert result.step_s <= limit_s * (1 + 1e-9)
        assert result.lower_bound_s <= result.step_s
        assert result.step_s == pytest.approx(CostModel(request).step_time_s(result.plan))
        assert 0 <= result.gap < 0.05


def test_healthy_cluster_gets_a_balanced_plan() -> None:
    plan = make_plan(eight_ranks(1.0)).plan
    assert {stage.num_layers for _, _, stage in plan.stages()} == {4}
    assert [pipeline.num_micro_batches for pipeline in plan.pipelines] == [16, 16]


def test_healthy_cluster_keeps_its_plan() -> None:
    current = ParallelPlan.homogeneous(16, 8, 4, 16)
    result = make_plan(eight_ranks(1.0, current=current))
    assert result.plan == current
    assert result.current_step_s == 76.0


def test_slow_device_moves_few_layers() -> None:
    current = ParallelPlan.homogeneous(16, 8, 4, 16)
    result = make_plan(eight_ranks(3.75, current=current))
    # Its pipeline goes from 4+4+4+4 to 5+1+5+5 in the old order: layers 4, 6, 7 and 11 move.
    assert num_moved_layers(result.plan, eight_ranks(3.75, current=current)) == 4
    assert result.plan.layers_of(3)[1] - result.plan.layers_of(3)[0] == 1


def test_grouping_stays_close_to_the_current_one() -> None:
    rates = [1.0] * 12
    rates[5] = rates[11] = 2.57
    current = ParallelPlan.homogeneous(16, 12, 4, 8)
    request = PlanRequest(equal_layers(16), tuple(rates), 24)
    best_s = make_plan(request).step_s
    result = make_plan(replace(request, current=current))
    assert result.step_s <= 1.01 * best_s
    # The fastest grouping moves 88 layers, however it is laid out.
    assert num_moved_layers(result.plan, replace(request, current=current)) <= 20


def test_failed_rank_is_standby() -> None:
    current = ParallelPlan.homogeneous(16, 8, 4, 16)
    result = make_plan(eight_ranks(math.inf, current=current))
    assert result.plan.standby == (3,)
    assert result.current_step_s == math.inf
    assert PlanResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_limiting_rank_is_the_slowest_stage_of_the_slowest_pipeline() -> None:
    request = PlanRequest(equal_layers(3), (1.0, 4.0), num_micro_batches=8, max_pipelines=1)
    result = make_plan(request)  # All layers on rank 0, or 2 + 1: 7 * 4 + 6 > 8 * 3.
    assert result.plan.standby == (1,)
    assert result.limiting_rank == 0


def test_one_device() -> None:
    result = make_plan(PlanRequest(equal_layers(4), (2.0,), num_micro_batches=3))
    assert result.step_s == result.lower_bound_s == 24.0


def test_devices_beyond_the_work_are_standby() -> None:
    result = make_plan(PlanRequest(equal_layers(2), (1.0,) * 12, num_micro_batches=3))
    assert result.step_s == 2.0
    assert len(result.plan.standby) >= 12 - 2 * 3


def test_slow_device_comes_first_where_memory_is_tight() -> None:
    # Three micro-batches in flight on the first of three stages: it can hold one layer only.
    profile = equal_layers(5, activation_bytes=10)
    request = PlanRequest(profile, (1.0, 1.0, 2.0), 12, memory_bytes=40, max_pipelines=1)
    result = make_plan(request)
    assert [stage.num_layers for stage in result.plan.pipelines[0].stages] == [1, 2, 2]
    assert result.plan.pipelines[0].stages[0].ranks == (2,)


def test_all_failed() -> None:
    with pytest.raises(PlanError, match=r"no usable device: all 2 ranks"):
        make_plan(PlanRequest(equal_layers(4), (math.inf, math.inf), 4))


def test_layer_that_fits_nowhere_is_named() -> None:
    layers = (LayerProfile("small", 1.0, 10), LayerProfile("huge", 1.0, 1000))
    with pytest.raises(PlanError, match=r"layer 1 \(huge\) does not fit into memory_bytes \(500\)"):
        make_plan(PlanRequest(ModelProfile(layers), (1.0, 1.0), 4, memory_bytes=500))


def test_too_little_memory_in_all() -> None:
    with pytest.raises(PlanError, match=r"memory_bytes \(20\) on 2 usable ranks"):
        make_plan(PlanRequest(equal_layers(6, state_bytes=10), (1.0, 1.0), 4, memory_bytes=20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches is 0"),
        ({"time_limit_s": math.nan}, "time_limit_s is nan"),
        ({"message_s": -1.0}, "message_s is -1.0"),
        ({"rates": (1.0, math.nan)}, "rank 1 is nan"),
        ({"profile": ModelProfile(())}, "layer times"),
        ({"current": ParallelPlan.homogeneous(4, 4, 2)}, "4 layers on 4 ranks"),
    ],
)
def test_wrong_requests(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(replace(PlanRequest(equal_layers(16), (1.0, 1.0), 4), **change))


def test_request_round_trip() -> None:
    request = eight_ranks(math.inf, current=ParallelPlan.homogeneous(16, 8, 4, 16), nodes=((0, 1), (2,)))
    text = json.dumps(request.to_dict(), allow_nan=False)
    assert '"inf"' in text
    assert PlanRequest.from_dict(json.loads(text)) == request


def large_cluster(**changes: object) -> PlanRequest:
    rates = [1.0] * 64
    rates[5], rates[20], rates[40] = 2.57, 3.75, 5.42
    return replace(PlanRequest(equal_layers(80), tuple(rates), 64, max_pipelines=8), **changes)


def test_large_cluster() -> None:
    result = make_plan(large_cluster())
    assert result.gap < 0.05


def test_time_limit_is_kept_with_a_legal_plan() -> None:
    start_s = time.monotonic()
    result = make_plan(large_cluster(time_limit_s=0.05))
    assert time.monotonic() - start_s < 5.0
    assert result.plan.num_micro_batches == 64
    assert result.lower_bound_s <= result.step_s


def test_same_request_same_plan() -> None:
    request = eight_ranks(2.57, current=ParallelPlan.homogeneous(16, 8, 4, 16), max_pipelines=None)
    assert len({make_plan(request).plan for _ in range(3)}) == 1


def test_pipelines_keep_their_places() -> None:
    """A healthy pipeline that is not touched stays where it is, whatever the search's own order."""
    current = ParallelPlan.homogeneous(16, 8, 4, 16)
    rates = tuple(3.75 if rank == 2 else 1.0 for rank in range(8))
    profile = ModelProfile(tuple(LayerProfile("block", 1.0) for _ in range(16)))
    request = PlanRequest(profile, rates, 32, current=current, max_pipelines=2)
    plan = make_plan(request).plan
    assert plan.pipelines[1].stages == current.pipelines[1].stages
    assert set(plan.pipelines[0].ranks) <= set(current.pipelines[0].ranks)
