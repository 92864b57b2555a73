"""Training does not depend on the plan where TP groups differ between stages, pipelines and plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from malleus_ds.models import GPTConfig, LlamaConfig, VocabParallelLoss, gpt_layers, llama_layers
from malleus_ds.plan import ParallelPlan, PlanError
from tests.distributed.reference import (
    BASE_SEED,
    Result,
    assert_same_training,
    config,
    gpt,
    make_engine,
    plan,
    single_process,
    train,
)
from tests.harness import DistributedTest

NUM_STEPS = 3

PLANS = {
    "four_beside_two_one_one": plan(([((0, 1, 2, 3), 0, 8)], 5), ([((4, 5), 0, 3), (6, 3, 6), (7, 6, 8)], 3)),
    "two_and_one_with_standby": plan(
        ([((2, 0), 0, 4), (1, 4, 6), ((5, 4), 6, 8)], 5), ([(7, 0, 5), (6, 5, 8)], 3), standby=(3,)
    ),
    "one_to_four_to_two": plan(([(0, 0, 2), ((7, 5, 4, 6), 2, 6), ((1, 2), 6, 8)], 8), standby=(3,)),
    "two_to_four": plan(([((0, 1), 0, 3), ((2, 3, 4, 5), 3, 8)], 6), ([(6, 0, 4), (7, 4, 8)], 2)),
    "all_ones": plan(([(0, 0, 3), (1, 3, 8)], 4), ([(2, 0, 5), (3, 5, 8)], 4), standby=(4, 5, 6, 7)),
}


def tp_config(**malleus: Any) -> dict[str, Any]:
    return config(seed=BASE_SEED, tensor_parallel={"max_degree": 4}, **malleus)


def llama() -> LlamaConfig:
    return LlamaConfig(
        vocabulary_size=24, hidden_size=16, intermediate_size=32, num_heads=8, num_kv_heads=4, num_blocks=6
    )


class TestDegrees(DistributedTest):
    world_size = 8
    timeout_s = 240.0

    @pytest.mark.parametrize("name", PLANS)
    def test_equals_single_process(self, name: str) -> None:
        specs = gpt_layers(gpt(num_heads=4))
        expected = single_process(specs, VocabParallelLoss(), NUM_STEPS)
        engine = make_engine(PLANS[name], specs, VocabParallelLoss(), ds_config=tp_config())
        assert_same_training(train(engine, NUM_STEPS), expected)

    @pytest.mark.parametrize("model", [gpt(num_heads=4), gpt(tie_embeddings=True, num_heads=4), llama()])
    def test_switches_between_degrees(self, model: GPTConfig | LlamaConfig) -> None:
        """From 4 to 2, 1 and back; standby ranks leave and come, and tied stages have different degrees."""
        specs = gpt_layers(model) if isinstance(model, GPTConfig) else llama_layers(model)
        expected = single_process(specs, VocabParallelLoss(), len(PLANS) + 1)
        route = [*PLANS.values(), next(iter(PLANS.values()))]
        engine = make_engine(route[0], specs, VocabParallelLoss(), ds_config=tp_config())
        losses, norms = [], []
        for next_plan in route:
            if next_plan != engine.plan:
                engine.reconfigure(next_plan)
            part = train(engine, 1)
            losses += part.losses
            norms += part.norms
        assert_same_training(Result(losses, norms, part.parameters), expected)

    def test_evaluation_and_a_plan_that_does_not_fit(self) -> None:
        specs = gpt_layers(gpt(num_heads=4))
        engine = make_engine(
            PLANS["two_and_one_with_standby"], specs, VocabParallelLoss(), ds_config=tp_config()
        )
        samples = torch.randint(0, 24, (2, 9), generator=torch.Generator().manual_seed(3))
        batch = (samples[:, :-1], samples[:, 1:])
        before = engine.eval_batch(iter([batch] * 5)).item()
        wide: ParallelPlan = plan(([(tuple(range(8)), 0, 8)], 8))
        with pytest.raises(PlanError, match=r"TP degree 8.*max_degree"):
            engine.reconfigure(wide)
        assert engine.eval_batch(iter([batch] * 5)).item() == pytest.approx(before, rel=1e-6)
        engine.reconfigure(PLANS["one_to_four_to_two"])
        assert engine.eval_batch(iter([batch] * 8)).item() == pytest.approx(before, rel=1e-5)
