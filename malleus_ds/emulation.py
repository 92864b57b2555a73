"""Emulated devices: a layer that really computes, and then waits until it took a given time.

Forward takes ``layer_ms * weight * rate`` and backward twice that. All works through module hooks
and identity nodes in the autograd graph, so it serves any engine, and values and gradients stay
the same bit by bit.

- The hooks sit next to the layer: hooks of others, as a timing hook, include the wait.
- A forward without gradient (evaluation, activation checkpointing) only has the forward wait.
- The backward time runs from the gradient of the output to that of the input. A layer without a
  differentiable input (an embedding) waits its whole backward time before it computes.
- Layers pass each other tensors, or tuples or lists of them, as in DeepSpeed's pipelines.
- Layers are hooked as modules: a tied head whose ``forward_fn`` uses the weight without calling
  the module takes no emulated time.
- The wait blocks the host. It emulates CPU devices, and a GPU only where its own time is nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from malleus_ds.config import ConfigError, EmulationConfig
from malleus_ds.detector.waits import CollectiveWaits

BACKWARD_TO_FORWARD = 2.0
"""A backward pass computes two products where the forward pass computes one."""


def layers_of(module: Any) -> dict[int, nn.Module]:
    """The modules of a `PipelineModule`'s local layers by layer index; plain functions left out.

    A tied layer with a ``forward_fn`` gives the module that it shares.
    """
    modules: dict[int, nn.Module] = {}
    for layer, function in enumerate(module.forward_funcs, start=module._local_start):
        callee = function.args[0] if isinstance(function, partial) and function.args else function
        if isinstance(callee, nn.Module):
            modules[layer] = callee
    return modules


class EmulatedDevice:
    """The device of one rank, by the script of an `EmulationConfig`.

    num_calls, num_overruns: waits so far, and those that came too late because the computation
    alone took longer. Many overruns mean that ``layer_ms`` is too small for this machine.
    """

    def __init__(self, config: EmulationConfig, rank: int, waits: CollectiveWaits | None = None) -> None:
        """waits: time in TP collectives, which is not the device's."""
        self.config = config
        self.rank = rank
        self._waits = waits or CollectiveWaits()
        self.num_calls = 0
        self.num_overruns = 0
        self._debt_s = 0.0
        self._in_calls_s = 0.0
        self._handles: list[RemovableHandle] = []
        self.set_step(0)

    @property
    def rate(self) -> float:
        """Straggling rate in the current step: the latest event so far of this rank, else 1.0."""
        return self._rate

    def set_step(self, step: int) -> None:
        """Start ``step``: its rate, and its noise, which depends on (seed, rank, step) alone."""
        events = [event for event in self.config.events if event.rank == self.rank and event.step <= step]
        self._rate = sorted(events, key=lambda event: event.step)[-1].rate if events else 1.0
        self._noise = np.random.default_rng((self.config.seed % 2**64, self.rank, step))
        self._step_factor = self._noisy(self.config.step_jitter)

    def duration_s(self, weight: float) -> float:
        """Draw the forward time of the next call of a layer with factor ``weight``."""
        healthy_s = self.config.layer_ms * 1e-3 * weight
        return healthy_s * self._rate * self._step_factor * self._noisy(self.config.jitter)

    def attach(self, layers: Mapping[int, nn.Module], relative_time: float = 1.0) -> None:
        """Emulate ``layers`` (by layer index) and no others, each ``relative_time`` times as long.

        A module that several layers share has the weight of the first of them. Raises
        `ConfigError` when ``layer_weights`` ends before the last layer.
        """
        weights = {layer: relative_time * self._weight(layer, module) for layer, module in layers.items()}
        self.detach()
        hooked: set[nn.Module] = set()
        for layer, module in layers.items():
            if weights[layer] > 0 and module not in hooked:
                self._hook(module, weights[layer])
            hooked.add(module)

    def detach(self) -> None:
        """Emulate no layer any more; backward passes under way keep their waits."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def now_s(self) -> float:
        """The device's clock: leaves out the time of ended layer calls, as one may hold others, and that of
        TP collectives.

        Non-reentrant activation checkpointing recomputes layers in the backward of a later one.
        """
        return self._waits.now_s() - self._in_calls_s

    def wait(self, start_s: float, duration_s: float) -> None:
        """Return ``duration_s`` after ``start_s`` (of `now_s`), exact in the long run.

        What a wait is too long by is taken off the next ones, up to the whole of each.
        """
        elapsed_s = self.now_s() - start_s
        self.num_calls += 1
        self.num_overruns += elapsed_s > duration_s
        remaining_s = duration_s - self._debt_s - elapsed_s
        if remaining_s > 0:
            time.sleep(remaining_s)
        taken_s = self.now_s() - start_s
        self._in_calls_s += taken_s
        self._debt_s = min(self._debt_s + taken_s - duration_s, duration_s)

    def _noisy(self, half_width: float) -> float:
        return 1.0 + half_width * self._noise.uniform(-1.0, 1.0)

    def _weight(self, layer: int, module: nn.Module) -> float:
        weights = self.config.layer_weights
        if weights is None:
            return 0.0 if next(module.parameters(), None) is None else 1.0
        if layer >= len(weights):
            raise ConfigError(
                f"malleus.emulation.layer_weights: {len(weights)} weights, but there is a layer {layer}; "
                f"give one weight per layer of the model, or leave the key out"
            )
        return weights[layer]

    def _hook(self, module: nn.Module, weight: float) -> None:
        call = _LayerCall(self, 0.0)

        def before_forward(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
            # Each call has a state of its own: 1F1B keeps several micro-batches in flight.
            nonlocal call
            call = _LayerCall(self, self.duration_s(weight))
            if torch.is_grad_enabled():
                call.has_input_node = any(tensor.requires_grad for tensor in _tensors(inputs))
                return _through_node(call.end_backward, inputs)
            return inputs

        def after_forward(_: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
            self.wait(call.start_s, call.duration_s)
            return _through_node(call.begin_backward, outputs) if torch.is_grad_enabled() else outputs

        self._handles += [
            module.register_forward_pre_hook(before_forward),
            module.register_forward_hook(after_forward, prepend=True),
        ]


class _LayerCall:
    """One forward of one layer, and its backward."""

    def __init__(self, device: EmulatedDevice, duration_s: float) -> None:
        self.device = device
        self.duration_s = duration_s
        self.start_s = device.now_s()
        self.has_input_node = False
        self._backward_start_s: float | None = None
        self._has_waited = False

    def begin_backward(self) -> None:
        """The gradient of the output is there; with several outputs, maybe in several passes."""
        if self._backward_start_s is None:
            self._backward_start_s = self.device.now_s()
        if not self.has_input_node:
            self.end_backward()

    def end_backward(self) -> None:
        """The gradient of the input is there. Waits in the first pass that comes here."""
        if self._backward_start_s is None or self._has_waited:
            return
        self._has_waited = True
        self.device.wait(self._backward_start_s, BACKWARD_TO_FORWARD * self.duration_s)


class _Identity(torch.autograd.Function):
    """Tensors unchanged; calls ``on_backward()`` when their gradients come by."""

    @staticmethod
    def forward(
        ctx: Any, on_backward: Callable[[], None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.on_backward = on_backward
        ctx.set_materialize_grads(False)
        # Not a view of the input, which a following layer could not change in place.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.on_backward()
        return (None, *gradients)


def _through_node(on_backward: Callable[[], None], value: Any) -> Any:
    """``value`` with all its tensors that require gradients passed through one `_Identity`."""
    tensors = [tensor for tensor in _tensors(value) if tensor.requires_grad]
    if not tensors:
        return value
    return _replace(value, iter(_Identity.apply(on_backward, *tensors)))  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested tuples and lists, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _replace(value: Any, replacements: Iterator[torch.Tensor]) -> Any:
    """``value`` with its tensors that require gradients replaced, in the order of `_tensors`."""
    if isinstance(value, torch.Tensor):
        return next(replacements) if value.requires_grad else value
    if isinstance(value, tuple | list):
        items = [_replace(item, replacements) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
