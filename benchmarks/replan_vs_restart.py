"""The interruption of a re-plan in place against stopping the job and starting it again under the new plan.

Eight ranks, the model of `migration.py`: 372 MB of fp32 parameters and Adam moments, from 2 pipelines of 4
stages to two uneven pipelines. In place: from the end of the last step under the old plan to the start of
the first under the new one. Restart: the same, with a checkpoint, new processes, and loading; both on the
same machine with a warm disk cache. Planning is in neither: it goes on beside the training.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import migration
import ranks

from malleus_ds.cli.job import find_launcher, job_command
from malleus_ds.report.bars import Bar

MIN_SPEEDUP = 20.0
TRAIN, RESTART = "train", "restart"
_STARTED_S = time.time()


def make_parser() -> argparse.ArgumentParser:
    parser = ranks.make_parser(__doc__)
    parser.add_argument("--hidden-size", type=int, default=400, help="of the GPT (default: %(default)s)")
    parser.add_argument("--switches", type=int, default=4, help="timed switches (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a first look: a small model, no bar")
    parser.add_argument("--phase", choices=(TRAIN, RESTART), default=TRAIN, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser


def job(args: argparse.Namespace) -> dict[str, Any] | None:
    """On every rank; the measurements, on rank 0."""
    return train(args) if args.phase == TRAIN else restart(args)


def train(args: argparse.Namespace) -> dict[str, Any] | None:
    """Switch to and fro in place, then save a checkpoint and end."""
    import torch.distributed as dist
    from contenders import make_engine

    engine = make_engine(*_workload(args))
    engine.train_batch()
    engine.train_batch()
    first, second = engine.plan, migration.uneven_plan(engine.plan)
    switches = []
    for index in range(args.switches):
        switches.append(migration.timed_switch(engine, first if index % 2 else second))
        began = time.perf_counter()
        engine.train_batch()
        dist.barrier()
        switches[-1]["next_step_s"] = time.perf_counter() - began
    ended_s = time.time()
    engine.save_checkpoint(args.folder)
    dist.barrier()
    saved_s = time.time()
    plan = second.to_dict() if engine.global_rank == 0 else None
    engine.destroy()
    return None if plan is None else {"switches": switches, "ended": ended_s, "saved": saved_s, "plan": plan}


def restart(args: argparse.Namespace) -> dict[str, Any] | None:
    """A new job under the new plan, up to its first step; moments of its start as seconds since 1970."""
    import torch.distributed as dist
    from contenders import make_engine

    from malleus_ds.plan import ParallelPlan

    dist.barrier()
    joined_s = time.time()
    plan = ParallelPlan.load(Path(args.folder) / "plan.json")
    engine = make_engine(*_workload(args), plan=plan)
    dist.barrier()
    built_s = time.time()
    engine.load_checkpoint(args.folder)
    dist.barrier()
    loaded_s = time.time()
    engine.train_batch()
    dist.barrier()
    stepped_s = time.time()
    is_speaker = engine.global_rank == 0
    engine.destroy()
    if not is_speaker:
        return None
    return {
        "started": _STARTED_S,
        "joined": joined_s,
        "built": built_s,
        "loaded": loaded_s,
        "stepped": stepped_s,
    }


def _workload(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    from contenders import Workload

    off = {"enabled": False}
    workload = Workload(num_micro_batches=2, hidden_size=64 if args.quick else args.hidden_size)
    return workload, {"bucket_bytes": 2**22, "detector": off, "planner": off}


def evaluate(measured: Mapping[str, Any]) -> ranks.Verdict:
    """Pure."""
    trained, restarted = measured["train"], measured["restart"]
    first, later = trained["switches"][0], trained["switches"][1:]
    # The first one: a job that re-plans has most often not been under the new plan before.
    in_place_s = first["duration_s"]
    moments = {**{name: trained[name] for name in ("ended", "saved")}, **restarted}
    names = ("ended", "saved", "started", "joined", "built", "loaded")
    labels = (
        "saving the checkpoint",
        "ending, and starting processes",
        "imports, joining the process group",
        "building the engine",
        "loading the checkpoint",
    )
    parts = {
        f"restart: {label}, s": moments[after] - moments[before]
        for label, before, after in zip(labels, names, names[1:], strict=False)
    }
    restart_s = moments["loaded"] - moments["ended"]
    figures = {
        "restart, s": restart_s,
        **parts,
        "restart: first step, s": moments["stepped"] - moments["loaded"],
        "in place, first switch, s": in_place_s,
        **{f"in place: {name}, mean of the ranks, s": s for name, s in first["parts_s"].items()},
        "in place: first step, s": first["next_step_s"],
        "in place, later switches, s": sum(each["duration_s"] for each in later) / max(len(later), 1),
        "floor: bytes that must move, MB": first["lower_bound_bytes"] / 1e6,
        "floor: bare transport of these bytes, s": first["transport_s"],
    }
    return ranks.Verdict(
        figures, [Bar("restart / re-plan in place", restart_s / in_place_s, MIN_SPEEDUP, "higher")]
    )


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.measurements is not None:
        return ranks.run_rank(job, args)
    ranks.check_json_path(parser, args)
    began = time.monotonic()
    machine = ranks.describe_machine()
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="malleus-benchmark-") as folder:
        for phase in (TRAIN, RESTART):
            path = Path(folder) / f"{phase}.json"
            options = ["--measurements", str(path), "--phase", phase, "--folder", folder]
            command = job_command(
                find_launcher("mpirun"), ranks.NUM_RANKS, Path(__file__), [*sys.argv[1:], *options]
            )
            code = ranks.run(command)
            if code != 0:
                return code
            measured[phase] = json.loads(path.read_text(encoding="utf-8"))
            (Path(folder) / "plan.json").write_text(json.dumps(measured[TRAIN]["plan"]), encoding="utf-8")
    details = {"machine": machine, "duration_s": time.monotonic() - began, **measured}
    verdict = evaluate(measured)
    return ranks.publish(details, replace(verdict, bars=[]) if args.quick else verdict, args.json)


if __name__ == "__main__":
    sys.exit(main())
