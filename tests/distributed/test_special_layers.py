"""Layers that a switch of plans could hurt: frozen parts, buffers, functions, hidden tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from malleus_ds import MalleusPipelineModule, initialize
from malleus_ds.models.gpt import gpt_layers, gpt_loss
from malleus_ds.pipe.agreement import AgreementError, SwitchFailedError
from malleus_ds.placement import LayoutError
from tests.distributed.reference import (
    BASE_SEED,
    LEARNING_RATE,
    NUM_MICRO_BATCHES,
    Result,
    Tokens,
    assert_same_training,
    config,
    gather_parameters,
    gpt,
    make_engine,
    plan,
    single_process,
    train,
)
from tests.distributed.test_engine import ONE_AND_THREE, TWO_AND_ONE
from tests.harness import DistributedTest


class Odd(nn.Module):
    """A residual layer with a frozen parameter, a random buffer and a parameter that gets no gradient."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.frozen = nn.Parameter(torch.rand(size), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(3))
        self.register_buffer("mask", torch.rand(size) > 0.3)
        self.register_buffer("scale", torch.rand(()), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden) * self.frozen * self.mask * self.scale


class Breaks(nn.Module):
    """Cannot be built on rank 3."""

    def __init__(self) -> None:
        super().__init__()
        if dist.get_rank() == 3:
            raise OSError("no such file")
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


class TestSpecialLayers(DistributedTest):
    world_size = 4

    def specs(self) -> list[Any]:
        """Embedding, odd layers, a ready-made module, a function, and the head: 8 layers."""
        torch.manual_seed(3)
        first, *_, block, head = gpt_layers(gpt())
        return [
            first,
            LayerSpec(Odd),
            block,
            nn.Linear(16, 16),
            torch.tanh,
            LayerSpec(Odd),
            block,
            head,
        ]

    def test_frozen_parameters_buffers_modules_and_functions_move(self) -> None:
        expected = single_process(self.specs(), gpt_loss, 4)
        engine = make_engine(TWO_AND_ONE, self.specs())
        first = train(engine, 2)
        engine.reconfigure(ONE_AND_THREE)
        second = train(engine, 2)
        result = Result(first.losses + second.losses, first.norms + second.norms, second.parameters)
        assert_same_training(result, expected)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_activation_checkpointing_keeps_the_dropout(self, use_reentrant: bool) -> None:
        expected = single_process(gpt_layers(gpt()), gpt_loss, 4)
        ds_config = {
            **config(seed=BASE_SEED),
            "pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": use_reentrant},
        }
        engine = make_engine(TWO_AND_ONE, ds_config=ds_config, checkpointable_layers=["Block"])
        first = train(engine, 2)
        engine.reconfigure(ONE_AND_THREE)
        second = train(engine, 2)
        assert_same_training(
            Result(first.losses + second.losses, first.norms + second.norms, second.parameters), expected
        )

    def test_a_layer_that_cannot_be_built_leaves_the_old_plan(self) -> None:
        specs = [*gpt_layers(gpt())[:7], LayerSpec(Breaks), gpt_layers(gpt())[7]]
        old = plan(([(2, 0, 5), (0, 5, 9)], 5), ([(1, 0, 9)], 3), standby=(3,))
        new = plan(([(1, 0, 9)], 2), ([(0, 0, 1), (2, 1, 4), (3, 4, 9)], 6))
        expected = single_process_with_scale(specs)
        engine = make_engine(old, specs)
        losses = [engine.train_batch().item()]
        with pytest.raises(SwitchFailedError, match=r"the old plan stays: .*no such file"):
            engine.reconfigure(new)
        assert engine.plan == old
        losses.append(engine.train_batch().item())
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def single_process_with_scale(specs: list[Any]) -> list[float]:
    """The reference with `Breaks` built on every rank: it is a scale by ones at the start."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * self.weight

    replaced = [LayerSpec(Scale) if spec.typename is Breaks else spec for spec in specs]
    return single_process(replaced, gpt_loss, 2).losses


class Rebinds(nn.Module):
    """Assigns its buffer anew, hides a tensor in a list, reads values in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.hidden = [torch.full((16,), self.rates[1])]
        self.empty = nn.Parameter(torch.zeros(0))
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return (hidden * self.scale + self.hidden[0]).transpose(1, 2).contiguous().transpose(1, 2)


