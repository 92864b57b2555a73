"""Checkpoints on real ranks: saved under any plan, loaded under any other, and training goes on the same."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from hypothesis import HealthCheck, Phase, assume, given, settings
from torch import Tensor, nn

from malleus_ds import MalleusPipelineEngine
from malleus_ds.checkpoint import CheckpointError
from malleus_ds.checkpoint.disk import Disk
from malleus_ds.models import GPTConfig, VocabParallelLoss, gpt_layers
from malleus_ds.models.gpt import Block
from malleus_ds.plan import ParallelPlan
from tests.distributed.checkpoint_reference import (
    assert_same_state,
    gather_state,
    manifest_of,
    num_data_bytes,
    stored,
)
from tests.distributed.reference import (
    BASE_SEED,
    LEARNING_RATE,
    config,
    gather_parameters,
    gpt,
    make_engine,
    plan,
)
from tests.distributed.test_precision import allow_fp16, train_with_overflow
from tests.harness import DistributedTest, RankPool, run_ranks
from tests.strategies import legal_plans

NUM_LAYERS = 8
NUM_EXAMPLES = 4

EIGHT = plan(([((0, 1, 2, 3), 0, 8)], 5), ([((4, 5), 0, 3), (6, 3, 6), (7, 6, 8)], 3))
FOUR = plan(([((2, 0), 0, 5), (1, 5, 8)], 8), standby=(3,))
TWO_AND_ONE_ONE = plan(([((3, 0), 0, 8)], 5), ([(2, 0, 3), (1, 3, 8)], 3))


def ds_config(micro_batch_size: int = 2, **malleus: Any) -> dict[str, Any]:
    result = config(seed=BASE_SEED, tensor_parallel={"max_degree": 4}, **malleus)
    result["train_micro_batch_size_per_gpu"] = micro_batch_size
    result["train_batch_size"] = 8 * micro_batch_size
    return result


def engine_of(
    first_plan: ParallelPlan, tie_embeddings: bool = False, **arguments: Any
) -> MalleusPipelineEngine:
    arguments = {"ds_config": ds_config(), **arguments}
    specs = gpt_layers(gpt(tie_embeddings, num_heads=4))
    return make_engine(first_plan, specs, VocabParallelLoss(), **arguments)


def steps(engine: MalleusPipelineEngine, count: int) -> list[float]:
    return [engine.train_batch().item() for _ in range(count)]


def optimizer_steps(engine: MalleusPipelineEngine) -> set[float]:
    """Over all ranks."""
    own = {float(state["step"]) for state in engine.optimizer.state.values()}
    gathered: list[set[float]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return set().union(*gathered)


class Host:
    """Keeps one engine in each rank between calls."""

    def __init__(self) -> None:
        self.engine: MalleusPipelineEngine | None = None

    def get(self, first_plan: ParallelPlan) -> MalleusPipelineEngine:
        if self.engine is None:
            self.engine = engine_of(first_plan, ds_config=ds_config(micro_batch_size=1))
        return self.engine


HOST = Host()


def save_and_load_elsewhere(first: ParallelPlan, second: ParallelPlan, folder: Path) -> None:
    """On each rank: save under ``first``, train on, and load under ``second``."""
    engine = HOST.get(first)
    engine.reconfigure(first)
    steps(engine, 1)
    before = gather_state(engine)
    position = (engine.global_steps, engine.global_samples, optimizer_steps(engine))
    engine.save_checkpoint(str(folder), tag="here")
    expected = steps(engine, 1)
    engine.reconfigure(second)
    engine.load_checkpoint(str(folder))
    assert (engine.global_steps, engine.global_samples, optimizer_steps(engine)) == position
    assert_same_state(gather_state(engine), before)
    torch.testing.assert_close(steps(engine, 1), expected, rtol=1e-5, atol=0)
    if dist.get_rank() == 0:
        assert_same_state(stored(folder / "here", engine.optimizer.shapes), before)
        num_bytes = sum(values.nbytes for values in before.values())
        assert num_data_bytes(folder / "here") == num_bytes, "each byte is written once"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(8) as ranks:
        yield ranks


plans = legal_plans(NUM_LAYERS, 8, num_micro_batches=8, degrees=(1, 2, 4))


@settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(first=plans, second=plans)
def test_any_plan_loads_what_any_other_saved(
    pool: RankPool, tmp_path: Path, first: ParallelPlan, second: ParallelPlan
) -> None:
    assume(first != second)
    pool.run(save_and_load_elsewhere, first, second, tmp_path)


SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_type": "linear"}}


def scheduled_config() -> dict[str, Any]:
    return {**ds_config(shuffle=True), "scheduler": SCHEDULE}


def save_with_eight(folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more: what those were like."""
    engine = engine_of(EIGHT, tie_embeddings=True, ds_config=scheduled_config())
    steps(engine, 2)
    assert engine.save_checkpoint(str(folder), client_state={"epoch": 3, "best": float("inf")}) is True
    return {
        "state": gather_state(engine),
        "losses": steps(engine, 2),
        "lr": engine.get_lr(),
        "samples": engine.global_samples,
    }


