from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.utils import logger
from torch import Tensor, nn

from malleus_ds.detector.calibration import LayerClass, LayerInput, TensorSpec
from malleus_ds.detector.probe import (
    ProbeCandidate,
    StandbyProbe,
    StandbyProber,
    build_spare,
    steps_to_wait,
)
from malleus_ds.zero.binding import tensor_slots

CPU = torch.device("cpu")


def one_tensor(*shape: int, dtype: str = "float32") -> LayerInput:
    return LayerInput((TensorSpec(shape, dtype),), is_tuple=False)


def sleepy(module: nn.Module, forward_s: float, backward_s: float) -> nn.Module:
    module.register_forward_pre_hook(lambda module, args: time.sleep(forward_s))
    module.weight.register_hook(lambda gradient: time.sleep(backward_s))
    return module


class TestStandbyProbe:
    def test_times_forward_and_backward_and_leaves_no_trace(self) -> None:
        layer = sleepy(nn.Linear(8, 8), forward_s=0.01, backward_s=0.02)
        probe = StandbyProbe(layer, one_tensor(2, 8), layer_s=0.03, device=CPU)
        rng_state = torch.get_rng_state()
        started_s = time.perf_counter()
        compute_s, expected_s = probe.run()
        elapsed_s = time.perf_counter() - started_s
        assert expected_s == 0.03
        assert 0.03 <= compute_s <= elapsed_s
        assert torch.equal(torch.get_rng_state(), rng_state)
        assert all(parameter.grad is None for parameter in layer.parameters())

    def test_integer_input_and_a_caller_without_gradients(self) -> None:
        layer = sleepy(nn.Embedding(4, 8), forward_s=0.0, backward_s=0.02)
        with torch.no_grad():
            compute_s, _ = StandbyProbe(layer, one_tensor(2, 5, dtype="int64"), 0.02, CPU).run()
        assert compute_s >= 0.02

    def test_a_layer_that_exchanges_tuples(self) -> None:
        seen: list[Any] = []

        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(8))

            def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
                seen.append(inputs)
                hidden, mask, positions = inputs
                return hidden.masked_fill(~mask, 0.0) * self.weight[positions], mask, positions

        specs = (TensorSpec((2, 8), "float64"), TensorSpec((2, 1), "bool"), TensorSpec((2, 8), "int64"))
        layer = sleepy(Masked(), forward_s=0.0, backward_s=0.02)
        compute_s, _ = StandbyProbe(layer, LayerInput(specs, is_tuple=True), 0.02, CPU).run()
        assert compute_s >= 0.02
        hidden, mask, positions = seen[0]
        assert hidden.dtype == torch.float64
        assert hidden.std() > 0
        assert [tensor.requires_grad for tensor in seen[0]] == [True, False, False]
        assert mask.all()
        assert positions.eq(0).all()

    def test_dropout_draws_do_not_reach_the_caller(self) -> None:
        probe = StandbyProbe(nn.Dropout(0.5), one_tensor(64), layer_s=0.01, device=CPU)
        torch.manual_seed(5)
        expected = torch.randn(4)
        torch.manual_seed(5)
        probe.run()
        assert torch.equal(torch.randn(4), expected)


class TestBuildSpare:
    def test_a_spec_is_built_and_a_module_copied(self) -> None:
        built = build_spare(LayerSpec(nn.Linear, 3, 5), CPU)
        assert isinstance(built, nn.Linear)
        assert built.weight.shape == (5, 3)
        own = nn.Linear(3, 5).eval()
        copied = build_spare(own, CPU)
        assert torch.equal(copied.weight, own.weight)
        assert copied.weight is not own.weight
        assert copied.training

    def test_a_module_that_left_this_rank(self) -> None:
        own = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        for slot in tensor_slots(own).values():
            slot.release()
        spare = build_spare(own, CPU)
        tensors = [*spare.parameters(), *spare.buffers()]
        assert len(tensors) == 7
        assert not any(tensor.is_meta for tensor in tensors)
        assert all(parameter.requires_grad and parameter.std() > 0 for parameter in spare.parameters())
        assert spare(torch.randn(4, 3)).isfinite().all()
        assert all(tensor.is_meta for tensor in [*own.parameters(), *own.buffers()])


class Slow(nn.Module):
    """Takes ``device_s[0]``, the current speed of a device."""

    def __init__(self, device_s: list[float]) -> None:
        super().__init__()
        self.device_s = device_s
        self.num_calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.device_s[0])
        return inputs


