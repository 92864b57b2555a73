"""Changing the global batch of a running job: exact, agreed, and known to planner and data."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from malleus_ds.detector.rates import Shift
from malleus_ds.models.gpt import gpt_layers, gpt_loss
from malleus_ds.pipe.agreement import AgreementError
from malleus_ds.pipe.engine import MalleusPipelineEngine
from malleus_ds.plan import PlanError
from malleus_ds.planner.types import PlanRequest, PlanResult
from tests.distributed.reference import (
    BASE_SEED,
    MICRO_BATCH_SIZE,
    Result,
    Tokens,
    assert_same_training,
    config,
    gpt,
    make_engine,
    plan,
    single_process,
    train,
)
from tests.harness import DistributedTest

TWO_AND_ONE = plan(([(2, 0, 5), (0, 5, 8)], 5), ([(1, 0, 8)], 3), standby=(3,))


def assert_sizes_agree(engine: MalleusPipelineEngine, num_micro_batches: int) -> None:
    """What stock code reads of the batch, and its own arithmetic."""
    size = num_micro_batches * MICRO_BATCH_SIZE
    assert engine.train_batch_size() == engine.plan.global_batch_size == size
    assert engine.train_micro_batch_size_per_gpu() == engine.micro_batch_size == MICRO_BATCH_SIZE
    replicas = engine.grid.get_data_parallel_world_size()
    assert replicas == engine.dp_world_size == engine.mpu.get_data_parallel_world_size()
    assert size == MICRO_BATCH_SIZE * engine.gradient_accumulation_steps() * replicas
    start, stop = engine._micro_batch_range()
    assert engine.micro_batches == stop - start
    assert sum(engine.plan.data_shares) == num_micro_batches


class TestExactness(DistributedTest):
    world_size = 4

    def test_equals_a_single_process_that_changes_its_batch(self) -> None:
        """Up, down, to an odd number, over a switch of plans and back; with dropout."""
        counts = [8, 16, 16, 2, 13, 13, 9, 8]
        expected = single_process(gpt_layers(gpt()), gpt_loss, len(counts), counts)
        constant = {"type": "LinearLR", "params": {"start_factor": 1.0, "total_iters": 5}}
        engine = make_engine(TWO_AND_ONE, ds_config={**config(seed=BASE_SEED), "scheduler": constant})
        losses, norms, seen = [], [], []
        for step, count in enumerate(counts):
            if step == 5:
                switched = plan(([(3, 0, 8)], 4), ([(1, 0, 1), (2, 1, 7), (0, 7, 8)], 9))
                engine.reconfigure(switched)
            engine.set_train_batch_size(count * MICRO_BATCH_SIZE)
            assert_sizes_agree(engine, count)
            assert engine.dp_world_size == (1 if count % 2 else 2)  # pipelines at the start
            seen.append(list(engine.plan.data_shares))
            result = train(engine, 1)
            losses += result.losses
            norms += result.norms
        assert seen == [[5, 3], [10, 6], [10, 6], [1, 1], [8, 5], [4, 9], [3, 6], [2, 6]]
        assert engine.global_samples == sum(counts) * MICRO_BATCH_SIZE
        assert engine.global_steps == len(counts)
        assert engine.lr_scheduler.last_epoch == len(counts)
        assert_same_training(Result(losses, norms, result.parameters), expected)

    def test_equal_pipelines_with_an_iterator_as_in_deepspeed(self) -> None:
        counts = [4, 6, 3]
        expected = single_process(gpt_layers(gpt()), gpt_loss, len(counts), counts).losses
        ds_config = {**config(seed=BASE_SEED), "train_batch_size": 4 * MICRO_BATCH_SIZE}
        engine = make_engine(None, num_stages=2, data=None, ds_config=ds_config)
        losses = []
        data, position = Tokens(), 0

        def batches() -> Any:
            while True:  # one iterator for the whole job
                for index in range(*engine._micro_batch_range()):
                    first = position + index * MICRO_BATCH_SIZE
                    yield torch.utils.data.default_collate([data[first], data[first + 1]])

        iterator = batches()
        for count in counts:
            engine.set_train_batch_size(count * MICRO_BATCH_SIZE)
            assert_sizes_agree(engine, count)
            losses.append(engine.train_batch(iterator).item())
            position += count * MICRO_BATCH_SIZE
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)

    def test_refusals_leave_the_batch(self) -> None:
        engine = make_engine(TWO_AND_ONE)
        for size in (17, 2):
            with pytest.raises(PlanError, match=f"train_batch_size is {size}"):
                engine.set_train_batch_size(size)
        with pytest.raises(AgreementError, match=r"ranks \[1\] have different batch sizes: 20 and 24"):
            engine.set_train_batch_size(24 if dist.get_rank() == 1 else 20)
        with pytest.raises(PlanError, match="cannot become 4 in a running job"):
            engine.set_train_micro_batch_size(4)
        assert engine.plan == TWO_AND_ONE
        assert_sizes_agree(engine, 8)


class Planner:
    """Stands for the planner's process: keeps the requests, answers when told."""

    pending = False

    def __init__(self) -> None:
        self.requests: list[PlanRequest] = []
        self.answer: PlanResult | None = None

    def submit(self, request: PlanRequest) -> None:
        self.requests.append(request)

    def poll(self) -> PlanResult | None:
        answer, self.answer = self.answer, None
        return answer

    def close(self) -> None:
        pass


