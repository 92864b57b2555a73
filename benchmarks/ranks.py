"""Runs a benchmark: starts its script once more on all ranks, judges what they measured, reports.

A benchmark is a script with a *job*, which runs on every rank and returns measurements on rank 0,
and a pure *evaluation* of these measurements as bars. Both can be called without this module.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from malleus_ds.cli.job import find_launcher, job_command
from malleus_ds.report.bars import Bar, bars_table, exit_code, write_json


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an evaluation gives. figures: by name, unit in the name; None where not measured."""

    figures: dict[str, float | None]
    bars: list[Bar]


Job = Callable[[argparse.Namespace], dict[str, Any] | None]
Evaluation = Callable[[Mapping[str, Any]], Verdict]

NUM_RANKS = 8
_TIMEOUT_S = 1200.0
_STOP_S = 10.0


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures and bars to FILE")
    # With this option the process is a rank.
    parser.add_argument("--measurements", type=Path, help=argparse.SUPPRESS)
    return parser


def run_benchmark(script: str, parser: argparse.ArgumentParser, job: Job, evaluate: Evaluation) -> int:
    """The main program of a benchmark, in its first process and in its ranks; returns the exit code."""
    args = parser.parse_args()
    if args.measurements is not None:
        return run_rank(job, args)
    check_json_path(parser, args)
    began = time.monotonic()
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="malleus-benchmark-") as folder:
        path = Path(folder) / "measurements.json"
        arguments = [*sys.argv[1:], "--measurements", str(path)]
        code = run(job_command(find_launcher("mpirun"), NUM_RANKS, Path(script), arguments))
        if code != 0:
            return code
        measured = json.loads(path.read_text(encoding="utf-8"))
    options = {name: value for name, value in vars(args).items() if name not in ("json", "measurements")}
    details = {"machine": machine, "options": options, "duration_s": time.monotonic() - began, **measured}
    return publish(details, evaluate(measured), args.json)


def check_json_path(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Before the work, not after it."""
    if args.json is not None and not args.json.resolve().parent.is_dir():
        parser.error(f"--json {args.json}: its folder does not exist; create it, or give another path")


def publish(details: Mapping[str, Any], verdict: Verdict, path: Path | None) -> int:
    """Show the verdict, write it with the details to ``path``, and return the exit code."""
    table = Table("figure", Column("measured", justify="right"), title="Figures", title_justify="left")
    for name, value in verdict.figures.items():
        table.add_row(name, "-" if value is None else f"{value:.4g}")
    console = Console()
    console.print(table)
    console.print(bars_table(verdict.bars))
    if path is not None:
        write_json(path, {**details, "figures": verdict.figures}, verdict.bars)
    return exit_code(verdict.bars)


def describe_machine() -> dict[str, Any]:
    """What the figures depend on; the load is that of the last minute, before the ranks start."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "platform": platform.platform(),
        "num_cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed", "mpi4py")},
    }


def run_rank(job: Job, args: argparse.Namespace) -> int:
    # The first process needs neither torch nor DeepSpeed.
    from malleus_ds.comm import init_distributed
    from malleus_ds.launch import run_job

    def main() -> None:
        init_distributed()
        measured = job(args)
        if measured is not None:
            args.measurements.write_text(json.dumps(measured), encoding="utf-8")

    run_job(main)
    return 0


def run(command: Sequence[str]) -> int:
    """Run the ranks to their end; returns the exit code of the launcher."""
    # Many ranks share few cores: one thread each. DeepSpeed logs to stdout, which is for the report.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment)
    try:
        return process.wait(_TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.terminate()  # mpirun passes it on to its ranks
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
