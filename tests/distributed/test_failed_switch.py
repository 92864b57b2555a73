"""Switches that fail, on one rank or on all: every rank says so, keeps the old plan, and trains on."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from malleus_ds.migration.errors import MigrationError, StateLostError
from malleus_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss
from malleus_ds.pipe.agreement import AgreementError
from malleus_ds.pipe.engine import MalleusPipelineEngine
from malleus_ds.placement import Part
from tests.distributed.reference import assert_same_training, config, make_engine, plan, single_process, train
from tests.distributed.test_migration import assert_same_bits, held_state
from tests.harness import DistributedTest

SHORT_RANK = 1
"""Has 4 layers of 10, and is to have all of them."""

OLD = plan(([(0, 0, 6), (1, 6, 10)], 5), ([(2, 0, 5), (3, 5, 10)], 3))
NEW = plan(([(1, 0, 10)], 3), ([(3, 0, 2), (2, 2, 5), (0, 5, 10)], 5))
OTHER = plan(([(1, 0, 10)], 4), ([(3, 0, 2), (2, 2, 5), (0, 5, 10)], 4))


def specs() -> list[object]:
    """2.4 MB of parameters and moments per block, so that a switch needs memory."""
    sizes = GPTConfig(24, hidden_size=128, num_heads=2, num_blocks=8, sequence_length=8, dropout=0.2)
    return gpt_layers(sizes)


def make() -> MalleusPipelineEngine:
    ds_config = config(bucket_bytes=2**20)
    return make_engine(OLD, specs(), ds_config=ds_config)


@contextmanager
def failing_allocator(engine: MalleusPipelineEngine) -> Iterator[None]:
    """The second piece cannot be had, as on a GPU that is full."""
    allocate, num_calls = engine.optimizer.allocate_bytes, 0

    def fail(num_bytes: int) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            raise torch.OutOfMemoryError("out of memory")
        return allocate(num_bytes)

    if engine.global_rank == SHORT_RANK:
        engine.optimizer.allocate_bytes = fail
    yield
    engine.optimizer.allocate_bytes = allocate


@contextmanager
def lost_moment(engine: MalleusPipelineEngine) -> Iterator[None]:
    """A rank lacks a state tensor that only it should have."""
    if engine.global_rank != SHORT_RANK:
        yield
        return
    state = next(iter(engine.optimizer.state.values()))
    moment = state.pop("exp_avg")
    yield
    state["exp_avg"] = moment


@contextmanager
def missing_holder(engine: MalleusPipelineEngine) -> Iterator[None]:
    """No rank holds the first bucket."""
    placement = engine.placement
    part = placement.parts[0][0]
    lost = (Part(part.start, part.stop, ()),)
    engine.optimizer.placement = replace(placement, parts=(lost, *placement.parts[1:]))
    yield
    engine.optimizer.placement = placement


def close_connections() -> None:
    """To its peers, this process has ended."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # not one that listens
                connection.shutdown(socket.SHUT_RDWR)


class FullStorages(dict[int, Any]):
    """Storage by bucket, which a migration replaces one by one; there is no memory for the second half."""

    def __init__(self, storages: dict[int, Any]) -> None:
        super().__init__(storages)
        self.num_free = len(storages) // 2

    def __setitem__(self, index: int, storage: Any) -> None:
        self.num_free -= 1
        if self.num_free < 0:
            raise torch.OutOfMemoryError("out of memory")
        super().__setitem__(index, storage)


class TestFailedSwitch(DistributedTest):
    world_size = 4

    def test_all_ranks_keep_the_old_plan_and_train_on(self) -> None:
        expected = single_process(specs(), gpt_loss, 4)
        engine = make()
        parts = [train(engine, 1)]
        assert engine.prepare(NEW, 2) > 0
        assert engine.prepare(NEW) == 0  # a group has threads, which need memory, too
        short = f"rank {SHORT_RANK}: "
        for fault, message in (
            (
                failing_allocator,
                rf"{short}the switch needs [\d.]+ MiB .* after [\d.]+ MiB there is no more.* bucket_bytes",
            ),
            (lost_moment, rf"{short}the optimizer has no exp_avg of elements \[\d+, \d+\) of '\d\."),
            (missing_holder, r"rank 0: no rank has elements \[0, \d+\) of the parameter of '0\."),
        ):
            before = held_state(engine)
            with fault(engine), pytest.raises(MigrationError, match=f"the old plan stays: {message}"):
                engine.reconfigure(NEW)
            assert engine.plan == OLD
            assert_same_bits(before, held_state(engine))
            if fault is failing_allocator:
                parts.append(train(engine, 1))
        with pytest.raises(AgreementError, match=r"rank 0 and ranks .1. have different plans"):
            engine.reconfigure(OTHER if engine.global_rank == SHORT_RANK else NEW)
        parts.append(train(engine, 1))
        report = engine.reconfigure(NEW)
        assert report.num_new_groups == 0
        assert engine.plan == NEW
        parts.append(train(engine, 1))
        result = replace(
            parts[-1],
            losses=[loss for part in parts for loss in part.losses],
            norms=[norm for part in parts for norm in part.norms],
        )
        assert_same_training(result, expected)

    def test_a_failure_after_the_checks_is_named_on_all_ranks(self) -> None:
        """Memory that was there when it was tried is gone when it is needed."""
        engine = make()
        engine.train_batch()
        engine.prepare(NEW)
        if engine.global_rank == SHORT_RANK:
            engine.optimizer.storages = FullStorages(engine.optimizer.storages)
        try:
            own = rf"^rank {engine.global_rank}: .*start again from a checkpoint"
            with pytest.raises(StateLostError, match=own):
                engine.reconfigure(NEW)
            for use in (
                engine.train_batch,
                lambda: engine.reconfigure(OLD),
                lambda: engine.save_checkpoint("checkpoints"),
                lambda: engine.load_checkpoint("checkpoints"),
            ):
                with pytest.raises(StateLostError, match="the training state was lost in a switch"):
                    use()
        finally:
            close_connections()
