"""What ranks receive to go from one plan to another: parameters, and their shares of the optimizer's state.

An estimate per layer: a rank's share of a slice of one layer is the interval that its pipeline's position
among all pipelines gives it, while the real shards cut fused layers.
"""

from __future__ import annotations

import numpy as np

from malleus_ds.plan import ParallelPlan
from malleus_ds.planner.micro_batches import FloatArray, IntArray
from malleus_ds.planner.types import PlanRequest


def received_bytes(old: ParallelPlan, new: ParallelPlan, request: PlanRequest) -> FloatArray:
    """Bytes that each rank receives, by rank.

    Parameters count as much as their gradients; where those are not given, half of ``state_bytes``.
    """
    profile = request.profile
    slice_count = profile.max_degree
    parameter_bytes = np.repeat(
        [layer.gradient_bytes or layer.state_bytes // 2 for layer in profile.layers], slice_count
    )
    optimizer_bytes = np.repeat([layer.optimizer_bytes for layer in profile.layers], slice_count)
    before = holders(old, slice_count).reshape(len(old.pipelines), -1)
    after = holders(new, slice_count).reshape(len(new.pipelines), -1)
    received = np.zeros(request.world_size)
    for pipeline_id, ranks in enumerate(after):
        matches = before == ranks
        held = matches.any(axis=0)
        position = matches.argmax(axis=0)
        start, stop = pipeline_id / len(after), (pipeline_id + 1) / len(after)
        first = np.maximum(start, position / len(before))
        last = np.minimum(stop, (position + 1) / len(before))
        kept = np.where(held, np.maximum(last - first, 0.0), 0.0)
        sizes = np.where(held, 0, parameter_bytes) + optimizer_bytes * (stop - start - kept)
        received += np.bincount(ranks, weights=sizes, minlength=request.world_size)
    return received


def holders(plan: ParallelPlan, max_degree: int) -> IntArray:
    """Ranks, ``[pipeline, layer, slice]``; one of degree t holds ``max_degree / t`` neighbouring slices."""
    ranks = np.empty((len(plan.pipelines), plan.num_layers, max_degree), dtype=np.int64)
    for pipeline_id, _, stage in plan.stages():
        start, stop = stage.layers
        ranks[pipeline_id, start:stop] = np.repeat(np.array(stage.ranks), max_degree // stage.degree)
    return ranks
