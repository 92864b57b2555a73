"""`malleus simulate`: how systems get through situations with slow devices."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malleus_ds.cli.errors import UsageError
from malleus_ds.cli.quiet import quiet_solvers
from malleus_ds.files import (
    BUILT_IN_MODELS,
    cluster_from_hostfile,
    load_cluster,
    load_model,
    make_request,
    parse_rates,
    published_cluster,
)
from malleus_ds.simulate.situations import Situation, find_situation, parse_names, tour

if TYPE_CHECKING:
    from malleus_ds.files import ClusterFile
    from malleus_ds.plan import ParallelPlan
    from malleus_ds.planner.types import PlanRequest
    from malleus_ds.simulate.baselines import System
    from malleus_ds.simulate.compare import Row
    from malleus_ds.simulate.report import Comparison
    from malleus_ds.simulate.scenario import Delays

_PLAIN_COLUMNS = 120

_DESCRIPTION = """\
Lets a training job meet slow devices, once per system that could run it, and compares what becomes of its
steps. Each step is simulated instruction by instruction (1F1B, messages, gradient reduction, optimizer);
nothing is started and no GPU is needed.

The job starts on a healthy cluster, goes through the situations in order, and ends healthy. Before a
system answers a situation it has to notice it, and to make a plan; then it migrates, or restarts.

systems:
  megatron, deepspeed    the best equal plan, never changed; they differ in which ranks form a pipeline
  ... +restart           restart without the nodes that have a straggler, on the best equal plan for the rest
  data only              moves micro-batches between the pipelines of megatron
  layers only            moves layers between the stages of megatron
  malleus                changes devices, stages, layers and data

situations (ranks and how many times slower they are):
  S1  0: 2.57                       S4  0: 2.57, 8: 3.75, 16: 5.42
  S2  0: 5.42                       S5  0: 2.57, 1: 3.75, 2: 5.42
  S3  0: 2.57, 8: 5.42              S6  0 to 7: 2.57 (a whole node of 8)
"""
_EPILOG = """\
what is printed:
  a table of systems against situations. Three figures each: time of a step; how many times the healthy
  step that is; how many times the optimum that is, healthy step x N / sum(1 / rate), which no system
  can reach by much less than 1. The last column counts the samples of the whole run, with all delays.

examples:
  malleus simulate --model 110b
      all systems through S1 to S6 on the 8 x 8 devices of the built-in 110b model
  malleus simulate --model 70b --situations S3,S6 --trace step.json --plot throughput.svg
      two situations; the last one's step as a timeline for https://ui.perfetto.dev; a picture over time
  malleus simulate --model mine.yaml --hostfile hosts --rates '{"5": 3.0, "9": "inf"}' --json -
      your own model and nodes with one slow and one failed device; all figures as JSON on stdout
  malleus simulate --model 32b --systems megatron,malleus --restart-s 600 --situation-steps 500
      some systems only; other delays

exit codes:
  0  done
  2  a mistake in what was given
