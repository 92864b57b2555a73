"""`malleus plan`: the best plan for a model on a cluster with slow devices."""

from __future__ import annotations

import argparse
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
from malleus_ds.files.reading import read_text

if TYPE_CHECKING:
    from malleus_ds.files import ClusterFile
    from malleus_ds.plan import ParallelPlan
    from malleus_ds.planner.types import PlanRequest
    from malleus_ds.report.plan_answer import PlanAnswer

_PLAIN_COLUMNS = 120

_DESCRIPTION = f"""\
Finds the fastest way to train a model on the devices that you have, as slow as they are now: which
devices form tensor-parallel groups, which groups form the stages of which pipeline, how many layers
each stage holds, how much data each pipeline takes, and which devices are better left standby.
Nothing is started and no GPU is needed; the answer is a prediction by a cost model.

Three things go in:
  the model      --model: a built-in one ({", ".join(BUILT_IN_MODELS)}), or a file with the time and memory of
                 its layers
  the devices    --cluster: a file with nodes, memory, links and rates; or --hostfile: DeepSpeed's;
                 default: the cluster that the model was profiled on
  how slow       --rates: per rank, how many times slower than a healthy device it is (its straggling
                 rate): 1.0 healthy (default), 2.57 slow, inf failed
The file formats are in docs/planning.md.
"""
_EPILOG = """\
what is printed:
  the picture      a line per pipeline, a block per stage: the ranks of its tensor-parallel group, its
                   degree (TP8), its layers (20L), and, unless 1, the time of a layer against a healthy
                   group (x2.57), which also gives the colour; then the micro-batches (m) that the
                   pipeline takes in a step, and its time
  step             predicted time of one training step
  lower bound      no plan whatever is faster; the gap says how much could be left to gain
  healthy optimum  the step with all devices healthy x N / sum(1 / rate): what a perfect spread of
                   the work would reach; slightly above 1 times that is as good as it gets
  why              the device that limits the step, and by how much; where the time and memory go
  alternatives     the next best plans, for instance with another number of pipelines
  with --current   what changes from that plan, and how many bytes move

examples:
  malleus plan --model 110b --rates '{"0": 5.42}'
      one slow device in the cluster of the built-in 110b model
  malleus plan --model 70b --hostfile hosts --rates rates.json --out plan.json --svg plan.svg
      your own nodes; writes the plan for launcher/train.py --plan, and a drawing
  malleus plan --model mine.yaml --cluster cluster.yaml --current plan.json --json -
      your own model; stays close to the plan in use; all figures as JSON on stdout

exit codes:
  0  a plan was found
  2  a mistake in what was given, or no plan is possible: the message says what is missing
"""


def add_parser(commands: Any) -> None:
    """commands: of `argparse.ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        "plan",
        help="find the fastest plan for a model on devices of which some are slow",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    given = parser.add_argument_group("what to plan for")
    given.add_argument(
        "--model",
        metavar="NAME|FILE",
        required=True,
        help=f"{', '.join(BUILT_IN_MODELS)}, or a model file (YAML, JSON)",
    )
    devices = given.add_mutually_exclusive_group()
    devices.add_argument("--cluster", metavar="FILE", help="cluster file (YAML, JSON)")
    devices.add_argument("--hostfile", metavar="FILE", help="DeepSpeed hostfile: '<host> slots=8' lines")
    given.add_argument(
        "--rates",
        metavar="JSON|FILE",
        help="""straggling rates by rank, such as '{"0": 5.42, "3": "inf"}'; replace the cluster file's""",
    )
    given.add_argument(
        "--current", metavar="PLAN", help="the plan in use (JSON): stay close to it, show the changes"
    )
    given.add_argument(
        "--global-batch", metavar="N", type=int, help="samples of one step (default: the model file's)"
    )
    search = parser.add_argument_group("the search")
    search.add_argument("--max-pipelines", metavar="N", type=int, help="most pipelines of a plan")
    search.add_argument(
        "--time-limit",
        metavar="S",
        type=float,
        default=10.0,
        help="seconds to search; as long again for the healthy optimum (default: 10)",
    )
    search.add_argument("--top", metavar="K", type=int, default=3, help="alternatives to show (default: 3)")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="all figures as JSON; - or nothing: to stdout"
    )
    output.add_argument("--svg", metavar="FILE", help="draw the plan")
    output.add_argument("--out", metavar="PLAN", help="write the plan (JSON), for launcher/train.py --plan")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code; raises `UsageError`, `FileError` and `PlanError`."""
    _check(args)
    model = load_model(args.model)
    cluster = _cluster(args) or published_cluster(model)
    request = make_request(
        model,
        cluster,
        rates=None if args.rates is None else parse_rates(args.rates, cluster.world_size),
        global_batch_size=args.global_batch,
        current=None if args.current is None else _current(args.current),
        max_pipelines=args.max_pipelines,
        time_limit_s=args.time_limit,
        num_alternatives=args.top,
    )
    answer = _answer(model.name, request)
    _write(args, answer)
    if args.json != "-":
        from rich.console import Console

        from malleus_ds.report.plan_answer import print_answer

        console = Console(width=None if sys.stdout.isatty() else _PLAIN_COLUMNS, highlight=False)
        print_answer(console, answer)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Before the search: what it would find must have a place, and numbers must make sense."""
    for name in ("global_batch", "max_pipelines", "time_limit"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} {value}: it must be positive")
    if args.top < 0:
        raise UsageError(f"--top {args.top}: it must be 0 or more")
    for name in ("json", "svg", "out"):
        path = getattr(args, name)
        if path is None or (name == "json" and path == "-"):
            continue
        if Path(path).is_dir():
            raise UsageError(f"--{name} {path}: it is a folder; give the path of a file")
        if not Path(path).resolve().parent.is_dir():
            raise UsageError(f"--{name} {path}: its folder does not exist; create it, or give another path")


