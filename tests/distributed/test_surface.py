"""What scripts for DeepSpeed's pipeline engine call and read, under uneven plans and on standby ranks."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineError
from torch import Tensor, nn

from malleus_ds import MalleusPipelineEngine, MalleusPipelineModule, initialize
from malleus_ds.models import VocabParallelLoss, gpt_layers
from malleus_ds.models.gpt import gpt_loss
from malleus_ds.plan import ParallelPlan
from tests.distributed.reference import (
    BASE_SEED,
    LEARNING_RATE,
    MICRO_BATCH_SIZE,
    NUM_MICRO_BATCHES,
    Tokens,
    config,
    gpt,
    make_engine,
    plan,
    single_process,
)
from tests.harness import DistributedTest

FIRST = plan(([(2, 0, 5), (0, 5, 8)], 5), ([(1, 0, 8)], 3), standby=(3,))
SECOND = plan(([(3, 0, 8)], 2), ([(1, 0, 1), (2, 1, 8)], 6), standby=(0,))
GLOBAL_BATCH = NUM_MICRO_BATCHES * MICRO_BATCH_SIZE


class Shortened(Tokens):
    """Samples whose length changes from one micro-batch to the next."""

    lengths = (8, 3, 5, 8, 2, 7, 4, 6)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length = self.lengths[index // MICRO_BATCH_SIZE % len(self.lengths)]
        tokens, labels = super().__getitem__(index)
        return tokens[:length], labels[:length]


class Loss(nn.Module):
    """Remembers its last value."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.last: Tensor | None = None

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = self.function(logits, labels)
        self.last = loss.detach()
        return loss


class Reporting(MalleusPipelineModule):
    """Reports losses beside its loss, as mixtures of experts do; only last stages have any."""

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        last = self.loss_fn.last
        return None if last is None else {"double": 2 * last, "one": torch.ones(())}


def same_everywhere(value: Any) -> bool:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered == [value] * len(gathered)


def assert_place(engine: MalleusPipelineEngine, current: ParallelPlan) -> None:
    """Stage, pipeline and layers, from the plan itself."""
    rank, module, grid = dist.get_rank(), engine.module, engine.grid
    position = current.position(rank)
    pipeline = None if position is None else current.pipelines[position.pipeline_id]
    stage_id = 0 if position is None else position.stage_id
    num_stages = 1 if pipeline is None else len(pipeline.stages)
    start, stop = current.layers_of(rank)
    assert engine.plan == current
    assert engine.is_standby == (position is None)
    assert (engine.global_rank, engine.stage_id, engine.num_stages) == (rank, stage_id, num_stages)
    assert engine.is_first_stage() == (stage_id == 0)
    assert engine.is_last_stage() == (stage_id == num_stages - 1)
    assert engine.is_pipe_parallel == (num_stages > 1)
    assert engine.is_data_parallel
    assert engine.micro_batches == (0 if pipeline is None else pipeline.num_micro_batches)
    assert grid is engine.mpu is module.mpu() is module._grid
    assert grid.topology() is module.topology() is module._topo
    assert grid.get_pipe_parallel_rank() == stage_id
    assert grid.get_pipe_parallel_world_size() == module.num_pipeline_stages() == num_stages
    assert 0 <= grid.get_data_parallel_rank() < grid.get_data_parallel_world_size()
    assert grid.get_slice_parallel_rank() == 0
    ranks = (rank,) if pipeline is None else pipeline.ranks
    assert [grid.stage_to_global(stage) for stage in range(num_stages)] == list(ranks)
    ones = torch.ones(())
    dist.all_reduce(ones, group=grid.get_data_parallel_group())  # usable for averages, on every rank
    assert ones == dist.get_world_size()
    assert (module._local_start, module._local_stop) == (start, stop)
    assert len(module.forward_funcs) == stop - start
    assert list(module.tied_modules) == []
    assert module.parts == module.partitions()
    assert callable(module.compile)
    assert not any(hasattr(parameter, "ds_id") for parameter in module.parameters())  # as without ZeRO-3
    if pipeline is not None:
        assert module.partitions() == list(pipeline.boundaries)
        assert [module.stage_owner(layer) for layer in range(start, stop)] == [stage_id] * (stop - start)


def assert_totals(engine: MalleusPipelineEngine, num_steps: int) -> None:
    """What must be the same on every rank."""
    assert engine.train_batch_size() == GLOBAL_BATCH
    assert engine.train_micro_batch_size_per_gpu() == engine.micro_batch_size == MICRO_BATCH_SIZE
    replicas = engine.grid.get_data_parallel_world_size()
    assert engine.gradient_accumulation_steps() * replicas == NUM_MICRO_BATCHES
    assert (engine.global_steps, engine.global_samples) == (num_steps, num_steps * GLOBAL_BATCH)
    assert (engine.skipped_steps, engine.was_step_applied()) == (0, True)
    assert engine.get_lr() == [LEARNING_RATE] == [group["lr"] for group in engine.optimizer.param_groups]
    assert (engine.optimizer.cur_scale, engine.optimizer.overflow) == (1.0, False)
    assert engine.lr_scheduler is None
    assert engine.wall_clock_breakdown() is True
    assert engine.steps_per_print() == 1
    additional = engine.get_additional_losses()
    assert additional is not None
    assert list(additional) == ["double", "one"]
    assert additional["double"].item() == pytest.approx(2 * engine.agg_train_loss.item(), rel=1e-6)
    assert additional["one"] == 1
    assert same_everywhere(
        (engine.agg_train_loss.item(), float(engine.get_global_grad_norm()), additional["double"].item())
    )


