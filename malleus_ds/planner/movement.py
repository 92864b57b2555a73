"""How much of the model's state ranks must receive to go from the current plan to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from malleus_ds.plan import ParallelPlan
from malleus_ds.planner.micro_batches import FloatArray
from malleus_ds.planner.received import received_bytes
from malleus_ds.planner.types import PlanRequest


@dataclass(frozen=True)
class Movement:
    """Weights of what must move, in bytes; in layers where the profile knows no sizes."""

    request: PlanRequest

    @cached_property
    def layer_bytes(self) -> FloatArray:
        """``[layer]`` parameters and gradients, and one replica's share of the optimizer's state."""
        current = self.request.current
        number = 1 if current is None else len(current.pipelines)
        layers = self.request.profile.layers
        per_rank = np.array([layer.state_bytes + layer.optimizer_bytes / number for layer in layers])
        return per_rank * self.request.profile.max_degree

    @cached_property
    def weights(self) -> FloatArray:
        return self.layer_bytes if self.layer_bytes.any() else np.ones(len(self.layer_bytes))

    @cached_property
    def held(self) -> dict[int, tuple[tuple[int, int], float, float]]:
        """What each rank holds now: its layers, and its slices as a range within ``[0, 1]``."""
        current = self.request.current
        return (
            {}
            if current is None
            else {
                rank: (stage.layers, index / stage.degree, (index + 1) / stage.degree)
                for _, _, stage in current.stages()
                for index, rank in enumerate(stage.ranks)
            }
        )

    def in_slice_order(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The ranks of a group in the order of the slices that they hold now."""
        return tuple(sorted(ranks, key=lambda rank: (self.held.get(rank, ((), 2.0, 2.0))[1], rank)))

    def prefix(self, ranks: Sequence[int]) -> FloatArray:
        """``[num_layers + 1]`` what a group, in slice order, must receive to hold the layers before each."""
        missing = self.weights.copy()
        for index, rank in enumerate(ranks):
            if rank in self.held:
                (start, stop), low, high = self.held[rank]
                shared = min(high, (index + 1) / len(ranks)) - max(low, index / len(ranks))
                missing[start:stop] -= max(0.0, shared) * self.weights[start:stop]
        return np.concatenate([[0.0], np.cumsum(np.maximum(missing, 0.0))])

    def of(self, plan: ParallelPlan) -> float:
        """Weight of all that ranks must receive; 0 without a current plan."""
        if self.request.current is None:
            return 0.0
        total = 0.0
        for _, _, stage in plan.stages():
            prefix = self.prefix(stage.ranks)
            total += float(prefix[stage.layers[1]] - prefix[stage.layers[0]])
        return total

    def received_bytes(self, plan: ParallelPlan) -> int:
        """What all ranks receive, optimizer shards counted as they are cut; 0 where no sizes are known."""
        current = self.request.current
        return 0 if current is None else round(float(received_bytes(current, plan, self.request).sum()))
