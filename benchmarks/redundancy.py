"""In-memory redundancy: what it takes of a step and of memory, and the way back after a node is lost.

Eight emulated ranks on two nodes, in 2 pipelines of 4 stages. An engine with redundancy and one without live
in the same processes and take turns. Then the memory of the first node is deleted, and a new engine goes on
from what the second one has: the first node's ranks get all they hold from there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ranks

from malleus_ds.report.bars import Bar

if TYPE_CHECKING:
    from malleus_ds import MalleusPipelineEngine

MAX_STEP_RATIO = 1.05
NODES = ((0, 1, 2, 3), (4, 5, 6, 7))
NUM_COPIES = 2
NUM_GENERATIONS = 2
ELEMENT_BYTES = 12
"""fp32 parameter and Adam's two moments."""


def make_parser() -> argparse.ArgumentParser:
    parser = ranks.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="steps of each engine (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=128, help="of the GPT (default: %(default)s)")
    parser.add_argument(
        "--layer-ms", type=float, default=10.0, help="forward time of a healthy block (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a first look: three rounds, a small model")
    return parser


def job(args: argparse.Namespace) -> dict[str, Any] | None:
    """On every rank; the measurements, on rank 0."""
    import torch.distributed as dist

    folder = [tempfile.mkdtemp(prefix="malleus-benchmark-", dir=_memory()) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        return _measure(args, Path(folder[0]))
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)


def _memory() -> str | None:
    """A file system in memory, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _measure(args: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    import torch.distributed as dist
    from contenders import Ours, Workload, overrun_share

    if args.quick:
        args = argparse.Namespace(rounds=3, hidden_size=32, layer_ms=2.0)
    workload = Workload(layer_ms=args.layer_ms, num_micro_batches=8, hidden_size=args.hidden_size)
    node = next(index for index, members in enumerate(NODES) if dist.get_rank() in members)
    directory = folder / f"node{node}"
    os.environ["MALLEUS_MEMORY_DIR"] = str(directory)
    plain = Ours(workload, has_detector=False)
    kept = Ours(workload, has_detector=False, nodes=NODES, redundancy={"enabled": True})
    steps = [{"plain": plain.step(), "kept": kept.step()} for _ in range(args.rounds)]
    kept.engine.end_keeping()
    cost = kept.engine.redundancy_cost
    assert cost is not None, "it is enabled"
    share = overrun_share([plain.device, kept.device])
    dist.barrier()
    on_disk = sum(path.stat().st_size for path in directory.rglob("*.bin"))
    dist.barrier()
    if dist.get_rank() == NODES[0][0]:
        shutil.rmtree(directory)
    dist.barrier()
    survivor = Ours(workload, has_detector=False, nodes=NODES, redundancy={"enabled": True})
    dist.barrier()
    began = time.perf_counter()
    resumed = survivor.engine.resume()
    dist.barrier()
    resume_s = time.perf_counter() - began
    own = {
        "cost": asdict(cost),
        "source": resumed.source,
        "lost_steps": kept.engine.global_steps - resumed.step,
        "num_different": _num_different(survivor.engine, kept.engine),
    }
    gathered: list[dict[str, Any]] = [own] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    on_disks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(on_disks, on_disk)
    elements = [bucket.num_elements for bucket in kept.engine.placement.buckets]
    for each in (plain, kept, survivor):
        each.engine.destroy()
    if dist.get_rank():
        return None
    return {
        "steps": steps,
        "ranks": gathered,
        "on_disk_bytes": [on_disks[members[0]] for members in NODES],
        "model_state_bytes": sum(elements) * ELEMENT_BYTES,
        "resume_s": resume_s,
        "overrun_share": share,
    }


def _num_different(engine: MalleusPipelineEngine, other: MalleusPipelineEngine) -> int:
    """Tensors of this rank's state that do not have the same bits, under the same plan."""
    return sum(
        mine.tolist() != theirs.tolist()
        for mine, theirs in zip(_tensors(engine), _tensors(other), strict=True)
    )


def _tensors(engine: MalleusPipelineEngine) -> list[Any]:
    """Flat parameters and moments as integers."""
    import torch

    tensors = []
    for storage in engine.optimizer.storages.values():
        states = [engine.optimizer.state[s.parameter] for s in storage.shards if s.parameter is not None]
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        tensors += [storage.flat[: storage.stop - storage.start], *moments]
    return [tensor.view(torch.int32) for tensor in tensors]


def evaluate(measured: Mapping[str, Any]) -> ranks.Verdict:
    """Pure. The first step of each engine starts it up."""
    steps, on_ranks = measured["steps"][1:], measured["ranks"]
    costs = [rank["cost"] for rank in on_ranks]
    step_s = statistics.median(step["plain"] for step in steps)

    def per_step(name: str) -> list[float]:
        return [cost[name] / cost["num_generations"] for cost in costs]

    waits_s = [start + wait for start, wait in zip(per_step("start_s"), per_step("wait_s"), strict=True)]
    ratio = statistics.median(step["kept"] / step["plain"] for step in steps)
    theory = measured["model_state_bytes"] * NUM_COPIES * NUM_GENERATIONS
    held = sum(cost["held_bytes"] for cost in costs)
    figures: dict[str, float | None] = {
        "state of the model, MB": measured["model_state_bytes"] / 1e6,
        "copied to another node in a step, all ranks, MB": sum(cost["copy_bytes"] for cost in costs) / 1e6,
        "held in memory, all hosts, MB": held / 1e6,
        "held in memory, fullest rank, MB": max(cost["held_bytes"] for cost in costs) / 1e6,
        "step without, s": step_s,
        "step with, s": statistics.median(step["kept"] for step in steps),
        "the step's wait for it, mean of ranks, share": statistics.fmean(waits_s) / step_s,
        "in the background, mean of ranks, s per step": statistics.fmean(per_step("background_s")),
        "resume after the loss, s": measured["resume_s"],
        "steps lost": float(max(rank["lost_steps"] for rank in on_ranks)),
        "emulated waits that came too late, share": measured["overrun_share"],
    }
    is_from_memory = all(rank["source"] == "memory" for rank in on_ranks)
    num_different = sum(rank["num_different"] for rank in on_ranks)
    excess = max(abs(total - theory) for total in (held, sum(measured["on_disk_bytes"])))
    bars = [
        Bar("step with / without", ratio, MAX_STEP_RATIO, "lower"),
        Bar("bytes held beyond two copies of two generations", excess, 0, "lower"),
        Bar("tensors with other bits after the loss", num_different if is_from_memory else None, 0, "lower"),
    ]
    return ranks.Verdict(figures, bars)


if __name__ == "__main__":
    sys.exit(ranks.run_benchmark(__file__, make_parser(), job, evaluate))
