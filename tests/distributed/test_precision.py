"""bf16 and fp16: against one process of the same precision with fp32 masters and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocations import AllocationLog
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from malleus_ds import MalleusPipelineEngine
from malleus_ds.config import ConfigError
from malleus_ds.models.gpt import gpt_layers, gpt_loss
from malleus_ds.pipe.rng import layer_seed
from malleus_ds.plan import ParallelPlan
from tests.distributed.reference import (
    BASE_SEED,
    CLIP_NORM,
    LEARNING_RATE,
    MICRO_BATCH_SIZE,
    NUM_MICRO_BATCHES,
    Result,
    Tokens,
    assert_same_training,
    build_all,
    config,
    gather_parameters,
    gpt,
    make_engine,
    plan,
    single_process,
    train,
)
from tests.distributed.test_special_layers import Odd
from tests.harness import DistributedTest

TWO_AND_ONE = plan(([(2, 0, 5), (0, 5, 8)], 5), ([(1, 0, 8)], 3), standby=(3,))
ONE_AND_THREE = plan(([(3, 0, 8)], 2), ([(1, 0, 1), (2, 1, 7), (0, 7, 8)], 6))
FOUR = plan(([(1, 0, 1), (0, 1, 2), (3, 2, 6), (2, 6, 8)], 8))
ROUTE = (TWO_AND_ONE, ONE_AND_THREE, FOUR)
STEPS_PER_PLAN = 2

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 2.0**18
"""Too large for the first steps: they overflow."""


def precision_config(precision: str, **options: Any) -> dict[str, Any]:
    return {**config(seed=BASE_SEED), precision: {"enabled": True, **options}}


def allow_fp16() -> None:
    """On this rank: DeepSpeed refuses fp16 on CPUs without instructions for it, though torch computes it."""
    pytest.MonkeyPatch().setattr(get_accelerator(), "is_fp16_supported", lambda: True)


class SameDtype:
    """A model in low precision, with fp32 masters and gradients, in one process and plain torch."""

    def __init__(self, specs: Sequence[Any], dtype: torch.dtype, loss_scale: float) -> None:
        self.modules, self.functions = build_all(specs)
        self.loss_scale = loss_scale
        self.num_skipped = 0
        for parameter in self.modules.parameters():
            parameter.data = parameter.data.to(dtype)
        self.trained = [parameter for parameter in self.modules.parameters() if parameter.requires_grad]
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.trained]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LEARNING_RATE)
        self.data = Tokens()

    def train(self, num_steps: int) -> Result:
        losses, norms = [], []
        for step in range(num_steps):
            for master in self.masters:
                master.grad = torch.zeros_like(master)
            losses.append(sum(self._accumulate(step, index) for index in range(NUM_MICRO_BATCHES)))
            norms.append(self._update())
        tensors = {**dict(self.modules.named_parameters()), **dict(self.modules.named_buffers())}
        return Result(losses, norms, {name: tensor.detach() for name, tensor in tensors.items()})

    def _accumulate(self, step: int, index: int) -> float:
        """One micro-batch; its part of the mean loss."""
        first = (step * NUM_MICRO_BATCHES + index) * MICRO_BATCH_SIZE
        samples = [self.data[first + offset] for offset in range(MICRO_BATCH_SIZE)]
        value = torch.stack([tokens for tokens, _ in samples])
        for layer, function in enumerate(self.functions):
            torch.manual_seed(layer_seed(BASE_SEED, step, index, layer))
            value = function(value)
        loss = gpt_loss(value, torch.stack([labels for _, labels in samples]))
        torch.autograd.backward(loss * self.loss_scale)
        for parameter, master in zip(self.trained, self.masters, strict=True):
            if parameter.grad is not None:
                assert master.grad is not None
                master.grad += parameter.grad.float() / self.loss_scale / NUM_MICRO_BATCHES
                parameter.grad = None
        return loss.item() / NUM_MICRO_BATCHES

    def _update(self) -> float:
        norm = float(nn.utils.clip_grad_norm_(self.masters, CLIP_NORM))
        if not math.isfinite(norm):
            self.num_skipped += 1
            self.loss_scale /= 2
            return math.inf
        self.optimizer.step()
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.data.copy_(master.detach())
        return norm


def train_along(engine: MalleusPipelineEngine, route: Sequence[ParallelPlan] = ROUTE) -> Result:
    """Some steps under each plan."""
    losses: list[float] = []
    norms: list[float] = []
    for index, next_plan in enumerate(route):
        if index > 0:
            engine.reconfigure(next_plan)
        part = train(engine, STEPS_PER_PLAN)
        losses, norms = losses + part.losses, norms + part.norms
    return Result(losses, norms, part.parameters)


def assert_close_training(actual: Result, expected: Result, rtol: float) -> None:
    """Losses to ``rtol``; norms and parameters roughly: they tell which dtype is where."""
    torch.testing.assert_close(actual.losses, expected.losses, rtol=rtol, atol=0)
    torch.testing.assert_close(actual.norms, expected.norms, rtol=10 * rtol, atol=0)
    assert actual.parameters.keys() == expected.parameters.keys()
    for name, tensor in expected.parameters.items():
        torch.testing.assert_close(actual.parameters[name], tensor, rtol=2**-7, atol=2e-3)


class TestExactness(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize(("tie_embeddings", "rtol"), [(False, 1e-4), (True, 5e-3)])
    def test_bf16_over_switches(self, tie_embeddings: bool, rtol: float) -> None:
        """The single process adds the two gradients of a tied weight in bf16, the job adds them in fp32."""
        specs = gpt_layers(gpt(tie_embeddings))
        expected = SameDtype(specs, torch.bfloat16, 1.0).train(STEPS_PER_PLAN * len(ROUTE))
        engine = make_engine(ROUTE[0], specs, ds_config=precision_config("bf16"))
        assert_close_training(train_along(engine), expected, rtol)

    @pytest.mark.parametrize("is_dynamic", [True, False])
    def test_fp16_over_switches(self, is_dynamic: bool) -> None:
        """The dynamic scale starts too large: the first steps are skipped, here and there."""
        allow_fp16()
        specs = gpt_layers(gpt())
        reference = SameDtype(specs, torch.float16, LOSS_SCALE if is_dynamic else 1024.0)
        expected = reference.train(STEPS_PER_PLAN * len(ROUTE))
        options = {"initial_scale_power": 18, "hysteresis": 1} if is_dynamic else {"loss_scale": 1024}
        engine = make_engine(ROUTE[0], specs, ds_config=precision_config("fp16", **options))
        assert_close_training(train_along(engine), expected, rtol=1e-4)
        assert engine.skipped_steps == reference.num_skipped
        assert (engine.skipped_steps > 0) == is_dynamic
        assert engine.optimizer.cur_scale == engine.optimizer.loss_scale == reference.loss_scale

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_frozen_parameters_buffers_modules_and_functions_keep_their_dtypes(self, precision: str) -> None:
        """DeepSpeed casts all parameters, and no buffers, whether a layer was there at the start or came."""
        allow_fp16()

        def specs() -> list[Any]:
            torch.manual_seed(3)
            first, *_, block, head = gpt_layers(gpt())
            middle = [LayerSpec(Odd), block, nn.Linear(16, 16), torch.tanh, LayerSpec(Odd), block]
            return [first, *middle, head]

        options = {"loss_scale": 128} if precision == "fp16" else {}
        scale = 128.0 if precision == "fp16" else 1.0
        expected = SameDtype(specs(), DTYPES[precision], scale).train(STEPS_PER_PLAN * len(ROUTE))
        engine = make_engine(ROUTE[0], specs(), ds_config=precision_config(precision, **options))
        result = train_along(engine)
        assert_close_training(result, expected, rtol=1e-4)
        assert result.parameters["1.frozen"].dtype == DTYPES[precision]
        assert result.parameters["1.scale"].dtype == torch.float32
        assert result.parameters["1.mask"].dtype == torch.bool

    @pytest.mark.parametrize("section", ["bf16", "fp16"])
    def test_switched_off_is_fp32(self, section: str) -> None:
        specs = gpt_layers(gpt())
        ds_config = {**config(seed=BASE_SEED), section: {"enabled": False}}
        expected = single_process(specs, gpt_loss, STEPS_PER_PLAN * len(ROUTE))
        assert_same_training(train_along(make_engine(ROUTE[0], specs, ds_config=ds_config)), expected)

    def test_checkpointed_activations(self) -> None:
        specs = gpt_layers(gpt())
        expected = SameDtype(specs, torch.bfloat16, 1.0).train(STEPS_PER_PLAN * len(ROUTE))
        ds_config = precision_config("bf16") | {"pipeline": {"activation_checkpoint_interval": 1}}
        engine = make_engine(ROUTE[0], specs, ds_config=ds_config, checkpointable_layers=["Block"])
        assert_close_training(train_along(engine), expected, rtol=1e-4)


def train_with_overflow(engine: MalleusPipelineEngine, rank: int) -> None:
    """A step in which the gradient of one rank is not finite."""
    reduce_gradients = engine.optimizer.reduce_gradients

    def overflow() -> None:
        gradients: list[Tensor] = [gradient for _, gradient in engine.optimizer.trained()]
        gradients[-1][0] = torch.inf
        reduce_gradients()

    with pytest.MonkeyPatch.context() as patch:
        if engine.global_rank == rank:
            patch.setattr(engine.optimizer, "reduce_gradients", overflow)
        engine.train_batch()


def same_everywhere(value: Any) -> bool:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return all(other == value for other in gathered)


class TestOverflow(DistributedTest):
    world_size = 4

    def test_one_rank_makes_all_skip_and_halve_the_scale(self) -> None:
        allow_fp16()
        options = {"initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2}
        ds_config = precision_config("fp16", **options)
        ds_config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
        engine = make_engine(TWO_AND_ONE, ds_config=ds_config)
        scaler = engine.optimizer.loss_scaler
        assert scaler is not None
        engine.train_batch()
        engine.reconfigure(ONE_AND_THREE)
        before, scheduled = gather_parameters(engine), engine.lr_scheduler.last_batch_iteration
        train_with_overflow(engine, rank=2)
        after = gather_parameters(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert engine.optimizer.overflow
        assert float(engine.get_global_grad_norm()) == math.inf
        assert (engine.skipped_steps, engine.global_steps) == (1, 2)
        assert engine.lr_scheduler.last_batch_iteration == scheduled
        assert engine.optimizer.loss_scale == 128
        engine.reconfigure(TWO_AND_ONE)
        scales = []
        for _ in range(3):
            engine.train_batch()
            scales.append(engine.optimizer.loss_scale)
        # It grows after two steps in a row beyond the first one, which closes the interval.
        assert scales == [128, 128, 256]
        assert same_everywhere(vars(scaler)), "standby ranks count, too"
        assert not engine.optimizer.overflow
        assert engine.lr_scheduler.last_batch_iteration == scheduled + 3
        assert all(state["step"] == 4 for state in engine.optimizer.state.values())
        assert not any(
            torch.equal(before[name], tensor) for name, tensor in gather_parameters(engine).items()
        )

    @pytest.mark.parametrize(
        ("precision", "options", "scale"),
        [
            ("fp16", {"loss_scale": 64}, 64.0),
            ("bf16", {}, 1.0),
            ("bf16", {"check_grad_overflow": False}, 1.0),
        ],
    )
    def test_fixed_scales(self, precision: str, options: dict[str, Any], scale: float) -> None:
        """bf16 skips such steps, too, as DeepSpeed does, unless it is told not to look."""
        allow_fp16()
        engine = make_engine(TWO_AND_ONE, ds_config=precision_config(precision, **options))
        before = gather_parameters(engine)
        train_with_overflow(engine, rank=0)
        after = {name: tensor.nan_to_num(-1.0) for name, tensor in gather_with_nan(engine).items()}
        is_skipped = options.get("check_grad_overflow", True)
        assert (engine.skipped_steps == 1) == is_skipped
        assert all(torch.equal(before[name], after[name]) for name in before) == is_skipped
        assert engine.optimizer.loss_scale == scale


def gather_with_nan(engine: MalleusPipelineEngine) -> dict[str, Tensor]:
    """As `gather_parameters`, of any holder: values that are no numbers are unequal to themselves."""
    held = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    gathered: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, held)
    return {name: tensor for part in gathered for name, tensor in part.items()}


def held_tensors(engine: MalleusPipelineEngine) -> dict[int, list[Tensor]]:
    """Parameters, masters and moments of each bucket."""
    held = {}
    for index, storage in engine.optimizer.storages.items():
        stepped = [shard.parameter for shard in storage.shards if shard.parameter is not None]
        moments = [
            engine.optimizer.state[master][name] for master in stepped for name in ("exp_avg", "exp_avg_sq")
        ]
        held[index] = [storage.flat, *stepped, *moments]
    return held


def num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def try_memory(
    allocate: Callable[[int], Tensor], log: AllocationLog, left_out: list[int], num_bytes: int
) -> Tensor:
    """Allocate, and note that it is no part of the state."""
    piece = allocate(num_bytes)
    left_out.append(log.number(piece))
    return piece


class TestMemory(DistributedTest):
    world_size = 4

    def test_a_switch_stays_within_two_buckets_of_the_fuller_plan(self) -> None:
        """Without gradients, which hardly exist while state moves and would hide what it takes, and without
        the memory that is tried out before."""
        engine = make_engine(ROUTE[0], ds_config=precision_config("bf16"))
        engine.train_batch()
        allocate = engine.optimizer.allocate_bytes
        for next_plan in (*ROUTE[1:], *ROUTE):
            before = held_tensors(engine)
            held_before, buckets = sum(map(num_bytes, before.values())), [*map(num_bytes, before.values())]
            log = AllocationLog(tensor for tensors in before.values() for tensor in tensors)
            del before
            gradients = [log.number(gradient) for _, gradient in engine.optimizer.trained()]
            engine.optimizer.allocate_bytes = partial(try_memory, allocate, log, gradients)
            with log:
                engine.reconfigure(next_plan)
            gradients += [log.number(gradient) for _, gradient in engine.optimizer.trained()]
            after = held_tensors(engine)
            held_after = sum(map(num_bytes, after.values()))
            largest = max([0, *buckets, *map(num_bytes, after.values())])
            assert log.peak_bytes(left_out=gradients) <= max(held_before, held_after) + 2 * largest
            del after


class TestConfig(DistributedTest):
    world_size = 2

    def test_gradients_are_not_accumulated_in_low_precision(self) -> None:
        first = plan(([(0, 0, 8)], 4), ([(1, 0, 8)], 4))
        ds_config = precision_config("bf16") | {"data_types": {"grad_accum_dtype": "bf16"}}
        with pytest.raises(ConfigError, match=r"grad_accum_dtype is 'bf16': .*in fp32; give \"fp32\""):
            make_engine(first, ds_config=ds_config)
        ds_config["data_types"] = {"grad_accum_dtype": "fp32"}
        engine = make_engine(first, ds_config=ds_config)
        engine.train_batch()
        assert {parameter.dtype for parameter in engine.optimizer.state} == {torch.float32}
        assert all(parameter.grad is None for parameter in engine.module.parameters())
