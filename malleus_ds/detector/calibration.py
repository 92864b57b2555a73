"""From the first steps' measurements on all ranks to the healthy cost and memory of each layer."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from malleus_ds.model_profile import LayerProfile, ModelProfile

# Adam with an fp32 master: the gradient is as large as the parameter, and so is each moment.
_STATE_COPIES = 2
_OPTIMIZER_COPIES = 2


class CalibrationError(ValueError):
    """Measurements from which no model profile can be made."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type name of a tensor, e.g. ``(1, 128, 64)`` and ``"float32"``."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What a layer takes for one micro-batch: one tensor, or a tuple of tensors."""

    tensors: tuple[TensorSpec, ...]
    is_tuple: bool


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Equal for layers that do the same work.

    name: of the type or function; function_layer: the first layer that runs the same function, as
    two functions may have one name (None: the module itself is called); inputs: None if unknown.
    """

    name: str
    function_layer: int | None = None
    parameter_shapes: tuple[tuple[int, ...], ...] = ()
    inputs: LayerInput | None = None


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """One layer on one rank.

    total_s: forward and backward of all its micro-batches together; inputs: of one micro-batch, None
    when they are not tensors; input_bytes, output_bytes: of their tensors; kept_bytes: what the backward
    of one micro-batch needs, with the input and without the output and the parameters.
    """

    num_micro_batches: int
    total_s: float
    inputs: LayerInput | None = None
    input_bytes: int = 0
    output_bytes: int = 0
    kept_bytes: int = 0

    def at_largest_degree(self, relative_time: float, part: float) -> LayerMeasurement:
        """What it would be at the job's largest TP degree, from that at this rank's.

        relative_time: ``rho`` of this rank's degree; part: its degree / the largest. Taken as cut is all that
        is kept but the input.
        """
        cut_bytes = max(self.kept_bytes - self.input_bytes, 0)
        return replace(
            self,
            total_s=self.total_s / relative_time,
            kept_bytes=self.kept_bytes - cut_bytes + round(cut_bytes * part),
        )


def calibrate(
    measurements: Sequence[Mapping[int, LayerMeasurement]],
    layer_classes: Sequence[LayerClass],
    parameter_bytes: Sequence[int],
    loss_s: float = 0.0,
) -> ModelProfile:
    """The healthy cost of every layer.

    measurements: one mapping from layer index to its measurement per rank; layer_classes,
    parameter_bytes: one per layer; loss_s: of the loss per micro-batch. It counts for the last layer.

    All layers of a class cost the same: the median, over the faster half of the ranks that hold
    the class, of the rank's mean time. So slow devices do not raise the cost while half of the
    ranks are healthy, and a single lucky measurement does not lower it.

    ``activation_bytes`` is what a layer keeps (the most on any rank). An output is the next layer's
    input and counts there, so each tensor between two layers counts once in a stage; the last layer's
    output counts for that layer. What the loss itself keeps is left out.

    Layers that were not measured cost 0 if they have no parameters; otherwise `CalibrationError`.
    """
    if len(layer_classes) != len(parameter_bytes):
        raise CalibrationError(
            f"layer_classes has {len(layer_classes)} entries and parameter_bytes {len(parameter_bytes)}: "
            f"give one of each per layer"
        )
    costs_s = _class_costs_s(measurements, layer_classes)
    by_layer = _by_layer(measurements)
    layers = []
    for layer, (kind, size_bytes) in enumerate(zip(layer_classes, parameter_bytes, strict=True)):
        if kind not in costs_s and size_bytes > 0:
            raise CalibrationError(
                f"layer {layer} ({kind.name}) has {size_bytes} bytes of parameters, but no rank measured it: "
                f"calibrate in a step in which every layer runs"
            )
        layers.append(
            LayerProfile(
                name=kind.name,
                time_s=costs_s.get(kind, 0.0),
                state_bytes=_STATE_COPIES * size_bytes,
                optimizer_bytes=_OPTIMIZER_COPIES * size_bytes,
                activation_bytes=max((found.kept_bytes for found in by_layer[layer]), default=0),
            )
        )
    if layers:
        output_bytes = max((found.output_bytes for found in by_layer[len(layers) - 1]), default=0)
        layers[-1] = replace(
            layers[-1],
            time_s=layers[-1].time_s + loss_s,
            activation_bytes=layers[-1].activation_bytes + output_bytes,
        )
    inputs_bytes = [found.input_bytes for layer in range(1, len(layers)) for found in by_layer[layer]]
    return ModelProfile(tuple(layers), message_bytes=max(inputs_bytes, default=0))


def split_overhead(overheads_s: Sequence[float], loss_overheads_s: Sequence[float]) -> tuple[float, float]:
    """``(overhead_s, loss_s)`` from what a micro-batch costs a rank outside of its layers.

    overheads_s: of ranks without the loss, loss_overheads_s: of last stages. The typical overhead is
    the engine's own; what last stages take on top is the loss. When all stages are last ones, these
    cannot be told apart: all of it is overhead.
    """
    if not overheads_s:
        return max(statistics.median(loss_overheads_s or [0.0]), 0.0), 0.0
    overhead_s = max(statistics.median(overheads_s), 0.0)
    return overhead_s, max(statistics.median(loss_overheads_s or [0.0]) - overhead_s, 0.0)


def _class_costs_s(
    measurements: Sequence[Mapping[int, LayerMeasurement]], layer_classes: Sequence[LayerClass]
) -> dict[LayerClass, float]:
    means_s: defaultdict[LayerClass, list[float]] = defaultdict(list)
    for measurement in measurements:
        by_class: defaultdict[LayerClass, list[LayerMeasurement]] = defaultdict(list)
        for layer, found in measurement.items():
            if not 0 <= layer < len(layer_classes):
                raise CalibrationError(f"layer {layer} was measured; the model has {len(layer_classes)}")
            if found.num_micro_batches > 0:
                by_class[layer_classes[layer]].append(found)
        for kind, alike in by_class.items():
            num_micro_batches = sum(found.num_micro_batches for found in alike)
            means_s[kind].append(sum(found.total_s for found in alike) / num_micro_batches)
    return {
        kind: statistics.median(sorted(values)[: math.ceil(len(values) / 2)])
        for kind, values in means_s.items()
    }


def _by_layer(
    measurements: Sequence[Mapping[int, LayerMeasurement]],
) -> defaultdict[int, list[LayerMeasurement]]:
    result: defaultdict[int, list[LayerMeasurement]] = defaultdict(list)
    for measurement in measurements:
        for layer, found in measurement.items():
            result[layer].append(found)
    return result