def load_elsewhere(first_plan: ParallelPlan, folder: Path, expected: dict[str, Any]) -> None:
    """With another world, a new engine goes on where the old one was."""
    engine = engine_of(first_plan, tie_embeddings=True, ds_config=scheduled_config())
    path, client_state = engine.load_checkpoint(str(folder))
    assert path == str(folder / "global_step2")
    assert client_state == {"epoch": 3, "best": float("inf")}
    assert_same_state(gather_state(engine), expected["state"])
    torch.testing.assert_close(steps(engine, 2), expected["losses"], rtol=1e-5, atol=0)
    assert engine.get_lr() == expected["lr"]
    assert (engine.global_steps, engine.global_samples) == (4, expected["samples"])
    assert (engine.skipped_steps, engine.micro_steps) == (0, 0)


def test_other_world_sizes_go_on_with_what_eight_ranks_saved(tmp_path: Path) -> None:
    expected = run_ranks(save_with_eight, 8, tmp_path)[0]
    run_ranks(load_elsewhere, 4, FOUR, tmp_path, expected)
    run_ranks(load_elsewhere, 1, plan(([(0, 0, 8)], 8)), tmp_path, expected)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def newer_version(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))


class Touches:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def plant(path: Path) -> None:
    path.write_bytes(pickle.dumps(Touches(path.parent / "executed")))


FAULTS: list[tuple[str, Callable[[Path], None], str]] = [
    ("rank_00001.safetensors", flip, "damaged"),
    ("rank_00001.safetensors", truncate, "bytes, but"),
    ("rank_00002.safetensors", os.remove, "No such file"),
    ("rank_00000.safetensors", plant, "bytes, but"),
    ("manifest.json", flip, "damaged"),
    ("manifest.json", truncate, "damaged"),
    ("manifest.json", plant, "damaged"),
    ("manifest.json", os.remove, "No such file"),
    ("manifest.json", newer_version, "format version 99"),
]


def load_error(engine: MalleusPipelineEngine, *args: Any, **kwargs: Any) -> str:
    """The message, which must be the same on all ranks."""
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(*args, **kwargs)
    messages: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(messages, str(caught.value))
    assert set(messages) == {messages[0]}
    return messages[0]


