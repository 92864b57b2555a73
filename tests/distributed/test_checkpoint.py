"""Checkpoints on real ranks: saved under any plan, loaded under any other, and training goes on the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings

from malleus_ds import MalleusPipelineEngine
from malleus_ds.models import VocabParallelLoss, gpt_layers
from malleus_ds.plan import ParallelPlan
from tests.distributed.checkpoint_reference import (
    assert_same_state,
    gather_state,
    num_data_bytes,
    stored,
)
from tests.distributed.reference import BASE_SEED, config, gpt, make_engine, plan, single_process
from tests.harness import RankPool
from tests.strategies import legal_plans

NUM_LAYERS = 8
NUM_EXAMPLES = 5
STEPS_BEFORE, STEPS_AFTER = 1, 1

EIGHT = plan(([((0, 1, 2, 3), 0, 8)], 5), ([((4, 5), 0, 3), (6, 3, 6), (7, 6, 8)], 3))
FOUR = plan(([((2, 0), 0, 5), (1, 5, 8)], 8), standby=(3,))
ONE_AND_TWO = plan(([(0, 0, 8)], 5), ([(2, 0, 3), (1, 3, 8)], 3))


def ds_config(micro_batch_size: int = 2, **malleus: Any) -> dict[str, Any]:
    result = config(seed=BASE_SEED, tensor_parallel={"max_degree": 4}, **malleus)
    result["train_micro_batch_size_per_gpu"] = micro_batch_size
    result["train_batch_size"] = 8 * micro_batch_size
    return result


def engine_of(first_plan: ParallelPlan, **arguments: Any) -> MalleusPipelineEngine:
    arguments = {"ds_config": ds_config(), **arguments}
    return make_engine(first_plan, gpt_layers(gpt(num_heads=4)), VocabParallelLoss(), **arguments)


def steps(engine: MalleusPipelineEngine, count: int) -> list[float]:
    return [engine.train_batch().item() for _ in range(count)]


def reference_losses(count: int) -> list[float]:
    return single_process(gpt_layers(gpt(num_heads=4)), VocabParallelLoss(), count).losses


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
    steps(engine, STEPS_BEFORE)
    before = gather_state(engine)
    position = (engine.global_steps, engine.global_samples)
    engine.save_checkpoint(str(folder), tag="here")
    expected = steps(engine, STEPS_AFTER)
    engine.reconfigure(second)
    engine.load_checkpoint(str(folder))
    assert (engine.global_steps, engine.global_samples) == position
    assert_same_state(gather_state(engine), before)
    torch.testing.assert_close(steps(engine, STEPS_AFTER), expected, rtol=1e-5, atol=0)
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
    pool.run(save_and_load_elsewhere, first, second, tmp_path)
