from __future__ import annotations

import time
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from malleus_ds.detector.calibration import LayerInput, TensorSpec
from malleus_ds.detector.layer_timer import LayerTimer

CPU = torch.device("cpu")


class Sleep(torch.autograd.Function):
    """Identity that takes a known time in each direction."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class SleepyLinear(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.durations_s = (forward_s, backward_s)

    def forward(self, inputs: Tensor) -> Tensor:
        return Sleep.apply(self.linear(inputs), *self.durations_s)


class SleepyEmbedding(nn.Module):
    """Integer input: no gradient marks the end of its backward."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.durations_s = (forward_s, backward_s)

    def forward(self, tokens: Tensor) -> Tensor:
        return Sleep.apply(self.embedding(tokens), *self.durations_s)


DURATIONS_S = {3: (0.010, 0.025), 4: (0.030, 0.010), 5: (0.005, 0.040)}


Layers = dict[int, Callable[[Any], Any]]


def middle_stage() -> Layers:
    return {layer_id: SleepyLinear(*durations) for layer_id, durations in DURATIONS_S.items()}


def received() -> Tensor:
    return torch.randn(2, 8, requires_grad=True)


def sums_s(durations_s: dict[int, tuple[float, float]]) -> dict[int, float]:
    return {layer_id: sum(durations) for layer_id, durations in durations_s.items()}


class Rank:
    """Runs a rank's instructions, and times them as a whole."""

    def __init__(self, layers: Layers, checkpointed: Container[int] = ()) -> None:
        self.layers = layers
        modules = [layer for layer in layers.values() if isinstance(layer, nn.Module)]
        constants = [parameter for module in modules for parameter in module.parameters()]
        self.timer = LayerTimer(CPU, constants, checkpointed)
        self.elapsed_s = 0.0

    def forward(self, inputs: Any, run: Callable[[Any], Tensor] | None = None) -> Tensor:
        started_s = time.perf_counter()
        output = (run or self.run_layers)(inputs)
        self.elapsed_s += time.perf_counter() - started_s
        return output

    def backward(self, output: Tensor) -> None:
        started_s = time.perf_counter()
        self.timer.mark_backward_start()
        output.backward(torch.ones_like(output))
        self.timer.mark_backward_end()
        self.elapsed_s += time.perf_counter() - started_s

    def run_layers(self, inputs: Any) -> Any:
        for layer_id, function in self.layers.items():
            inputs = self.timer.run(layer_id, function, inputs)
        return inputs

    def check(self, expected_s: dict[int, float], num_micro_batches: int) -> None:
        """Each layer has its sleeps, which never end early, and no time is counted twice.

        Both hold on a busy machine, too; a tenth is for medians that stand for all.
        """
        times = self.timer.take()
        assert sorted(times) == sorted(expected_s)
        for layer_id, layer_s in expected_s.items():
            assert times[layer_id].num_micro_batches == num_micro_batches
            assert times[layer_id].total_s >= num_micro_batches * layer_s, layer_id
        assert sum(layer_time.total_s for layer_time in times.values()) <= 1.1 * self.elapsed_s


def test_each_layer_gets_its_own_time_in_1f1b_order() -> None:
    rank = Rank(middle_stage())
    # Two micro-batches in flight; waits between the instructions belong to nobody.
    outputs = [rank.forward(received())]
    for _ in range(3):
        outputs.append(rank.forward(received()))
        time.sleep(0.05)
        rank.backward(outputs.pop(0))
        time.sleep(0.05)
    rank.backward(outputs.pop())
    rank.check(sums_s(DURATIONS_S), num_micro_batches=4)
    assert rank.timer.take() == {}


