"""A training script for `malleus-run` that suffers the faults it is told: see `Fault`.

    malleus-run ... elastic_job.py FOLDER NUM_STEPS

FOLDER has ``faults.json``, and gets the checkpoints and ``losses.jsonl``. With a file ``in_memory`` in it,
the job keeps its state in memory and writes no checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from malleus_ds import MalleusPipelineEngine, ParallelPlan, init_distributed
from malleus_ds.checkpoint.disk import Disk
from malleus_ds.launch import run_job
from malleus_ds.plan import Stage
from tests.distributed.reference import BASE_SEED, config, make_engine

TIMEOUT_S = 12.0


@dataclass(frozen=True)
class Fault:
    """In attempt ``attempt``, before step ``step``, rank ``rank``. how: see `_suffer`; where: "step"; "save"
    and "checkpoint" (when the one before the step begins, and half-way through its file); "migration" (with
    half of the state moved, in a switch before the step)."""

    attempt: int
    step: int
    rank: int
    how: str
    where: str = "step"


def _suffer(how: str) -> None:
    if how == "host":  # with all processes of it: they are one process group
        os.killpg(os.getpgid(0), signal.SIGKILL)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}[how])


class FaultyDisk(Disk):
    def __init__(self, fault: Callable[[], None]) -> None:
        self.fault = fault

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        super().write(file, data[: len(data) // 2])
        file.flush()
        self.fault()


class FaultyStorages(dict[int, Any]):
    """Storage by bucket, as the optimizer has it; a migration takes out and puts in one after the other."""

    def __init__(self, storages: dict[int, Any], fault: Callable[[], None]) -> None:
        super().__init__(storages)
        self.countdown, self.fault = len(storages) // 2, fault

    def pop(self, *key: Any) -> Any:
        self.countdown -= 1
        if self.countdown == 0:
            self.fault()
        return super().pop(*key)


def rotated(plan: ParallelPlan) -> ParallelPlan:
    """Each rank takes the place of the next one, so that all state moves."""

    def moved(stage: Stage) -> Stage:
        return replace(stage, ranks=tuple((rank + 1) % plan.world_size for rank in stage.ranks))

    pipelines = tuple(
        replace(pipeline, stages=tuple(map(moved, pipeline.stages))) for pipeline in plan.pipelines
    )
    standby = tuple(sorted((rank + 1) % plan.world_size for rank in plan.standby))
    return replace(plan, pipelines=pipelines, standby=standby)


def train(engine: MalleusPipelineEngine, folder: Path, num_steps: int, faults: list[Fault]) -> None:
    rank, kept = engine.global_rank, str(folder / "kept")
    saves = not engine.malleus_config.redundancy.enabled
    resumed = engine.resume(kept)
    if rank == 0:
        record(folder / "resumed.jsonl", source=resumed.source, step=resumed.step)
    for step in range(engine.global_steps, num_steps):
        for fault in [fault for fault in faults if fault.step == step]:
            is_own = fault.rank == rank
            if fault.where == "migration":
                if is_own:
                    suffer = partial(_suffer, fault.how)
                    engine.optimizer.storages = FaultyStorages(engine.optimizer.storages, suffer)
                engine.reconfigure(rotated(engine.plan))
            elif is_own and fault.where == "step":
                _suffer(fault.how)
        loss = engine.train_batch().item()
        if rank == 0:
            record(folder / "losses.jsonl", step=step, loss=loss, plan=engine.plan.to_dict())
        for fault in faults:
            if (fault.step, fault.rank) == (step + 1, rank):
                if fault.where == "save":
                    _suffer(fault.how)
                if fault.where == "checkpoint":
                    engine._disk = FaultyDisk(partial(_suffer, fault.how))
        if saves:
            engine.save_checkpoint(kept)


def record(path: Path, **details: Any) -> None:
    entry = {"attempt": int(os.environ["MALLEUS_ATTEMPT"]), **details}
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def look_around(folder: Path) -> None:
    """Record what the rank is told, and leave a mark in the host's memory."""
    host, memory = os.environ["MALLEUS_HOST"], Path(os.environ["MALLEUS_MEMORY_DIR"])
    own_mark = memory / f"attempt_{os.environ['MALLEUS_ATTEMPT']}"
    found = sorted(path.name for path in memory.iterdir() if path != own_mark)  # the other rank may be first
    if int(os.environ["LOCAL_RANK"]) == 0:
        record(folder / "hosts.jsonl", host=host, memory=str(memory), found=found)
    own_mark.touch()


def main() -> None:
    folder, num_steps = Path(sys.argv[-2]), int(sys.argv[-1])
    faults = [Fault(**fault) for fault in json.loads((folder / "faults.json").read_text())]
    attempt = int(os.environ["MALLEUS_ATTEMPT"])
    init_distributed()
    redundancy = {"enabled": (folder / "in_memory").exists()}
    ds_config = config(seed=BASE_SEED, timeout_s=TIMEOUT_S, redundancy=redundancy)
    engine = make_engine(None, num_stages=2, ds_config=ds_config, partition_method="uniform")
    look_around(folder)
    train(engine, folder, num_steps, [fault for fault in faults if fault.attempt == attempt])
    engine.destroy()


if __name__ == "__main__":
    run_job(main)
