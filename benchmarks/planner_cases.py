"""What the benchmark of the planner plans: the published situations, and random clusters of any size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from malleus_ds.files import load_model
from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.planner.types import PlanRequest

REPOSITORY = Path(__file__).resolve().parents[1]
_REFERENCE = REPOSITORY / "tests" / "cases" / "planner_reference.json"
_MIB = 2**20
NODE_SIZE = 8


@dataclass(frozen=True, slots=True)
class Situation:
    """A published model and situation, in units of one healthy layer's time.

    constants: the published numbers of the model; reference: those of the published plan.
    """

    name: str
    request: PlanRequest
    constants: Mapping[str, Any]
    reference: Mapping[str, Any]


def situations(time_limit_s: float) -> Iterator[Situation]:
    """All models in all situations, the healthy one first."""
    published = json.loads(_REFERENCE.read_text(encoding="utf-8"))
    for model, constants in published["models"].items():
        num_devices = constants["num_nodes"] * constants["devices_per_node"]
        for scenario, slow in published["scenarios"].items():
            request = PlanRequest(
                published_profile(constants),
                tuple(float(slow.get(str(rank), 1.0)) for rank in range(num_devices)),
                num_micro_batches=constants["num_micro_batches"],
                nodes=node_ranks(num_devices, constants["devices_per_node"]),
                memory_bytes=_bytes(constants["memory_bound_mib"] - constants["memory_gap_mib"]),
                time_limit_s=time_limit_s,
            )
            name = f"{model}/{scenario}"
            yield Situation(name, request, constants, published["reference"][name])


def published_profile(constants: Mapping[str, Any]) -> ModelProfile:
    """The published memory formula, whose terms do not depend on the number of pipelines."""
    table = tuple(_bytes(mib) for mib in reversed(constants["memory_k_mib"]))
    embedding_bytes = _bytes(constants["memory_embedding_mib"])
    num_layers = constants["num_layers"]
    degrees = [degree for degree in (8, 4, 2, 1) if degree <= constants["tp_max"]]
    return ModelProfile(
        layers=tuple(
            LayerProfile(
                "layer",
                time_s=1.0,
                state_bytes=embedding_bytes if index in (0, num_layers - 1) else 0,
                activation_table=table,
            )
            for index in range(num_layers)
        ),
        rho=tuple(zip(degrees, constants["rho"], strict=False)),
        device_bytes=_bytes(constants["memory_extra_mib"]),
    )


def published_plan(reference: Mapping[str, Any]) -> ParallelPlan:
    pipelines = []
    for pipeline in reference["pipelines"]:
        edges = list(accumulate((stage["layers"] for stage in pipeline["stages"]), initial=0))
        ranks = [tuple(stage["devices"]) for stage in pipeline["stages"]]
        pipelines.append(Pipeline(tuple(map(Stage, ranks, pairwise(edges))), pipeline["micro_batches"]))
    return ParallelPlan(tuple(pipelines), standby=tuple(reference["standby"]))


def published_step(plan: ParallelPlan, situation: Situation) -> float:
    """1F1B time with fill by the published formulas, from the plan alone.

    Raises ValueError where a stage does not fit the published memory.
    """
    constants, rates = situation.constants, situation.request.rates
    tp_max = constants["tp_max"]
    limit_mib = constants["memory_bound_mib"] - constants["memory_gap_mib"]
    steps: list[float] = []
    for pipeline in plan.pipelines:
        times = []
        for stage_id, stage in enumerate(pipeline.stages):
            fraction = int(math.log2(tp_max // stage.degree))
            slowest = constants["rho"][fraction] * max(rates[rank] for rank in stage.ranks)
            times.append(slowest * stage.num_layers)
            is_end = stage_id in (0, len(pipeline.stages) - 1)
            ends = constants["memory_embedding_mib"] if is_end else 0.0
            in_flight = min(len(pipeline.stages) - stage_id, pipeline.num_micro_batches)
            per_layer = _per_layer_mib(constants["memory_k_mib"], in_flight)
            needed_mib = (per_layer * stage.num_layers + ends) * tp_max / stage.degree
            needed_mib += constants["memory_extra_mib"]
            if needed_mib > limit_mib + 0.01:
                raise ValueError(f"{situation.name}: {stage} needs {needed_mib:.0f} of {limit_mib:.0f} MiB")
        steps.append((pipeline.num_micro_batches - 1) * max(times) + sum(times))
    return max(steps)


def _per_layer_mib(table: list[float], in_flight: int) -> float:
    """The published table goes from the most micro-batches in flight to 1; longer pipelines go on at its
    first difference."""
    if in_flight <= len(table):
        return table[-in_flight]
    return table[0] + (table[0] - table[1]) * (in_flight - len(table))


def random_cluster(
    num_devices: int, num_slow: int, seed: int, time_limit_s: float, model_name: str = "70b"
) -> PlanRequest:
    """A published model, nodes of 8, slow devices anywhere at 1.1 to 12, one micro-batch per device."""
    rng = np.random.default_rng((seed, num_devices))
    rates = np.ones(num_devices)
    rates[rng.choice(num_devices, num_slow, replace=False)] = rng.uniform(1.1, 12.0, num_slow)
    model = load_model(model_name)
    return PlanRequest(
        model.profile,
        tuple(rates.tolist()),
        num_micro_batches=num_devices,
        micro_batch_size=model.micro_batch_size,
        nodes=node_ranks(num_devices, NODE_SIZE),
        memory_bytes=model.memory_bytes,
        time_limit_s=time_limit_s,
    )


def node_ranks(num_devices: int, node_size: int) -> tuple[tuple[int, ...], ...]:
    starts = range(0, num_devices, node_size)
    return tuple(tuple(range(start, min(start + node_size, num_devices))) for start in starts)


def _bytes(mib: float) -> int:
    return round(mib * _MIB)