class TestSurface(DistributedTest):
    world_size = 4

    def test_names_of_engine_and_module(self, tmp_path: Path) -> None:
        """With timers and a monitor on, whose coordinator is a last stage and then on standby."""
        monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
        ds_config = {
            **config(seed=BASE_SEED),
            "wall_clock_breakdown": True,
            "steps_per_print": 1,
            "csv_monitor": monitor,
        }
        module = Reporting(gpt_layers(gpt()), loss_fn=Loss(gpt_loss), plan=FIRST, base_seed=BASE_SEED)
        engine, optimizer, loader, scheduler = initialize(
            model=module, training_data=Tokens(), config=ds_config
        )
        assert (engine.module, engine.optimizer, engine.training_dataloader) == (module, optimizer, loader)
        assert engine.lr_scheduler is scheduler
        assert type(engine.basic_optimizer) is torch.optim.AdamW
        losses = []
        for number, current in enumerate((FIRST, SECOND)):
            if current != engine.plan:
                engine.reconfigure(current)
            assert engine.first_output_send
            assert engine.pipe_recv_buf is None
            losses += [engine.train_batch().item() for _ in range(2)]
            assert losses[-1] == engine.agg_train_loss.item()
            assert_place(engine, current)
            assert_totals(engine, 2 * number + 2)
        for method in (engine.forward, engine.backward, engine.step):
            with pytest.raises(PipelineError):
                method()
        engine.set_has_attention_mask(False)
        engine.reset_activation_shape()
        module.set_checkpoint_interval(0)
        assert (engine.module.activation_checkpoint_interval, engine.timers is None) == (0, False)
        expected = single_process(gpt_layers(gpt()), gpt_loss, 4).losses
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        assert engine.monitor.enabled
        if dist.get_rank() == 0:
            rows = list(csv.reader((tmp_path / "job" / "Train_Samples_train_loss.csv").open()))
            assert [int(step) for step, _ in rows[1:]] == [GLOBAL_BATCH * step for step in range(1, 5)]
            assert [float(loss) for _, loss in rows[1:]] == pytest.approx(expected, rel=1e-5)
            assert (tmp_path / "job" / "Train_Samples_lr.csv").exists()

    def test_a_tensor_parallel_last_stage_counts_its_losses_once(self) -> None:
        """Under a batch that changes; all ranks of the stage have the loss, and report it."""
        layers = plan(([(2, 0, 5), ((0, 3), 5, 8)], 5), ([(1, 0, 8)], 3))
        specs, counts = gpt_layers(gpt()), [8, 11, 4]
        module = Reporting(specs, loss_fn=Loss(VocabParallelLoss()), plan=layers, base_seed=BASE_SEED)
        engine, *_ = initialize(model=module, training_data=Tokens(), config=config(seed=BASE_SEED))
        losses = []
        for count in counts:
            engine.set_train_batch_size(count * MICRO_BATCH_SIZE)
            losses.append(engine.train_batch().item())
            additional = engine.get_additional_losses()
            assert additional is not None
            assert additional["double"].item() == pytest.approx(2 * losses[-1], rel=1e-6)
            assert additional["one"] == 1
        expected = single_process(specs, VocabParallelLoss(), 3, counts).losses
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)

    def test_loaders_batch_functions_and_shapes(self) -> None:
        """`set_dataloader`, `set_dataiterator`, `set_batch_fn` and lengths that change with each batch."""
        engine = make_engine(FIRST, data=None, dynamic_shape=True)
        assert engine.dynamic_shape
        data = Tokens()

        def batches(first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
            for index in range(first, last):
                samples = [data[2 * index], data[2 * index + 1]]
                yield torch.utils.data.default_collate(samples)

        start, stop = engine._micro_batch_range()

        def cut() -> Callable[[Any], Any]:
            """A batch function, which knows this rank's micro-batches by their order."""
            upcoming = itertools.cycle(Shortened.lengths[start:stop])

            def shorten(batch: Any) -> Any:
                length = next(upcoming)
                return tuple(part[:, :length] for part in batch)

            return shorten

        loaders = [list(batches(first + start, first + stop)) for first in (0, NUM_MICRO_BATCHES)]
        engine.set_batch_fn(cut())
        engine.set_dataloader(loaders[0])
        assert engine.training_dataloader is loaders[0]
        losses = [engine.train_batch().item()]
        engine.set_dataiterator(iter(loaders[1]))
        losses.append(engine.train_batch().item())
        expected = single_process(gpt_layers(gpt()), gpt_loss, 2, data=Shortened()).losses
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
