from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from malleus_ds.config import DetectorConfig
from malleus_ds.detector.rates import RateEstimator, Shift
from malleus_ds.detector.record import StepRecord

WORLD_SIZE = 8
CONFIG = DetectorConfig()
Noise = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def uniform(half_width: float) -> Noise:
    return lambda generator, shape: 1 + generator.uniform(-half_width, half_width, shape)


def gaussian(sigma: float) -> Noise:
    return lambda generator, shape: 1 + sigma * generator.standard_normal(shape)


def feed(estimator: RateEstimator, ratios: Sequence[float], expected_s: float = 1.0) -> Shift | None:
    """One step in which each rank takes ``ratio * expected_s``."""
    estimator.update([StepRecord(0, ratio * expected_s, expected_s, 0) for ratio in ratios])
    return estimator.shift()


def ratios_of(changes: dict[int, float], scale: float = 1.0) -> list[float]:
    return [scale * changes.get(rank, 1.0) for rank in range(WORLD_SIZE)]


def settled(steps: int = 10) -> RateEstimator:
    estimator = RateEstimator(WORLD_SIZE, CONFIG)
    for _ in range(steps):
        assert feed(estimator, ratios_of({})) is None
    return estimator


@pytest.mark.parametrize("noise", [uniform(0.10), gaussian(0.05)], ids=["uniform", "gaussian"])
def test_no_shift_in_300_runs_of_200_healthy_noisy_steps(noise: Noise) -> None:
    generator = np.random.default_rng(1000)
    num_alarms = 0
    for _ in range(300):
        estimator = RateEstimator(WORLD_SIZE, CONFIG)
        steps = noise(generator, (200, WORLD_SIZE)).tolist()
        num_alarms += any(feed(estimator, step) is not None for step in steps)
    assert num_alarms == 0


@pytest.mark.parametrize("rate", [1.5, 2.57, 3.75, 5.42])
def test_a_slow_rank_is_reported_after_two_records_within_5_percent(rate: float) -> None:
    generator = np.random.default_rng(3)
    for _ in range(50):
        estimator = RateEstimator(WORLD_SIZE, CONFIG)
        steps = uniform(0.03)(generator, (12, WORLD_SIZE))
        steps[10:, 3] *= rate
        shifts = [feed(estimator, step) for step in steps.tolist()]
        assert shifts[:11] == [None] * 11
        shift = shifts[11]
        assert shift is not None
        assert (shift.ranks, shift.old_rates) == ((3,), (1.0,))
        assert shift.new_rates[0] == pytest.approx(rate, rel=0.05)
        assert shift.new_rates[0] == estimator.rates[3]


def test_recovery_is_reported_after_two_records() -> None:
    estimator = settled()
    slow = ratios_of({2: 3.75, 5: 2.57})
    assert feed(estimator, slow) is None
    shift = feed(estimator, slow)
    assert shift is not None
    assert shift.ranks == (2, 5)
    assert shift.new_rates == pytest.approx((3.75, 2.57))
    estimator.accept(estimator.rates)
    for _ in range(6):
        assert feed(estimator, slow) is None
    partly = ratios_of({5: 2.57})
    assert feed(estimator, partly) is None
    shift = feed(estimator, partly)
    assert shift is not None
    assert (shift.ranks, shift.old_rates) == ((2,), pytest.approx((3.75,)))
    assert shift.new_rates == pytest.approx((1.0,))
    assert estimator.rates[5] == pytest.approx(2.57)


@pytest.mark.parametrize("direction", [8.0, 1 / 8])
def test_one_slow_or_fast_step_is_never_a_shift_and_leaves_no_trace(direction: float) -> None:
    estimator = settled()
    for _ in range(5):
        assert feed(estimator, ratios_of({4: direction})) is None
        assert feed(estimator, ratios_of({})) is None
    assert feed(estimator, ratios_of({4: 5.0})) is None
    assert feed(estimator, ratios_of({4: 0.2})) is None  # Both far off, but not on the same side.
    assert estimator.rates == pytest.approx((1.0,) * WORLD_SIZE)


def test_one_slow_step_of_the_whole_machine() -> None:
    estimator = settled()
    assert feed(estimator, [1.0, 1.9, 3.0, 1.4, 2.2, 1.0, 1.7, 5.0]) is None
    assert feed(estimator, ratios_of({})) is None
    assert estimator.rates == pytest.approx((1.0,) * WORLD_SIZE)


def test_a_small_change_needs_the_median_of_the_window() -> None:
    estimator = settled(20)
    shifts = [feed(estimator, ratios_of({1: 1.2})) for _ in range(CONFIG.window_steps)]
    assert shifts[:2] == [None, None]
    assert shifts[-1] is not None
    assert shifts[-1].ranks == (1,)
    assert shifts[-1].new_rates == pytest.approx((1.2,))


def test_a_change_below_the_small_shift_is_followed_and_not_reported() -> None:
    estimator = settled(20)
    for _ in range(60):
        assert feed(estimator, ratios_of({1: 1.08})) is None
    assert estimator.rates[1] == pytest.approx(1.08, rel=0.01)