"""


def add_parser(commands: Any) -> None:
    """commands: of `argparse.ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        "simulate",
        help="compare systems in situations with slow devices",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_given(parser.add_argument_group("what to simulate"))
    delays = parser.add_argument_group("delays")
    for name, default, text in (
        ("--situation-steps", 200.0, "length of each situation, in healthy steps"),
        ("--detection-steps", 5.0, "steps until a change is noticed"),
        ("--planning-s", None, "seconds to make a plan (default: as measured)"),
        ("--migration-s", None, "seconds to move state (default: bytes over the link)"),
        ("--restart-s", 180.0, "seconds from stopping to training again"),
        ("--link-gb-per-s", None, "link of a device, 10^9 bytes/s (default: the cluster file's, or 25)"),
    ):
        shown = text if default is None else f"{text} (default: {default:g})"
        delays.add_argument(name, metavar="N", type=float, default=default, help=shown)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="all figures and plans; - or nothing: to stdout"
    )
    output.add_argument("--trace", metavar="FILE", help="a step of the last system, as Chrome trace JSON")
    output.add_argument(
        "--trace-situation", metavar="NAME", help="which one (default: the last that is slow)"
    )
    output.add_argument(
        "--plot", metavar="FILE", help="throughput over time, .svg or .png (needs matplotlib)"
    )
    parser.set_defaults(run=run)


def _add_given(given: Any) -> None:
    given.add_argument(
        "--model",
        metavar="NAME|FILE",
        required=True,
        help=f"{', '.join(BUILT_IN_MODELS)}, or a model file (YAML, JSON)",
    )
    devices = given.add_mutually_exclusive_group()
    devices.add_argument("--cluster", metavar="FILE", help="cluster file (YAML, JSON)")
    devices.add_argument("--hostfile", metavar="FILE", help="DeepSpeed hostfile: '<host> slots=8' lines")
    given.add_argument("--situations", metavar="LIST", help="such as S1-S6 (default) or S3,healthy,S1")
    given.add_argument(
        "--rates",
        metavar="JSON|FILE",
        help="""one more situation, 'given', instead of the default ones: '{"0": 5.42, "3": "inf"}'""",
    )
    given.add_argument("--systems", metavar="LIST", help="names as in the table, by commas (default: all)")
    given.add_argument(
        "--static", metavar="PLAN", help="plan (JSON) of megatron; default: the best equal one"
    )
    given.add_argument(
        "--global-batch", metavar="N", type=int, help="samples of a step (default: the model's)"
    )
    given.add_argument(
        "--time-limit", metavar="S", type=float, default=10.0, help="of each search (default: 10)"
    )
    given.add_argument(
        "--backward-ratio", metavar="X", type=float, default=2.0, help="backward / forward time (default: 2)"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit code; raises `UsageError` and other mistakes of the user."""
    _check(args)
    model = load_model(args.model)
    cluster = _cluster(args) or published_cluster(model)
    situations = _situations(args, cluster)
    if args.trace_situation not in {None, *(situation.name for situation in situations)}:
        raise UsageError(f"--trace-situation {args.trace_situation}: not one of --situations; add it there")
    request = make_request(
        model, cluster, global_batch_size=args.global_batch, time_limit_s=args.time_limit, num_alternatives=0
    )
    request.check()
    comparison = _compare(args, model.name, request, situations)
    try:
        _write(args, comparison, request)
    except OSError as error:
        raise UsageError(
            f"{error.filename}: cannot be written ({error.strerror}); give another path"
        ) from error
    if args.json != "-":
        _print(comparison)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Before the search: numbers must make sense, and what it finds must have a place."""
    for name in ("global_batch", "time_limit", "backward_ratio", "situation_steps", "link_gb_per_s"):
        _check_number(name, getattr(args, name), positive=True)
    for name in ("detection_steps", "planning_s", "migration_s", "restart_s"):
        _check_number(name, getattr(args, name), positive=False)
    for name in ("json", "trace", "plot"):
        path = getattr(args, name)
        if path is None or (name == "json" and path == "-"):
            continue
        if Path(path).is_dir() or not Path(path).resolve().parent.is_dir():
            raise UsageError(f"--{name} {path}: not a file in an existing folder; give another path")
    if args.plot is not None and Path(args.plot).suffix not in {".svg", ".png"}:
        raise UsageError(f"--plot {args.plot}: end its name with .svg or .png")


def _check_number(name: str, value: float | None, positive: bool) -> None:
    if value is None:
        return
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        meaning = "positive" if positive else "0 or more"
        raise UsageError(f"--{name.replace('_', '-')} {value:g}: it must be {meaning}, and finite")


def _cluster(args: argparse.Namespace) -> ClusterFile | None:
    if args.cluster is not None:
        return load_cluster(args.cluster)
    return None if args.hostfile is None else cluster_from_hostfile(args.hostfile)


def _situations(args: argparse.Namespace, cluster: ClusterFile) -> list[Situation]:
    """Those asked for; else the cluster file's own rates where it has some; else S1 to S6."""
    size = cluster.world_size
    is_slow = any(rate != 1.0 for rate in cluster.rates)
    names = args.situations
    if names is None and args.rates is None and not is_slow:
        names = "S1-S6"
    situations = [] if names is None else [find_situation(name, size) for name in parse_names(names)]
    if args.rates is not None:
        situations.append(Situation("given", parse_rates(args.rates, size)))
    elif args.situations is None and is_slow:
        situations.append(Situation("cluster", cluster.rates))
    return tour(situations)


def _systems(args: argparse.Namespace, request: PlanRequest) -> tuple[ParallelPlan, tuple[System, ...]]:
    """The static plan, and the systems asked for."""
    from malleus_ds.plan import ParallelPlan, PlanError
    from malleus_ds.planner.checker import check_answer
    from malleus_ds.simulate.baselines import all_systems
    from malleus_ds.simulate.equal_plan import best_equal_plan, healthy

    try:
        if args.static is None:
            static = best_equal_plan(request)
        else:
            static = ParallelPlan.load(args.static)
            check_answer(static, healthy(request))
    except PlanError as error:
        hint = "give one with --static" if args.static is None else f"--static {args.static}"
        raise UsageError(f"no plan to start from ({hint}): {error}") from error
    systems = all_systems(static)
    if args.systems is None:
        return static, systems
    known = {system.name: system for system in systems}
    chosen = [name.strip() for name in args.systems.split(",")]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise UsageError(f"--systems {unknown[0]}: unknown; choose from {', '.join(known)}")
    return static, tuple(known[name] for name in chosen)


def _compare(
    args: argparse.Namespace, model: str, request: PlanRequest, situations: list[Situation]
) -> Comparison:
    from malleus_ds.report.waiting import counting
    from malleus_ds.simulate.compare import compare
    from malleus_ds.simulate.engine import simulate
    from malleus_ds.simulate.equal_plan import healthy
    from malleus_ds.simulate.report import Comparison
    from malleus_ds.simulate.scenario import throughput

    static, systems = _systems(args, request)
    healthy_s = simulate(static, healthy(request), args.backward_ratio).makespan_s
    with quiet_solvers(), counting("simulating", len(systems) * len(situations)) as on_step:
        rows = compare(systems, request, situations, args.backward_ratio, on_step)
    situation_s = args.situation_steps * healthy_s
    delays = _delays(args, request)
    segments = tuple(
        throughput(row, delays, situation_s, healthy_s, request.global_batch_size) for row in rows
    )
    return Comparison(model, healthy_s, rows, segments)


def _delays(args: argparse.Namespace, request: PlanRequest) -> Delays:
    from malleus_ds.simulate.scenario import DEFAULT_LINK_BYTES_PER_S, Delays

    link = DEFAULT_LINK_BYTES_PER_S
    if args.link_gb_per_s is not None:
        link = args.link_gb_per_s * 1e9
    elif request.links is not None:
        link = request.links.inter_bytes_per_s
    return Delays(args.detection_steps, args.planning_s, args.migration_s, args.restart_s, link)


def _write(args: argparse.Namespace, comparison: Comparison, request: PlanRequest) -> None:
    import json

    from malleus_ds.simulate.report import to_dict

    if args.json is not None:
        text = json.dumps(to_dict(comparison), indent=2, allow_nan=False) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            Path(args.json).write_text(text, encoding="utf-8")
    if args.trace is not None:
        _write_trace(args, comparison.rows[-1], request)
    if args.plot is not None:
        from malleus_ds.simulate.plot import write_plot

        try:
            write_plot(args.plot, comparison, request.global_batch_size)
        except ModuleNotFoundError as error:
            raise UsageError(f"--plot {args.plot}: {error}; pip install matplotlib") from error


def _write_trace(args: argparse.Namespace, row: Row, request: PlanRequest) -> None:
    from dataclasses import replace

    from malleus_ds.simulate.engine import simulate
    from malleus_ds.simulate.trace import write_trace

    name = args.trace_situation
    if name is None:
        name = row.outcomes[max(len(row.outcomes) - 2, 0)].situation.name
    outcome = next(outcome for outcome in row.outcomes if outcome.situation.name == name)
    if outcome.plan is None:
        raise UsageError(f"--trace {args.trace}: {row.system.name} has no plan in {name}: {outcome.reason}")
    slow = replace(request, rates=outcome.situation.rates)
    write_trace(args.trace, simulate(outcome.plan, slow, args.backward_ratio), slow)


def _print(comparison: Comparison) -> None:
    from rich.console import Console

    from malleus_ds.simulate.report import reasons, table

    console = Console(width=None if sys.stdout.isatty() else _PLAIN_COLUMNS, highlight=False)
    console.print(table(comparison))
    for reason in reasons(comparison):
        console.print(f"no plan: {reason}", markup=False, soft_wrap=True)
