"""Switching plans: bytes on the wire, time against the bare transport, the interruption by parts, memory.

Eight ranks, 372 MB of fp32 parameters and Adam moments. The state goes back and forth between the usual 2
pipelines of 4 stages and two uneven pipelines of 3 and 5 stages with the ranks in reverse. No emulated
devices. The bare transport sends the same bytes of each pair in one message, between buffers that are there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ranks

from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.report.bars import Bar

if TYPE_CHECKING:
    from allocations import AllocationLog
    from torch import Tensor

    from malleus_ds import MalleusPipelineEngine
    from malleus_ds.placement import Placement

STATES = ("parameter", "exp_avg", "exp_avg_sq")
ITEM_BYTES = 4
MAX_BUCKETS_ABOVE = 2.0
MAX_TRANSPORT_RATIO = 1.5
MIN_RATIO_BYTES = 200 * 10**6
"""Below, the time of the migration is not that of its bytes."""


def make_parser() -> argparse.ArgumentParser:
    parser = ranks.make_parser(__doc__)
    parser.add_argument("--switches", type=int, default=10, help="timed switches (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=400, help="of the GPT (default: %(default)s)")
    parser.add_argument(
        "--bucket-kib", type=int, default=32768, help="the config's bucket_bytes (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a first look: two switches, a small model")
    return parser


def job(args: argparse.Namespace) -> dict[str, Any] | None:
    """On every rank; the measurements, on rank 0."""
    from contenders import Workload, make_engine

    if args.quick:
        args = argparse.Namespace(switches=2, hidden_size=64, bucket_kib=64)
    workload = Workload(num_micro_batches=2, hidden_size=args.hidden_size)
    off = {"enabled": False}
    section = {"bucket_bytes": args.bucket_kib * 2**10, "detector": off, "planner": off}
    engine = make_engine(workload, section)
    engine.train_batch()  # now the optimizer has moments
    first, second = engine.plan, uneven_plan(engine.plan)
    first_switch = timed_switch(engine, second)
    switches = [timed_switch(engine, second if index % 2 else first) for index in range(args.switches)]
    peaks = [peak for plan in (first, second, first) for peak in _traced_switch(engine, plan)]
    engine.train_batch()  # the state is complete
    is_speaker = engine.global_rank == 0
    elements = [bucket.num_elements for bucket in engine.placement.buckets]
    engine.destroy()
    if not is_speaker:
        return None
    return {
        "model_state_bytes": sum(elements) * len(STATES) * ITEM_BYTES,
        "num_buckets": len(elements),
        "first_switch": first_switch,
        "switches": switches,
        "peaks": peaks,
    }


def uneven_plan(plan: ParallelPlan) -> ParallelPlan:
    """One stage fewer in the first pipeline and one more in the second, on the ranks in reverse."""
    reverse = sorted(plan.ranks, reverse=True)
    num_first = plan.world_size // 2 - 1
    return ParallelPlan(
        pipelines=tuple(
            Pipeline(_stages(members, plan.num_layers), pipeline.num_micro_batches)
            for members, pipeline in zip(
                (reverse[:num_first], reverse[num_first:]), plan.pipelines, strict=True
            )
        ),
        micro_batch_size=plan.micro_batch_size,
    )


def _stages(members: Sequence[int], num_layers: int) -> tuple[Stage, ...]:
    cuts = [num_layers * index // len(members) for index in range(len(members) + 1)]
    return tuple(
        Stage((rank,), (start, stop)) for rank, start, stop in zip(members, cuts, cuts[1:], strict=False)
    )


def timed_switch(engine: MalleusPipelineEngine, plan: ParallelPlan) -> dict[str, Any]:
    """A switch, and the bare transport of its bytes beside it. Collective; durations of the slowest rank."""
    import torch
    import torch.distributed as dist

    from malleus_ds.placement import place

    old, new = engine.optimizer.placement, place(plan, engine.placement.buckets)
    assert old is not None, "the engine is placed"
    lower_bound_bytes = missing_bytes(old, new)
    transport_s = _bare_transport_s(pair_bytes(old, new))
    dist.barrier()
    began = time.perf_counter()
    report = engine.reconfigure(plan)
    dist.barrier()
    duration_s = time.perf_counter() - began
    sent_bytes = torch.tensor(report.migration.sent_bytes)
    dist.all_reduce(sent_bytes)
    parts_s = torch.tensor(list(report.parts_s.values()), dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(parts_s)
    slowest_s = torch.tensor([duration_s, report.migration.duration_s, transport_s], dtype=torch.float64)
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
    duration_s, migration_s, transport_s = slowest_s.tolist()
    return {
        "sent_bytes": int(sent_bytes),
        "lower_bound_bytes": lower_bound_bytes,
        "num_new_groups": report.num_new_groups,
        "duration_s": duration_s,
        "migration_s": migration_s,
        "transport_s": transport_s,
        "parts_s": dict(zip(report.parts_s, parts_s.tolist(), strict=True)),
    }


def missing_bytes(old: Placement, new: Placement) -> int:
    """The lower bound: what each rank must hold and does not, element by element."""
    import numpy as np

    num_missing = 0
    for bucket in old.buckets:
        for state in STATES:
            held = np.zeros((2, old.plan.world_size, bucket.num_elements), dtype=bool)
            for placement, masks in zip((old, new), held, strict=True):
                for holding in placement.holdings(bucket.index, state):
                    masks[list(holding.ranks), holding.start : holding.stop] = True
            num_missing += int(np.count_nonzero(held[1] & ~held[0]))
    return num_missing * ITEM_BYTES


def pair_bytes(old: Placement, new: Placement) -> dict[tuple[int, int], int]:
    """What the migration sends, by (source, destination)."""
    from malleus_ds.migration.transfers import transfers
    from malleus_ds.placement import StateTensors

    schema = [StateTensors(STATES, (ITEM_BYTES,) * len(STATES))] * len(old.buckets)
    totals: dict[tuple[int, int], int] = defaultdict(int)
    for move in transfers(old, new, schema):
        totals[move.source, move.destination] += (move.stop - move.start) * ITEM_BYTES
    return dict(sorted(totals.items()))


def _bare_transport_s(totals: Mapping[tuple[int, int], int]) -> float:
    """Seconds for one message per pair, all at once, between buffers that are there already. Collective."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    operations = []
    for (source, destination), num_bytes in totals.items():
        if rank in (source, destination):
            buffer = torch.ones(num_bytes, dtype=torch.uint8)
            is_source = rank == source
            function, peer = (dist.isend, destination) if is_source else (dist.irecv, source)
            operations.append(dist.P2POp(function, buffer, peer))
    dist.barrier()
    began = time.perf_counter()
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    dist.barrier()
    return time.perf_counter() - began


