"""Nodes are lost, and what is left goes on from memory: real ranks, killed, on two emulated nodes."""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.utils import logger
from torch import Tensor, nn

from malleus_ds import MalleusPipelineEngine
from malleus_ds.models import VocabParallelLoss, gpt_layers
from malleus_ds.plan import ParallelPlan
from malleus_ds.redundancy.errors import RedundancyError
from malleus_ds.redundancy.part import Part
from malleus_ds.redundancy.survey import parts
from tests.distributed.checkpoint_reference import Whole, assemble, assert_same_state, gather_state, held
from tests.distributed.reference import BASE_SEED, config, gpt, make_engine, plan, single_process
from tests.harness import RanksFailedError, run_ranks

NODES = ((0, 1), (2, 3))
MANY_STEPS = 40
NUM_STEPS_AFTER = 3
UNEVEN = plan(([((0, 1), 0, 4), (2, 4, 8)], 5), ([(3, 0, 8)], 3))
TWO_STAGES = plan(([(1, 0, 3), (0, 3, 8)], 8))
ONE_TP_GROUP = plan(([((0, 1), 0, 8)], 8))


def engine_of(
    first_plan: ParallelPlan,
    folder: Path,
    layers: list[Any] | None = None,
    settings: dict[str, Any] | None = None,
    **redundancy: Any,
) -> MalleusPipelineEngine:
    """With the memory of this rank's node in ``folder``; two ranks are node 1. settings: of DeepSpeed."""
    is_whole = dist.get_world_size() == 4
    os.environ["MALLEUS_MEMORY_DIR"] = str(folder / f"node{dist.get_rank() // 2 if is_whole else 1}")
    section = config(
        seed=BASE_SEED,
        tensor_parallel={"max_degree": 2},
        redundancy={"enabled": True, **redundancy},
        nodes=NODES if is_whole else None,
        timeout_s=60.0,
    )
    return make_engine(
        first_plan,
        layers or gpt_layers(gpt(num_heads=4)),
        VocabParallelLoss(),
        ds_config={**section, **(settings or {})},
    )


def record_what_is_kept(engine: MalleusPipelineEngine, folder: Path) -> None:
    """After each step this rank writes down what it holds, before it is copied and without the others."""
    keep = engine._keep

    def record_and_keep() -> None:
        torch.save(held(engine), folder / f"state_{engine.global_steps}_{dist.get_rank()}.pt")
        keep()

    engine._keep = record_and_keep  # type: ignore[method-assign]


def recorded(folder: Path, step: int, shapes: dict[str, tuple[int, ...]]) -> Whole:
    """The whole state after ``step`` steps."""
    found = [torch.load(path) for path in folder.glob(f"state_{step}_*.pt")]
    return assemble([piece for pieces in found for piece in pieces], shapes)


def last_recorded(folder: Path) -> int:
    """The last step that all four ranks completed."""
    return max(step for step in range(1, MANY_STEPS) if len(list(folder.glob(f"state_{step}_*.pt"))) == 4)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_node_0_dies(folder: Path, last_step: int, delay_s: float) -> None:
    engine = engine_of(UNEVEN, folder)
    record_what_is_kept(engine, folder)
    for _ in range(MANY_STEPS):
        engine.train_batch()
        if engine.global_steps == 1:
            engine.save_checkpoint(str(folder / "checkpoints"))
        if engine.global_steps == last_step and dist.get_rank() in NODES[0]:
            threading.Timer(delay_s, die).start()


class DyingPart(Part):
    """Kills its process when all bytes of a part are there, but it does not count yet."""

    def finish(self, header: bytes) -> None:
        die()


def train_until_a_copy_is_torn(folder: Path) -> None:
    """The one that rank 2 keeps of step 4."""
    engine = engine_of(UNEVEN, folder)
    record_what_is_kept(engine, folder)
    for step in range(1, MANY_STEPS):
        if step == 4 and dist.get_rank() == 2:
            assert engine._keeper is not None
            for part in engine._keeper._slots[1].copies.values():
                part.__class__ = DyingPart
        engine.train_batch()


def lose_node_0(folder: Path, train: Callable[..., None], *args: Any) -> None:
    with pytest.raises(RanksFailedError):
        run_ranks(train, 4, folder, *args)
    shutil.rmtree(folder / "node0")