def test_first_stage_with_tokens_and_the_description_of_the_input() -> None:
    durations_s = {0: (0.010, 0.030), 1: (0.020, 0.010)}
    rank = Rank({0: SleepyEmbedding(*durations_s[0]), 1: SleepyLinear(*durations_s[1])})
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    rank.backward(rank.forward(tokens))
    times = rank.timer.take()
    assert times[0].inputs == LayerInput((TensorSpec((2, 5), "int64"),), is_tuple=False)
    assert times[1].inputs == LayerInput((TensorSpec((2, 5, 8), "float32"),), is_tuple=False)
    assert [times[layer_id].input_bytes for layer_id in (0, 1)] == [10 * 8, 80 * 4]
    assert [times[layer_id].output_bytes for layer_id in (0, 1)] == [80 * 4, 80 * 4]
    for _ in range(3):
        rank.backward(rank.forward(tokens))
    rank.check(sums_s(durations_s), num_micro_batches=3)


def test_what_a_pre_hook_adds_is_part_of_the_layer() -> None:
    layer = nn.Linear(8, 8)
    layer.register_forward_pre_hook(lambda module, args: (Sleep.apply(args[0], 0.02, 0.04),))
    rank = Rank({0: nn.Linear(8, 8), 1: layer})
    for _ in range(3):
        rank.backward(rank.forward(received()))
    rank.check({0: 0.0, 1: 0.06}, num_micro_batches=3)


def test_functions_and_one_module_under_two_layers() -> None:
    """A tied module as embedding and, by a function that never calls it, as head; a plain function."""
    embedding = SleepyEmbedding(0.01, 0.02)

    def head(module: SleepyEmbedding, hidden: Tensor) -> Tensor:
        return Sleep.apply(hidden @ module.embedding.weight.T, 0.03, 0.05)

    rank = Rank(
        {0: embedding, 1: lambda hidden: Sleep.apply(hidden, 0.02, 0.01), 2: partial(head, embedding)}
    )
    for _ in range(3):
        rank.backward(rank.forward(torch.zeros(2, 5, dtype=torch.int64)))
    rank.check({0: 0.03, 1: 0.03, 2: 0.08}, num_micro_batches=3)


def test_a_layer_that_returns_its_input_takes_nothing() -> None:
    layers: Layers = middle_stage()
    layers[4] = nn.Identity()
    rank = Rank(layers)
    for _ in range(3):
        rank.backward(rank.forward(received()))
    assert rank.timer.elapsed_s <= rank.elapsed_s
    times = rank.timer.take()
    assert times[4].total_s < 3 * 0.005
    assert [times[layer_id].total_s >= 3 * sum(DURATIONS_S[layer_id]) for layer_id in (3, 5)] == [True] * 2


