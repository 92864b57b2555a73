"""A day of situations: throughput over time, with the delays that a system has until it has answered.

Each situation lasts equally long for all systems. A system first runs its plan of before under the new rates,
while it notices and plans (beside training), then stands still to migrate or restart, then runs its new plan.
Steps count in fractions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from malleus_ds.simulate.compare import Outcome, Row

Phase = Literal["detection", "planning", "migration", "restart", "settled"]


DEFAULT_LINK_BYTES_PER_S = 25e9


class ScenarioError(ValueError):
    """A scenario whose situations are too short for what happens in them."""


@dataclass(frozen=True, slots=True)
class Delays:
    """detection_steps: run before a change is noticed (a job that stands still counts healthy steps);
    planning_s, migration_s: None: as measured, and the bytes of the rank that receives most over
    ``bandwidth_bytes_per_s``; restart_s: from checkpoint to training again.
    """

    detection_steps: float = 5.0
    planning_s: float | None = None
    migration_s: float | None = None
    restart_s: float = 180.0
    bandwidth_bytes_per_s: float = DEFAULT_LINK_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Segment:
    """A time of one throughput."""

    situation: str
    phase: Phase
    start_s: float
    end_s: float
    samples_per_s: float


def throughput(
    row: Row, delays: Delays, situation_s: float, healthy_s: float, batch_size: int
) -> tuple[Segment, ...]:
    """Throughput of a system over time, from 0 to ``situation_s`` times the number of its situations.

    healthy_s: a healthy step; batch_size: samples of a step. Raises `ScenarioError` when a situation ends
    before the system has answered it.
    """
    segments: list[Segment] = []
    for index, outcome in enumerate(row.outcomes):
        end_s = (index + 1) * situation_s
        now_s = index * situation_s
        phases = _phases(row, outcome, delays, healthy_s, batch_size) if index else []
        needed_s = sum(seconds for _, seconds, _ in phases)
        if needed_s > situation_s:
            raise ScenarioError(
                f"situation {outcome.situation.name} lasts {situation_s:.0f} s, but {row.system.name} needs "
                f"{needed_s:.0f} s to answer it; make situations longer or delays shorter"
            )
        for phase, seconds, rate in phases:
            segments.append(Segment(outcome.situation.name, phase, now_s, now_s + seconds, rate))
            now_s += seconds
        settled = batch_size / outcome.step_s
        segments.append(Segment(outcome.situation.name, "settled", now_s, end_s, settled))
    return tuple(segment for segment in segments if segment.end_s > segment.start_s)


def num_samples(segments: Sequence[Segment]) -> float:
    """Samples trained in all."""
    return sum((segment.end_s - segment.start_s) * segment.samples_per_s for segment in segments)


def _phases(
    row: Row, outcome: Outcome, delays: Delays, healthy_s: float, batch_size: int
) -> list[tuple[Phase, float, float]]:
    """``(phase, seconds, samples per second)`` until the system has answered."""
    if not outcome.is_new:
        return []
    step_s = outcome.old_step_s if math.isfinite(outcome.old_step_s) else healthy_s
    before = batch_size / outcome.old_step_s
    phases: list[tuple[Phase, float, float]] = [("detection", delays.detection_steps * step_s, before)]
    if row.system.restarts:
        return [*phases, ("restart", delays.restart_s, 0.0)]
    planning_s = outcome.planning_s if delays.planning_s is None else delays.planning_s
    migration_s = delays.migration_s
    if migration_s is None or not outcome.moved_bytes:
        migration_s = outcome.longest_bytes / delays.bandwidth_bytes_per_s
    return [*phases, ("planning", planning_s, before), ("migration", migration_s, 0.0)]
