"""Forward and backward time of each layer of a rank, and its memory, in the calibration steps."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from malleus_ds.detector.calibration import LayerInput, LayerMeasurement, TensorSpec
from malleus_ds.detector.saved_bytes import memory_bytes, run_and_count, tensors_of
from malleus_ds.detector.waits import CollectiveWaits


class LayerTimer:
    """Runs the layers of a rank and times them. The layers of one rank form a chain, by index.

    device: where they compute. On CUDA every reading synchronises the device: for the calibration
    steps only. constants: parameters and buffers, which are not memory of a micro-batch.
    checkpointed: layers under activation checkpointing, of which only the input stays. waits: time in TP
    collectives, which is left out.

    The gradient at the boundary of two layers is complete when the backward of the one is done and that
    of the other starts, so hooks on the tensors there give the backward time of each layer, in
    whatever order the schedule runs the micro-batches. The engine bounds both ends of each
    backward with `mark_backward_start` and `mark_backward_end`; what comes before the gradient of the
    last layer's output (the loss, the engine's own work) belongs to no layer. A recomputed forward
    (activation checkpointing) counts as backward time of its layer.
    """

    def __init__(
        self,
        device: torch.device,
        constants: Iterable[Tensor] = (),
        checkpointed: Container[int] = (),
        waits: CollectiveWaits | None = None,
    ) -> None:
        self._waits = waits or CollectiveWaits()
        self._device = device
        self._constants = list(constants)
        self._checkpointed = checkpointed
        self._forwards_s: defaultdict[int, list[float]] = defaultdict(list)
        self._backwards_s: defaultdict[int, list[float]] = defaultdict(list)
        self._parts_s: defaultdict[int, float] = defaultdict(float)  # of the backward under way
        self._traffic: dict[int, _Traffic] = {}
        self._kept_bytes: dict[int, int] = {}
        self._backward_mark_s: float | None = None
        self._boundary: int | None = None  # the lowest one that this backward has reached

    def run(self, layer: int, function: Callable[[Any], Any], inputs: Any) -> Any:
        """``function(inputs)``, timed as a forward pass of ``layer`` in training."""
        # A pre-hook of the module may replace the input by the output of an autograd node whose
        # backward belongs to this layer, so the original input is hooked.
        self._hook(inputs, boundary=layer)
        started_s = self._now_s()
        try:
            outputs = self._call(layer, function, inputs)
        finally:  # Checkpointing ends a recomputation by an exception once it has what it needs.
            self._add_forward(layer, self._now_s() - started_s)
        self._hook(outputs, boundary=layer + 1)
        if self._backward_mark_s is None:
            self._traffic[layer] = _Traffic(
                describe(inputs), memory_bytes(tensors_of(inputs)), memory_bytes(tensors_of(outputs))
            )
        return outputs

    def mark_backward_start(self) -> None:
        """Call before each backward of a micro-batch."""
        self._boundary = None
        self._backward_mark_s = self._now_s()

    def mark_backward_end(self) -> None:
        """Call after each backward of a micro-batch. Raises RuntimeError without its start."""
        if self._backward_mark_s is None:
            raise RuntimeError("mark_backward_end without mark_backward_start")
        # A layer without differentiable input (an embedding) ends here; after others, nothing runs.
        if self._boundary is not None and self._boundary - 1 in self._forwards_s:
            self._pass_boundary(self._boundary - 1)
        for layer, layer_s in self._parts_s.items():
            self._backwards_s[layer].append(layer_s)
        self._parts_s.clear()
        self._backward_mark_s = None

    @property
    def elapsed_s(self) -> float:
        """Time spent in all layers since the last take, as it was: outliers count."""
        parts = itertools.chain(self._forwards_s.values(), self._backwards_s.values())
        return sum(map(sum, parts))

    def take(self) -> dict[int, LayerMeasurement]:
        """What was measured since the last take, for the layers that ran.

        The median micro-batch stands for all, so that what happens once does not count: the first
        calls load libraries and choose kernels. Kept memory is measured in a layer's first call ever.
        """
        result = {
            layer: LayerMeasurement(
                num_micro_batches=len(forwards_s),
                total_s=len(forwards_s)
                * (statistics.median(forwards_s) + statistics.median(self._backwards_s[layer] or [0.0])),
                inputs=self._traffic[layer].inputs,
                input_bytes=self._traffic[layer].input_bytes,
                output_bytes=self._traffic[layer].output_bytes,
                kept_bytes=self._kept_bytes.get(layer, self._traffic[layer].input_bytes),
            )
            for layer, forwards_s in self._forwards_s.items()
        }
        self._forwards_s.clear()
        self._backwards_s.clear()
        return result

    def _call(self, layer: int, function: Callable[[Any], Any], inputs: Any) -> Any:
        is_counted = layer in self._kept_bytes or layer in self._checkpointed
        # Under checkpointing the hooks of the count would take the place of the recomputation's own.
        if is_counted or not torch.is_grad_enabled() or self._backward_mark_s is not None:
            return function(inputs)
        outputs, self._kept_bytes[layer] = run_and_count(function, inputs, self._constants)
        return outputs

    def _add_forward(self, layer: int, forward_s: float) -> None:
        if self._backward_mark_s is None:
            self._forwards_s[layer].append(forward_s)
        else:
            # Recomputed inside the backward of a layer, maybe of another one: not part of that.
            self._parts_s[layer] += forward_s
            self._backward_mark_s += forward_s

    def _hook(self, value: Any, boundary: int) -> None:
        def gradient_is_complete(gradient: Tensor) -> None:
            # A backward outside the marks (of a user's own) is not the engine's.
            if self._backward_mark_s is not None:
                self._pass_boundary(boundary)

        for tensor in tensors_of(value):
            if tensor.requires_grad:
                tensor.register_hook(gradient_is_complete)  # type: ignore[no-untyped-call]

    def _pass_boundary(self, boundary: int) -> None:
        """A gradient between the layers ``boundary - 1`` and ``boundary`` is complete: time so far was
        spent in the layer above the lowest boundary reached before, or, where that is this boundary
        with another tensor, still in the layer behind it."""
        assert self._backward_mark_s is not None
        now_s = self._now_s()
        if self._boundary is not None:
            # A layer that returns its input has one tensor at two boundaries: go down step by step.
            layer = self._boundary - 1 if boundary < self._boundary else boundary
            self._parts_s[min(layer, max(self._forwards_s))] += now_s - self._backward_mark_s
        self._boundary = boundary if self._boundary is None else min(boundary, self._boundary)
        self._backward_mark_s = now_s

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._waits.now_s()


@dataclass(frozen=True, slots=True)
class _Traffic:
    """What goes into a layer and comes out of it, for one micro-batch."""

    inputs: LayerInput | None
    input_bytes: int
    output_bytes: int


def describe(inputs: Any) -> LayerInput | None:
    """Shapes and types of a tensor or a tuple of tensors, which pipelines exchange; else None."""
    is_tuple = isinstance(inputs, tuple)
    tensors = inputs if is_tuple else (inputs,)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    specs = tuple(
        TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors
    )
    return LayerInput(specs, is_tuple)
