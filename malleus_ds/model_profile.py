"""What the planner and the detector know of a model: cost, memory and parameters per layer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer of the pipeline. All values are those at the largest TP degree, per device.

    name: its type; time_s: forward and backward of one micro-batch on a healthy device; state_bytes:
    parameters and gradients; optimizer_bytes: master weights and optimizer moments before sharding;
    activation_bytes: kept for the backward pass, per micro-batch in flight; activation_table: measured
    totals for 1, 2, ... micro-batches in flight, where they are not proportional (beyond the table its
    last difference repeats); gradient_bytes: reduced over the pipelines; optimizer_s: the optimizer's
    step before sharding.
    """

    name: str
    time_s: float
    state_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    activation_table: tuple[int, ...] = ()
    gradient_bytes: int = 0
    optimizer_s: float = 0.0

    def activations(self, in_flight: int) -> int:
        """Bytes of the activations of so many micro-batches in flight."""
        table = self.activation_table
        if not table:
            return self.activation_bytes * in_flight
        if in_flight <= len(table):
            return table[in_flight - 1] if in_flight else 0
        slope = table[-1] - (table[-2] if len(table) > 1 else 0)
        return table[-1] + slope * (in_flight - len(table))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LayerProfile:
        return cls(**{**data, "activation_table": tuple(data.get("activation_table", ()))})


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """All layers of a model, in order.

    message_bytes: one activation between two stages; rho: ``(degree, relative layer time)`` for each TP
    degree that may be used, 1.0 at the largest; device_bytes: memory that a device needs apart from its
    layers; tau: ``(micro-batch size, relative layer time)``, 1.0 for the size that was profiled (sizes
    that are not listed cannot be planned, except the profiled one).
    """

    layers: tuple[LayerProfile, ...]
    message_bytes: int = 0
    rho: tuple[tuple[int, float], ...] = ((1, 1.0),)
    device_bytes: int = 0
    tau: tuple[tuple[int, float], ...] = ()

    @property
    def layer_times_s(self) -> tuple[float, ...]:
        return tuple(layer.time_s for layer in self.layers)

    @property
    def max_degree(self) -> int:
        """The TP degree that the layers' values hold for."""
        return max(degree for degree, _ in self.rho)

    def relative_time(self, degree: int) -> float:
        """``rho(degree)``. Raises KeyError for a degree that was not profiled."""
        return dict(self.rho)[degree]

    def time_s(self, layers: tuple[int, int]) -> float:
        """Healthy time of one micro-batch over the layer range ``[start, stop)``, in seconds."""
        return sum(layer.time_s for layer in self.layers[layers[0] : layers[1]])

    def to_dict(self) -> dict[str, Any]:
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "message_bytes": self.message_bytes,
            "rho": [list(pair) for pair in self.rho],
            "device_bytes": self.device_bytes,
            "tau": [list(pair) for pair in self.tau],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelProfile:
        return cls(
            layers=tuple(LayerProfile.from_dict(layer) for layer in data["layers"]),
            message_bytes=int(data["message_bytes"]),
            rho=tuple((int(degree), float(factor)) for degree, factor in data.get("rho", [[1, 1.0]])),
            device_bytes=int(data.get("device_bytes", 0)),
            tau=tuple((int(size), float(factor)) for size, factor in data.get("tau", [])),
        )

    def to_json(self) -> str:
        return json.dumps(self.to_dict())
