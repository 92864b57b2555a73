"""`malleus demo`: a job in which devices slow down and recover, followed live and measured."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from malleus_ds.cli.errors import JobFailedError, UsageError
from malleus_ds.cli.job import LAUNCHERS, Job, find_launcher, job_command
from malleus_ds.config import EmulationConfig, parse_config
from malleus_ds.report.bars import Bar, bars_table, exit_code, write_json
from malleus_ds.report.demo_bars import demo_bars
from malleus_ds.report.demo_tables import print_situations
from malleus_ds.report.live import LiveView
from malleus_ds.report.measurements import Measurements
from malleus_ds.report.situations import Situation, find_situations

NUM_RANKS = 8
MAX_DURATION_S = 240.0
_LAST_STEPS = 10
_PLAIN_COLUMNS = 110
_PATIENCE_S = 120.0

_DESCRIPTION = """\
Trains a small GPT on real text with 8 ranks on this machine: 2 pipelines of 4 stages. The ranks
compute and communicate for real; how long a layer takes is emulated, so that devices can be slow.

First all devices are healthy. Then one becomes 3.75 times slower, later a second one 2.57 times,
and later both recover. Each time the job finds out by its own measurements, makes a new plan while
training goes on, and moves its state to the new plan between two steps.

At the end: how long a step took before and after each re-plan, beside the optimum
T_healthy * N / sum(1 / rate), the plans, and the bars that the demo must hold.
"""
_EXAMPLES = """\
examples:
  malleus demo                              the whole story, in under 4 minutes on 2 cores
  malleus demo --json demo.json             also write all figures and bars as JSON
  malleus demo --data ~/books               train on your own text
  malleus demo --healthy-steps 200          200 healthy steps first: no re-plan for noise alone
  malleus demo --launcher deepspeed         without MPI: the control plane runs over gloo
"""


def add_parser(commands: Any) -> None:
    """commands: of `argparse.ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        "demo",
        help="watch a job re-plan itself around slow devices",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures and bars to FILE")
    parser.add_argument(
        "--data",
        metavar="PATH",
        type=Path,
        help="text file or folder (default: the sources of Python's library)",
    )
    parser.add_argument(
        "--healthy-steps", metavar="N", type=int, help="healthy steps at the start (default: 10)"
    )
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default="auto",
        help="default: mpirun, or deepspeed where that is missing",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code; raises `UsageError` and `JobFailedError`."""
    began = time.monotonic()
    _check(args)
    # The drawn plans need up to 100 columns; a terminal has what it has.
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_COLUMNS)
    launcher = find_launcher(args.launcher)
    if args.launcher == "auto" and launcher.name != "mpirun":
        console.print("mpirun is missing: using the deepspeed launcher, and gloo instead of MPI")
    repository = _repository()
    config = json.loads((repository / "configs" / "demo.json").read_text(encoding="utf-8"))
    if args.healthy_steps is not None:
        _shift_events(config, args.healthy_steps)
    emulation = parse_config(config["malleus"]).emulation
    assert emulation is not None, "the demo's config emulates devices"
    folder = Path(tempfile.mkdtemp(prefix="malleus-demo-"))
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    measurements = _follow(args, console, launcher, repository, folder, emulation)
    situations = find_situations(measurements, emulation.events)
    duration_s = time.monotonic() - began
    max_duration_s = MAX_DURATION_S if args.healthy_steps is None else None
    bars = demo_bars(measurements, situations, duration_s, max_duration_s)
    _report(console, measurements, situations, bars)
    console.print(f"output of the ranks: {folder / 'ranks.log'}", highlight=False, soft_wrap=True)
    if args.json is not None:
        write_json(args.json, _details(measurements, situations, launcher, duration_s), bars)
    return exit_code(bars)


def _check(args: argparse.Namespace) -> None:
    """Before anything starts, and before a run of minutes cannot be written down."""
    if args.data is not None and not args.data.exists():
        raise UsageError(f"--data {args.data}: no such file or folder; give an existing one, or leave it out")
    if args.healthy_steps is not None and args.healthy_steps < 6:
        raise UsageError(
            f"--healthy-steps {args.healthy_steps}: give at least 6, of which 3 are for calibration"
        )
    if args.json is not None and not args.json.resolve().parent.is_dir():
        raise UsageError(f"--json {args.json}: its folder does not exist; create it, or give another path")


def _repository() -> Path:
    repository = Path(__file__).resolve().parents[2]
    if not (repository / "launcher" / "train.py").exists():
        raise UsageError(
            "the demo runs launcher/train.py with configs/demo.json, which are not in the installed package: "
            "run it from a clone of the repository, installed with pip install -e ."
        )
    return repository


def _shift_events(config: dict[str, Any], healthy_steps: int) -> None:
    """Let the first change come after ``healthy_steps``, and all others as much later."""
    events = config["malleus"]["emulation"]["events"]
    shift = healthy_steps - min(event["step"] for event in events)
    for event in events:
        event["step"] += shift


def _follow(
    args: argparse.Namespace,
    console: Console,
    launcher: Path,
    repository: Path,
    folder: Path,
    emulation: EmulationConfig,
) -> Measurements:
    """Run the job and show it; returns all that it measured."""
    num_steps = max(event.step for event in emulation.events) + _LAST_STEPS
    measurements_path = folder / "measurements.jsonl"
    arguments = ["--deepspeed_config", str(folder / "config.json"), "--steps", str(num_steps)]
    arguments += ["--measurements", str(measurements_path)]
    if args.data is not None:
        arguments += ["--data", str(args.data.resolve())]
    command = job_command(launcher, NUM_RANKS, repository / "launcher" / "train.py", arguments)
    measurements = Measurements()
    console.print(f"starting {NUM_RANKS} ranks with {launcher.name} ...", highlight=False)
    with (
        Job(command, folder / "ranks.log", measurements_path) as job,
        LiveView(console, num_steps, emulation.events) as view,
    ):
        for record in job.records(_PATIENCE_S):
            if record is not None:
                measurements.add(record)
                view.show(record)
    if measurements.end is None:
        raise JobFailedError(f"the job ended before its last step; see {job.log_path}")
    return measurements


def _report(
    console: Console, measurements: Measurements, situations: list[Situation], bars: list[Bar]
) -> None:
    console.print()
    print_situations(console, situations)
    steps = measurements.steps
    console.print(f"loss: first {steps[0].loss:.4f}, last {steps[-1].loss:.4f}", highlight=False)
    console.print(bars_table(bars))


def _details(
    measurements: Measurements, situations: list[Situation], launcher: Path, duration_s: float
) -> dict[str, Any]:
    steps = measurements.steps
    assert measurements.start is not None
    assert measurements.end is not None
    return {
        "launcher": launcher.name,
        "world_size": measurements.start.world_size,
        "duration_s": duration_s,
        "first_loss": steps[0].loss,
        "last_loss": steps[-1].loss,
        "losses": [step.loss for step in steps],
        "durations_s": [step.duration_s for step in steps],
        "num_emulated_calls": measurements.end.num_emulated_calls,
        "num_overruns": measurements.end.num_overruns,
        "situations": [situation.to_dict() for situation in situations],
    }
