"""The planner: against the published plans, against brute force, and on clusters of up to 8,192 devices.

Parts: reference: 3 models in the situations S1 to S6; small: random problems of up to 6 devices, whose
optimum is known; scale: random clusters, with the planner's usual time and with 20 times as much.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from planner_reference import run_reference
from planner_report import Report
from planner_scale import LONGER, SIZES, run_scale
from planner_small import run_small
from ranks import describe_machine
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from malleus_ds.report.bars import bars_table, exit_code, write_json

PARTS: dict[str, Callable[[argparse.Namespace, Progress], Report]] = {
    "reference": run_reference,
    "small": run_small,
    "scale": run_scale,
}


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no such part: {', '.join(unknown)}; choose from {', '.join(PARTS)}"
        )
    return parts


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", metavar="FILE", type=Path, help="write all figures and bars to FILE")
    add(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw cost against size (.svg or .png); needs the part scale",
    )
    add("--parts", type=_parts, default=list(PARTS), help="comma-separated (default: reference,small,scale)")
    add("--quick", action="store_true", help="a first look: 100 small problems, 3 clusters of 64 devices")
    add("--instances", type=int, default=2000, help="small problems (default: %(default)s)")
    add("--clusters", type=int, default=20, help="per size (default: %(default)s)")
    add(
        "--largest", type=int, default=8192, help="clusters of at most so many devices (default: %(default)s)"
    )
    add(
        "--long",
        type=int,
        default=20,
        metavar="N",
        help=f"clusters of 8192 that are also planned with {LONGER} times the time (default: %(default)s): "
        f"most searches end by themselves within a minute, but each may take 16; the smaller ones always are",
    )
    add("--model", default="70b", help="published model of the part scale (default: %(default)s)")
    add("--reference-limit", type=float, default=20.0, help="s, in the part reference (default: %(default)s)")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.plot is not None and "scale" not in args.parts:
        parser.error("--plot needs the part scale: add it to --parts")
    if args.plot is not None and args.plot.suffix not in (".svg", ".png"):
        parser.error(f"--plot {args.plot}: the picture's name ends with .svg or .png")
    for path in (args.json, args.plot):
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"{path}: its folder does not exist; create it, or give another path")
    if min(args.instances, args.clusters) < 1 or args.largest < SIZES[0].num_devices:
        parser.error("--instances and --clusters must be at least 1, --largest at least 64")
    machine = describe_machine() | {name: version(name) for name in ("cvxpy", "highspy", "numpy", "scipy")}
    began = time.monotonic()
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        reports = {name: PARTS[name](args, progress) for name in args.parts}
    bars = [bar for report in reports.values() for bar in report.bars]
    console = Console()
    for report in reports.values():
        console.print(report.table)
    console.print(bars_table(bars))
    details: dict[str, Any] = {name: report.details for name, report in reports.items()}
    if args.json is not None:
        options = {key: value for key, value in vars(args).items() if key not in ("json", "plot")}
        header = {"machine": machine, "options": options, "duration_s": time.monotonic() - began}
        write_json(args.json, {**header, **details}, bars)
    if args.plot is not None and details["scale"]["clusters"]:
        from planner_plot import plot_scale

        plot_scale(details["scale"]["clusters"], [size for size in SIZES if size.has_bars], args.plot)
    return exit_code(bars)


if __name__ == "__main__":
    sys.exit(main())