class Lines(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def go_on(folder: Path, first_plan: ParallelPlan = TWO_STAGES, **arguments: Any) -> dict[str, Any]:
    """As the ranks of node 1; asserts that the state is what was recorded, and that the log says why."""
    log = Lines()
    logger.addHandler(log)
    engine = engine_of(first_plan, folder, **arguments)
    resumed = engine.resume(str(folder / "checkpoints"))
    assert engine.global_steps == resumed.step
    assert engine.global_samples == resumed.step * first_plan.global_batch_size
    assert_same_state(gather_state(engine), recorded(folder, resumed.step, engine.optimizer.shapes))
    if dist.get_rank() == 0:
        assert any(line.startswith("resume: ") and resumed.reason in line for line in log.lines)
    learning_rate = engine.get_lr()
    losses = [engine.train_batch().item() for _ in range(NUM_STEPS_AFTER)]
    engine.destroy()
    dist.barrier()
    kept = {(header.run, header.step, header.rank) for _, header in parts(folder / "node1")}
    return {"resumed": asdict(resumed), "losses": losses, "lr": learning_rate, "kept": kept}


def spoil_checkpoints(folder: Path) -> None:
    """Whoever reads their tensors fails."""
    for path in folder.glob("checkpoints/*/*.safetensors"):
        path.write_bytes(b"")


@pytest.fixture(scope="module")
def expected_losses() -> list[float]:
    return single_process(gpt_layers(gpt(num_heads=4)), VocabParallelLoss(), 12).losses


def assert_goes_on(told: dict[str, Any], expected_losses: list[float], source: str, step: int) -> None:
    assert (told["resumed"]["source"], told["resumed"]["step"]) == (source, step)
    expected = expected_losses[step : step + NUM_STEPS_AFTER]
    assert told["losses"] == pytest.approx(expected, rel=1e-5)
    # Only what this job kept is left: two generations of its two ranks, without copies on its one node.
    assert {(key[1], key[2]) for key in told["kept"]} == {
        (step + after, rank) for after in (NUM_STEPS_AFTER - 1, NUM_STEPS_AFTER) for rank in (0, 1)
    }
    assert len({run for run, _, _ in told["kept"]}) == 1


def test_a_node_is_lost_at_any_moment_and_then_both_copies_of_a_share(
    tmp_path: Path, expected_losses: list[float]
) -> None:
    moment = random.Random(1)
    lose_node_0(tmp_path, train_until_node_0_dies, moment.randint(3, 6), moment.random() * 0.3)
    shutil.copytree(tmp_path, tmp_path / "lost")
    spoil_checkpoints(tmp_path)
    last = last_recorded(tmp_path)
    told = run_ranks(go_on, 2, tmp_path)[0]
    assert told["resumed"]["step"] in (last - 1, last)  # the last copies may have been under way
    assert_goes_on(told, expected_losses, "memory", told["resumed"]["step"])

    for path in tmp_path.glob("lost/node1/run-*/rank_00001.*"):
        path.unlink()
    told = run_ranks(go_on, 2, tmp_path / "lost")[0]
    assert_goes_on(told, expected_losses, "checkpoint", 1)
    reason = told["resumed"]["reason"]
    assert "these shares of parameters and optimizer state are lost: " in reason
    assert "rank 1's (kept by node 0 (" in reason  # and others, whose copies were under way
    assert told["resumed"]["path"] == str(tmp_path / "lost" / "checkpoints" / "global_step1")


def test_a_torn_copy_does_not_count(tmp_path: Path, expected_losses: list[float]) -> None:
    lose_node_0(tmp_path, train_until_a_copy_is_torn)
    losses = run_ranks(go_on_every_second_step, 2, tmp_path)[0]
    assert losses == pytest.approx(expected_losses[3:8], rel=1e-5)


def steps_kept(engine: MalleusPipelineEngine, folder: Path) -> set[int]:
    engine.end_keeping()
    dist.barrier()
    kept = {header.step for _, header in parts(folder / "node1")}
    dist.barrier()
    return kept


def go_on_every_second_step(folder: Path) -> list[float]:
    """From step 3 on; then from a checkpoint, because it is newer, and what was in memory is gone."""
    engine = engine_of(ONE_TP_GROUP, folder, interval_steps=2)
    resumed = engine.resume(str(folder / "checkpoints"))
    assert (resumed.source, resumed.step) == ("memory", 3)
    assert "of step 4 these shares" in resumed.reason
    again = engine.resume(str(folder / "checkpoints"))
    assert (again.source, again.step, again.reason) == ("memory", 3, ""), "what was torn is gone"
    assert_same_state(gather_state(engine), recorded(folder, 3, engine.optimizer.shapes))
    losses = [engine.train_batch().item()]
    assert steps_kept(engine, folder) == {3, 4}, "until the next one, what it went on from stays"
    losses += [engine.train_batch().item() for _ in range(3)]
    assert steps_kept(engine, folder) == {4, 6}
    engine.save_checkpoint(str(folder / "checkpoints"))
    resumed = engine.resume(str(folder / "checkpoints"))
    assert (resumed.source, resumed.step) == ("checkpoint", 7)
    assert resumed.reason == "memory is whole as of step 6, the checkpoint of 7"
    assert steps_kept(engine, folder) == set()
    losses.append(engine.train_batch().item())
    assert steps_kept(engine, folder) == {8}
    engine.destroy()
    return losses


class LatePart(Part):
    """Is written when the forward passes of the next step are over."""

    def begin(self, num_bytes: int) -> Tensor:
        time.sleep(0.5)
        return super().begin(num_bytes)


class Counter(nn.Module):
    """Counts its calls in a buffer, in place: what is kept of a step must not have the next one's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(3, dtype=torch.int64))
        self.num_calls: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        return hidden


MIXED = {
    "bf16": {"enabled": True},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_type": "linear"}},
}
THREE_STAGES = plan(([((0, 1), 0, 4), (2, 4, 6), (3, 6, 9)], 8))
WITH_STANDBY = plan(([(2, 0, 2), ((0, 1), 2, 9)], 8), standby=(3,))
ALONE = plan(([(0, 0, 9)], 8), standby=(1,))


def counting_layers() -> list[Any]:
    layers = gpt_layers(gpt(num_heads=4))
    return [*layers[:3], LayerSpec(Counter), *layers[3:]]


def train_mixed(folder: Path) -> dict[str, Any]:
    """Two steps, a new plan, two more steps; then two that are not kept."""
    occupied = folder / "occupied"
    occupied.mkdir(exist_ok=True)
    (occupied / "node1").touch()
    engine = engine_of(THREE_STAGES, occupied, counting_layers(), MIXED)
    with pytest.raises(RedundancyError, match=r"occupied/node1' on node 1 \(.*File exists"):
        engine.train_batch()
    assert engine._keeper is not None
    engine._keeper.directory = folder / "limited"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    engine.train_batch()
    with pytest.raises(RedundancyError, match=r"own\.0\.bin: cannot hold \d+ bytes"):
        engine.train_batch()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    engine = engine_of(THREE_STAGES, folder, counting_layers(), MIXED)
    assert engine.resume(str(folder / "checkpoints")).source == "nothing"
    record_what_is_kept(engine, folder)
    for _ in range(2):
        engine.train_batch()
    engine.reconfigure(WITH_STANDBY)
    engine.train_batch()
    assert engine._keeper is not None
    own = engine._keeper._slots[1].own
    if own is not None:
        own.__class__ = LatePart
    engine.train_batch()
    learning_rate = engine.get_lr()
    engine._keep = lambda: None  # type: ignore[method-assign]
    losses = [engine.train_batch().item() for _ in range(NUM_STEPS_AFTER)]
    cost = engine.redundancy_cost
    on_disk = sum(path.stat().st_size for path in folder.glob("node*/run-*/*.bin"))
    shapes = engine.optimizer.shapes
    return {"cost": cost, "on_disk": on_disk, "lr": learning_rate, "losses": losses, "shapes": shapes}


def test_masters_buffers_tp_groups_and_a_new_plan(tmp_path: Path) -> None:
    told = run_ranks(train_mixed, 4, tmp_path)
    whole = sum(tensor.nbytes for tensor in recorded(tmp_path, 4, told[0]["shapes"]).values())
    costs = [each["cost"] for each in told]
    assert sum(cost.own_bytes for cost in costs) == sum(cost.copy_bytes for cost in costs) == whole
    assert costs[3].own_bytes == 0
    assert told[0]["on_disk"] == sum(cost.held_bytes for cost in costs) == 2 * 2 * whole
    shutil.rmtree(tmp_path / "node0")
    after = run_ranks(go_on_mixed, 2, tmp_path)[0]
    assert (after["resumed"]["source"], after["resumed"]["step"]) == ("memory", 4)
    assert after["lr"] == told[0]["lr"]
    assert after["losses"] == pytest.approx(told[0]["losses"], rel=1e-3)


def go_on_mixed(folder: Path) -> dict[str, Any]:
    return go_on(folder, ALONE, layers=counting_layers(), settings=MIXED)
