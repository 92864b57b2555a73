"""The plans found so far, all of them checked; and the choice among them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from malleus_ds.plan import ParallelPlan, PlanError
from malleus_ds.planner.checker import check_answer
from malleus_ds.planner.layout import in_current_order
from malleus_ds.planner.movement import Movement
from malleus_ds.planner.types import Alternative, PlanRequest

# A plan this much slower than the best is as good, if it moves less.
EQUAL_STEP = 0.01


@dataclass(slots=True)
class Candidates:
    """deadline_s: on the monotonic clock; found: step time of each plan."""

    request: PlanRequest
    movement: Movement
    deadline_s: float
    found: dict[ParallelPlan, float] = field(default_factory=dict)

    def remaining_s(self) -> float:
        return self.deadline_s - time.monotonic()

    @property
    def best_s(self) -> float:
        """Step time of the fastest plan; inf without one."""
        return min(self.found.values(), default=math.inf)

    @property
    def equal_s(self) -> float:
        """A plan with this step time may still be chosen."""
        return self.best_s * (1.0 if self.request.current is None else 1.0 + EQUAL_STEP)

    def offer(self, plan: ParallelPlan) -> float:
        """Keep the plan if it is legal; returns its step time, inf if it is not."""
        if plan not in self.found:
            try:
                self.found[plan] = check_answer(plan, self.request)
            except PlanError:
                return math.inf
        return self.found[plan]

    def choose(self) -> tuple[ParallelPlan, float]:
        """The plan that moves least among those about as fast as the best; of these the fastest."""
        fast = [(plan, step_s) for plan, step_s in self.found.items() if step_s <= self.equal_s]
        plan, step_s = min(fast, key=lambda item: (self.movement.of(item[0]), item[1]))
        return in_current_order(plan, self.request.current), step_s

    def alternatives(self, chosen: ParallelPlan) -> tuple[Alternative, ...]:
        """The fastest other plans that differ in more than the ranks and the order of stages."""
        shapes = {_shape(chosen)}
        others: list[Alternative] = []
        for plan, step_s in sorted(self.found.items(), key=lambda item: item[1]):
            if len(others) >= self.request.num_alternatives:
                break
            if _shape(plan) not in shapes:
                shapes.add(_shape(plan))
                others.append(Alternative(plan, step_s))
        return tuple(others)


def _shape(plan: ParallelPlan) -> tuple[int, Sequence[object]]:
    pipelines = [
        (
            pipeline.num_micro_batches,
            tuple(sorted((stage.degree, stage.num_layers) for stage in pipeline.stages)),
        )
        for pipeline in plan.pipelines
    ]
    return plan.micro_batch_size, tuple(sorted(pipelines))
