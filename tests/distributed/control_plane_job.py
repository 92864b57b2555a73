"""What a rank of a control-plane test does; the tests call it in their own ranks or run it under mpirun.

As a script it writes what it saw to ``REPORT/rank_<r>.json``; the tests hold it against what it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from malleus_ds.comm import init_distributed
from malleus_ds.detector.control_plane import ControlPlane, ControlPlaneError
from malleus_ds.detector.factory import make_control_plane
from malleus_ds.detector.mpi import MpiControlPlane, abort_on_error

RECORD_SIZE = 6
LONG_TIMEOUT_S = 60.0
SHORT_TIMEOUT_S = 2.0


def record(rank: int, step: int) -> np.ndarray:
    """The record of a rank in a step: any numbers, the same wherever they are computed."""
    values = np.random.default_rng((rank, step)).normal(size=RECORD_SIZE)
    values[0] = step
    return values


def payload(rank: int) -> bytes:
    """Bytes of a length of its own for each rank, none for rank 1."""
    return np.random.default_rng(rank).bytes(0 if rank == 1 else 1000 * rank + 7)


def error_of(call: Callable[[], Any]) -> str:
    """``"<type>: <message>"`` of the error that the call raises; empty when it raises none."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def make_plane(kind: Any, timeout_s: float = LONG_TIMEOUT_S) -> ControlPlane:
    return make_control_plane(kind, timeout_s, dist.get_world_size(), dist.get_rank())


def exchange_beside_training(plane: ControlPlane, num_steps: int) -> dict[str, Any]:
    """Exchanges that stay in flight over a step of all-reduces and uneven sleeps."""
    received, sums = [], []
    plane.start_exchange(record(plane.rank, 0))
    for step in range(1, num_steps + 1):
        time.sleep(0.003 * ((plane.rank + step) % plane.size))
        traffic = torch.full((20_000,), float(plane.rank + step))
        dist.all_reduce(traffic)
        sums.append(traffic.unique().tolist())
        received.append(plane.finish_exchange().tolist())
        plane.start_exchange(record(plane.rank, step))
    double_start = error_of(lambda: plane.start_exchange(record(plane.rank, 99)))
    received.append(plane.finish_exchange().tolist())
    return {"received": received, "sums": sums, "double_start": double_start}


def conformance(plane: ControlPlane) -> dict[str, Any]:
    last = plane.size - 1
    report: dict[str, Any] = {"carrier": plane.name, "place": [plane.rank, plane.size]}
    report |= exchange_beside_training(plane, num_steps=6)
    report["finish_without_start"] = error_of(plane.finish_exchange)
    report["gathered"] = [part.hex() for part in plane.all_gather_bytes(payload(plane.rank))]
    for root in (0, last):
        own = payload(root) if plane.rank == root else None
        report[f"broadcast_{'first' if root == 0 else 'last'}"] = plane.broadcast(
            own, len(payload(root)), root
        ).hex()
    report["empty_broadcast"] = plane.broadcast(b"" if plane.rank == 0 else None, 0).hex()
    if plane.rank == 0:
        report["wrong_size"] = error_of(lambda: plane.broadcast(b"abc", 4))
    return report


def late_rank(plane: ControlPlane) -> dict[str, Any]:
    """The last rank comes only after all others have given it up."""
    report: dict[str, Any] = {}
    if plane.rank != plane.size - 1:
        plane.start_exchange(record(plane.rank, 7))
        started_s = time.monotonic()
        report["lost_peer"] = error_of(plane.finish_exchange)
        report["waited_s"] = time.monotonic() - started_s
    dist.barrier()
    if plane.rank == plane.size - 1:
        # Completes what the others left open, so that MPI can finalise; in gloo it is an error.
        plane.start_exchange(record(plane.rank, 7))
        error_of(plane.finish_exchange)
    return report


def run_suite(kind: str) -> dict[str, Any]:
    plane = make_plane(kind)
    report = conformance(plane)
    plane.close()
    report |= late_rank(make_plane(kind, SHORT_TIMEOUT_S))
    dist.barrier()
    return report


def run_choice(kind: str) -> dict[str, Any]:
    """Which carrier is chosen, or the error."""
    names: list[str] = []
    error = error_of(lambda: names.append(make_plane(kind).name))
    return {"carrier": names, "error": error}


def run_killed(kind: str) -> None:
    """Rank 1 is killed while an exchange is open."""
    plane = make_plane(kind)
    plane.all_gather_bytes(b"connected")
    if plane.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    plane.start_exchange(record(plane.rank, 3))
    plane.finish_exchange()


def run_one_rank_fails(how: str) -> None:
    """Rank 1 leaves by an exception while the others wait; MPI only."""
    plane = MpiControlPlane(LONG_TIMEOUT_S)
    if plane.rank == 1:
        if how == "exit":
            sys.exit(2)
        raise ControlPlaneError("rank 1 found a fault")
    plane.start_exchange(record(plane.rank, 0))
    plane.finish_exchange()


def join_without_mpi(swap: bool) -> None:
    """Take the place from mpirun, or the mirrored one, without starting MPI; MASTER_PORT is given."""
    rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    place = str(size - 1 - rank if swap else rank)
    os.environ.update(RANK=place, LOCAL_RANK=place, WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    init_distributed(timeout_s=LONG_TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=["suite", "swapped", "killed", "raise", "exit"])
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()
    if args.scenario in ("raise", "exit"):
        run_one_rank_fails(args.scenario)
        return
    join_without_mpi(swap=args.scenario == "swapped")
    scenario = {"suite": run_suite, "swapped": run_choice, "killed": run_killed}[args.scenario]
    report = scenario("auto")
    (args.report / f"rank_{dist.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    with abort_on_error():
        main()
