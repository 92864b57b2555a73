"""From the measurements of a job and the script of rates: how it did in each situation. No torch.

A *situation* is a range of steps in which no device changes. Only this report reads the script: the
job must find out by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from malleus_ds.config import RateEvent
from malleus_ds.plan import ParallelPlan
from malleus_ds.report.measurements import Event, Measurements


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of plans. first_step: the first under the new plan; rates: that the plan was made for."""

    first_step: int
    rates: tuple[float, ...]
    plan: ParallelPlan
    planning_s: float
    migration_s: float
    total_bytes: int
    sent_bytes: int | None

    @property
    def moved_mib(self) -> float:
        return self.total_bytes / 2**20


@dataclass(frozen=True, slots=True)
class Situation:
    """What happened in the steps ``[start, stop)``.

    rates: injected; changed_ranks: those whose rate differs from the situation before; num_shifts:
    how often the job saw rates move; old_step_s, new_step_s: median step under the plan before the
    first switch and after it, None without such steps; optimum_s: see `optimum_step_s`.
    """

    start: int
    stop: int
    rates: tuple[float, ...]
    changed_ranks: tuple[int, ...]
    num_shifts: int
    plan_before: ParallelPlan
    switches: tuple[Switch, ...]
    old_step_s: float | None
    new_step_s: float | None
    optimum_s: float | None

    @property
    def steps_to_switch(self) -> int | None:
        """From the first step with the new rates to the first step under a new plan."""
        return self.switches[0].first_step - self.start if self.switches else None

    @property
    def settled_step_s(self) -> float | None:
        """The step that the job came to: under the new plan, or the old one where it was kept."""
        return self.new_step_s if self.switches else self.old_step_s

    @property
    def ratio(self) -> float | None:
        """Settled step over the optimum."""
        if self.settled_step_s is None or self.optimum_s is None:
            return None
        return self.settled_step_s / self.optimum_s

    def rate_error(self, rank: int) -> float | None:
        """Relative error of the rate of ``rank`` that the first new plan was made for."""
        return abs(self.switches[0].rates[rank] / self.rates[rank] - 1) if self.switches else None

    def to_dict(self) -> dict[str, Any]:
        names = ("start", "stop", "rates", "changed_ranks", "num_shifts", "steps_to_switch")
        times = ("old_step_s", "new_step_s", "optimum_s", "ratio")
        return {
            **{name: getattr(self, name) for name in (*names, *times)},
            "rate_errors": {rank: self.rate_error(rank) for rank in self.changed_ranks},
            "plan_before": self.plan_before.to_dict(),
            "switches": [_switch_to_dict(switch) for switch in self.switches],
        }


def optimum_step_s(healthy_s: float, rates: Sequence[float]) -> float:
    """``T_healthy * N / sum(1 / x)``: the step if the work could be spread over all devices perfectly."""
    return healthy_s * len(rates) / sum(1 / rate for rate in rates)


def find_situations(measurements: Measurements, script: Sequence[RateEvent]) -> list[Situation]:
    """One situation per distinct step in ``script``, and the healthy one before; in order."""
    assert measurements.start is not None, "the job did not start"
    num_steps = len(measurements.steps)
    starts = sorted({0, *(event.step for event in script if event.step < num_steps)})
    switches = _switches(measurements)
    plan = ParallelPlan.from_dict(measurements.start.plan)
    rates = (1.0,) * measurements.start.world_size
    situations: list[Situation] = []
    for start, stop in zip(starts, [*starts[1:], num_steps], strict=True):
        old_rates, rates = rates, _rates_at(script, start, measurements.start.world_size)
        own = tuple(switch for switch in switches if start < switch.first_step <= stop)
        first_new = own[0].first_step if own else stop
        situations.append(
            Situation(
                start=start,
                stop=stop,
                rates=rates,
                changed_ranks=tuple(rank for rank, rate in enumerate(rates) if rate != old_rates[rank]),
                num_shifts=len(measurements.events_of("shift", range(start, stop))),
                plan_before=plan,
                switches=own,
                old_step_s=_median_step_s(measurements, range(start, first_new)),
                new_step_s=_median_step_s(measurements, range(first_new, stop)),
                optimum_s=None,
            )
        )
        plan = own[-1].plan if own else plan
    healthy_s = _healthy_step_s(situations)
    if healthy_s is None:
        return situations
    return [replace(each, optimum_s=optimum_step_s(healthy_s, each.rates)) for each in situations]


def _healthy_step_s(situations: Sequence[Situation]) -> float | None:
    """The fastest healthy situation, so that a disturbed start does not flatter what comes later."""
    settled = [each.settled_step_s for each in situations if set(each.rates) == {1.0}]
    return min((step_s for step_s in settled if step_s is not None), default=None)


def _rates_at(script: Sequence[RateEvent], step: int, world_size: int) -> tuple[float, ...]:
    rates = [1.0] * world_size
    for event in sorted(script, key=lambda event: event.step):
        if event.step <= step and event.rank < world_size:
            rates[event.rank] = event.rate
    return tuple(rates)


def _median_step_s(measurements: Measurements, steps: range) -> float | None:
    """Without the steps that do more than train: those up to the calibration, and those with a switch."""
    calibrated = measurements.first_event("calibrated", range(len(measurements.steps)))
    first = 0 if calibrated is None else calibrated.step + 1
    switching = {event.step for event in measurements.events_of("switched", steps)}
    durations_s = [
        measurements.steps[step].duration_s for step in steps if step >= first and step not in switching
    ]
    return statistics.median(durations_s) if durations_s else None


def _switches(measurements: Measurements) -> list[Switch]:
    planned: Event | None = None
    switches: list[Switch] = []
    for event in measurements.events:
        if event.kind == "planned":
            planned = event
        if event.kind == "switched" and planned is not None:
            migration, end = event.details["migration"], measurements.end
            switches.append(
                Switch(
                    first_step=event.step + 1,
                    rates=tuple(planned.details["rates"]),
                    plan=ParallelPlan.from_dict(event.details["plan"]),
                    planning_s=planned.details["planning_s"],
                    migration_s=event.details["duration_s"],
                    total_bytes=migration["total_bytes"],
                    sent_bytes=None if end is None else end.sent_bytes[len(switches)],
                )
            )
    return switches


def _switch_to_dict(switch: Switch) -> dict[str, Any]:
    return {
        "first_step": switch.first_step,
        "rates": switch.rates,
        "plan": switch.plan.to_dict(),
        "planning_s": switch.planning_s,
        "migration_s": switch.migration_s,
        "total_bytes": switch.total_bytes,
        "sent_bytes": switch.sent_bytes,
    }
