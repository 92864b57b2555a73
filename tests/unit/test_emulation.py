from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from malleus_ds.config import ConfigError, EmulationConfig, RateEvent
from malleus_ds.emulation import EmulatedDevice, layers_of
from malleus_ds.models import GPTConfig, gpt_layers, gpt_loss
from tests.harness import DistributedTest

LAYER_MS = 5.0
NUM_CALLS = 10
PATIENCE_S = 60.0


def make_device(rank: int = 0, **settings: Any) -> EmulatedDevice:
    return EmulatedDevice(EmulationConfig(layer_ms=LAYER_MS, **settings), rank)


def events(*script: tuple[int, int, float]) -> tuple[RateEvent, ...]:
    return tuple(RateEvent(step=step, rank=rank, rate=rate) for step, rank, rate in script)


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def attached(device: EmulatedDevice, model: nn.Sequential) -> nn.Sequential:
    device.attach(dict(enumerate(model)))
    return model


def takes(expected_ms: float, call: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None) -> bool:
    """Whether ``call(prepare())`` takes `expected_ms` within 5 %, the preparation not counted.

    The mean of a round of calls counts; a busy machine may spoil many rounds.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        arguments = [prepare() for _ in range(NUM_CALLS)]
        start = time.perf_counter()
        for argument in arguments:
            call(argument)
        mean_ms = (time.perf_counter() - start) / NUM_CALLS * 1e3
        if mean_ms == pytest.approx(expected_ms, rel=0.05):
            return True
    print(f"the last round took {mean_ms:.2f} ms per call instead of {expected_ms:.2f}")
    return False


def differentiable(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_forward_and_backward_take_their_time() -> None:
    model = attached(make_device(), three_layers())
    x = differentiable(2, 4)
    assert takes(3 * LAYER_MS, lambda _: model(x))
    assert takes(3 * 2 * LAYER_MS, torch.Tensor.backward, prepare=lambda: model(x).sum())


def test_micro_batches_in_flight_keep_their_own_times() -> None:
    """1F1B: the forward of the next micro-batch runs before the backward of this one."""
    model = attached(make_device(), three_layers())
    in_flight = [model(differentiable(2, 4)).sum()]

    def forward_then_backward(_: None) -> None:
        in_flight.append(model(differentiable(2, 4)).sum())
        in_flight.pop(0).backward()

    assert takes(3 * 3 * LAYER_MS, forward_then_backward)


def test_values_and_gradients_stay_the_same_bit_by_bit() -> None:
    def run(device: EmulatedDevice | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(7, 6), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(6, 3)
        )
        if device is not None:
            attached(device, model)
        output = model(torch.tensor([[1, 2, 2], [0, 6, 5]]))
        output.square().mean().backward()
        return [output, *(parameter.grad for parameter in model.parameters())]

    device = make_device(jitter=0.2)
    pairs = zip(run(None), run(device), strict=True)
    assert all(torch.equal(plain, emulated) for plain, emulated in pairs)
    assert device.num_calls == 6


def test_the_rate_follows_the_script() -> None:
    script = events((8, 1, 1.0), (2, 1, 3.0), (4, 0, 9.0), (5, 1, 2.0), (5, 1, 2.5))
    device = make_device(rank=1, events=script)
    rates = []
    for step in range(10):
        device.set_step(step)
        rates.append(device.rate)
    assert rates == [1.0, 1.0, 3.0, 3.0, 3.0, 2.5, 2.5, 2.5, 1.0, 1.0]
    assert make_device(rank=2, events=script).rate == 1.0


def test_a_slow_step_takes_longer() -> None:
    device = make_device(events=events((1, 0, 2.57)))
    model = attached(device, three_layers())
    device.set_step(1)
    assert takes(2.57 * 3 * 3 * LAYER_MS, lambda _: model(differentiable(2, 4)).sum().backward())


def durations(device: EmulatedDevice, step: int, num_calls: int = 400) -> list[float]:
    device.set_step(step)
    return [device.duration_s(1.0) * 1e3 / LAYER_MS for _ in range(num_calls)]


def test_jitter_is_bounded_centred_and_reproducible() -> None:
    device = make_device(rank=3, jitter=0.1, seed=-1)
    first = durations(device, step=5)
    assert 0.9 <= min(first) < 0.91
    assert 1.09 < max(first) <= 1.1
    assert sum(first) / len(first) == pytest.approx(1.0, abs=0.01)
    assert durations(device, step=6) != first
    assert durations(make_device(rank=3, jitter=0.1, seed=-1), step=5) == first
    assert durations(make_device(rank=4, jitter=0.1, seed=-1), step=5) != first
    assert durations(make_device(rank=3, jitter=0.1, seed=0), step=5) != first


def test_step_jitter_is_one_factor_per_rank_and_step() -> None:
    factors = []
    for rank in range(10):
        device = make_device(rank=rank, step_jitter=0.2)
        for step in range(40):
            drawn = set(durations(device, step, num_calls=3))
            assert len(drawn) == 1
            factors += drawn
    assert len(set(factors)) == 400
    assert 0.8 <= min(factors) < 0.82
    assert 1.18 < max(factors) <= 1.2


def test_a_layer_without_differentiable_input_waits_too() -> None:
    device = make_device()
    model = attached(device, nn.Sequential(nn.Embedding(5, 4)))
    tokens = torch.tensor([1, 2])
    model(tokens).sum().backward()
    assert device.num_calls == 2
    assert takes(2 * LAYER_MS, torch.Tensor.backward, prepare=lambda: model(tokens).sum())


class Exchange(nn.Module):
    """A pair and a mask in, the same out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        a, b, mask = inputs
        return self.linear(a) + b, a * b, mask


