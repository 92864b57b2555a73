"""What the pictures of a plan show: the plan with its times, rates and memory. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from malleus_ds.plan import ParallelPlan
from malleus_ds.planner.cost_model import CostModel
from malleus_ds.planner.types import PlanRequest


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage.

    group_rate: time of a layer against a healthy group of the largest degree; time_s: of one micro-batch;
    needed_bytes: peak memory of each of its devices; is_limiting: the slowest stage of the slowest pipeline.
    """

    ranks: tuple[int, ...]
    layers: tuple[int, int]
    group_rate: float
    time_s: float
    needed_bytes: int
    is_limiting: bool

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True, slots=True)
class PipelineView:
    """One pipeline. time_s: of its micro-batches, without the update."""

    stages: tuple[StageView, ...]
    num_micro_batches: int
    time_s: float

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for pipelines that differ in their ranks only."""
        stages = [(stage.num_layers, len(stage.ranks), round(stage.group_rate, 3)) for stage in self.stages]
        return (self.num_micro_batches, any(stage.is_limiting for stage in self.stages), *stages)


@dataclass(frozen=True, slots=True)
class PlanView:
    """One plan. rates: of all ranks; update_s: gradient reduction and optimizer, after the pipelines."""

    pipelines: tuple[PipelineView, ...]
    standby: tuple[int, ...]
    rates: tuple[float, ...]
    num_layers: int
    micro_batch_size: int
    max_degree: int
    step_s: float
    update_s: float

    def stages(self) -> Iterator[StageView]:
        for pipeline in self.pipelines:
            yield from pipeline.stages


def view_plan(plan: ParallelPlan, request: PlanRequest) -> PlanView:
    """A plan with what the cost model says of it."""
    cost, size = CostModel(request), plan.micro_batch_size
    times_s = cost.pipeline_times_s(plan)
    slowest, limiting = times_s.index(max(times_s)), cost.limiting_rank(plan)
    pipelines = tuple(
        PipelineView(
            tuple(
                StageView(
                    ranks=stage.ranks,
                    layers=stage.layers,
                    group_rate=request.profile.relative_time(stage.degree)
                    * max(request.rates[rank] for rank in stage.ranks),
                    time_s=cost.stage_time_s(stage, size),
                    needed_bytes=cost.stage_bytes(plan, pipeline_id, stage_id),
                    is_limiting=pipeline_id == slowest and limiting in stage.ranks,
                )
                for stage_id, stage in enumerate(pipeline.stages)
            ),
            pipeline.num_micro_batches,
            times_s[pipeline_id],
        )
        for pipeline_id, pipeline in enumerate(plan.pipelines)
    )
    step_s = cost.step_time_s(plan)
    return PlanView(
        pipelines=pipelines,
        standby=plan.standby,
        rates=request.rates,
        num_layers=plan.num_layers,
        micro_batch_size=size,
        max_degree=request.profile.max_degree,
        step_s=step_s,
        update_s=step_s - max(times_s),
    )
