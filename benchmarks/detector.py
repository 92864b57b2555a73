"""The detector: no false alarm in healthy but noisy steps, and a slow device found soon and exactly.

Eight emulated ranks in 2 pipelines of 4 stages; every layer call and every rank's step takes up to 10 %
more or less than it should. The planner is off, so nothing is re-planned: the benchmark asks the rate
estimator after each step whether rates moved, as the control loop does before it asks the planner.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ranks

from malleus_ds.report.bars import Bar

if TYPE_CHECKING:
    from contenders import Ours

MAX_RATE_ERROR = 0.05
MAX_STEPS_TO_DETECTION = 4
RATE = 3.75
SLOW_RANK = 2
CALIBRATION_STEPS = 3
"""One that warms up and two that time the layers."""


def make_parser() -> argparse.ArgumentParser:
    parser = ranks.make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="healthy steps (default: %(default)s)")
    parser.add_argument(
        "--slow-steps", type=int, default=10, help="steps with a slow device (default: %(default)s)"
    )
    parser.add_argument(
        "--layer-ms", type=float, default=4.0, help="forward time of a healthy block (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a first look: 20 healthy steps")
    return parser


def job(args: argparse.Namespace) -> dict[str, Any] | None:
    """On every rank; the measurements, on rank 0."""
    from contenders import Ours, Workload, overrun_share

    from malleus_ds.config import RateEvent

    num_healthy = 20 if args.quick else args.steps
    first_slow = CALIBRATION_STEPS + num_healthy
    workload = Workload(layer_ms=args.layer_ms, num_micro_batches=8, jitter=0.1, step_jitter=0.1)
    event = RateEvent(step=first_slow, rank=SLOW_RANK, rate=RATE)
    ours = Ours(workload, has_planner=False, events=[event])
    steps = [_watched_step(ours, step) for step in range(first_slow + args.slow_steps)]
    share = overrun_share([ours.device])
    is_speaker = ours.engine.global_rank == 0
    ours.engine.destroy()
    if not is_speaker:
        return None
    return {"first_slow_step": first_slow, "slow_rank": SLOW_RANK, "overrun_share": share, "steps": steps}


def _watched_step(ours: Ours, step: int) -> dict[str, Any]:
    """One step, and on rank 0 what the estimator says after it."""
    duration_s = ours.step()
    loop = ours.engine.control_loop
    assert loop is not None, "the detector is enabled"
    shift = loop.estimator.shift()
    if shift is not None:
        loop.estimator.accept(loop.estimator.rates)  # a plan would now be made for these
    return {
        "step": step,
        "duration_s": duration_s,
        "rates": list(loop.estimator.rates),
        "shift": None if shift is None else asdict(shift),
    }


def evaluate(measured: Mapping[str, Any]) -> ranks.Verdict:
    """Pure. A shift is a false alarm in a healthy step, and the detection afterwards."""
    first_slow, slow_rank = measured["first_slow_step"], measured["slow_rank"]
    healthy = [step for step in measured["steps"] if step["step"] < first_slow]
    slow = [step for step in measured["steps"] if step["step"] >= first_slow]
    found = [s for s in slow if s["shift"] is not None and slow_rank in s["shift"]["ranks"]]
    others = [rate for s in slow for rank, rate in enumerate(s["rates"]) if rank != slow_rank]
    figures = {
        "healthy steps": float(len(healthy)),
        "largest rate in a healthy step": max(max(step["rates"]) for step in healthy),
        "rate at detection": found[0]["rates"][slow_rank] if found else None,
        "rate at the end": slow[-1]["rates"][slow_rank],
        "largest rate of another rank": max(others),
        "shifts with the slow device": float(sum(step["shift"] is not None for step in slow)),
        "emulated waits that came too late, share": measured["overrun_share"],
    }
    error = abs(slow[-1]["rates"][slow_rank] / RATE - 1) if found else None
    steps_to_detection = found[0]["step"] - first_slow + 1 if found else None
    bars = [
        Bar("shifts in healthy steps", sum(step["shift"] is not None for step in healthy), 0, "lower"),
        Bar("steps to detection", steps_to_detection, MAX_STEPS_TO_DETECTION, "lower"),
        Bar(f"error of the estimated rate {RATE}", error, MAX_RATE_ERROR, "lower"),
    ]
    return ranks.Verdict(figures, bars)


if __name__ == "__main__":
    sys.exit(ranks.run_benchmark(__file__, make_parser(), job, evaluate))
