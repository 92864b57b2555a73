"""Calibration on real ranks: what the profile says of layers whose cost and memory are known."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn
from torch.nn import functional

from malleus_ds.models.gpt import gpt_layers, gpt_loss
from malleus_ds.pipe.engine import MalleusPipelineEngine
from tests.distributed.reference import BASE_SEED, config, gpt, make_engine, plan
from tests.harness import DistributedTest

FLOAT_BYTES = 4
SAMPLES, LENGTH, HIDDEN, VOCABULARY = 2, 8, 16, 24
HIDDEN_BYTES = SAMPLES * LENGTH * HIDDEN * FLOAT_BYTES
LOSS_S, FUNCTION_S, CHEAP_S = 0.02, 0.01, 0.005
NUM_CALIBRATION_STEPS = 3


def slow_loss(logits: Tensor, labels: Tensor) -> Tensor:
    time.sleep(LOSS_S)
    return gpt_loss(logits, labels)


class Embed(nn.Module):
    """Tokens -> (hidden, mask)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return functional.embedding(tokens, self.weight), tokens % 2


class Masked(nn.Module):
    """(hidden, mask) -> (hidden, mask)."""

    def __init__(self, extra_s: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.extra_s = extra_s

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        time.sleep(self.extra_s)
        hidden, mask = inputs
        return torch.tanh(hidden * self.weight) * mask.unsqueeze(-1), mask


class Logits(nn.Linear):
    def __init__(self) -> None:
        super().__init__(HIDDEN, VOCABULARY, bias=False)


def first_of(inputs: tuple[Tensor, Tensor]) -> Tensor:
    time.sleep(FUNCTION_S)
    return inputs[0] * 1.0


def calibrated(first_plan: Any, specs: list[Any], loss_fn: Any = slow_loss, **arguments: Any) -> Any:
    """An engine after its calibration; asserts that all ranks have the same profile."""
    ds_config = config(seed=BASE_SEED, detector={"control_plane": "gloo"}, planner={"enabled": False})
    engine = make_engine(first_plan, specs, loss_fn, ds_config=ds_config, **arguments)
    for _ in range(NUM_CALIBRATION_STEPS):
        engine.train_batch()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pickle.dumps(engine.measurement.profile))
    assert gathered[0] is not None
    assert len(set(gathered)) == 1
    return engine


def step(engine: MalleusPipelineEngine) -> tuple[float, float]:
    """What a rank says of a step without micro-batches: a standby rank its probe, others nothing."""
    assert engine.measurement is not None
    engine.measurement.begin_step()
    return engine.measurement.finish_step(0)


class TestMeasurement(DistributedTest):
    world_size = 3

    def test_tied_layers_and_the_loss(self) -> None:
        specs = gpt_layers(gpt(tie_embeddings=True))
        engine = calibrated(plan(([(0, 0, 4), (1, 4, 8)], 8), standby=(2,)), specs)
        profile = engine.measurement.profile
        table_bytes = VOCABULARY * HIDDEN * FLOAT_BYTES
        for index, name in ((0, "TokenEmbedding"), (7, "malleus_ds.models.common.tied_head(TokenEmbedding)")):
            assert profile.layers[index].name == name
            assert profile.layers[index].state_bytes == 2 * table_bytes
            assert profile.layers[index].optimizer_bytes == 2 * table_bytes
        assert profile.layers[7].time_s >= LOSS_S
        assert all(0 < layer_s < LOSS_S for layer_s in profile.layer_times_s[:7])
        assert len(set(profile.layer_times_s[2:6])) == 1  # Blocks, of both stages.
        assert profile.message_bytes == HIDDEN_BYTES
        # The head saves its input; the loss needs the logits.
        logits_bytes = SAMPLES * LENGTH * VOCABULARY * FLOAT_BYTES
        assert profile.layers[7].activation_bytes == HIDDEN_BYTES + logits_bytes
        compute_s, expected_s = step(engine)
        if dist.get_rank() == 2:
            assert compute_s > 0
            assert expected_s == profile.layers[2].time_s  # Not of the last layer, whose cost is the loss.
        else:
            assert expected_s == 0
        engine.destroy()

    def test_tuples_and_functions(self) -> None:
        specs = [
            LayerSpec(Embed),
            LayerSpec(Masked),
            Masked(extra_s=CHEAP_S),
            LayerSpec(Masked),
            first_of,
            LayerSpec(Logits),
        ]
        engine = calibrated(plan(([(2, 0, 3), (0, 3, 6)], 8), standby=(1,)), specs, gpt_loss)
        profile = engine.measurement.profile
        assert profile.layers[4].name == "tests.distributed.test_measurement.first_of"
        assert profile.layers[4].time_s >= FUNCTION_S
        # Layers 1 to 3 are of one class, whoever holds them; the second always sleeps.
        assert len(set(profile.layer_times_s[1:4])) == 1
        mask_bytes = SAMPLES * LENGTH * 8
        assert profile.message_bytes == HIDDEN_BYTES + mask_bytes
        # The input and tanh's output; the mask, which goes on, counts where it ends.
        assert profile.layers[1].activation_bytes == 2 * HIDDEN_BYTES
        assert profile.layers[4].activation_bytes == HIDDEN_BYTES + mask_bytes
        if dist.get_rank() == 1:
            assert step(engine)[0] > 0
        engine.destroy()

    def test_only_last_stages(self) -> None:
        """The loss is then part of the common overhead, and rates stay right."""
        specs = gpt_layers(gpt())
        engine = calibrated(plan(([(0, 0, 8)], 4), ([(2, 0, 8)], 4), standby=(1,)), specs)
        assert max(engine.measurement.profile.layer_times_s) < LOSS_S
        engine.destroy()

    @pytest.mark.parametrize("checkpoint", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint])
    def test_under_activation_checkpointing_blocks_keep_their_input(self, checkpoint: Any) -> None:
        specs = gpt_layers(gpt())
        engine = calibrated(
            plan(([(0, 0, 3), (1, 3, 8)], 8), standby=(2,)),
            specs,
            gpt_loss,
            activation_checkpoint_interval=1,
            activation_checkpoint_func=checkpoint,
            checkpointable_layers=["Block"],
        )
        profile = engine.measurement.profile
        assert [layer.activation_bytes for layer in profile.layers[1:7]] == [HIDDEN_BYTES] * 6
        assert profile.layers[7].activation_bytes > 2 * HIDDEN_BYTES  # With the norm's output and the logits.
        assert all(layer_s > 0 for layer_s in profile.layer_times_s)
        engine.destroy()
