"""A slow member of a TP group: who is found, and what the new plan gains.

Eight emulated ranks on two nodes, in 2 pipelines of one TP group of 4 each. One member becomes slow, and
with it its whole group. The detector must name it and not its peers, which wait for it in every layer; the
planner may split the group.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import ranks

from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.report.bars import Bar

MAX_RATE_ERROR = 0.05
MAX_PEER_RATE = 1.05
MAX_STEP_RATIO = 1.12
RATE = 3.0
SLOW_RANK = 2
FIRST_SLOW_STEP = 5
RHO = {"1": 3.4, "2": 1.8, "4": 1.0}
"""Layer time by degree: splitting in four is not four times as fast."""

NODES = ((0, 1, 2, 3), (4, 5, 6, 7))


def make_parser() -> argparse.ArgumentParser:
    parser = ranks.make_parser(__doc__)
    parser.add_argument(
        "--slow-steps", type=int, default=12, help="steps with a slow device (default: %(default)s)"
    )
    parser.add_argument(
        "--layer-ms", type=float, default=30.0, help="forward time of a healthy block (default: %(default)s)"
    )
    return parser


def job(args: argparse.Namespace) -> dict[str, Any] | None:
    """On every rank; the measurements, on rank 0."""
    from contenders import Ours, Workload, overrun_share

    from malleus_ds.config import RateEvent

    workload = Workload(layer_ms=args.layer_ms, num_micro_batches=4, num_blocks=6)
    plan = ParallelPlan(
        tuple(Pipeline((Stage(ranks_of, (0, 8)),), workload.num_micro_batches) for ranks_of in NODES)
    )
    ours = Ours(
        workload,
        events=[RateEvent(step=FIRST_SLOW_STEP, rank=SLOW_RANK, rate=RATE)],
        plan=plan,
        nodes=NODES,
        tensor_parallel={"rho": RHO},
    )
    steps = []
    for _ in range(FIRST_SLOW_STEP + args.slow_steps):
        digest = ours.engine.plan.digest
        duration_s = ours.step()
        # A step that ends with a switch holds the migration.
        steps.append({"plan": digest, "duration_s": duration_s, "ended": ours.engine.plan.digest != digest})
    share = overrun_share([ours.device])
    loop = ours.engine.control_loop
    assert loop is not None, "the detector is enabled"
    events = [{"step": event.step, "kind": event.kind, **event.details} for event in loop.events]
    is_speaker = ours.engine.global_rank == 0
    ours.engine.destroy()
    if not is_speaker:
        return None
    return {
        "steps": steps,
        "events": events,
        "overrun_share": share,
        "num_micro_batches": workload.num_micro_batches,
        "plan": str(ours.engine.plan),
    }


def evaluate(measured: Mapping[str, Any]) -> ranks.Verdict:
    """Pure. Rates are those that the plan was made for, in the steps in which the group was slow."""
    steps, events = measured["steps"], {event["kind"]: event for event in measured["events"]}
    first, last = steps[0]["plan"], steps[-1]["plan"]
    # Two steps start up; the one at the switch moves state.
    healthy_s = statistics.median(step["duration_s"] for step in steps[2:FIRST_SLOW_STEP])
    slow_s = [s["duration_s"] for s in steps[FIRST_SLOW_STEP:] if s["plan"] == first and not s["ended"]]
    new_s = [step["duration_s"] for step in steps if step["plan"] == last != first]
    planned = events.get("planned")
    rates = [] if planned is None else planned["rates"]
    peers = [rate for rank, rate in enumerate(rates) if rank != SLOW_RANK]
    figures: dict[str, float | None] = {
        "healthy step, s": healthy_s,
        "slow member, old plan, s": statistics.median(slow_s) if slow_s else None,
        "slow member, new plan, s": statistics.median(new_s) if new_s else None,
        "planned step, s": None if planned is None else planned["step_s"],
        "lower bound, s": None if planned is None else planned["lower_bound_s"],
        "rate of the slow member": rates[SLOW_RANK] if rates else None,
        "speed-up": statistics.median(slow_s) / statistics.median(new_s) if slow_s and new_s else None,
        "emulated waits that came too late, share": measured["overrun_share"],
    }
    ratio = None
    if planned is not None and new_s:
        # Healthy, both pipelines are one stage: no fill. Messages and the group's collectives, which
        # the cost model leaves out, are in both measured steps.
        model_s = measured["num_micro_batches"] * sum(
            layer["time_s"] for layer in events["calibrated"]["profile"]["layers"]
        )
        figures["healthy step of the cost model, s"] = model_s
        ratio = statistics.median(new_s) / healthy_s / (planned["lower_bound_s"] / model_s)
    bars = [
        Bar(
            "error of its rate", abs(rates[SLOW_RANK] / RATE - 1) if rates else None, MAX_RATE_ERROR, "lower"
        ),
        Bar("largest rate of a peer", max(peers) if peers else None, MAX_PEER_RATE, "lower"),
        Bar("new step / healthy step, against the lower bound", ratio, MAX_STEP_RATIO, "lower"),
    ]
    return ranks.Verdict(figures, bars)


if __name__ == "__main__":
    sys.exit(ranks.run_benchmark(__file__, make_parser(), job, evaluate))
