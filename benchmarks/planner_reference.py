"""The planner in the published situations, against the published plans."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from planner_cases import Situation, published_plan, published_step, situations
from planner_report import EXACT, Report, timed_plan
from rich.progress import Progress
from rich.table import Table

from malleus_ds.planner import PlanResult
from malleus_ds.report.bars import Bar
from malleus_ds.simulate.engine import simulate


def run_reference(args: argparse.Namespace, progress: Progress) -> Report:
    cases = list(situations(1.0 if args.quick else args.reference_limit))
    rows: list[dict[str, Any]] = []
    healthy = 0.0
    for case in progress.track(cases, description="reference"):
        result, planning_s = timed_plan(case.request)
        step = published_step(result.plan, case)
        if case.name.endswith("/healthy"):
            healthy = step
        rows.append(_reference_row(case, step, healthy, result, planning_s))
    slow = [row for row in rows if not row["case"].endswith("/healthy")]
    bars = [
        Bar("reference: ours / reference, largest", _largest(slow, "ours", "reference"), 1 + EXACT, "lower"),
        Bar(
            f"reference: strictly better, of {len(slow)}",
            sum(row["ours"] < row["reference"] * (1 - EXACT) for row in slow),
            14,
            "higher",
        ),
        Bar(
            "reference: mean of (step / healthy step) / optimum",
            statistics.mean(row["ours / optimum"] for row in slow),
            1.040,
            "lower",
        ),
        # The formula lets nothing overlap behind the slowest stage, so no simulated step takes longer.
        Bar("reference: simulated / ours, largest", _largest(rows, "simulated", "ours"), 1 + EXACT, "lower"),
    ]
    return Report(_reference_table(rows), {"cases": rows}, bars)


def _largest(rows: Sequence[dict[str, Any]], name: str, other: str) -> float:
    return max(float(row[name] / row[other]) for row in rows)


def _reference_row(
    case: Situation, step: float, healthy: float, result: PlanResult, planning_s: float
) -> dict[str, Any]:
    reference, plan = case.reference, published_plan(case.reference)
    # Else the formula is not theirs.
    assert abs(published_step(plan, case) / reference["step"] - 1) < EXACT, case.name
    return {
        "case": case.name,
        "reference": reference["step"],
        "ours": step,
        "ours / optimum": step / reference["healthy_step"] / reference["optimum_ratio"],
        "by own healthy": step / healthy / reference["optimum_ratio"],
        "reference / optimum": reference["step"] / reference["healthy_step"] / reference["optimum_ratio"],
        "simulated": simulate(result.plan, case.request).makespan_s,
        "reference simulated": simulate(plan, case.request).makespan_s,
        "bound": result.lower_bound_s,
        "gap": result.gap,
        "planning_s": planning_s,
        "plan": result.plan.to_dict(),
    }


def _reference_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        title="Published situations, in times of a healthy layer; / opt: (step / healthy step) / optimum\n"
        "ratio; own: with our own healthy step; sim: simulated",
        title_justify="left",
    )
    for name in ("case", "ref", "ours", "ref / opt", "ours / opt", "own", "ref sim", "sim", "gap", "s"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["case"],
            *(f"{row[name]:.1f}" for name in ("reference", "ours")),
            *(f"{row[name]:.3f}" for name in ("reference / optimum", "ours / optimum", "by own healthy")),
            *(f"{row[name]:.1f}" for name in ("reference simulated", "simulated")),
            f"{row['gap']:.1%}",
            f"{row['planning_s']:.2f}",
        )
    return table
