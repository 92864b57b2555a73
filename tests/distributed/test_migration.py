"""Migration on real ranks: bit-exact there and back, and exactly the bytes that must move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from malleus_ds.pipe.engine import MalleusPipelineEngine
from malleus_ds.plan import ParallelPlan
from tests.distributed.reference import NUM_MICRO_BATCHES, Tokens, config, gpt_layers, make_engine
from tests.distributed.reference import gpt as gpt_config
from tests.harness import RankPool
from tests.strategies import legal_plans

WORLD_SIZE = 4
NUM_LAYERS = 8

Held = dict[tuple[str, str], list[tuple[int, int, torch.Tensor]]]
"""(state tensor, logical tensor) -> the intervals [start, stop) that a rank holds, with their values."""


class EngineHost:
    """Keeps one engine in each rank between calls."""

    def __init__(self) -> None:
        self.engine: MalleusPipelineEngine | None = None

    def get(self, plan: ParallelPlan) -> MalleusPipelineEngine:
        if self.engine is None:
            ds_config = config()
            ds_config["train_batch_size"] = NUM_MICRO_BATCHES
            ds_config["train_micro_batch_size_per_gpu"] = 1
            self.engine = make_engine(plan, gpt_layers(gpt_config()), ds_config=ds_config, data=Tokens())
        return self.engine


HOST = EngineHost()


def held_state(engine: MalleusPipelineEngine) -> Held:
    """Everything this rank holds, read from the optimizer's storages, by element of the model."""
    held: Held = {}
    for storage in engine.optimizer.storages.values():
        (shard,) = storage.shards
        state = engine.optimizer.state.get(shard.parameter, {})
        offset = 0
        for piece in storage.bucket.pieces:
            size = piece.stop - piece.start
            held[("parameter", piece.tensor)] = [(0, size, storage.flat[offset : offset + size].clone())]
            start, stop = max(offset, shard.start), min(offset + size, shard.stop)
            for name in ("exp_avg", "exp_avg_sq"):
                if start < stop and name in state:
                    values = state[name][start - shard.start : stop - shard.start].clone()
                    held[(name, piece.tensor)] = [(start - offset, stop - offset, values)]
            offset += size
    return held


def there_and_back(first: ParallelPlan, second: ParallelPlan) -> dict[str, Any]:
    """On each rank: be at ``first``, train a step, go to ``second`` and come back."""
    engine = HOST.get(first)
    engine.reconfigure(first)
    engine.train_batch()
    before = held_state(engine)
    steps_before = optimizer_steps(engine)
    there = engine.reconfigure(second)
    between = held_state(engine)
    steps_between = optimizer_steps(engine)
    back = engine.reconfigure(first)
    return {
        "before": before,
        "between": between,
        "after": held_state(engine),
        "steps": (steps_before, steps_between, optimizer_steps(engine)),
        "sent": (there.migration.sent_bytes, back.migration.sent_bytes),
        "total": (there.migration.total_bytes, back.migration.total_bytes),
        "module": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
    }


def optimizer_steps(engine: MalleusPipelineEngine) -> set[float]:
    return {float(state["step"]) for state in engine.optimizer.state.values()}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD_SIZE) as ranks:
        yield ranks


plans = legal_plans(NUM_LAYERS, WORLD_SIZE, num_micro_batches=NUM_MICRO_BATCHES)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=plans, second=plans)
def test_there_and_back_is_the_identity_at_the_lower_bound(
    pool: RankPool, first: ParallelPlan, second: ParallelPlan
) -> None:
    results = pool.run(there_and_back, first, second)
    for result in results:
        assert_same_bits(result["before"], result["after"])
        for name, parameter in result["module"].items():
            ((start, stop, values),) = result["before"][("parameter", name)]
            assert (start, stop) == (0, parameter.numel())
            assert torch.equal(values, parameter.flatten())
    all_steps = {step for result in results for steps in result["steps"] for step in steps}
    assert len(all_steps) == 1, "the step count is the same on all shards, before and after"
    assert_same_model(results)
    for direction, (old, new) in enumerate((("before", "between"), ("between", "after"))):
        needed = sum(missing_bytes(result[old], result[new]) for result in results)
        assert sum(result["sent"][direction] for result in results) == needed
        assert results[0]["total"][direction] == needed


def assert_same_bits(before: Held, after: Held) -> None:
    assert before.keys() == after.keys()
    for key, intervals in before.items():
        for (start, stop, values), (other_start, other_stop, others) in zip(
            intervals, after[key], strict=True
        ):
            assert (start, stop) == (other_start, other_stop), key
            assert torch.equal(values.view(torch.int32), others.view(torch.int32)), key


def assert_same_model(results: list[dict[str, Any]]) -> None:
    """Gathered over all ranks, the state is complete and the same under both plans."""
    whole: dict[str, dict[tuple[str, str, int], float]] = {"before": {}, "between": {}}
    for moment, elements in whole.items():
        for result in results:
            for (state, tensor), intervals in result[moment].items():
                for start, _, values in intervals:
                    for offset, value in enumerate(values.tolist()):
                        known = elements.setdefault((state, tensor, start + offset), value)
                        assert known == value, (moment, state, tensor)
    assert whole["before"] == whole["between"]


def missing_bytes(old: Held, new: Held) -> int:
    """What a rank must receive: elements that it holds in ``new`` but not in ``old``, four bytes each."""
    total = 0
    for key, intervals in new.items():
        had = {i for start, stop, _ in old.get(key, []) for i in range(start, stop)}
        total += sum(4 for start, stop, _ in intervals for i in range(start, stop) if i not in had)
    return total
