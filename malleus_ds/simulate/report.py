"""A comparison as a table for a terminal, and as data for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from malleus_ds.simulate.compare import Outcome, Row
from malleus_ds.simulate.scenario import Segment, num_samples

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Comparison:
    """healthy_s: step of the static plan without stragglers; segments: throughput over time of each row."""

    model: str
    healthy_s: float
    rows: tuple[Row, ...]
    segments: tuple[tuple[Segment, ...], ...]

    def samples(self) -> list[float]:
        """Trained by each system in the whole scenario."""
        return [num_samples(segments) for segments in self.segments]

    def to_optimum(self, outcome: Outcome) -> float:
        """Step over the optimum ``healthy_s * N / sum(1 / x)``."""
        return outcome.step_s / self.healthy_s / outcome.situation.optimum_ratio


def table(comparison: Comparison) -> Table:
    """Systems against situations."""
    from rich.table import Table

    shown = Table(title=f"Simulated step of {comparison.model}", title_justify="left", show_lines=True)
    shown.add_column("system")
    for outcome in comparison.rows[0].outcomes:
        shown.add_column(outcome.situation.name, justify="right", no_wrap=True)
    shown.add_column("samples", justify="right", no_wrap=True)
    most = max(comparison.samples())
    for row, samples in zip(comparison.rows, comparison.samples(), strict=True):
        cells = [_cell(comparison, outcome) for outcome in row.outcomes]
        shown.add_row(row.system.name, *cells, f"{samples:.0f}\n{samples / most:.0%}")
    shown.caption = (
        f"step; step / healthy step of {comparison.healthy_s:.4g} s; step / optimum, which is healthy step * "
        f"N / sum(1 / rate). samples: of the whole scenario, with all delays. *: no plan, keeps its old one"
    )
    shown.caption_justify = "left"
    return shown


def reasons(comparison: Comparison) -> Iterator[str]:
    """Why systems have no plan, a line each."""
    for row in comparison.rows:
        for outcome in row.outcomes:
            if outcome.plan is None:
                yield f"{row.system.name}, {outcome.situation.name}: {outcome.reason}"


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """All figures and plans. JSON has no infinity: a step that never ends is null."""
    first = comparison.rows[0].outcomes
    return {
        "model": comparison.model,
        "healthy_step_s": comparison.healthy_s,
        "situations": [
            {
                "name": outcome.situation.name,
                "rates": _slow_rates(outcome.situation.rates),
                "optimum_ratio": outcome.situation.optimum_ratio,
            }
            for outcome in first
        ],
        "systems": [
            {
                "name": row.system.name,
                "about": row.system.about,
                "samples": samples,
                "outcomes": [_outcome(comparison, outcome) for outcome in row.outcomes],
                "throughput": [_segment(segment) for segment in segments],
            }
            for row, segments, samples in zip(
                comparison.rows, comparison.segments, comparison.samples(), strict=True
            )
        ],
    }


def _cell(comparison: Comparison, outcome: Outcome) -> str:
    if math.isinf(outcome.step_s):
        return "stands\nstill" + ("" if outcome.plan else " *")
    mark = "" if outcome.plan else " *"
    ratio = outcome.step_s / comparison.healthy_s
    return f"{outcome.step_s:.4g} s{mark}\n{ratio:.3f}\n{comparison.to_optimum(outcome):.3f}"


def _slow_rates(rates: Sequence[float]) -> dict[str, float | str]:
    return {str(rank): "inf" if math.isinf(rate) else rate for rank, rate in enumerate(rates) if rate != 1.0}


def _outcome(comparison: Comparison, outcome: Outcome) -> dict[str, Any]:
    return {
        "situation": outcome.situation.name,
        "step_s": _finite(outcome.step_s),
        "to_healthy": _finite(outcome.step_s / comparison.healthy_s),
        "to_optimum": _finite(comparison.to_optimum(outcome)),
        "old_step_s": _finite(outcome.old_step_s),
        "planning_s": outcome.planning_s,
        "moved_bytes": outcome.moved_bytes,
        "reason": outcome.reason,
        "plan": None if outcome.plan is None else outcome.plan.to_dict(),
    }


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "situation": segment.situation,
        "phase": segment.phase,
        "start_s": segment.start_s,
        "end_s": segment.end_s,
        "samples_per_s": segment.samples_per_s,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