class Failing(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        raise ValueError("needs its neighbours")


def candidate(layer: int, spec: Any, layer_s: float, inputs: LayerInput | None) -> ProbeCandidate:
    kind = LayerClass(f"kind {layer}", inputs=inputs)
    return ProbeCandidate(layer, spec, kind, layer_s)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What DeepSpeed's logger, which passes nothing on to its parents, says."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


class TestStandbyProber:
    def test_the_costliest_layer_that_can_run(self) -> None:
        known = one_tensor(2, 8)
        layers = [
            candidate(0, LayerSpec(nn.Linear, 8, 8), 0.01, known),
            candidate(1, nn.Linear(8, 8), 0.03, known),
            candidate(2, TiedLayerSpec("key", nn.Linear, 8, 8), 0.9, known),
            candidate(3, torch.tanh, 0.9, known),
            candidate(4, LayerSpec(nn.Linear, 8, 8), 0.9, None),
        ]
        emulated: dict[int, nn.Module] = {}
        prober = StandbyProber(layers, 1, CPU, emulated.update)
        compute_s, expected_s = prober.begin_step(1.0)
        assert compute_s > 0
        assert expected_s == 0.03
        assert list(emulated) == [1]
        assert StandbyProber(layers[2:], 1, CPU).begin_step(1.0) == (0.0, 0.0)

    def test_building_draws_no_number_of_the_caller(self) -> None:
        rng_state = torch.get_rng_state()
        prober = StandbyProber([candidate(0, LayerSpec(nn.Linear, 8, 8), 1.0, one_tensor(2, 8))], 1, CPU)
        assert prober.begin_step(1.0)[0] > 0
        assert torch.equal(torch.get_rng_state(), rng_state)

    @pytest.mark.parametrize("spec", [LayerSpec(Failing), LayerSpec(nn.Linear, "8", 8), nn.Linear(3, 8)])
    def test_a_layer_that_fails_gives_way_to_the_next(self, spec: Any, warnings: list[str]) -> None:
        known = one_tensor(2, 8)
        bad, good = candidate(4, spec, 0.9, known), candidate(0, nn.Linear(8, 8), 0.01, known)
        alike = ProbeCandidate(5, spec, bad.kind, 0.8)
        prober = StandbyProber([good, bad, alike], 1, CPU)
        assert prober.begin_step(1.0) == (0.0, 0.0)
        assert [prober.begin_step(1.0)[1] for _ in range(3)] == [0.01] * 3
        assert len(warnings) == 1
        assert "layer 4 (kind 4)" in warnings[0]
        assert "Error: " in warnings[0]

    def test_a_long_probe_waits_and_returns_to_every_step_when_short(self) -> None:
        device_s = [0.3]
        prober = StandbyProber([candidate(0, LayerSpec(Slow, device_s), 0.01, one_tensor(2))], 1, CPU)
        step_s = 4.0  # A probe of 0.3 s and the like is free.
        assert [prober.begin_step(step_s)[1] > 0 for _ in range(3)] == [True] * 3
        # Longer than half a step of 0.4 s, the last probe delays the next by 10 * 0.3 / 0.4 steps.
        ran = [prober.begin_step(0.4)[1] > 0 for _ in range(40)]
        first = ran.index(True)
        assert 7 <= first <= 30  # Not the 0th: at least ceil(7.5) steps, more on a busy machine.
        device_s[0] = 0.0
        next_runs = [prober.begin_step(0.4)[1] > 0 for _ in range(60)]
        first = next_runs.index(True)
        assert all(next_runs[first:])

    def test_interval(self) -> None:
        prober = StandbyProber([candidate(0, nn.Linear(8, 8), 0.01, one_tensor(2, 8))], 3, CPU)
        assert [prober.begin_step(9.0)[1] > 0 for _ in range(7)] == [True, False, False] * 2 + [True]

    def test_a_new_spare_after_a_switch(self) -> None:
        emulated: list[nn.Module] = []
        prober = StandbyProber(
            [candidate(0, LayerSpec(nn.Linear, 8, 8), 0.01, one_tensor(2, 8))],
            5,
            CPU,
            lambda layers: emulated.extend(layers.values()),
        )
        prober.begin_step(1.0)
        prober.drop()
        assert prober.begin_step(1.0)[1] > 0
        assert emulated[0] is not emulated[1]


@pytest.mark.parametrize(
    ("probe_s", "step_s", "interval_steps", "expected"),
    [
        (0.0, 0.0, 1, 1),
        (0.5, 1.0, 1, 1),
        (0.6, 1.0, 1, 6),
        (3.0, 1.0, 1, 30),
        (0.61, 1.0, 1, 7),
        (0.6, 1.0, 20, 20),
        (0.1, 1.0, 4, 4),
    ],
)
def test_steps_to_wait(probe_s: float, step_s: float, interval_steps: int, expected: int) -> None:
    assert steps_to_wait(probe_s, step_s, interval_steps) == expected
