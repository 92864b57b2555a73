"""Training does not depend on the plan, nor on when it changes (design 4.4)."""

from __future__ import annotations

import pytest

from malleus_ds.models import LlamaConfig, VocabParallelLoss, gpt_layers, gpt_loss, llama_layers
from malleus_ds.plan import ParallelPlan
from tests.distributed.reference import (
    assert_same_training,
    gpt,
    make_engine,
    plan,
    single_process,
    train,
)
from tests.harness import DistributedTest

NUM_STEPS = 4

PLANS = {
    "equal": plan(([(0, 0, 3), (2, 3, 6), (4, 6, 8)], 4), ([(1, 0, 3), (3, 3, 6), (5, 6, 8)], 4)),
    "three_and_two_stages_shuffled_standby": plan(
        ([(4, 0, 2), (1, 2, 5), (3, 5, 8)], 5), ([(0, 0, 5), (5, 5, 8)], 3), standby=(2,)
    ),
    "unequal_layers": plan(([(5, 0, 1), (0, 1, 7), (2, 7, 8)], 2), ([(3, 0, 4), (1, 4, 5), (4, 5, 8)], 6)),
    "one_pipeline": plan(([(2, 0, 1), (0, 1, 2), (4, 2, 4), (3, 4, 5), (1, 5, 7), (5, 7, 8)], 8)),
    "three_pipelines": plan(
        ([(0, 0, 4), (1, 4, 8)], 4), ([(2, 0, 3), (3, 3, 8)], 3), ([(4, 0, 6), (5, 6, 8)], 1)
    ),
    "stages_of_one_and_four": plan(
        ([(2, 0, 8)], 2), ([(0, 0, 1), (5, 1, 4), (1, 4, 7), (4, 7, 8)], 6), standby=(3,)
    ),
    "coordinator_on_standby": plan(([(5, 0, 8)], 3), ([(4, 0, 2), (3, 2, 8)], 5), standby=(0, 1, 2)),
}


class TestPlans(DistributedTest):
    world_size = 6

    @pytest.mark.parametrize("name", PLANS)
    def test_equals_single_process(self, name: str) -> None:
        specs = gpt_layers(gpt())
        expected = single_process(specs, gpt_loss, NUM_STEPS)
        engine = make_engine(PLANS[name])
        assert engine.plan == PLANS[name]
        assert_same_training(train(engine, NUM_STEPS), expected)

    def test_tied_embeddings(self) -> None:
        specs = gpt_layers(gpt(tie_embeddings=True))
        expected = single_process(specs, gpt_loss, NUM_STEPS)
        engine = make_engine(PLANS["three_and_two_stages_shuffled_standby"], specs)
        assert_same_training(train(engine, NUM_STEPS), expected)


class TestSwitches(DistributedTest):
    world_size = 6

    @pytest.mark.parametrize("tie_embeddings", [False, True])
    def test_three_switches_equal_single_process(self, tie_embeddings: bool) -> None:
        """Two, one, three and two pipelines; ranks go to standby and come back."""
        route = [
            PLANS["three_and_two_stages_shuffled_standby"],
            PLANS["one_pipeline"],
            PLANS["three_pipelines"],
            PLANS["stages_of_one_and_four"],
        ]
        specs = gpt_layers(gpt(tie_embeddings))
        expected = single_process(specs, gpt_loss, 2 * len(route))
        engine = make_engine(route[0], specs)
        identities = [id(engine.optimizer.param_groups), id(engine.basic_optimizer), id(engine.module)]
        losses, norms = [], []
        for index, next_plan in enumerate(route):
            if index > 0:
                engine.reconfigure(next_plan)
            assert engine.plan == next_plan
            part = train(engine, 2)
            losses += part.losses
            norms += part.norms
        assert identities == [
            id(engine.optimizer.param_groups),
            id(engine.basic_optimizer),
            id(engine.module),
        ]
        assert_same_training(type(part)(losses, norms, part.parameters), expected)

    @pytest.mark.parametrize("tie_embeddings", [False, True])
    def test_llama(self, tie_embeddings: bool) -> None:
        """Its rotary tables are no state: a switch neither moves nor loses them."""
        llama = LlamaConfig(
            vocabulary_size=24,
            hidden_size=16,
            intermediate_size=24,
            num_heads=4,
            num_kv_heads=2,
            num_blocks=5 if tie_embeddings else 6,
            tie_embeddings=tie_embeddings,
        )
        specs = llama_layers(llama)
        expected = single_process(specs, VocabParallelLoss(), NUM_STEPS)
        engine = make_engine(PLANS["unequal_layers"], specs, VocabParallelLoss())
        before = train(engine, 2)
        engine.reconfigure(PLANS["three_and_two_stages_shuffled_standby"])
        after = train(engine, 2)
        losses, norms = before.losses + after.losses, before.norms + after.norms
        assert_same_training(type(after)(losses, norms, after.parameters), expected)

    def test_switch_before_every_step(self) -> None:
        specs = gpt_layers(gpt())
        expected = single_process(specs, gpt_loss, 6)
        route: list[ParallelPlan] = [*PLANS.values()][:6]
        engine = make_engine(route[-1])
        losses, norms = [], []
        for next_plan in route:
            engine.reconfigure(next_plan)
            part = train(engine, 1)
            losses += part.losses
            norms += part.norms
        assert_same_training(type(part)(losses, norms, part.parameters), expected)