def _traced_switch(engine: MalleusPipelineEngine, plan: ParallelPlan) -> list[dict[str, Any]]:
    """The memory of a switch, one entry per rank. Collective.

    Twice: "state" without gradients, which hardly exist while state moves and would hide what it takes, and
    without the memory that is tried out before; and "all".
    """
    import torch.distributed as dist
    from allocations import AllocationLog

    log = AllocationLog([])
    before, gradients_before = _held_bytes(engine, log), _gradients(engine, log)
    tried: list[int] = []
    allocate = engine.optimizer.allocate_bytes

    def note(num_bytes: int) -> Tensor:
        piece = allocate(num_bytes)
        tried.append(log.number(piece))
        return piece

    engine.optimizer.allocate_bytes = note
    with log:
        engine.reconfigure(plan)
    engine.optimizer.allocate_bytes = allocate
    after, gradients_after = _held_bytes(engine, log), _gradients(engine, log)
    held = sum(before), sum(after)
    totals = held[0] + sum(gradients_before.values()), held[1] + sum(gradients_after.values())
    left_out = [*gradients_before, *gradients_after, *tried]
    own = {
        "largest_bucket_bytes": max(before + after),
        "state": {"held_bytes": held, "peak_bytes": log.peak_bytes(left_out)},
        "all": {"held_bytes": totals, "peak_bytes": log.peak_bytes()},
    }
    gathered: list[dict[str, Any]] = [own] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def _held_bytes(engine: MalleusPipelineEngine, log: AllocationLog) -> list[int]:
    """Bytes of parameter and moments of each bucket on this rank; the log learns of all of them."""
    held = []
    for storage in engine.optimizer.storages.values():
        moments = [
            engine.optimizer.state[shard.parameter][name]
            for shard in storage.shards
            if shard.parameter is not None
            for name in STATES[1:]
        ]
        for tensor in (storage.flat, *moments):
            log.number(tensor)
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in (storage.flat, *moments)))
    return held


def _gradients(engine: MalleusPipelineEngine, log: AllocationLog) -> dict[int, int]:
    """Bytes of the flat gradients by their number."""
    return {log.number(gradient): gradient.nbytes for _, gradient in engine.optimizer.trained()}


def evaluate(measured: Mapping[str, Any]) -> ranks.Verdict:
    """Pure."""
    switches = measured["switches"]

    def median_of(name: str) -> float:
        return float(statistics.median(switch[name] for switch in switches))

    all_switches = [measured["first_switch"], *switches]
    excess = max(_buckets_above(peak) for peak in measured["peaks"])
    ratio = statistics.median(switch["migration_s"] / switch["transport_s"] for switch in switches)
    figures = {
        "state of the model, MB": measured["model_state_bytes"] / 1e6,
        "buckets": float(measured["num_buckets"]),
        "sent in a switch, MB": median_of("sent_bytes") / 1e6,
        "first switch, s": measured["first_switch"]["duration_s"],
        "first switch: new groups": float(measured["first_switch"]["num_new_groups"]),
        "later switches, s": median_of("duration_s"),
        "of which: migration, s": median_of("migration_s"),
        **{
            f"mean of the ranks: {name}, s": statistics.median(switch["parts_s"][name] for switch in switches)
            for name in switches[0]["parts_s"]
        },
        "bare transport of the same bytes, s": median_of("transport_s"),
        "migration / bare transport": ratio,
    }
    bars = [
        Bar(
            "bytes sent beyond the lower bound",
            max(abs(switch["sent_bytes"] - switch["lower_bound_bytes"]) for switch in all_switches),
            0,
            "lower",
        ),
        Bar("peak above the larger plan's state, buckets", excess, MAX_BUCKETS_ABOVE, "lower"),
    ]
    if median_of("sent_bytes") >= MIN_RATIO_BYTES:
        bars.append(Bar("migration / bare transport", ratio, MAX_TRANSPORT_RATIO, "lower"))
    return ranks.Verdict(figures, bars)


def _buckets_above(peak: Mapping[str, Any]) -> float:
    """Of one rank in one switch, in units of the largest part that it holds of a bucket."""
    return max(
        (peak[what]["peak_bytes"] - max(peak[what]["held_bytes"])) / peak["largest_bucket_bytes"]
        for what in ("state", "all")
    )


if __name__ == "__main__":
    sys.exit(ranks.run_benchmark(__file__, make_parser(), job, evaluate))
