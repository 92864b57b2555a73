"""Layers over the stages of one pipeline whose groups and order are given: the best division, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from malleus_ds.planner.cost_model import num_in_flight
from malleus_ds.planner.micro_batches import FloatArray, IntArray
from malleus_ds.planner.types import PlanRequest
from malleus_ds.planner.workload import BoolArray

_SLACK = 1e-9  # Relative: sums of the same times in another order.


def divide_layers(
    request: PlanRequest,
    groups: Sequence[tuple[int, ...]],
    rates: Sequence[float],
    num_pipelines: int,
    num_micro_batches: int,
    micro_batch_size: int,
) -> tuple[int, ...] | None:
    """``num_stages + 1`` boundaries with the least ``(m - 1) * max_j t_j + sum_j t_j``; None if none fits.

    groups: ranks of each stage, in order; rates: straggling rate of each group; num_pipelines: of the plan,
    which share the optimizer's state. Of equal divisions the most even one. Stages hold one layer or more.
    """
    num_stages = len(groups)
    if num_stages > len(request.profile.layers):
        return None
    prefix = np.cumsum([0.0, *request.profile.layer_times_s])
    ranges = prefix[None, :] - prefix[:, None]
    costs = []
    for stage_id, (group, rate) in enumerate(zip(groups, rates, strict=True)):
        in_flight = num_in_flight(num_stages, stage_id, num_micro_batches)
        fits = stage_fits(request, group, num_pipelines, in_flight, micro_batch_size)
        costs.append(np.where(fits, request.profile.relative_time(len(group)) * rate * ranges, np.inf))
    table = np.stack(costs)
    slowest_s = _least_slowest_s(table)
    if not np.isfinite(slowest_s):
        return None
    limits = np.unique(table[np.isfinite(table) & (table >= slowest_s * (1 - _SLACK))])
    least_sum_s, best_s, best_limit = _solve(table, np.inf)[0], np.inf, np.inf
    for limit in limits.tolist():
        if (num_micro_batches - 1) * limit + least_sum_s >= best_s:
            break
        time_s = (num_micro_batches - 1) * limit + _solve(table, limit)[0]
        if time_s < best_s:
            best_s, best_limit = time_s, limit
    # A small price on squares decides between equal sums only.
    evened = table + 1e-6 * table**2 / best_limit
    evened[table > best_limit * (1 + _SLACK)] = np.inf
    return _solve(evened, np.inf)[1]


def stage_fits(
    request: PlanRequest, group: Sequence[int], num_pipelines: int, in_flight: int, micro_batch_size: int
) -> BoolArray:
    """``[start, stop]``: whether a group can hold these layers (one or more) in its memory.

    As `CostModel.stage_bytes`, for all ranges at once.
    """
    profile = request.profile
    num_layers = len(profile.layers)
    is_range = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=np.bool_), k=1)
    node_id = next(index for index, ranks in enumerate(request.node_ranks) if group[0] in ranks)
    memory_bytes = request.node_memory_bytes(node_id)
    if memory_bytes is None:
        return is_range

    def ranges(sizes: Sequence[int]) -> IntArray:
        prefix = np.cumsum([0, *sizes], dtype=np.int64)
        return prefix[None, :] - prefix[:, None]

    activations = ranges([layer.activations(in_flight) for layer in profile.layers])
    size_factor = micro_batch_size / request.micro_batch_size
    layer_bytes = (
        ranges([layer.state_bytes for layer in profile.layers])
        - (-ranges([layer.optimizer_bytes for layer in profile.layers]) // num_pipelines)
        + np.rint(activations * size_factor).astype(np.int64)
    )
    needed = profile.device_bytes + layer_bytes * profile.max_degree // len(group)
    return np.asarray(is_range & (needed <= memory_bytes))


def _least_slowest_s(costs: FloatArray) -> float:
    """The least possible time of the slowest stage. costs: ``[stage, start, stop]``."""
    best = np.full(costs.shape[1], np.inf)
    best[0] = 0.0
    for cost in costs:
        best = np.maximum(best[:, None], cost).min(axis=0)
    return float(best[-1])


def _solve(costs: FloatArray, limit: float) -> tuple[float, tuple[int, ...]]:
    """The least sum of stage times with none above ``limit``, and its boundaries."""
    best = np.full(costs.shape[1], np.inf)
    best[0] = 0.0
    choices = []
    for cost in costs:
        totals = best[:, None] + np.where(cost <= limit * (1 + _SLACK), cost, np.inf)
        choices.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    boundaries = [costs.shape[1] - 1]
    for choice in reversed(choices):
        boundaries.append(int(choice[boundaries[-1]]))
    return float(best[-1]), tuple(reversed(boundaries))