def _cluster(args: argparse.Namespace) -> ClusterFile | None:
    if args.cluster is not None:
        return load_cluster(args.cluster)
    return None if args.hostfile is None else cluster_from_hostfile(args.hostfile)


def _current(path: str) -> ParallelPlan:
    from malleus_ds.plan import ParallelPlan, PlanError

    text = read_text(path)
    try:
        return ParallelPlan.from_json(text)
    except PlanError as error:
        raise UsageError(f"--current {path}: {error}") from error


def _check_current(current: ParallelPlan, request: PlanRequest) -> None:
    """Raise `UsageError` or `PlanError` unless the plan in use could be that of this job."""
    current.validate(len(request.profile.layers), request.world_size, nodes=request.nodes)
    if current.global_batch_size != request.global_batch_size:
        raise UsageError(
            f"--current: its global batch is {current.global_batch_size}, not {request.global_batch_size}; "
            f"give --global-batch {current.global_batch_size}, or another plan"
        )
    degrees = sorted(degree for degree, _ in request.profile.rho)
    for pipeline_id, stage_id, stage in current.stages():
        if stage.degree not in degrees:
            raise UsageError(
                f"--current: pipeline {pipeline_id}, stage {stage_id} has TP degree {stage.degree}; rho of "
                f"the model knows {degrees}: add it there, or give another plan"
            )


def _answer(model: str, request: PlanRequest) -> PlanAnswer:
    from dataclasses import replace

    from malleus_ds.planner import make_plan
    from malleus_ds.report.plan_answer import PlanAnswer
    from malleus_ds.report.waiting import waiting

    request.check()
    if request.current is not None:
        _check_current(request.current, request)
    with quiet_solvers(), waiting("planning", request.time_limit_s):
        result = make_plan(request)
    healthy = (1.0,) * request.world_size
    if request.rates == healthy:
        return PlanAnswer(model, request, result, result.step_s)
    with quiet_solvers(), waiting("planning for healthy devices, to compare", request.time_limit_s):
        best = make_plan(replace(request, rates=healthy, current=None, num_alternatives=0))
    return PlanAnswer(model, request, result, best.step_s)


def _write(args: argparse.Namespace, answer: PlanAnswer) -> None:
    import json

    if args.json is not None:
        text = json.dumps(answer.to_dict(), indent=2, allow_nan=False) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            _write_text("json", args.json, text)
    if args.svg is not None:
        from malleus_ds.report.plan_svg import draw_svg
        from malleus_ds.report.plan_view import view_plan

        view = view_plan(answer.result.plan, answer.request)
        _write_text("svg", args.svg, draw_svg(view, answer.outcome, answer.problem))
    if args.out is not None:
        _write_text("out", args.out, answer.result.plan.to_json() + "\n")


def _write_text(name: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--{name} {path}: cannot be written ({error.strerror}); give another path"
        ) from error