@pytest.mark.parametrize("in_two_passes", [False, True])
def test_tuples_wait_once_for_all_their_tensors(in_two_passes: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Exchange(), Exchange())
    a, b, mask = differentiable(2, 4), differentiable(2, 4), torch.tensor([True])
    leaves = [a, b, *model.parameters()]

    def backward(outputs: tuple[torch.Tensor, ...]) -> None:
        first, second, same_mask = outputs
        assert same_mask.equal(mask)
        if in_two_passes:  # as DeepSpeed's pipeline engine does it
            first.sum().backward(retain_graph=True)
            second.sum().backward()
        else:
            (first.sum() + second.sum()).backward()

    def gradients() -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        backward(model((a, b, mask)))
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    device = make_device()
    plain = gradients()
    attached(device, model)
    emulated = gradients()
    assert len(plain) == len(emulated) == 6
    assert all(torch.equal(x, y) for x, y in zip(plain, emulated, strict=True))
    assert device.num_calls == 4
    assert takes(2 * 2 * LAYER_MS, backward, prepare=lambda: model((a, b, mask)))


def test_evaluation_has_the_forward_wait_alone() -> None:
    device = make_device()
    model = attached(device, three_layers())
    with torch.no_grad():
        assert not model(differentiable(2, 4)).requires_grad
        assert device.num_calls == 3
        assert takes(3 * LAYER_MS, lambda _: model(differentiable(2, 4)))


# A non-reentrant recomputation stops early, before the end of its last layer.
@pytest.mark.parametrize(("use_reentrant", "num_recomputed"), [(True, 3), (False, 2)])
def test_activation_checkpointing_repeats_the_forward_wait(use_reentrant: bool, num_recomputed: int) -> None:
    device = make_device()
    model = attached(device, three_layers())

    def forward() -> torch.Tensor:
        return checkpoint(model, differentiable(2, 4), use_reentrant=use_reentrant).sum()  # type: ignore[no-any-return]

    forward().backward()
    assert device.num_calls == 3 + num_recomputed + 3
    assert takes((num_recomputed + 3 * 2) * LAYER_MS, torch.Tensor.backward, prepare=forward)


def test_layers_without_parameters_take_no_time_unless_they_have_a_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4)
    device = make_device()
    attached(device, model)(x)
    assert device.num_calls == 1
    weighted = make_device(layer_weights=(0.0, 2.5))
    device.detach()
    attached(weighted, model)
    model(x)
    assert (device.num_calls, weighted.num_calls) == (1, 1)
    assert takes(2.5 * LAYER_MS, lambda _: model(x))


def test_too_few_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer_weights: 2 weights, but there is a layer 2; give one"):
        attached(make_device(layer_weights=(1.0, 1.0)), three_layers())


def test_attaching_again_replaces_and_detaching_ends() -> None:
    device = make_device()
    model = attached(device, three_layers())
    device.attach({7: model[1]})
    model(torch.randn(2, 4))
    assert device.num_calls == 1
    device.detach()
    model(torch.randn(2, 4))
    assert device.num_calls == 1


def test_overruns_are_counted() -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(1.2 * LAYER_MS * 1e-3)
            return super().forward(x)

    device = make_device()
    model = attached(device, nn.Sequential(Slow(4, 4), nn.Linear(4, 4)))
    model(torch.randn(2, 4))
    assert (device.num_calls, device.num_overruns) == (2, 1)


