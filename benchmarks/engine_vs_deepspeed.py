"""Stock DeepSpeed and ours in one run: healthy, with a straggling device, and what the detector costs.

Eight ranks in 2 pipelines of 4 stages on emulated devices. The healthy engines live in the same
processes and take turns step by step, so that the machine's drift meets all of them alike. For each
straggling rate an engine of ours starts anew, meets the slow device and has to find a plan by itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ranks

from malleus_ds.model_profile import ModelProfile
from malleus_ds.planner.groups import build_cluster
from malleus_ds.planner.lower_bound import closed_form_bound_s
from malleus_ds.planner.types import PlanRequest
from malleus_ds.planner.workload import Workload as PlannerWorkload
from malleus_ds.report.bars import Bar
from malleus_ds.report.situations import optimum_step_s

if TYPE_CHECKING:
    from contenders import Contender, Ours, Workload

MAX_HEALTHY_RATIO = 1.02
MAX_COMPUTE_RATIO = 1.05
MAX_STRAGGLER_RATIO = 1.12
MAX_DETECTOR_SHARE = 0.01
CONTENDERS = ("stock", "ours", "undetected")
RATES = (2.57, 3.75, 5.42)
SLOW_RANK = 2
"""The second stage of the first pipeline."""

FIRST_SLOW_STEP = 4
"""After a step that warms up, two of calibration, and one under the control loop."""

_MAX_SLOW_STEPS = 20


def make_parser() -> argparse.ArgumentParser:
    parser = ranks.make_parser(__doc__)
    parser.add_argument(
        "--steps", type=int, default=12, help="timed steps of each healthy engine (default: %(default)s)"
    )
    parser.add_argument(
        "--slow-steps", type=int, default=4, help="timed steps after each re-plan (default: %(default)s)"
    )
    parser.add_argument(
        "--layer-ms", type=float, default=10.0, help="forward time of a healthy block (default: %(default)s)"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="straggling rates to meet")
    parser.add_argument("--quick", action="store_true", help="a first look: 3 steps, one rate, 4 ms")
    return parser


def job(args: argparse.Namespace) -> dict[str, Any] | None:
    """On every rank; the measurements, on rank 0."""
    from contenders import NUM_PIPELINES, Stock, Workload, overrun_share

    if args.quick:
        args = argparse.Namespace(steps=3, slow_steps=2, layer_ms=4.0, rates=(3.75,))
    workload = Workload(layer_ms=args.layer_ms)
    stock = Stock(workload)
    measured = _compare_healthy(workload, stock, args.steps)
    bare_workload = replace(workload, is_emulated=False)
    bare = Stock(bare_workload)
    measured["bare_step_s"] = _compare_healthy(bare_workload, bare, args.steps)["healthy_step_s"]
    bare.engine.destroy()
    shares = [measured["overrun_share"], overrun_share([stock.device])]
    situations = []
    for rate in args.rates:
        stock.set_rate(SLOW_RANK, rate)
        stock_step_s = [stock.step() for _ in range(max(1, args.slow_steps // 2))]
        situation = _straggle(workload, rate, args.slow_steps)
        shares.append(situation["overrun_share"])
        situations.append({"rate": rate, "stock_step_s": stock_step_s, **situation})
    stock.engine.destroy()
    measured |= {
        "world_size": stock.engine.world_size,
        "num_pipelines": NUM_PIPELINES,
        "num_micro_batches": workload.total_micro_batches,
        "num_blocks": workload.num_blocks,
        "block_s": workload.block_s,
        "slow_rank": SLOW_RANK,
        "situations": situations,
        "overrun_share": max(shares),
    }
    return measured if stock.engine.global_rank == 0 else None


def _compare_healthy(workload: Workload, stock: Contender, num_steps: int) -> dict[str, Any]:
    """Healthy steps of stock, ours, and ours without detector and planner."""
    import torch.distributed as dist
    from contenders import Ours, TimedControlLoop, overrun_share

    ours, undetected = Ours(workload), Ours(workload, has_detector=False, has_planner=False)
    loop = TimedControlLoop.put_around(ours.engine)
    for contender in (stock, undetected, *[ours] * FIRST_SLOW_STEP):
        contender.step()
    loop.durations_s.clear()
    step_s = _take_turns(dict(zip(CONTENDERS, (stock, ours, undetected), strict=True)), num_steps)
    loop_s: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(loop_s, statistics.median(loop.durations_s))
    share = overrun_share([ours.device, undetected.device])
    num_switches = len(ours.engine.switches)
    ours.engine.destroy()
    undetected.engine.destroy()
    return {
        "healthy_step_s": step_s,
        "healthy_switches": num_switches,
        "control_loop_s": loop_s,
        "overrun_share": share,
    }


def _take_turns(contenders: Mapping[str, Contender], num_rounds: int) -> dict[str, list[float]]:
    """One step of each per round; who begins changes, so that none always follows the same other."""
    step_s: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for _ in range(num_rounds):
        for name in names:
            step_s[name].append(contenders[name].step())
        names = [*names[1:], names[0]]
    return step_s


def _straggle(workload: Workload, rate: float, num_steps: int) -> dict[str, Any]:
    """A new job of ours meets a slow device. Ends ``num_steps`` after its last switch of plans."""
    from contenders import Ours, overrun_share

    from malleus_ds.config import RateEvent

    ours = Ours(workload, events=[RateEvent(step=FIRST_SLOW_STEP, rank=SLOW_RANK, rate=rate)])
    for _ in range(FIRST_SLOW_STEP):
        ours.step()
    old_step_s, new_step_s = _until_settled(ours, num_steps)
    loop = ours.engine.control_loop
    assert loop is not None, "the detector is enabled"
    situation = {
        "old_step_s": old_step_s,
        "new_step_s": new_step_s,
        "steps_to_switch": len(old_step_s) + 1 if ours.engine.switches else None,
        "events": [{"step": e.step, "kind": e.kind, **e.details} for e in loop.events],
        "overrun_share": overrun_share([ours.device]),
    }
    ours.engine.destroy()
    return situation


def _until_settled(ours: Ours, num_steps: int) -> tuple[list[float], list[float]]:
    """Durations of the steps under the old plan and under the last one. All ranks switch at the same
    boundary, so all leave together. A step that ends with a switch holds the migration: left out."""
    old_step_s: list[float] = []
    new_step_s: list[float] = []
    for _ in range(_MAX_SLOW_STEPS):
        num_switches = len(ours.engine.switches)
        duration_s = ours.step()
        if len(ours.engine.switches) > num_switches:
            new_step_s = []
        else:
            (new_step_s if num_switches else old_step_s).append(duration_s)
        if len(new_step_s) == num_steps:
            break
    return old_step_s, new_step_s


def evaluate(measured: Mapping[str, Any]) -> ranks.Verdict:
    """Pure. Healthy engines are compared round by round, by the median, because the machine drifts."""
    step_s = measured["healthy_step_s"]
    stock_s, ours_s, undetected_s = (statistics.median(step_s[name]) for name in CONTENDERS)
    detected_ratios = _ratios(step_s["ours"], step_s["undetected"])
    bare_s = measured["bare_step_s"]
    figures = {
        "healthy: stock, s": stock_s,
        "healthy: ours, s": ours_s,
        "healthy: ours without detector, s": undetected_s,
        "detector's cost: standard error": median_error(detected_ratios),
        "control loop / step, mean of ranks": statistics.fmean(measured["control_loop_s"]) / ours_s,
        "control loop / step, most of ranks": max(measured["control_loop_s"]) / ours_s,
        "healthy: ours / cost model": ours_s / _model_step_s(measured),
        "emulated waits that came too late, share": measured["overrun_share"],
        **{f"not emulated: {name}, s": statistics.median(bare_s[name]) for name in CONTENDERS},
    }
    bars = [
        Bar(
            "healthy: ours / stock",
            statistics.median(_ratios(step_s["ours"], step_s["stock"])),
            MAX_HEALTHY_RATIO,
            "lower",
        ),
        Bar("detector's cost / step", statistics.median(detected_ratios) - 1, MAX_DETECTOR_SHARE, "lower"),
        Bar(
            "not emulated: ours / stock",
            statistics.median(_ratios(bare_s["ours"], bare_s["stock"])),
            MAX_COMPUTE_RATIO,
            "lower",
        ),
    ]
    for situation in measured["situations"]:
        prefix = f"rate {situation['rate']}"
        beside = _situation_figures(measured, situation, stock_s, ours_s)
        bars.append(Bar(f"{prefix}: ours / optimum", beside["ours / optimum"], MAX_STRAGGLER_RATIO, "lower"))
        figures |= {f"{prefix}: {name}": value for name, value in beside.items()}
    return ranks.Verdict(figures, bars)


def median_error(values: Sequence[float]) -> float:
    """Standard error of the median, for normal noise, by the median absolute deviation."""
    centre = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - centre) for value in values)
    return float(1.2533 * deviation / len(values) ** 0.5)


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def _model_step_s(measured: Mapping[str, Any]) -> float:
    """``(m - 1) * max + sum`` of equal stages, as the emulated devices would have it without overhead."""
    num_stages = measured["world_size"] // measured["num_pipelines"]
    num_slots = measured["num_micro_batches"] // measured["num_pipelines"] + num_stages - 1
    return float(num_slots * measured["block_s"] * measured["num_blocks"] / num_stages)


def _situation_figures(
    measured: Mapping[str, Any], situation: Mapping[str, Any], stock_s: float, ours_s: float
) -> dict[str, float | None]:
    """Of one straggling rate; None for what could not be measured, as without a switch of plans."""
    events = {event["kind"]: event for event in situation["events"]}  # the last of each kind
    rates = [1.0] * measured["world_size"]
    rates[measured["slow_rank"]] = situation["rate"]
    optimum_s = optimum_step_s(ours_s, rates)
    request = PlanRequest(
        profile=ModelProfile.from_dict(events["calibrated"]["profile"]),
        rates=tuple(rates),
        num_micro_batches=measured["num_micro_batches"],
    )
    floor_s = closed_form_bound_s(
        PlannerWorkload(request, request.micro_batch_size), build_cluster(request), measured["num_pipelines"]
    )
    slow_stock_s = statistics.median(situation["stock_step_s"])
    new_s = statistics.median(situation["new_step_s"]) if situation["new_step_s"] else None
    planned = events.get("planned")
    return {
        "ours / optimum": None if new_s is None else new_s / optimum_s,
        "fill floor / optimum": floor_s / optimum_s,
        "planner's lower bound / optimum": None if planned is None else planned["lower_bound_s"] / optimum_s,
        "planner's plan / optimum": None if planned is None else planned["step_s"] / optimum_s,
        "stock / healthy stock": slow_stock_s / stock_s,
        "ours / healthy ours": None if new_s is None else new_s / ours_s,
        "speed-up over stock": None if new_s is None else slow_stock_s / new_s,
        "steps to the switch": situation["steps_to_switch"],
        "estimated rate": None if planned is None else planned["rates"][measured["slow_rank"]],
        "planning, s": None if planned is None else planned["planning_s"],
    }


if __name__ == "__main__":
    sys.exit(ranks.run_benchmark(__file__, make_parser(), job, evaluate))
