"""The planner on random clusters of up to 8,192 devices: time, gap to the bound, and what more time gives."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner_cases import random_cluster
from planner_report import Report, timed_plan
from rich.progress import Progress
from rich.table import Table

from malleus_ds.plan import PlanError
from malleus_ds.planner.solver import cvxpy
from malleus_ds.report.bars import Bar

LONGER = 20


@dataclass(frozen=True, slots=True)
class Size:
    """Clusters of one size. bar_s: for planning; limit_s: the planner's time limit, which its last step may
    overrun; has_bars: else the size is there for the plot alone."""

    num_devices: int
    num_slow: int
    bar_s: float
    limit_s: float
    has_bars: bool = True


SIZES = (
    Size(64, 8, 1.0, 0.92),
    Size(128, 12, 1.0, 0.92, has_bars=False),
    Size(256, 16, 5.0, 4.5, has_bars=False),
    Size(1024, 32, 5.0, 4.5),
    Size(4096, 128, 60.0, 48.0, has_bars=False),
    Size(8192, 256, 60.0, 48.0),
)


def run_scale(args: argparse.Namespace, progress: Progress) -> Report:
    cvxpy()  # Loads the libraries, as does the first plan.
    timed_plan(random_cluster(SIZES[0].num_devices, 0, seed=0, time_limit_s=1.0))
    largest = SIZES[0].num_devices if args.quick else args.largest
    sizes = [size for size in SIZES if size.num_devices <= largest]
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for size in sizes:
        num_clusters, num_long = _counts(size, args)
        for seed in progress.track(range(num_clusters), description=f"{size.num_devices} devices"):
            try:
                rows.append(_scale_row(size, seed, args.model, is_long=seed < num_long))
            except PlanError as error:  # There is one: rates do not make the usual plan illegal.
                failed.append({"num_devices": size.num_devices, "seed": seed, "error": str(error)})
    by_size = {size: [row for row in rows if row["num_devices"] == size.num_devices] for size in sizes}
    bars = [Bar("scale: clusters without a plan", len(failed), 0, "lower")]
    bars += [bar for size in sizes if size.has_bars for bar in _scale_bars(size, by_size[size])]
    table = _scale_table(by_size)
    table.caption = _missing(sizes, args)
    return Report(table, {"clusters": rows, "failed": failed, "not_measured": table.caption}, bars)


def _counts(size: Size, args: argparse.Namespace) -> tuple[int, int]:
    """How many clusters, and how many of them also with more time."""
    if args.quick:
        return min(3, args.clusters), 0
    if not size.has_bars:
        return min(5, args.clusters), 0
    return args.clusters, min(args.clusters, args.long) if size.bar_s >= 60 else args.clusters


def _missing(sizes: Sequence[Size], args: argparse.Namespace) -> str | None:
    """What a reader would otherwise take for measured."""
    if args.quick:
        return "quick: no larger cluster was planned, and none with more time"
    if args.long < args.clusters and any(size.bar_s >= 60 and size.has_bars for size in sizes):
        return (
            f"8192 devices: {args.long} of {args.clusters} clusters planned with {LONGER}x the time (--long)"
        )
    return None


def _scale_row(size: Size, seed: int, model_name: str, is_long: bool) -> dict[str, Any]:
    request = random_cluster(size.num_devices, size.num_slow, seed, size.limit_s, model_name)
    result, planning_s = timed_plan(request)
    row: dict[str, Any] = {
        "num_devices": size.num_devices,
        "num_slow": size.num_slow,
        "seed": seed,
        "planning_s": planning_s,
        "step_s": result.step_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "num_pipelines": len(result.plan.pipelines),
        "num_standby": len(result.plan.standby),
    }
    if is_long:
        longer, longer_s = timed_plan(replace(request, time_limit_s=LONGER * size.limit_s))
        row |= {"longer_planning_s": longer_s, "longer_step_s": longer.step_s}
        row["step / longer step"] = result.step_s / longer.step_s
    return row


def _mean_and_worst(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ({max(values):.3f})" if values else "-"


def _ratios(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["step / longer step"] for row in rows if "step / longer step" in row]


def _scale_table(by_size: Mapping[Size, Sequence[dict[str, Any]]]) -> Table:
    table = Table(
        title=f"Random clusters: mean, and worst in brackets\n{LONGER}x: planned again with {LONGER} "
        f"times the time; step ratio: to those plans",
        title_justify="left",
    )
    for name in ("devices", "slow", "clusters", "planning, s", "gap, %", f"{LONGER}x", "step ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for size, rows in by_size.items():
        table.add_row(*_scale_cells(size, rows))
    return table


def _scale_cells(size: Size, rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    ratios = _ratios(rows)
    return (
        str(size.num_devices),
        str(size.num_slow),
        str(len(rows)),
        _mean_and_worst([row["planning_s"] for row in rows]),
        _mean_and_worst([100 * row["gap"] for row in rows]),
        str(len(ratios)),
        _mean_and_worst(ratios),
    )


def _scale_bars(size: Size, rows: Sequence[dict[str, Any]]) -> list[Bar]:
    name, ratios = f"scale, {size.num_devices} devices", _ratios(rows)
    longest_s = max((row["planning_s"] for row in rows), default=None)
    gap = statistics.mean(row["gap"] for row in rows) if rows else None
    bars = [
        Bar(f"{name}: planning, largest, s", longest_s, size.bar_s, "lower"),
        Bar(f"{name}: gap to the lower bound, mean", gap, 0.06, "lower"),
    ]
    if ratios:
        bars.append(Bar(f"{name}: step / with {LONGER} x the time, largest", max(ratios), 1.01, "lower"))
    return bars
