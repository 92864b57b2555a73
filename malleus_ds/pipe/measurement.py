"""What one rank measures of itself: the healthy cost of its layers first, then each step's compute."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec
from torch import nn

from malleus_ds.config import MalleusConfig
from malleus_ds.detector.calibration import (
    LayerClass,
    LayerInput,
    LayerMeasurement,
    calibrate,
    split_overhead,
)
from malleus_ds.detector.clock import ComputeClock
from malleus_ds.detector.control_plane import ControlPlane
from malleus_ds.detector.layer_timer import LayerTimer
from malleus_ds.detector.probe import Emulate, ProbeCandidate, StandbyProber
from malleus_ds.model_profile import ModelProfile
from malleus_ds.pipe.module import MalleusPipelineModule
from malleus_ds.tensor_parallel.cuts import whole_shapes


class Measurement:
    """Calibrates in the first steps, then gives ``(compute_s, expected_s)`` of each step.

    Step 0 warms up and measures what each layer keeps in memory; the next ``calibration_steps`` time
    each layer; then all ranks exchange what they found and agree on one model profile, and on what a
    pass over a micro-batch costs outside of layers and loss (the engine's own work). This is taken off
    every measurement: it would make the rates of ranks with few layers too high and those of slow
    ranks too low. The loss counts for the last layer, as it is compute of the device that runs it. A
    standby rank runs a spare layer instead.
    """

    def __init__(
        self,
        module: MalleusPipelineModule,
        clock: ComputeClock,
        plane: ControlPlane,
        config: MalleusConfig,
        device: torch.device,
        emulate: Emulate | None,
    ) -> None:
        self._module = module
        self._clock = clock
        self._plane = plane
        self._config = config.detector
        degrees = config.tensor_parallel.degrees(module.num_slices)
        self._rho = tuple(sorted(degrees.items()))
        self._device = device
        self._emulate = emulate
        self._prober: StandbyProber | None = None
        self._probed = (0.0, 0.0)
        self._num_steps = 0
        self._step_began_s = time.perf_counter()
        self._passes = _Passes()
        self._overhead_s = 0.0  # per micro-batch
        self.profile: ModelProfile | None = None

    def begin_step(self) -> None:
        """Before the first micro-batch of a step."""
        now_s = time.perf_counter()
        last_step_s, self._step_began_s = now_s - self._step_began_s, now_s
        if self.profile is None and self._timer is None:
            constants = [*self._module.parameters(), *self._module.buffers()]
            self._module.layer_timer = LayerTimer(
                self._device, constants, checkpointed_layers(self._module), self._module.waits
            )
        if self._is_standby and self._prober is not None:
            self._probed = self._prober.begin_step(last_step_s)

    def before_backward(self) -> None:
        if self._timer is not None:
            self._timer.mark_backward_start()

    def after_backward(self) -> None:
        if self._timer is not None:
            self._timer.mark_backward_end()

    def finish_step(self, num_micro_batches: int) -> tuple[float, float]:
        """Compute and expected seconds of the step, ``(0, 0)`` when nothing was measured.

        Collective at the end of the last calibration step, where it raises `CalibrationError` on all
        ranks when a layer was not measured.
        """
        compute_s = self._clock.take_s()
        self._num_steps += 1
        if self._timer is not None:
            if self._num_steps == 1:
                self._timer.take()  # The first step's times are not typical.
            else:
                self._passes = self._passes.plus(compute_s, num_micro_batches)
            if self._num_steps > self._config.calibration_steps:
                self._calibrate(self._timer)
            return 0.0, 0.0
        assert self.profile is not None
        if self._is_standby:
            probed, self._probed = self._probed, (0.0, 0.0)
            return probed
        layers = self._module.plan.layers_of(self._module.global_rank)
        overhead_s = self._overhead_s * num_micro_batches
        expected_s = self.profile.time_s(layers) * self._relative_time * num_micro_batches
        return max(compute_s - overhead_s, 0.0), expected_s

    def moved(self) -> None:
        """The rank has other layers now: what was measured of single layers is void."""
        self._probed = (0.0, 0.0)
        if self._prober is not None:
            self._prober.drop()
        if self.profile is None:
            self._module.layer_timer = None
            self._num_steps = 0
            self._passes = _Passes()

    @property
    def _timer(self) -> LayerTimer | None:
        return self._module.layer_timer

    @property
    def _is_standby(self) -> bool:
        return bool(self._module._grid.is_standby)

    @property
    def _relative_time(self) -> float:
        """``rho`` of this rank's TP degree."""
        return dict(self._rho)[self._module._grid.slice_parallel_size]

    def _calibrate(self, timer: LayerTimer) -> None:
        """Exchange the measurements of all ranks; every rank computes the same profile."""
        module = self._module
        own = self._note(timer)
        module.layer_timer = None
        notes: list[_RankNote] = [
            pickle.loads(payload) for payload in self._plane.all_gather_bytes(pickle.dumps(own))
        ]
        overheads_s = [
            [
                note.overhead_s
                for note in notes
                if note.is_last_stage == is_last and note.overhead_s is not None
            ]
            for is_last in (False, True)
        ]
        self._overhead_s, loss_s = split_overhead(*overheads_s)
        # Holders of a layer agree on its class and size; the lowest rank speaks.
        merged = {layer: entry for note in reversed(notes) for layer, entry in note.layers.items()}
        layers = [merged[layer] for layer in range(module._num_layers)]
        profile = calibrate(
            [
                {layer: entry.found for layer, entry in note.layers.items() if entry.found is not None}
                for note in notes
            ],
            [entry.kind for entry in layers],
            [entry.parameter_bytes for entry in layers],
            loss_s,
        )
        self.profile = replace(profile, rho=self._rho)
        self._prober = self._make_prober(self.profile, [entry.kind for entry in layers], loss_s)

    def _make_prober(
        self, profile: ModelProfile, kinds: Sequence[LayerClass], loss_s: float
    ) -> StandbyProber:
        times_s = list(profile.layer_times_s)
        times_s[-1] -= loss_s  # A probe runs the layer alone,
        times_s = [dict(self._rho)[1] * time_s for time_s in times_s]  # and whole.
        layers = zip(self._module._layer_specs, kinds, times_s, strict=True)
        candidates = [ProbeCandidate(index, *layer) for index, layer in enumerate(layers)]
        return StandbyProber(candidates, self._config.probe_interval_steps, self._device, self._emulate)

    def _note(self, timer: LayerTimer) -> _RankNote:
        module, passes = self._module, self._passes
        degree, max_degree = module._grid.slice_parallel_size, module.num_slices
        outside_s = passes.total_s - timer.elapsed_s
        found = timer.take()
        modules = module.local_layers()
        layers = {}
        for layer in range(*module.plan.layers_of(module.global_rank)):
            measured = found.get(layer)
            if measured is not None:
                measured = measured.at_largest_degree(self._relative_time, degree / max_degree)
            part = modules.get(layer)
            kind = layer_class(
                module._layer_specs, layer, part, None if measured is None else measured.inputs
            )
            # A tied module counts for each of its layers: on stages of their own, each has a copy.
            size_bytes = 0 if part is None else module.bytes_at_largest_degree(part)
            layers[layer] = _LayerNote(kind, size_bytes, measured)
        return _RankNote(
            layers, bool(module._grid.is_last_stage), outside_s / passes.count if passes.count else None
        )


@dataclass(frozen=True, slots=True)
class _Passes:
    """Time of this rank's passes over ``count`` micro-batches, layers and all else."""

    total_s: float = 0.0
    count: int = 0

    def plus(self, compute_s: float, num_micro_batches: int) -> _Passes:
        return _Passes(self.total_s + compute_s, self.count + num_micro_batches)


@dataclass(frozen=True, slots=True)
class _LayerNote:
    kind: LayerClass
    parameter_bytes: int
    found: LayerMeasurement | None


@dataclass(frozen=True, slots=True)
class _RankNote:
    """What a rank tells the others. overhead_s: per micro-batch, outside of layers; None: had none."""

    layers: dict[int, _LayerNote]
    is_last_stage: bool
    overhead_s: float | None


def layer_class(
    specs: Sequence[Any], layer: int, module: nn.Module | None, inputs: LayerInput | None
) -> LayerClass:
    """The class of a layer: type or function, shapes of parameters and shapes of inputs.

    specs: of all layers, the same on all ranks; module: the layer's, None for a plain function.
    """
    function = _function_of(specs[layer])
    name = "" if module is None else type(module).__name__
    if function is not None:
        qualified = [getattr(function, "__module__", None), getattr(function, "__qualname__", None)]
        function_name = ".".join(filter(None, qualified)) or type(function).__name__
        name = function_name if module is None else f"{function_name}({name})"
    return LayerClass(
        name=name,
        function_layer=None if function is None else [_function_of(spec) for spec in specs].index(function),
        parameter_shapes=() if module is None else whole_shapes(module),
        inputs=inputs,
    )


def checkpointed_layers(module: MalleusPipelineModule) -> frozenset[int]:
    """The local layers that run under activation checkpointing."""
    interval = module.activation_checkpoint_interval
    return frozenset(
        layer
        for index, layer in enumerate(range(*module.plan.layers_of(module.global_rank)))
        if interval > 0 and module.is_checkpointable_results[index // interval]
    )


def _function_of(spec: Any) -> Any:
    """What is called in place of a module: a plain function, or that of a tied layer; else None."""
    if isinstance(spec, LayerSpec):
        return getattr(spec, "forward_fn", None)
    return None if isinstance(spec, nn.Module) else spec