def on_rank_0(action: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


class TestFaults(DistributedTest):
    world_size = 4

    def test_each_fault_is_one_error_that_names_the_file_and_changes_nothing(self, tmp_path: Path) -> None:
        engine = engine_of(TWO_AND_ONE_ONE)
        steps(engine, 1)
        engine.save_checkpoint(str(tmp_path), tag="good")
        steps(engine, 1)
        before = gather_state(engine)
        for index, (name, damage, message) in enumerate(FAULTS):
            bad = tmp_path / f"bad{index}"

            def prepare(bad: Path = bad, name: str = name, damage: Callable[[Path], None] = damage) -> None:
                shutil.copytree(tmp_path / "good", bad)
                damage(bad / name)

            on_rank_0(prepare)
            text = load_error(engine, str(tmp_path), tag=bad.name)
            assert str(bad / name) in text
            assert message in text
            assert not (bad / "executed").exists()
        assert "no such checkpoint" in load_error(engine, str(tmp_path), tag="absent")
        assert_same_state(gather_state(engine), before)
        assert engine.global_steps == 2
        assert engine.load_checkpoint(str(tmp_path / "bad0")) == (None, None)
        steps(engine, 1)

    def test_another_model_optimizer_or_scheduler_is_refused(self, tmp_path: Path) -> None:
        engine = engine_of(TWO_AND_ONE_ONE)
        engine.save_checkpoint(str(tmp_path), tag="good")
        path = str(tmp_path / "good" / "manifest.json")
        sgd = {**ds_config(), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        text = load_error(engine_of(TWO_AND_ONE_ONE, ds_config=sgd), str(tmp_path))
        assert text.startswith(f"{path}: has AdamW with 1 parameter groups, but the job has SGD with 1")
        scheduled = engine_of(TWO_AND_ONE_ONE, ds_config={**ds_config(), "scheduler": SCHEDULE})
        text = load_error(scheduled, str(tmp_path))
        assert text.startswith(f"{path}: has no LR scheduler, but the job has WarmupLR")
        assert scheduled.load_checkpoint(str(tmp_path), load_lr_scheduler_states=False)[0] is not None
        wide = gpt_layers(gpt(num_heads=4))
        wide[2] = LayerSpec(nn.Linear, 16, 16)
        other = make_engine(TWO_AND_ONE_ONE, wide, VocabParallelLoss(), ds_config=ds_config())
        assert "of another model: it lacks 2 tensors ['2.bias', '2.weight']" in load_error(
            other, str(tmp_path)
        )
        path_loaded, _ = other.load_checkpoint(str(tmp_path), load_module_strict=False)
        assert path_loaded == str(tmp_path / "good")

    def test_what_cannot_be_saved_is_refused_on_all_ranks(self, tmp_path: Path) -> None:
        engine = engine_of(TWO_AND_ONE_ONE)
        rank = dist.get_rank()
        with pytest.raises(CheckpointError, match=r"client_state\['rng'\] is a Tensor"):
            engine.save_checkpoint(str(tmp_path), client_state={"rng": torch.ones(1) if rank == 2 else 1})
        with pytest.raises(ValueError, match="different arguments of save_checkpoint"):
            engine.save_checkpoint(str(tmp_path), tag=f"tag{rank}")
        with pytest.raises(CheckpointError, match="tag is 'a/b'"):
            engine.save_checkpoint(str(tmp_path), tag="a/b")
        with pytest.raises(CheckpointError, match="save_dir is empty"):
            engine.save_checkpoint("")
        assert list(tmp_path.iterdir()) == []


class Half(nn.Module):
    """A frozen part, buffers and a trained part; counts its calls in a buffer that it replaces."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.frozen = nn.Parameter(torch.rand(size), requires_grad=False)
        self.register_buffer("mask", torch.rand(size) > 0.3)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))
        self.num_steps: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_steps = torch.full_like(self.num_steps, 5)
        return hidden + self.linear(hidden) * self.frozen * self.mask


class FrozenBlock(Block):
    """Its weights are cut, but not trained."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.requires_grad_(False)


class FullDisk(Disk):
    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        raise OSError(28, "No space left on device")


class PausedDisk(Disk):
    """Writes nothing in the background before ``goes_on`` is set."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        assert self.goes_on.wait(60)
        super().write(file, data)


class TestOptions(DistributedTest):
    world_size = 4

    def engine(self, optimizer: dict[str, Any] | None = None, **malleus: Any) -> MalleusPipelineEngine:
        specs = gpt_layers(gpt(num_heads=4))
        specs[3] = LayerSpec(Half)
        specs[4] = LayerSpec(FrozenBlock, gpt(num_heads=4))
        settings = ds_config(**malleus)
        settings["optimizer"] = optimizer or settings["optimizer"]
        return make_engine(TWO_AND_ONE_ONE, specs, VocabParallelLoss(), ds_config=settings)

    def test_frozen_parameters_and_buffers_and_parts_of_a_checkpoint(self, tmp_path: Path) -> None:
        engine = self.engine()
        engine.save_checkpoint(str(tmp_path), tag="start", save_latest=False)
        steps(engine, 2)
        engine.save_checkpoint(str(tmp_path), tag="all")
        before = gather_state(engine)
        engine.save_checkpoint(str(tmp_path), tag="tuned", exclude_frozen_parameters=True, save_latest=False)
        saved = {tensor["name"] for tensor in manifest_of(tmp_path / "all")["tensors"]}
        kept = {tensor["name"] for tensor in manifest_of(tmp_path / "tuned")["tensors"]}
        assert "3.frozen" in saved - kept
        assert all(name.startswith("4.") for name in saved - kept - {"3.frozen"})
        on_rank_0(lambda: assert_same_state(stored(tmp_path / "all", engine.optimizer.shapes), before))

        assert gather_parameters(engine)["3.num_steps"].item() == 5
        engine.load_checkpoint(str(tmp_path), tag="start")
        assert gather_parameters(engine)["3.num_steps"].item() == 0
        assert {state for state, _ in gather_state(engine)} == {"parameter"}

        fresh = self.engine()
        fresh.load_checkpoint(str(tmp_path))
        assert_same_state(gather_state(fresh), before)

        fresh = self.engine()
        only_module = {key: values for key, values in before.items() if key[0] == "parameter"}
        fresh.load_checkpoint(str(tmp_path), load_module_only=True)
        assert_same_state(gather_state(fresh), only_module)
        assert fresh.global_steps == 0
        fresh.load_checkpoint(str(tmp_path), load_optimizer_states=False)
        assert_same_state(gather_state(fresh), only_module)
        assert fresh.global_steps == 2
        assert "it lacks 13 tensors ['3.frozen', '4.attention" in load_error(
            fresh, str(tmp_path), tag="tuned"
        )
        fresh.load_checkpoint(str(tmp_path), tag="tuned", load_module_strict=False)
        assert_same_state(gather_state(fresh), before)

    def test_background_saves_equal_synchronous_ones(self, tmp_path: Path) -> None:
        engine = self.engine(checkpoint={"async_save": True})
        steps(engine, 1)
        engine.save_checkpoint(str(tmp_path), tag="sync", async_save=False)
        disk = engine._disk = PausedDisk()
        engine.save_checkpoint(str(tmp_path), tag="async")
        steps(engine, 2)
        assert not (tmp_path / "async").exists()
        disk.goes_on.set()
        engine.save_checkpoint(str(tmp_path), tag="second")
        engine.finish_saving()
        dist.barrier()
        for path in (tmp_path / "sync").iterdir():
            assert path.read_bytes() == (tmp_path / "async" / path.name).read_bytes(), path.name
        assert {path.name for path in tmp_path.iterdir()} == {"sync", "async", "second", "latest"}
        expected = steps(engine, 1)
        assert engine.load_checkpoint(str(tmp_path))[0] == str(tmp_path / "second")
        torch.testing.assert_close(steps(engine, 1), expected, rtol=1e-5, atol=0)
        engine.destroy()

    def test_the_job_says_how_a_step_is_computed(self, tmp_path: Path) -> None:
        """Options of the optimizer that change its result come from the checkpoint, the others do not."""
        engine = self.engine()
        steps(engine, 1)
        engine.save_checkpoint(str(tmp_path))
        expected = steps(engine, 2)
        params = {"lr": 0.5, "weight_decay": 0.3, "torch_adam": True, "fused": True}
        other = self.engine(optimizer={"type": "AdamW", "params": params})
        other.load_checkpoint(str(tmp_path))
        (group,) = other.optimizer.param_groups
        assert (group["lr"], group["fused"]) == (LEARNING_RATE, True)
        torch.testing.assert_close(steps(other, 2), expected, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_masters_and_the_loss_scale(self, tmp_path: Path, precision: str) -> None:
        """Saved under one plan, loaded under another by an engine that has trained otherwise."""
        allow_fp16()
        options: dict[str, Any] = {"enabled": True}
        if precision == "fp16":
            options |= {"initial_scale_power": 9, "hysteresis": 1}
        settings = ds_config() | {precision: options}
        specs = gpt_layers(gpt(num_heads=4))
        engine = make_engine(TWO_AND_ONE_ONE, specs, VocabParallelLoss(), ds_config=settings)
        steps(engine, 2)
        if precision == "fp16":
            train_with_overflow(engine, rank=1)
            assert engine.optimizer.loss_scale == 256
        engine.save_checkpoint(str(tmp_path))
        saved, expected = gather_state(engine), steps(engine, 2)
        assert any(state == "master" for state, _ in saved)
        other = make_engine(FOUR, specs, VocabParallelLoss(), ds_config=settings)
        steps(other, 3)
        other.load_checkpoint(str(tmp_path))
        assert_same_state(gather_state(other), saved)
        assert other.optimizer.loss_scale == (256 if precision == "fp16" else 1.0)
        assert other.skipped_steps == (precision == "fp16")
        torch.testing.assert_close(steps(other, 2), expected, rtol=1e-3, atol=0)

    def test_the_control_loop_goes_on_after_a_load(self, tmp_path: Path) -> None:
        engine = self.engine(detector={"enabled": True, "control_plane": "gloo", "calibration_steps": 1})
        steps(engine, 2)
        engine.save_checkpoint(str(tmp_path))
        expected = steps(engine, 2)
        engine.load_checkpoint(str(tmp_path))
        torch.testing.assert_close(steps(engine, 2), expected, rtol=1e-5, atol=0)
        engine.destroy()

    @pytest.mark.parametrize("async_save", [False, True])
    def test_a_rank_that_cannot_write_fails_the_save_on_all(self, tmp_path: Path, async_save: bool) -> None:
        engine = self.engine()
        engine.save_checkpoint(str(tmp_path), tag="good")
        if dist.get_rank() == 2:
            engine._disk = FullDisk()
        if async_save:
            engine.save_checkpoint(str(tmp_path), tag="good", async_save=True)
            steps(engine, 1)
        with pytest.raises(CheckpointError, match=r"rank_00002.safetensors: cannot be written \(No space"):
            engine.save_checkpoint(str(tmp_path), tag="next")
        dist.barrier()
        assert {path.name for path in tmp_path.iterdir()} == {"good", "latest"}
        assert engine.load_checkpoint(str(tmp_path))[0] == str(tmp_path / "good")
        engine._disk = Disk()
        engine.save_checkpoint(str(tmp_path), tag="good", async_save=async_save)
        engine.destroy()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "latest"]
