"""Measures a standby rank, which holds no layer, by running a spare one."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
from deepspeed.utils import logger
from torch import Tensor, nn

from malleus_ds.detector.calibration import LayerClass, LayerInput, TensorSpec
from malleus_ds.detector.clock import make_clock
from malleus_ds.detector.saved_bytes import tensors_of
from malleus_ds.zero.binding import tensor_slots

Emulate = Callable[[dict[int, nn.Module]], None]

# Of a spare layer whose tensors have no values; positive, as variances must be.
_LARGEST_SPARE_VALUE = 0.02


class StandbyProbe:
    """Times forward and backward of a spare layer of the model on random input.

    layer: on ``device``, not part of the trained parameters; inputs: of one micro-batch; layer_s:
    the layer's healthy time from the model profile.
    """

    def __init__(self, layer: nn.Module, inputs: LayerInput, layer_s: float, device: torch.device) -> None:
        self._layer = layer
        self._inputs = inputs
        self._layer_s = layer_s
        self._device = device
        self._clock = make_clock(device)

    def run(self) -> tuple[float, float]:
        """``(compute_s, expected_s)`` of one micro-batch; the RNG state is kept."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            tensors = tuple(map(self._random, self._inputs.tensors))
            layer_input = tensors if self._inputs.is_tuple else tensors[0]
            self._clock.start()
            outputs = [tensor for tensor in tensors_of(self._layer(layer_input)) if tensor.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            self._clock.stop()
        self._layer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # A standby rank has no work that this delays.
        return self._clock.take_s(), self._layer_s

    def _random(self, spec: TensorSpec) -> Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            return torch.randn(spec.shape, dtype=dtype, device=self._device, requires_grad=True)
        if dtype == torch.bool:  # A mask that lets all through.
            return torch.ones(spec.shape, dtype=dtype, device=self._device)
        # Index 0 is legal in every vocabulary.
        return torch.zeros(spec.shape, dtype=dtype, device=self._device)


@dataclass(frozen=True, slots=True)
class ProbeCandidate:
    """A layer of the model. spec: as the user gave it; layer_s: its healthy time, without the loss."""

    layer: int
    spec: Any
    kind: LayerClass
    layer_s: float


class StandbyProber:
    """Decides when a standby rank is probed, and with which layer: the costliest that runs here.

    Layers of own modules with known inputs can run: tied ones and functions are left out. A layer that
    fails to build or to run is reported once and never tried again, nor are others of its class.

    A standby rank idles while the others work, so a probe of up to half a step is free and runs every
    ``interval_steps``. A longer one delays everyone: the next waits `steps_to_wait`.
    """

    def __init__(
        self,
        layers: Iterable[ProbeCandidate],
        interval_steps: int,
        device: torch.device,
        emulate: Emulate | None = None,
    ) -> None:
        """emulate: makes layers, by index, run as on this rank's emulated device."""
        self._candidates = [candidate for candidate in layers if _can_run(candidate)]
        self._interval_steps = interval_steps
        self._device = device
        self._emulate = emulate
        self._probe: StandbyProbe | None = None
        self._probe_s = 0.0
        self._num_waited_steps = interval_steps

    def begin_step(self, step_s: float) -> tuple[float, float]:
        """``(compute_s, expected_s)`` of a probe, ``(0, 0)`` without one. step_s: of the last step."""
        self._num_waited_steps += 1
        if self._num_waited_steps < steps_to_wait(self._probe_s, step_s, self._interval_steps):
            return 0.0, 0.0
        self._num_waited_steps = 0
        chosen = max(self._candidates, key=lambda candidate: candidate.layer_s, default=None)
        if chosen is None:
            return 0.0, 0.0
        try:
            if self._probe is None:
                self._probe = self._warm_probe(chosen)
            started_s = time.perf_counter()
            result = self._probe.run()
            self._probe_s = time.perf_counter() - started_s
        except Exception as error:  # Whatever a layer raises that runs apart from the others.
            logger.warning(
                f"standby probe: layer {chosen.layer} ({chosen.kind.name}) does not run alone and is not "
                f"tried again: {type(error).__name__}: {error}"
            )
            self._candidates = [other for other in self._candidates if other.kind != chosen.kind]
            self.drop()
            return 0.0, 0.0
        return result

    def drop(self) -> None:
        """Free the spare layer; the next probe builds another."""
        self._probe = None
        self._probe_s = 0.0
        self._num_waited_steps = self._interval_steps

    def _warm_probe(self, chosen: ProbeCandidate) -> StandbyProbe:
        assert chosen.kind.inputs is not None
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            spare = build_spare(chosen.spec, self._device, chosen.kind.parameter_dtype)
        if self._emulate is not None:
            self._emulate({chosen.layer: spare})
        probe = StandbyProbe(spare, chosen.kind.inputs, chosen.layer_s, self._device)
        probe.run()  # The first run loads libraries and chooses kernels.
        return probe


def steps_to_wait(probe_s: float, step_s: float, interval_steps: int) -> int:
    """Steps from one probe to the next: ``interval_steps`` after one of up to half a step, which is
    free, else at least ``ceil(10 * probe_s / step_s)``: so it takes a tenth of the time at most."""
    if probe_s <= step_s / 2:
        return interval_steps
    return max(interval_steps, math.ceil(10 * probe_s / step_s))


def build_spare(
    spec: LayerSpec | nn.Module, device: torch.device, parameter_dtype: str | None = None
) -> nn.Module:
    """A layer of the model on ``device``, of its own: built, or copied from the user's module.

    A module that has been on this rank before has tensors without memory; the copy gets values.
    parameter_dtype: what the layer has in training, where DeepSpeed has cast it; None: as it is built.
    """
    module: nn.Module = spec.build() if isinstance(spec, LayerSpec) else copy.deepcopy(spec)
    for slot in tensor_slots(module).values():
        if slot.tensor.is_meta:
            values = torch.zeros_like(slot.tensor, device=device, requires_grad=False)
            slot.point_at(
                values.uniform_(0.0, _LARGEST_SPARE_VALUE) if values.is_floating_point() else values
            )
    if parameter_dtype is not None:
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(getattr(torch, parameter_dtype))
    return module.to(device).train()


def _can_run(candidate: ProbeCandidate) -> bool:
    is_own_module = isinstance(candidate.spec, LayerSpec | nn.Module)
    is_tied = isinstance(candidate.spec, TiedLayerSpec)
    return is_own_module and not is_tied and candidate.kind.inputs is not None and candidate.layer_s > 0
