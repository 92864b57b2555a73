"""The end of a step: the pipelines reduce their gradients, then each rank steps its share of the optimizer.

Slices with the same holders travel together, in a ring: ``2 (D - 1) / D`` of their bytes over each holder's
link for D holders. A reduction starts when all its holders have ended their backward passes and their
earlier reductions; those whose holders are ready first come first, later layers before earlier ones. This
differs from the cost model's formula in two ways: ranks wait for each other here, and a rank that ends early
also reduces early.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from malleus_ds.plan import ParallelPlan
from malleus_ds.planner.cost_model import CostModel
from malleus_ds.planner.micro_batches import FloatArray, IntArray
from malleus_ds.planner.received import holders
from malleus_ds.planner.types import PlanRequest


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduction. ranks: its holders, one per pipeline."""

    ranks: IntArray
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Update:
    """Reductions in order; start and end of each rank's optimizer step, by rank."""

    reductions: tuple[Reduction, ...]
    optimizer_start_s: FloatArray
    optimizer_end_s: FloatArray


def run_update(plan: ParallelPlan, request: PlanRequest, ready_s: FloatArray) -> Update:
    """ready_s: end of each rank's last backward pass, by rank (0 for standby ranks)."""
    free_s = ready_s.copy()
    reductions = []
    # Sorted stably, from a list that starts with the last layers, as the backward pass does.
    groups = sorted(_groups(plan, request), key=lambda group: float(ready_s[group[0]].max()))
    for ranks, seconds in groups:
        start_s = float(free_s[ranks].max())
        free_s[ranks] = start_s + seconds
        reductions.append(Reduction(ranks, start_s, start_s + seconds))
    return Update(tuple(reductions), free_s, free_s + _optimizer_s(plan, request))


def _groups(plan: ParallelPlan, request: PlanRequest) -> list[tuple[IntArray, float]]:
    """Holders and time of each reduction, last layers first; a single pipeline has none."""
    num_pipelines = len(plan.pipelines)
    if num_pipelines == 1:
        return []
    ranks = holders(plan, request.profile.max_degree)
    slices = ranks.reshape(num_pipelines, -1).T.copy()
    reductions_s = CostModel(request).reductions_s(plan).tolist()
    seconds: dict[bytes, float] = defaultdict(float)
    members: dict[bytes, IntArray] = {}
    for index, row in enumerate(slices):
        key = row.tobytes()
        members[key] = row
        seconds[key] += reductions_s[index // ranks.shape[2]]
    return [(row, seconds[key]) for key, row in members.items()][::-1]


def _optimizer_s(plan: ParallelPlan, request: PlanRequest) -> FloatArray:
    """Time of each rank's optimizer step, by rank: of its share of its layers."""
    layers_s = CostModel(request).optimizers_s(plan)
    seconds = np.zeros(request.world_size)
    for _, _, stage in plan.stages():
        num_slices = request.profile.max_degree / stage.degree
        seconds[list(stage.ranks)] = layers_s[slice(*stage.layers)].sum() * num_slices
    return seconds
