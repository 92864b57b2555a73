"""The lower bound: never above a legal plan, no weaker than work over speed, tight where that is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.plan import PlanError
from malleus_ds.planner import PlanRequest, make_plan
from malleus_ds.planner.checker import check_answer
from tests.brute_force import brute_force
from tests.planner_instances import random_request, with_updates


def fluid_bound_s(request: PlanRequest) -> float:
    """All work over the speed of all devices, each in a group of the degree that suits it best."""
    overhead = min(degree * factor for degree, factor in request.profile.rho) / request.profile.max_degree
    speed = sum(1 / request.rates[rank] for rank in request.usable_ranks) / request.profile.max_degree
    return request.num_micro_batches * sum(request.profile.layer_times_s) * overhead / speed


@pytest.mark.parametrize("time_limit_s", [0.001, 10.0])
def test_holds_under_updates_and_when_the_search_is_cut_short(time_limit_s: float) -> None:
    num_checked = 0
    for seed in range(4000, 4040):
        request = replace(with_updates(random_request(seed), seed), time_limit_s=time_limit_s)
        optimum = brute_force(request)
        try:
            result = make_plan(request)
        except PlanError:
            assert optimum is None, seed
            continue
        assert optimum is not None, seed
        optimum_s = check_answer(optimum, request)
        assert result.lower_bound_s <= optimum_s * (1 + 1e-9), seed
        assert check_answer(result.plan, request) >= optimum_s * (1 - 1e-9), seed
        num_checked += 1
    assert num_checked >= 30


@pytest.mark.parametrize("seed", range(8))
def test_no_weaker_than_work_over_speed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = np.where(rng.random(32) < 0.2, rng.uniform(1.1, 12.0, 32), 1.0)
    rates[rng.integers(32)] = math.inf
    request = PlanRequest(
        ModelProfile((LayerProfile("layer", 1.0),) * 20, rho=((1, 3.8), (2, 1.95), (4, 1.0))),
        tuple(rates.tolist()),
        num_micro_batches=40,
        nodes=tuple(tuple(range(start, start + 8)) for start in range(0, 32, 8)),
        time_limit_s=2.0,
    )
    result = make_plan(request)
    assert fluid_bound_s(request) * (1 - 1e-9) <= result.lower_bound_s <= result.step_s * (1 + 1e-9)


@pytest.mark.parametrize(("num_devices", "num_micro_batches"), [(1, 3), (4, 8), (8, 8), (16, 64)])
def test_tight_for_equal_devices_that_need_not_share(num_devices: int, num_micro_batches: int) -> None:
    """One device per pipeline: all devices work all the time, so nothing can be faster."""
    request = PlanRequest(
        ModelProfile((LayerProfile("layer", 0.5),) * 6), (2.0,) * num_devices, num_micro_batches
    )
    result = make_plan(request)
    expected_s = num_micro_batches / num_devices * 6 * 0.5 * 2.0
    assert result.step_s == pytest.approx(expected_s, rel=1e-9)
    assert result.lower_bound_s == pytest.approx(expected_s, rel=1e-6)


def test_knows_that_layers_are_whole() -> None:
    """Memory for 4 of 10 layers a device: 3 stages, so one holds 4 layers, however they are divided."""
    layer = LayerProfile("layer", 1.0, state_bytes=100)
    request = PlanRequest(ModelProfile((layer,) * 10), (1.0,) * 3, 200, memory_bytes=450)
    result = make_plan(request)
    assert result.step_s == pytest.approx(199 * 4 + 10)
    assert result.lower_bound_s >= 0.97 * result.step_s
