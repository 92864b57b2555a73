"""Step time and memory of a plan.

A stage of a TP group of degree t takes ``rho(t) * max rate * sum of its layers' times * tau(b)`` per
micro-batch, forward and backward together. A 1F1B pipeline with ``m`` micro-batches takes
``(m - 1) * max_j t_j + sum_j t_j``: one micro-batch passes all stages, the others follow at the pace of the
slowest stage. The step takes the slowest pipeline, then the slowest rank's update: reduction of its
gradients, ``2 (D - 1) / D`` of their bytes over its link for D holders, and the optimizer's step on its
share.

Left out: contention on links; the overlap of messages with compute (a message counts once per stage
boundary, in the fill) and of the update with the drain; the different forward to backward ratios of layers,
which shift 1F1B bubbles; gathering of parameters; latency of a message or a collective; memory of
communication buffers, of the allocator's fragmentation and of temporary tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from malleus_ds.plan import ParallelPlan, PlanError, Stage
from malleus_ds.planner.micro_batches import FloatArray
from malleus_ds.planner.types import PlanRequest


def pipeline_time_s(stage_times_s: Sequence[float], num_micro_batches: int, message_s: float = 0.0) -> float:
    """``(m - 1) * max + sum``, plus one message per stage boundary, in seconds."""
    fill_s = sum(stage_times_s) + message_s * (len(stage_times_s) - 1)
    if math.isinf(fill_s):
        return math.inf  # Also with one micro-batch.
    return (num_micro_batches - 1) * max(stage_times_s) + fill_s


def num_in_flight(num_stages: int, stage_id: int, num_micro_batches: int) -> int:
    """Micro-batches whose activations a 1F1B stage keeps at its peak."""
    return min(num_stages - stage_id, num_micro_batches)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of any plan that answers a request."""

    request: PlanRequest
    _node_of: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        node_of = {rank: index for index, ranks in enumerate(self.request.node_ranks) for rank in ranks}
        object.__setattr__(self, "_node_of", node_of)

    def size_factor(self, micro_batch_size: int) -> float:
        """Activations and messages of this micro-batch size, relative to the profiled one."""
        return micro_batch_size / self.request.micro_batch_size

    def time_factor(self, micro_batch_size: int) -> float:
        """``tau(b)``. Raises `PlanError` for a size that was not profiled."""
        if micro_batch_size == self.request.micro_batch_size:
            return 1.0
        tau = dict(self.request.profile.tau)
        if micro_batch_size not in tau:
            raise PlanError(
                f"micro_batch_size is {micro_batch_size}: the profile knows "
                f"{sorted({self.request.micro_batch_size, *tau})}"
            )
        return tau[micro_batch_size]

    def stage_time_s(self, stage: Stage, micro_batch_size: int) -> float:
        """Forward and backward of one micro-batch, in seconds (inf with a failed rank)."""
        profile = self.request.profile
        slowest = max(self.request.rates[rank] for rank in stage.ranks)
        if math.isinf(slowest):
            return math.inf  # Also where its layers take no time.
        group_rate = profile.relative_time(stage.degree) * slowest
        return group_rate * profile.time_s(stage.layers) * self.time_factor(micro_batch_size)

    def pipeline_times_s(self, plan: ParallelPlan) -> tuple[float, ...]:
        """Time of each pipeline, in seconds."""
        message_s = self.request.message_s * self.size_factor(plan.micro_batch_size)
        return tuple(
            pipeline_time_s(
                [self.stage_time_s(stage, plan.micro_batch_size) for stage in pipeline.stages],
                pipeline.num_micro_batches,
                message_s,
            )
            for pipeline in plan.pipelines
        )

    def reductions_s(self, plan: ParallelPlan) -> FloatArray:
        """``[layer]`` reduction of the gradients of one slice of each layer, in seconds.

        A TP group never crosses a node, so whether a link leaves the node is a matter of the layer alone.
        """
        layers, links, number = self.request.profile.layers, self.request.links, len(plan.pipelines)
        if links is None or number == 1:
            return np.zeros(len(layers))
        low, high = np.full(len(layers), len(self.request.node_ranks)), np.full(len(layers), -1)
        for _, _, stage in plan.stages():
            held, node_id = slice(*stage.layers), self._node_of[stage.ranks[0]]
            low[held] = np.minimum(low[held], node_id)
            high[held] = np.maximum(high[held], node_id)
        gradient_bytes = np.array([layer.gradient_bytes for layer in layers])
        bandwidths = np.where(low == high, links.intra_bytes_per_s, links.inter_bytes_per_s)
        return 2 * (number - 1) / number * gradient_bytes / bandwidths

    def optimizers_s(self, plan: ParallelPlan) -> FloatArray:
        """``[layer]`` one rank's share of the optimizer's step of one slice of each layer, in seconds."""
        return np.array([layer.optimizer_s for layer in self.request.profile.layers]) / len(plan.pipelines)

    def rank_updates_s(self, plan: ParallelPlan) -> dict[int, float]:
        """Gradient reduction and optimizer step of each rank that holds layers, in seconds."""
        layers_s = self.reductions_s(plan) + self.optimizers_s(plan)
        updates_s: dict[int, float] = {}
        for _, _, stage in plan.stages():
            num_slices = self.request.profile.max_degree / stage.degree
            seconds = float(layers_s[slice(*stage.layers)].sum()) * num_slices
            updates_s.update(dict.fromkeys(stage.ranks, seconds))
        return updates_s

    def step_time_s(self, plan: ParallelPlan) -> float:
        """Step time of a plan, in seconds (inf when it uses a failed rank)."""
        return max(self.pipeline_times_s(plan)) + max(self.rank_updates_s(plan).values())

    def limiting_rank(self, plan: ParallelPlan) -> int:
        """The slowest rank of the slowest stage of the slowest pipeline."""
        times_s = self.pipeline_times_s(plan)
        slowest = plan.pipelines[times_s.index(max(times_s))]
        stage = max(slowest.stages, key=lambda stage: self.stage_time_s(stage, plan.micro_batch_size))
        return max(stage.ranks, key=lambda rank: self.request.rates[rank])

    def stage_bytes(self, plan: ParallelPlan, pipeline_id: int, stage_id: int) -> int:
        """Peak memory of each rank of a stage, in bytes.

        State, ZeRO-1 share of the optimizer and activations in flight, all of which TP cuts, and what a
        device needs apart from its layers.
        """
        profile, pipeline = self.request.profile, plan.pipelines[pipeline_id]
        stage = pipeline.stages[stage_id]
        layers = profile.layers[stage.layers[0] : stage.layers[1]]
        in_flight = num_in_flight(len(pipeline.stages), stage_id, pipeline.num_micro_batches)
        activation_bytes = sum(layer.activations(in_flight) for layer in layers)
        layer_bytes = (
            sum(layer.state_bytes for layer in layers)
            + -(-sum(layer.optimizer_bytes for layer in layers) // len(plan.pipelines))
            + round(activation_bytes * self.size_factor(plan.micro_batch_size))
        )
        return profile.device_bytes + layer_bytes * profile.max_degree // stage.degree
