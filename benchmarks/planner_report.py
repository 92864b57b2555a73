"""What the parts of the planner's benchmark share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from malleus_ds.planner import PlanRequest, PlanResult, make_plan
from malleus_ds.planner.checker import check_answer
from malleus_ds.report.bars import Bar

EXACT = 1e-6


@dataclass(frozen=True, slots=True)
class Report:
    """Of one part. table: for the terminal; details: for the JSON file."""

    table: Table
    details: dict[str, Any]
    bars: list[Bar]


def timed_plan(request: PlanRequest) -> tuple[PlanResult, float]:
    """A plan that the checker accepts, and the seconds that it took."""
    began = time.perf_counter()
    result = make_plan(request)
    duration_s = time.perf_counter() - began
    step_s = check_answer(result.plan, request)
    assert abs(step_s / result.step_s - 1) < EXACT, (step_s, result.step_s)
    return result, duration_s
