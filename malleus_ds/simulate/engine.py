"""One training step of a plan, simulated from its definition: 1F1B, gradient reduction, optimizer.

Shares the profile with the cost model (what a stage takes on its ranks), but not its formula for a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from malleus_ds.plan import ParallelPlan
from malleus_ds.planner.cost_model import CostModel
from malleus_ds.planner.types import PlanRequest
from malleus_ds.simulate.pipeline import PipelineRun, run_pipeline
from malleus_ds.simulate.update import Update, run_update

Kind = Literal["forward", "backward", "reduce", "optimizer"]


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank does for a while.

    micro_batch: its index in the global batch (None for reduce and optimizer); stage_id: in its pipeline.
    """

    kind: Kind
    start_s: float
    end_s: float
    micro_batch: int | None
    stage_id: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated step.

    makespan_s: from its first forward to the end of the last optimizer (inf when the plan uses a failed
    rank); runs: of each pipeline; update: of all ranks.
    """

    plan: ParallelPlan
    makespan_s: float
    runs: tuple[PipelineRun, ...]
    update: Update

    @property
    def compute_s(self) -> float:
        """End of the last backward pass."""
        return max(run.makespan_s for run in self.runs)

    def spans(self) -> dict[int, tuple[Span, ...]]:
        """What each rank does, in order of time; standby ranks do nothing."""
        updates: dict[int, list[tuple[float, float]]] = {}
        for reduction in self.update.reductions:
            if reduction.end_s > reduction.start_s:
                for rank in reduction.ranks.tolist():
                    updates.setdefault(rank, []).append((reduction.start_s, reduction.end_s))
        spans: dict[int, tuple[Span, ...]] = dict.fromkeys(sorted(self.plan.standby), ())
        for pipeline_id, stage_id, stage in self.plan.stages():
            compute = tuple(self._compute(pipeline_id, stage_id))
            for rank in stage.ranks:
                reduce = [Span("reduce", *times, None, stage_id) for times in updates.get(rank, ())]
                spans[rank] = (*compute, *reduce, *self._optimizer(rank, stage_id))
        return spans

    def _compute(self, pipeline_id: int, stage_id: int) -> Iterator[Span]:
        first, _ = self.plan.micro_batch_range(pipeline_id)
        for work in self.runs[pipeline_id].stages[stage_id]:
            yield Span(work.direction, work.start_s, work.end_s, first + work.micro_batch, stage_id)

    def _optimizer(self, rank: int, stage_id: int) -> Iterator[Span]:
        start_s = float(self.update.optimizer_start_s[rank])
        end_s = float(self.update.optimizer_end_s[rank])
        if end_s > start_s:
            yield Span("optimizer", start_s, end_s, None, stage_id)


def simulate(plan: ParallelPlan, request: PlanRequest, backward_ratio: float = 2.0) -> Simulation:
    """Simulate one step of a legal plan with the request's profile, rates, links, nodes and ``message_s``.

    backward_ratio: backward time / forward time of each layer. Work: one visit per instruction of each
    distinct pipeline.
    """
    cost = CostModel(request)
    message_s = request.message_s * cost.size_factor(plan.micro_batch_size)
    known: dict[tuple[tuple[float, ...], int], PipelineRun] = {}
    runs = []
    ready_s = np.zeros(request.world_size)
    for pipeline in plan.pipelines:
        times_s = tuple(cost.stage_time_s(stage, plan.micro_batch_size) for stage in pipeline.stages)
        key = (times_s, pipeline.num_micro_batches)
        if key not in known:
            known[key] = run_pipeline(*key, message_s, backward_ratio)
        runs.append(known[key])
        for stage, work in zip(pipeline.stages, known[key].stages, strict=True):
            ready_s[list(stage.ranks)] = work[-1].end_s
    update = run_update(plan, request, ready_s)
    return Simulation(plan, float(update.optimizer_end_s.max()), tuple(runs), update)
