"""Which layers the stages of equal pipelines take: the methods of ``partition_method``. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from numbers import Integral
from typing import TypeAlias

from malleus_ds.model_profile import ModelProfile
from malleus_ds.plan import PlanError

PartitionMethod: TypeAlias = str | Sequence[int] | Sequence[tuple[int, int]]
"""A method by name, ``num_stages + 1`` boundaries, or one range ``(start, stop)`` per stage."""

LayerCosts: TypeAlias = Sequence[float] | ModelProfile
"""Time of each layer in any one unit, or a measured profile."""

_METHODS = "'uniform', 'parameters', 'best', 'profile', 'type:REGEX', or the boundaries of the stages"


def partition_layers(
    method: PartitionMethod,
    num_stages: int,
    layer_names: Sequence[str],
    count_parameters: Callable[[], Sequence[int]],
    layer_costs: LayerCosts | None = None,
) -> list[int]:
    """``num_stages + 1`` boundaries of the layers; no stage is empty.

    layer_names: types or functions, for ``type:REGEX``; count_parameters: trained parameters of each
    layer, called where they are needed. Raises `PlanError`.
    """
    if layer_costs is not None and method != "profile":
        raise PlanError(f"layer_costs is given, but partition_method is {method!r}: set it to 'profile'")
    if not isinstance(method, str):
        return _explicit(method, num_stages, len(layer_names))
    return balanced_boundaries(_weights(method, layer_names, count_parameters, layer_costs), num_stages)


def num_stages_of(method: PartitionMethod) -> int | None:
    """What boundaries or ranges say about the number of stages; a named method says nothing."""
    return None if isinstance(method, str) else len(_boundaries(method)) - 1


def _weights(
    method: str,
    layer_names: Sequence[str],
    count_parameters: Callable[[], Sequence[int]],
    layer_costs: LayerCosts | None,
) -> Sequence[float]:
    match method.lower():
        case "uniform":
            return [1] * len(layer_names)
        case "parameters" | "best":  # The division by parameters is the best one there is.
            return count_parameters()
        case "profile":
            return _costs(layer_costs, len(layer_names))
        case lowered if lowered.startswith("type:"):
            return _type_weights(method[len("type:") :], layer_names)
    raise PlanError(f"partition_method is {method!r}: use {_METHODS}")


def _type_weights(pattern: str, layer_names: Sequence[str]) -> list[int]:
    """1 for each layer whose type or function has the pattern in its name, in any case, as in DeepSpeed."""
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PlanError(f"partition_method 'type:{pattern}' has no valid pattern: {error}") from error
    weights = [int(regex.search(name) is not None) for name in layer_names]
    if not any(weights):
        raise PlanError(
            f"partition_method 'type:{pattern}' matches no layer: name one of {sorted(set(layer_names))}"
        )
    return weights


def _costs(layer_costs: LayerCosts | None, num_layers: int) -> Sequence[float]:
    if layer_costs is None:
        raise PlanError(
            "partition_method 'profile' needs measured times: pass layer_costs=, one per layer, or the "
            "profile of an earlier run"
        )
    costs = layer_costs.layer_times_s if isinstance(layer_costs, ModelProfile) else list(layer_costs)
    if len(costs) != num_layers:
        raise PlanError(f"layer_costs has {len(costs)} entries for {num_layers} layers: give one per layer")
    for layer, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise PlanError(f"layer_costs[{layer}] is {cost}: give a time of at least 0")
    return costs


def _explicit(
    method: Sequence[int] | Sequence[tuple[int, int]], num_stages: int, num_layers: int
) -> list[int]:
    boundaries = _boundaries(method)
    if len(boundaries) != num_stages + 1:
        raise PlanError(
            f"partition_method {method!r} describes {len(boundaries) - 1} stages, but num_stages is "
            f"{num_stages}: make them equal, or leave num_stages out"
        )
    if boundaries[0] != 0 or boundaries[-1] != num_layers or any(a >= b for a, b in pairwise(boundaries)):
        raise PlanError(
            f"partition_method {method!r}: boundaries must rise from 0 to the number of layers, "
            f"{num_layers}, with at least one layer per stage"
        )
    return boundaries


def _boundaries(method: Sequence[int] | Sequence[tuple[int, int]]) -> list[int]:
    """Boundaries from boundaries, or from ranges that follow each other."""
    entries = list(method)
    if len(entries) > 1 and all(isinstance(entry, Integral) for entry in entries):
        return [int(entry) for entry in entries if isinstance(entry, Integral)]  # also numpy's
    ranges = [tuple(entry) for entry in entries if isinstance(entry, Sequence)]
    if not ranges or len(ranges) != len(entries) or any(len(entry) != 2 for entry in ranges):
        raise PlanError(
            f"partition_method is {method!r}: use {_METHODS}, such as [0, 2, 5] or [(0, 2), (2, 5)]"
        )
    for (_, stop), (start, _) in pairwise(ranges):
        if start != stop:
            raise PlanError(
                f"partition_method {method!r}: a stage ends at {stop}, but the next begins at {start}; "
                f"give each layer to one stage"
            )
    return [int(ranges[0][0]), *(int(stop) for _, stop in ranges)]


def balanced_boundaries(weights: Sequence[float], num_parts: int) -> list[int]:
    """``num_parts + 1`` boundaries of non-empty contiguous parts whose largest weight is minimal.

    Among those the parts are as equal as possible (sum of squares), so that none is without weight
    where there is enough; then as many as possible end right behind a layer with weight, so that
    what has none goes with what it prepares; then lengths are as equal as possible. Exact: dynamic
    programmes over (part, stop). Raises `PlanError` when there are fewer layers than parts.
    """
    num_layers = len(weights)
    if num_parts > num_layers:
        raise PlanError(
            f"{num_layers} layers cannot fill {num_parts} stages: use at most {num_layers} stages, "
            f"or give a plan that leaves ranks standby"
        )
    prefix = list(accumulate(weights, initial=0.0))
    largest = _least_largest(prefix, num_parts)
    # Of the first layers up to each stop: (sum of squares, ends without weight, squared lengths, cuts).
    best: list[tuple[float, int, int, tuple[int, ...]] | None] = [(0.0, 0, 0, (0,))] + [None] * num_layers
    for part in range(num_parts):
        row: list[tuple[float, int, int, tuple[int, ...]] | None] = [None] * (num_layers + 1)
        for stop in range(part + 1, num_layers + 1):
            candidates = []
            for start in range(stop - 1, part - 1, -1):
                weight, before = prefix[stop] - prefix[start], best[start]
                if weight > largest:
                    break
                if before is not None:
                    squares, bare, lengths, cuts = before
                    bare += weights[stop - 1] == 0
                    squares, lengths = squares + weight**2, lengths + (stop - start) ** 2
                    candidates.append((squares, bare, lengths, (*cuts, stop)))
            row[stop] = min(candidates, default=None)
        best = row
    assert best[-1] is not None
    return list(best[-1][3])


def _least_largest(prefix: Sequence[float], num_parts: int) -> float:
    """The smallest largest weight of so many parts. prefix: sums of the first 0, 1, ... weights."""
    best = list(prefix)
    for part in range(1, num_parts):
        row = [math.inf] * len(prefix)
        for stop in range(part + 1, len(prefix)):
            for start in range(stop - 1, part - 1, -1):
                weight = prefix[stop] - prefix[start]
                row[stop] = min(row[stop], max(best[start], weight))
                if weight >= row[stop]:
                    break
        best = row
    return best[-1]
