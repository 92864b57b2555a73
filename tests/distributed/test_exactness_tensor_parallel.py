"""Training does not depend on the plan where TP groups differ between stages, pipelines and plans."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from malleus_ds.models import GPTConfig, LlamaConfig, VocabParallelLoss, gpt_layers, llama_layers
from malleus_ds.pipe.agreement import AgreementError, PeerLostError, SwitchFailedError
from malleus_ds.plan import ParallelPlan, PlanError
from malleus_ds.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallelError
from tests.distributed.reference import (
    BASE_SEED,
    Result,
    assert_same_training,
    config,
    gather_parameters,
    gpt,
    make_engine,
    plan,
    single_process,
    train,
)
from tests.distributed.test_precision import (
    DTYPES,
    STEPS_PER_PLAN,
    SameDtype,
    allow_fp16,
    train_along,
    train_with_overflow,
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

    def test_a_topology_with_a_model_axis(self) -> None:
        specs = gpt_layers(gpt(num_heads=4))
        expected = single_process(specs, VocabParallelLoss(), 1)
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
        ds_config = config(seed=BASE_SEED)
        engine = make_engine(None, specs, VocabParallelLoss(), ds_config=ds_config, topology=topology)
        assert {stage.degree for _, _, stage in engine.plan.stages()} == {2}
        assert_same_training(train(engine, 1), expected)

    def test_activation_checkpointing_keeps_the_dropout(self) -> None:
        """A recomputation runs the group's collectives again, inside the backward pass."""
        specs = gpt_layers(gpt(num_heads=4))
        expected = single_process(specs, VocabParallelLoss(), 2)
        engine = make_engine(
            PLANS["four_beside_two_one_one"],
            specs,
            VocabParallelLoss(),
            ds_config=tp_config(),
            activation_checkpoint_interval=2,
            checkpointable_layers=["Block"],
        )
        before = train(engine, 1)
        engine.reconfigure(PLANS["one_to_four_to_two"])
        after = train(engine, 1)
        losses, norms = before.losses + after.losses, before.norms + after.norms
        assert_same_training(Result(losses, norms, after.parameters), expected)

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

    def test_evaluations_of_different_shapes(self) -> None:
        specs = gpt_layers(gpt(num_heads=4))
        expected = single_process(specs, VocabParallelLoss(), 2)
        engine = make_engine(PLANS["two_to_four"], specs, VocabParallelLoss(), ds_config=tp_config())
        before = train(engine, 1)
        for size, length in ((3, 6), (1, 8)):
            tokens = torch.zeros(size, length, dtype=torch.int64)
            assert engine.eval_batch(iter([(tokens, tokens)] * 2), num_micro_batches=2).isfinite()
        after = train(engine, 1)
        losses, norms = before.losses + after.losses, before.norms + after.norms
        assert_same_training(Result(losses, norms, after.parameters), expected)

    def test_a_layer_that_can_no_more_be_built_leaves_the_old_plan(self) -> None:
        """Its old part cannot be built again either: the module of before must stay."""
        specs = gpt_layers(gpt(num_heads=4))
        specs[1] = LayerSpec(BuildsOnce, specs[1], 0)
        plain = gpt_layers(gpt(num_heads=4))
        expected = single_process(plain, VocabParallelLoss(), 2)
        engine = make_engine(PLANS["two_to_four"], specs, VocabParallelLoss(), ds_config=tp_config())
        losses = [engine.train_batch().item()]
        BuildsOnce.is_broken = True
        with pytest.raises(SwitchFailedError, match=r"the old plan stays: .*no such file"):
            engine.reconfigure(PLANS["four_beside_two_one_one"])
        assert engine.plan == PLANS["two_to_four"]
        losses.append(engine.train_batch().item())
        torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0)
        BuildsOnce.is_broken = False
        engine.reconfigure(PLANS["four_beside_two_one_one"])
        after = gather_parameters(engine)
        for name, tensor in expected.parameters.items():
            name = name.replace("1.", "1.block.", 1) if name.startswith("1.") else name
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-5)


class BuildsOnce(nn.Module):
    """A block that one rank cannot build while `is_broken`."""

    is_broken = False

    def __init__(self, block: LayerSpec, rank: int) -> None:
        super().__init__()
        if self.is_broken and dist.get_rank() == rank:
            raise FileNotFoundError("no such file")
        self.block = block.build()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.block(hidden)  # type: ignore[no-any-return]


