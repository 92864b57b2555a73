"""The brute force itself, against every plan written out and judged by the checker."""

from __future__ import annotations

import math

import pytest

from malleus_ds.planner.checker import check_answer
from tests.brute_force import brute_force
from tests.planner_instances import least_step_s, random_request, with_micro_batch_sizes, with_updates


@pytest.mark.parametrize(
    ("num_devices", "num_micro_batches", "seeds"), [(3, 4, range(120)), (4, 3, range(1000, 1040))]
)
def test_brute_force_is_the_least_over_all_plans(
    num_devices: int, num_micro_batches: int, seeds: range
) -> None:
    num_feasible = 0
    for seed in seeds:
        request = random_request(seed, num_devices, 4, num_micro_batches)
        if seed % 4 in (1, 3):
            request = with_updates(request, seed)
        if seed % 4 in (2, 3):
            request = with_micro_batch_sizes(request)
        plan = brute_force(request)
        expected_s = least_step_s(request)
        if plan is None:
            assert expected_s == math.inf, seed
        else:
            assert check_answer(plan, request) == pytest.approx(expected_s, rel=1e-9), seed
            num_feasible += 1
    assert len(seeds) * 0.7 < num_feasible < len(seeds), "the instances should be of both kinds"