class TestOddities(DistributedTest):
    world_size = 4

    def test_rebound_buffers_hidden_and_empty_tensors_survive_a_switch(self) -> None:
        first, *blocks, head = gpt_layers(gpt())
        specs = [first, LayerSpec(Rebinds), *blocks[2:], LayerSpec(Rebinds), head]
        old = plan(([(2, 0, 4), (0, 4, 8)], 8), standby=(1, 3))
        new = plan(([(1, 0, 2), (3, 2, 6), (2, 6, 8)], 8), standby=(0,))
        expected = single_process(specs, gpt_loss, 4)
        engine = make_engine(old, specs)
        before = train(engine, 2)
        engine.reconfigure(new)
        after = train(engine, 2)
        result = Result(before.losses + after.losses, before.norms + after.norms, after.parameters)
        assert after.parameters["1.calls"] == 4 * NUM_MICRO_BATCHES
        assert_same_training(result, expected)

    def test_groups_with_generators_train_and_a_frozen_first_stage_is_skipped(self) -> None:
        torch.manual_seed(1)
        specs = gpt_layers(gpt())
        module = MalleusPipelineModule(specs, loss_fn=gpt_loss, plan=TWO_AND_ONE, base_seed=BASE_SEED)
        if module._local_start == 0 and not module._grid.is_standby:
            for parameter in module.local_layers()[0].parameters():
                parameter.requires_grad_(False)
        groups = [{"params": (p for p in module.parameters() if p.requires_grad), "lr": LEARNING_RATE}]
        engine, *_ = initialize(
            model=module, model_parameters=groups, training_data=Tokens(), config=config(seed=BASE_SEED)
        )
        start = gather_parameters(engine)
        engine.train_batch()
        engine.reconfigure(plan(([(3, 0, 1), (1, 1, 8)], 2), ([(2, 0, 7), (0, 7, 8)], 6)))
        engine.train_batch()
        end = gather_parameters(engine)
        assert torch.equal(start["0.token.weight"], end["0.token.weight"])
        trained = [name for name in start if name.startswith("7.")]
        assert trained
        assert not any(torch.equal(start[name], end[name]) for name in trained)

    def test_an_optimizer_of_the_users_also_on_standby_ranks(self) -> None:
        """Made on every rank alike; rank 3 has no layer at first."""
        expected = single_process(gpt_layers(gpt()), gpt_loss, 4)
        ds_config = config(seed=BASE_SEED)
        del ds_config["optimizer"]
        module = MalleusPipelineModule(
            gpt_layers(gpt()), loss_fn=gpt_loss, plan=TWO_AND_ONE, base_seed=BASE_SEED
        )
        optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
        engine, *_ = initialize(model=module, optimizer=optimizer, training_data=Tokens(), config=ds_config)
        before = train(engine, 2)
        engine.reconfigure(ONE_AND_THREE)
        after = train(engine, 2)
        assert engine.basic_optimizer is optimizer
        losses, norms = before.losses + after.losses, before.norms + after.norms
        assert_same_training(Result(losses, norms, after.parameters), expected)

    def test_a_tensor_of_two_layers_is_refused(self) -> None:
        shared = nn.Linear(16, 16)
        first, *blocks, head = gpt_layers(gpt())
        specs = [first, shared, *blocks[2:], shared, head]
        with pytest.raises((LayoutError, AgreementError), match="one tensor in several layers"):
            make_engine(plan(([(0, 0, 8)], 4), ([(1, 0, 8)], 4), standby=(2, 3)), specs)

    def test_a_loss_with_parameters_is_refused(self) -> None:
        with pytest.raises((LayoutError, AgreementError), match="make it the last layer"):
            make_engine(TWO_AND_ONE, loss_fn=nn.Linear(2, 2))

    def test_groups_that_differ_between_ranks_are_refused(self) -> None:
        ds_config = config()
        module = MalleusPipelineModule(gpt_layers(gpt()), loss_fn=gpt_loss, plan=TWO_AND_ONE)
        groups = [{"params": list(module.parameters()), "lr": 0.1 * (1 + dist.get_rank())}]
        with pytest.raises(AgreementError, match="different optimizers or parameter groups"):
            initialize(model=module, model_parameters=groups, training_data=Tokens(), config=ds_config)

    def test_a_parameter_added_later_leaves_the_old_plan(self) -> None:
        engine = make_engine(TWO_AND_ONE)
        for module in engine.module.local_layers().values():
            module.extra = nn.Parameter(torch.ones(2))
        with pytest.raises(SwitchFailedError, match="other tensors than at the start"):
            engine.reconfigure(ONE_AND_THREE)
        assert engine.plan == TWO_AND_ONE
