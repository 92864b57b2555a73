"""Known plans of the baselines; that each is the best of its kind is tested in tests/property."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from malleus_ds.files import load_model, make_request
from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage
from malleus_ds.planner.received import received_bytes
from malleus_ds.planner.types import PlanRequest
from malleus_ds.simulate.baselines import System, all_systems
from malleus_ds.simulate.engine import simulate
from malleus_ds.simulate.equal_plan import best_equal_plan
from malleus_ds.simulate.situations import find_situation


def request_of(model: str, situation: str = "healthy") -> PlanRequest:
    request = make_request(load_model(model))
    return replace(request, rates=find_situation(situation, request.world_size).rates)


def system_of(name: str, request: PlanRequest) -> System:
    return {system.name: system for system in all_systems(best_equal_plan(request))}[name]


def step_layers(name: str, request: PlanRequest) -> float:
    """Simulated step of a system's plan, in times of a healthy layer."""
    plan = system_of(name, request).answer(request)
    return simulate(plan, request).makespan_s / request.profile.layers[0].time_s


@pytest.mark.parametrize(
    ("model", "num_pipelines", "degree", "step"), [("32b", 4, 2, 285), ("110b", 2, 8, 700)]
)
def test_published_healthy_plans_are_the_best_equal_ones(
    model: str, num_pipelines: int, degree: int, step: float
) -> None:
    request = request_of(model)
    plan = best_equal_plan(request)
    num_layers = len(request.profile.layers)
    groups = [tuple(range(start, start + degree)) for start in range(0, request.world_size, degree)]
    assert plan == ParallelPlan(
        tuple(
            Pipeline(
                tuple(
                    Stage(
                        groups[4 * index + stage],
                        (num_layers // 4 * stage, num_layers // 4 * (stage + 1)),
                    )
                    for stage in range(4)
                ),
                64 // num_pipelines,
            )
            for index in range(num_pipelines)
        )
    )
    assert simulate(plan, request).makespan_s == pytest.approx(step * request.profile.layers[0].time_s)


def test_data_axis_is_inner_in_the_other_layout() -> None:
    plan = best_equal_plan(request_of("32b"), "stages")
    assert plan.pipelines[1].ranks == (2, 3, 10, 11, 18, 19, 26, 27)


@pytest.mark.parametrize(
    ("name", "situation", "step"),
    [
        # The first of four stages has 16 times 38.55 s of work, and waits for its first gradient until
        # 12.85 + 45, while its four forward passes end at 4 * 12.85.
        ("megatron", "S1", 16 * 38.55 + 12.85 + 45 - 4 * 12.85),
        # Three nodes of four groups: 2 pipelines of 6 stages of 10 layers (4 of 3 do not fit their memory).
        ("megatron+restart", "S1", 31 * 10 + 60),
        # Three pipelines take 20 micro-batches, 19 * 15 + 60; the slow one has 4: 3 * 38.55 + 154.2.
        ("data only", "S6", 345),
        # The whole slow pipeline cannot help itself: 2.57 * 285.
        ("layers only", "S6", 2.57 * 285),
    ],
)
def test_steps_of_baselines(name: str, situation: str, step: float) -> None:
    assert step_layers(name, request_of("32b", situation)) == pytest.approx(step, rel=1e-9)


def test_restart_leaves_out_nodes_with_a_straggler() -> None:
    request = request_of("110b", "S3")
    plan = system_of("megatron+restart", request).answer(request)
    assert set(range(16)) <= set(plan.standby)


def test_restart_without_memory_or_nodes_says_so() -> None:
    request = request_of("32b", "S4")
    with pytest.raises(PlanError, match="no equal plan on 8 ranks of 1 nodes fits"):
        system_of("megatron+restart", request).answer(request)
    with pytest.raises(PlanError, match="every node has a straggler"):
        system_of("deepspeed+restart", request).answer(replace(request, rates=(2.0,) * 32))


@pytest.mark.parametrize("name", ["megatron", "deepspeed", "data only", "layers only"])
def test_a_failed_device_needs_a_restart(name: str) -> None:
    request = replace(request_of("32b"), rates=(math.inf, *(1.0,) * 31))
    with pytest.raises(PlanError, match="failed rank"):
        system_of(name, request).answer(request)
    assert set(range(8)) <= set(system_of("deepspeed+restart", request).answer(request).standby)


def test_received_bytes() -> None:
    layers = tuple(LayerProfile("block", 1.0, 10, 12, gradient_bytes=4) for _ in range(4))
    request = PlanRequest(ModelProfile(layers), (1.0,) * 4, 4)
    first, second = Stage((0,), (0, 2)), Stage((1,), (2, 4))
    one = ParallelPlan((Pipeline((first, second), 4),), 1, (2, 3))
    assert received_bytes(one, one, request).tolist() == [0, 0, 0, 0]
    # Layer 1 moves: its parameters and its optimizer state.
    moved = ParallelPlan((Pipeline((Stage((0,), (0, 1)), Stage((1,), (1, 4))), 4),), 1, (2, 3))
    assert received_bytes(one, moved, request).tolist() == [0, 16, 0, 0]
    # A second pipeline takes half of the optimizer state of each of its layers.
    twins = ParallelPlan(
        (Pipeline((first, second), 2), Pipeline((Stage((2,), (0, 2)), Stage((3,), (2, 4))), 2))
    )
    assert received_bytes(one, twins, request).tolist() == [0, 0, 2 * (4 + 6), 2 * (4 + 6)]
    assert received_bytes(twins, one, request).tolist() == [2 * 6, 2 * 6, 0, 0]


def test_received_bytes_of_split_groups() -> None:
    layers = tuple(LayerProfile("block", 1.0, 10, 12, gradient_bytes=4) for _ in range(2))
    request = PlanRequest(ModelProfile(layers, rho=((2, 1.0), (1, 2.0))), (1.0,) * 2, 4)
    together = ParallelPlan((Pipeline((Stage((0, 1), (0, 2)),), 4),))
    apart = ParallelPlan((Pipeline((Stage((0,), (0, 1)), Stage((1,), (1, 2))), 4),))
    # Each rank lacks one slice of the layer that it gets whole.
    assert np.array_equal(received_bytes(together, apart, request), [16, 16])