def test_an_estimate_refines_and_is_reported_again_when_the_plan_was_made_for_a_wrong_one() -> None:
    estimator = settled()
    for ratio in (4.6, 4.6):  # The slow-down began with two harder steps.
        shift = feed(estimator, ratios_of({6: ratio}))
    assert shift is not None
    estimator.accept(estimator.rates)
    shifts = [feed(estimator, ratios_of({6: 3.75})) for _ in range(30)]
    assert shifts[0] is None
    reported = [shift for shift in shifts if shift is not None]
    assert reported
    assert reported[-1].new_rates == pytest.approx((3.75,), rel=0.03)


def test_a_gradual_slow_down_is_reported() -> None:
    estimator = settled()
    for step in range(60):
        shift = feed(estimator, ratios_of({0: 1.01**step}))
        if shift is not None:
            break
    assert shift is not None
    assert shift.ranks == (0,)
    assert 1.12 <= shift.new_rates[0] <= 1.01**step


@pytest.mark.parametrize("drift", [1.5, 0.6, 1.1])
def test_a_machine_that_drifts_as_a_whole_has_not_shifted(drift: float) -> None:
    estimator = settled()
    for _ in range(10):
        assert feed(estimator, ratios_of({}, scale=drift)) is None
    for step in range(100):
        assert feed(estimator, ratios_of({}, scale=drift * 1.01**step)) is None
    assert estimator.rates == pytest.approx((1.0,) * WORLD_SIZE)


def test_more_than_half_of_the_ranks_may_slow_down_later() -> None:
    estimator = settled()
    slow = dict.fromkeys(range(5), 2.57)
    feed(estimator, ratios_of(slow))
    shift = feed(estimator, ratios_of(slow))
    assert shift is not None
    assert shift.ranks == (0, 1, 2, 3, 4)
    assert estimator.rates == pytest.approx((2.57,) * 5 + (1.0,) * 3)
    estimator.accept(estimator.rates)
    slow |= {5: 1.8}
    feed(estimator, ratios_of(slow))
    shift = feed(estimator, ratios_of(slow))
    assert shift is not None
    assert (shift.ranks, shift.new_rates) == ((5,), pytest.approx((1.8,)))


def test_a_rank_that_is_slow_from_the_start_and_a_wrong_profile() -> None:
    estimator = RateEstimator(WORLD_SIZE, CONFIG)
    # The profile promises twice the real time: a common factor, which is no one's rate.
    assert feed(estimator, ratios_of({7: 3.0}, scale=0.5)) is None
    shift = feed(estimator, ratios_of({7: 3.0}, scale=0.5))
    assert shift is not None
    assert (shift.ranks, shift.new_rates) == ((7,), pytest.approx((3.0,)))


def test_records_are_normalised_by_the_expected_time() -> None:
    estimator = settled()
    for expected_s in (0.1, 7.0, 0.01):
        assert feed(estimator, ratios_of({}), expected_s) is None


def test_records_without_a_measurement_change_nothing() -> None:
    estimator = settled()
    rates = estimator.rates
    estimator.update([StepRecord(0, 9.0, 0.0, 0)] * WORLD_SIZE)
    assert estimator.rates == rates
    slow = [StepRecord(0, 3.0 if rank == 3 else 1.0, 1.0, 0) for rank in range(WORLD_SIZE)]
    gap = [StepRecord(0, 0.0, 0.0, 0) if rank == 3 else slow[rank] for rank in range(WORLD_SIZE)]
    for records in (slow, gap, gap):  # A rank that is probed every third step.
        estimator.update(records)
        assert estimator.shift() is None
    estimator.update(slow)
    assert estimator.shift() == Shift((3,), (1.0,), (pytest.approx(3.0),))


def test_a_failed_rank_counts_at_once_and_can_come_back() -> None:
    estimator = settled()
    records = [StepRecord(0, 1.0, 1.0, 0, failed=rank == 1) for rank in range(WORLD_SIZE)]
    estimator.update(records)
    assert estimator.shift() == Shift((1,), (1.0,), (math.inf,))
    estimator.accept(estimator.rates)
    estimator.update(records)
    assert estimator.shift() is None
    assert feed(estimator, ratios_of({})) is None
    shift = feed(estimator, ratios_of({}))
    assert shift == Shift((1,), (math.inf,), (pytest.approx(1.0),))


def test_two_ranks_and_one() -> None:
    pair = RateEstimator(2, CONFIG)
    for _ in range(5):
        assert feed(pair, [1.0, 1.0]) is None
    feed(pair, [1.0, 2.5])
    assert feed(pair, [1.0, 2.5]) == Shift((1,), (1.0,), (pytest.approx(2.5),))
    alone = RateEstimator(1, CONFIG)
    for ratio in (1.0, 1.0, 2.0, 2.0, 2.0):
        assert feed(alone, [ratio]) is None  # There is nobody to be slower than.


def test_wrong_numbers_of_ranks() -> None:
    estimator = settled()
    with pytest.raises(ValueError, match="2 records for 8 ranks"):
        feed(estimator, [1.0, 1.0])
    with pytest.raises(ValueError, match="1 rates for 8 ranks"):
        estimator.accept([1.0])