def test_the_loss_is_part_of_no_layer() -> None:
    rank = Rank({6: SleepyLinear(0.01, 0.02), 7: SleepyLinear(0.0, 0.01)})
    for _ in range(3):
        rank.backward(Sleep.apply(rank.forward(received()), 0.02, 0.05))
    assert 3 * 0.04 <= rank.timer.elapsed_s <= rank.elapsed_s - 3 * 0.05
    rank.check({6: 0.03, 7: 0.01}, num_micro_batches=3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_backward_time_of_its_layer(use_reentrant: bool) -> None:
    rank = Rank(middle_stage())
    for _ in range(3):
        with set_checkpoint_early_stop(False):  # Else the last layer is recomputed in part only.
            output = rank.forward(
                received(), lambda inputs: checkpoint(rank.run_layers, inputs, use_reentrant=use_reentrant)
            )
        rank.backward(output)
    expected_s = {layer_id: 2 * ahead + back for layer_id, (ahead, back) in DURATIONS_S.items()}
    rank.check(expected_s, num_micro_batches=3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_that_stops_early(use_reentrant: bool) -> None:
    """The engine's way: two layers under one checkpoint behind an embedding, and one without."""
    layers: Layers = {0: SleepyEmbedding(0.01, 0.03), **{k: SleepyLinear(0.01, 0.02) for k in (1, 2, 3)}}
    rank = Rank(layers, checkpointed={1, 2})

    def run(tokens: Tensor) -> Tensor:
        hidden = rank.timer.run(0, layers[0], tokens)

        def block(value: Tensor) -> Tensor:
            return rank.timer.run(2, layers[2], rank.timer.run(1, layers[1], value))

        hidden = checkpoint(block, hidden, use_reentrant=use_reentrant)
        return rank.timer.run(3, layers[3], hidden)

    for _ in range(3):
        rank.backward(rank.forward(torch.zeros(2, 5, dtype=torch.int64), run))
    # Non-reentrant: layer 2 stops once its last saved tensor is there, before it sleeps.
    rank.check({0: 0.04, 1: 0.04, 2: 0.04 if use_reentrant else 0.03, 3: 0.03}, num_micro_batches=3)


def test_several_inputs_and_tuples() -> None:
    class Join(nn.Module):
        def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
            return Sleep.apply(inputs[0] * 2, 0.01, 0.02) + Sleep.apply(inputs[1] * 3, 0.01, 0.02)

    rank = Rank({0: lambda inputs: (SleepyLinear(0.0, 0.01)(inputs[0]), inputs[1]), 1: Join()})
    for _ in range(3):
        rank.backward(rank.forward((received(), received())))
    rank.check({0: 0.01, 1: 0.06}, num_micro_batches=3)


def test_tuples_are_recorded_and_other_inputs_are_not() -> None:
    timer = LayerTimer(CPU)
    mask = torch.ones(2, 1, dtype=torch.bool)
    timer.run(0, lambda inputs: inputs[0], (received(), mask))
    timer.run(1, lambda inputs: inputs[0], (received(), None))
    times = timer.take()
    assert times[0].inputs == LayerInput((TensorSpec((2, 8), "float32"), TensorSpec((2, 1), "bool")), True)
    assert times[0].input_bytes == 16 * 4 + 2
    assert times[1].inputs is None


class TestKeptBytes:
    """With 2 samples of 8 float32 values, a tensor of a micro-batch has 64 bytes."""

    def kept(self, layers: Layers, inputs: Any = None, **options: Any) -> list[int]:
        rank = Rank(layers, **options)
        for _ in range(2):
            rank.backward(rank.forward(received() if inputs is None else inputs))
        return [found.kept_bytes for found in rank.timer.take().values()]

    def test_linear_and_relu(self) -> None:
        # ReLU saves its output, which is the input of the next Linear and counts there.
        assert self.kept({0: nn.Linear(8, 8), 1: nn.ReLU(), 2: nn.Linear(8, 8)}) == [64, 64, 64]

    def test_inside_of_a_layer(self) -> None:
        # The input, ReLU's output of 4 times the size (saved by ReLU and by Linear), no parameters.
        layer = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        assert self.kept({0: layer}) == [64 + 256]

    def test_views_count_once(self) -> None:
        assert self.kept({0: lambda value: (value.T * value.flatten().view(8, 2)).sum()}) == [64]

    def test_under_checkpointing_only_the_input(self) -> None:
        layer = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

        def checkpointed(value: Tensor) -> Tensor:
            return checkpoint(layer, value, use_reentrant=False)

        assert self.kept({0: layer}, checkpointed={0}) == [64]
        assert self.kept({0: checkpointed}) == [64]  # What autograd really keeps.


def test_what_happens_once_does_not_count() -> None:
    layer = SleepyLinear(0.5, 0.5)
    rank = Rank({0: layer})
    for _ in range(5):
        rank.backward(rank.forward(received()))
        layer.durations_s = (0.01, 0.02)
    times = rank.timer.take()
    assert 0.03 <= times[0].total_s / times[0].num_micro_batches < 0.2  # The mean is above that.


def test_the_timer_does_not_change_the_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    inputs = received()
    output = model(inputs)
    output.backward(torch.ones_like(output))
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    rank = Rank(dict(enumerate(model)))
    rank.backward(rank.forward(inputs))
    found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))


def test_a_rank_without_layers() -> None:
    timer = LayerTimer(CPU)
    timer.mark_backward_start()
    timer.mark_backward_end()
    assert timer.take() == {}


def test_backward_end_without_start() -> None:
    with pytest.raises(RuntimeError, match="without mark_backward_start"):
        LayerTimer(CPU).mark_backward_end()
