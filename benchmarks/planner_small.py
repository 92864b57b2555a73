"""The planner on small random problems, against brute force."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from planner_cases import REPOSITORY
from planner_report import EXACT, Report
from rich.progress import Progress
from rich.table import Column, Table

from malleus_ds.plan import PlanError
from malleus_ds.planner import make_plan
from malleus_ds.planner.checker import check_answer
from malleus_ds.report.bars import Bar


def run_small(args: argparse.Namespace, progress: Progress) -> Report:
    sys.path.insert(0, str(REPOSITORY))  # the brute force is shared with the tests
    from tests.brute_force import brute_force
    from tests.planner_instances import instance

    gaps: dict[int, float] = {}
    wrong_answers: list[int] = []
    high_bounds: list[int] = []
    num_infeasible = 0
    for seed in progress.track(range(100 if args.quick else args.instances), description="small"):
        request = instance(seed)
        optimum = brute_force(request)
        try:
            result = make_plan(request)
        except PlanError:
            num_infeasible += 1
            if optimum is not None:
                wrong_answers.append(seed)
            continue
        if optimum is None:
            wrong_answers.append(seed)
            continue
        optimum_s = check_answer(optimum, request)
        gaps[seed] = check_answer(result.plan, request) / optimum_s - 1
        if result.lower_bound_s > optimum_s * (1 + 1e-9):
            high_bounds.append(seed)
    details = {
        "gaps": gaps,
        "num_infeasible": num_infeasible,
        "wrong_answers": wrong_answers,
        "high_bounds": high_bounds,
    }
    return _report(gaps, details)


def _report(gaps: Mapping[int, float], details: dict[str, Any]) -> Report:
    """gaps: to the optimum, by seed, where there is a legal plan."""
    within = sum(gap <= 0.01 for gap in gaps.values()) / len(gaps)
    table = Table("small problems", Column("", justify="right"), title="Brute force", title_justify="left")
    for name, value in {
        "problems with a legal plan": len(gaps),
        "problems without": details["num_infeasible"],
        "share of plans that are optimal": sum(gap <= EXACT for gap in gaps.values()) / len(gaps),
        "share within 1 %": within,
        "largest gap": max(gaps.values()),
    }.items():
        table.add_row(name, f"{value:.6g}")
    num_wrong, num_high = len(details["wrong_answers"]), len(details["high_bounds"])
    bars = [
        Bar("small: share within 1 % of the optimum", within, 0.99, "higher"),
        Bar("small: plan without a legal one, or error in spite of one", num_wrong, 0, "lower"),
        Bar("small: lower bounds above the optimum", num_high, 0, "lower"),
    ]
    return Report(table, details, bars)