def test_a_late_wait_is_made_up_for_by_the_next() -> None:
    device = make_device()

    def late_and_next(_: None) -> None:
        device.wait(device.now_s() - 0.003, 0.002)  # 1 ms late
        device.wait(device.now_s(), 0.010)

    assert takes(9.0, late_and_next)


def test_hooks_of_others_see_the_original_input_and_the_whole_wait() -> None:
    model = three_layers()
    seen: list[torch.Tensor] = []
    stamps: list[float] = []

    def before(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(inputs[0])
        stamps.append(time.perf_counter())

    def after(*_: Any) -> None:
        stamps.append(time.perf_counter())

    model[0].register_forward_pre_hook(before, prepend=True)
    model[0].register_forward_hook(after)
    device = make_device()
    attached(device, model)
    model[0].register_forward_hook(after)
    x = differentiable(2, 4)
    model(x)
    assert seen[0] is x
    assert min(stamps[1:]) - stamps[0] >= LAYER_MS * 1e-3


def test_a_shared_module_has_the_weight_of_its_first_layer() -> None:
    embedding = nn.Embedding(5, 4)
    device = make_device(layer_weights=(0, 0, 0, 2, 0, 0, 7))
    device.attach({3: embedding, 6: embedding})
    embedding(torch.tensor([1]))
    assert device.num_calls == 1
    assert takes(2 * LAYER_MS, lambda _: embedding(torch.tensor([1])))


GPT = GPTConfig(
    vocabulary_size=17, hidden_size=8, num_heads=2, num_blocks=3, sequence_length=6, dropout=0.1,
    tie_embeddings=True,
)  # fmt: skip
NUM_MICRO_BATCHES = 4
NUM_STEPS = 12


def stock_pipeline() -> PipelineModule:
    """Layers 0-3 | 4-7 on two ranks: token, position, block, block | block, function, norm, head."""
    layers = gpt_layers(GPT)
    layers.insert(5, torch.nn.functional.hardtanh)
    return PipelineModule(layers, num_stages=2, loss_fn=gpt_loss, partition_method="uniform")


def train_stock(
    module: PipelineModule, device: EmulatedDevice | None
) -> tuple[list[torch.Tensor], list[float]]:
    """Losses of `NUM_STEPS` steps of DeepSpeed's own engine, and the time of each."""
    config = {
        "train_batch_size": 2 * NUM_MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    if device is not None:
        device.attach(layers_of(engine.module))
    torch.manual_seed(0)
    batch = torch.arange(12).reshape(2, 6)
    losses, steps_s = [], []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        losses.append(engine.train_batch(iter([(batch, batch + 1)] * NUM_MICRO_BATCHES)))
        steps_s.append(time.perf_counter() - start)
    return losses, steps_s


class TestStockEngine(DistributedTest):
    world_size = 2

    def test_layers_of_a_pipeline_module(self) -> None:
        module = stock_pipeline()
        tied = module.tied_modules["token_embedding"]
        names = {layer: type(each).__name__ for layer, each in layers_of(module).items()}
        if module.stage_id == 0:
            assert names == {0: "TokenEmbedding", 1: "PositionEmbedding", 2: "Block", 3: "Block"}
            assert layers_of(module)[0] is tied
        else:
            assert names == {4: "Block", 6: "FinalNorm", 7: "TokenEmbedding"}
            assert layers_of(module)[7] is tied

    def test_training_is_the_same_and_takes_its_time(self) -> None:
        torch.manual_seed(0)
        plain, _ = train_stock(stock_pipeline(), None)
        torch.manual_seed(0)
        module, device = stock_pipeline(), make_device()
        emulated, steps_s = train_stock(module, device)
        assert all(torch.equal(x, y) for x, y in zip(plain, emulated, strict=True))
        # The tied head does not call its module.
        num_emulated = 4 if module.stage_id == 0 else 2
        assert device.num_calls == NUM_STEPS * NUM_MICRO_BATCHES * 2 * num_emulated
        # Stage 0 takes 4 layers of 3 units per micro-batch, and once waits for the 2 layers of stage 1.
        expected_s = 3e-3 * LAYER_MS * (NUM_MICRO_BATCHES * 4 + 2)
        # Twice the wait would be twice as long; a busy machine may spoil some steps.
        assert min(steps_s) < 1.6 * expected_s
        if module.stage_id == 0:
            # One step makes up for what an earlier one was too long by. Only stage 0 is sure to begin first.
            assert sum(steps_s) >= NUM_STEPS * 3e-3 * LAYER_MS * NUM_MICRO_BATCHES * 4