class TestControlLoop(DistributedTest):
    world_size = 2

    def test_plans_of_the_old_batch_are_dropped_and_made_anew(self) -> None:
        first = plan(([(0, 0, 8)], 4), ([(1, 0, 8)], 4))
        better = plan(([(0, 0, 8)], 5), ([(1, 0, 8)], 3))
        settings = config(
            seed=BASE_SEED,
            detector={
                "control_plane": "gloo",
                "calibration_steps": 1,
                "large_shift": 1e6,
                "small_shift": 1e6,
            },
            planner={"enabled": False},
        )
        engine = make_engine(first, ds_config=settings)
        loop = engine.control_loop
        assert loop is not None
        planner = Planner()
        moved = [Shift((1,), (1.0,), (2.0,))]
        if dist.get_rank() == 0:
            loop._planner = planner  # type: ignore[assignment]
            loop.estimator.shift = lambda: moved[0] if moved else None  # type: ignore[method-assign]
        losses = []

        def step(num_steps: int = 1) -> None:
            losses.extend(engine.train_batch().item() for _ in range(num_steps))

        step(4)  # calibrates, then asks for a plan
        if dist.get_rank() == 0:
            assert planner.requests[-1].num_micro_batches == 8
            planner.answer = PlanResult(better, 0.5, 0.5, 1.0, 0, 0.1)
            moved.clear()
        engine.set_train_batch_size(24)
        step(2)  # the answer is for the batch before
        assert list(engine.plan.data_shares) == [6, 6]
        if dist.get_rank() == 0:
            assert loop.events[-1].kind == "kept"
            assert "batch changed while a plan was made" in loop.events[-1].details["reason"]
            moved.append(Shift((1,), (1.0,), (2.0,)))
        step()
        if dist.get_rank() == 0:
            assert planner.requests[-1].num_micro_batches == 12
            assert planner.requests[-1].current == engine.plan
            planner.answer = PlanResult(better.with_micro_batches([8, 4]), 0.5, 0.5, 1.0, 0, 0.1)
            moved.clear()
        step()  # adopts and announces
        assert json.loads(loop._announced or b"{}").keys() == (
            {"base", "plan"} if dist.get_rank() == 0 else set()
        )
        engine.set_train_batch_size(16)
        step(2)  # the announcement arrives, for another batch
        assert list(engine.plan.data_shares) == [4, 4]
        assert engine.switches == []
        if dist.get_rank() == 0:
            assert "batch changed since the plan was announced" in loop.events[-1].details["reason"]
        counts = [8] * 4 + [12] * 4 + [8] * 2
        expected = single_process(gpt_layers(gpt()), gpt_loss, len(counts), counts).losses
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        engine.destroy()