class TestWrongInput(DistributedTest):
    """Refused at the start, on all ranks, and not at a later switch."""

    world_size = 2

    def test_a_module_object_with_parts_that_a_later_plan_may_cut(self) -> None:
        specs = [ColumnParallelLinear(8, 8), RowParallelLinear(8, 8)]
        with pytest.raises((PlanError, AgreementError), match=r"object, which cannot be cut again"):
            make_engine(plan(([(0, 0, 1), (1, 1, 2)], 8)), specs, ds_config=tp_config())

    def test_heads_that_the_largest_degree_does_not_divide(self) -> None:
        specs = gpt_layers(gpt(num_heads=2))
        with pytest.raises(TensorParallelError, match=r"num_heads .* is 2, but .* groups of 4"):
            make_engine(plan(([(0, 0, 4), (1, 4, 8)], 8)), specs, ds_config=tp_config())

    def test_a_group_that_crosses_a_node(self) -> None:
        specs = gpt_layers(gpt(num_heads=4))
        ds_config = tp_config(nodes=[[0], [1]])
        crossing = plan(([((0, 1), 0, 8)], 8))
        with pytest.raises(PlanError, match="must stay inside one node"):
            make_engine(crossing, specs, VocabParallelLoss(), ds_config=ds_config)
        first = plan(([(0, 0, 4), (1, 4, 8)], 8))
        engine = make_engine(first, specs, VocabParallelLoss(), ds_config=ds_config)
        with pytest.raises(PlanError, match="must stay inside one node"):
            engine.reconfigure(crossing)
        assert engine.plan == first


class TestStuckPeer(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stages", [[((0, 1), 0, 8)], [(1, 0, 4), (0, 4, 8)], [(0, 0, 4), (1, 4, 8)]])
    def test_is_noticed_after_the_timeout_of_the_config(self, stages: list[Any]) -> None:
        """In a TP group, and where a stage waits for activations or for gradients."""
        specs = gpt_layers(gpt(num_heads=4))
        engine = make_engine(
            plan((stages, 8)), specs, VocabParallelLoss(), ds_config=config(seed=BASE_SEED, timeout_s=2.0)
        )
        engine.train_batch()
        if dist.get_rank() == 0:
            began_s = time.monotonic()
            with pytest.raises(PeerLostError, match="lost a peer in step 1"):
                engine.train_batch()
            assert time.monotonic() - began_s < 7
        else:
            time.sleep(8)


class TestLowPrecision(DistributedTest):
    """Against one process of the same precision; also partial sums of a group are then in it."""

    world_size = 8
    timeout_s = 240.0

    @pytest.mark.parametrize(
        ("precision", "tie_embeddings", "rtol"),
        [("bf16", False, 1e-4), ("bf16", True, 5e-3), ("fp16", False, 1e-4)],
    )
    def test_switches_between_degrees(self, precision: str, tie_embeddings: bool, rtol: float) -> None:
        allow_fp16()
        specs = gpt_layers(gpt(tie_embeddings, num_heads=4))
        num_steps = STEPS_PER_PLAN * len(PLANS)
        options, scale = ({"loss_scale": 128}, 128.0) if precision == "fp16" else ({}, 1.0)
        expected = SameDtype(specs, DTYPES[precision], scale).train(num_steps)
        ds_config = {**tp_config(), precision: {"enabled": True, **options}}
        route = list(PLANS.values())
        engine = make_engine(route[0], specs, VocabParallelLoss(), ds_config=ds_config)
        actual = train_along(engine, route)
        torch.testing.assert_close(actual.losses, expected.losses, rtol=rtol, atol=0)
        torch.testing.assert_close(actual.norms, expected.norms, rtol=5e-3, atol=0)
        # All together: a bias of keys, say, has no gradient but rounding, which Adam makes large.
        names = sorted(expected.parameters)
        mine, theirs = (
            torch.cat([result.parameters[name].flatten().float() for name in names])
            for result in (actual, expected)
        )
        assert (mine - theirs).norm() < 1e-2 * theirs.norm()

    def test_an_overflow_on_one_rank_of_a_group_skips_the_step_everywhere(self) -> None:
        allow_fp16()
        ds_config = {**tp_config(), "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
        engine = make_engine(
            PLANS["four_beside_two_one_one"],
            gpt_layers(gpt(num_heads=4)),
            VocabParallelLoss(),
            ds_config=ds_config,
        )
        engine.train_batch()
        engine.reconfigure(PLANS["one_to_four_to_two"])
        before = gather_parameters(engine)
        train_with_overflow(engine, rank=5)
        after = gather_parameters(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert engine.skipped_steps == 1
        assert engine.optimizer.loss_scale == 128
        engine.train_batch()
        assert engine.skipped_steps == 1
