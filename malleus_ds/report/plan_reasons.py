"""Why a plan takes as long as it does: which device limits it, and by how much. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from malleus_ds.plan import ParallelPlan
from malleus_ds.plan.drawing import ranks_text
from malleus_ds.planner.cost_model import CostModel
from malleus_ds.planner.types import PlanRequest


@dataclass(frozen=True, slots=True)
class Reasons:
    """What limits a plan.

    rank: the slowest device of the slowest stage of the slowest pipeline; stage_s: that stage's time per
    micro-batch, next_stage_s: that of the pipeline's second slowest stage (None: it has one stage);
    pipeline_s, next_pipeline_s: the same of pipelines per step; step_s = steady_s + fill_s + message_s +
    update_s: the slowest stage's time for all micro-batches, the fill, messages in the fill, gradient
    reduction and optimizer; healthy_rank_step_s: step of the same plan if this one device were healthy;
    fullest_rank: where the least memory is left, with the bytes it needs and those it may use (None: no
    limit).
    """

    rank: int
    rate: float
    pipeline_id: int
    stage_id: int
    stage_ranks: tuple[int, ...]
    num_layers: int
    stage_s: float
    next_stage_s: float | None
    pipeline_s: float
    next_pipeline_s: float | None
    step_s: float
    steady_s: float
    fill_s: float
    message_s: float
    update_s: float
    healthy_rank_step_s: float
    fullest_rank: int
    needed_bytes: int
    usable_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """One sentence per reason."""
        stage = f"pipeline {self.pipeline_id}, stage {self.stage_id} (ranks {ranks_text(self.stage_ranks)})"
        following = ""
        if self.next_stage_s is not None:
            following = f"; the pipeline's next slowest stage takes {self.next_stage_s * 1000:.1f} ms"
        lines = [
            f"{stage} is the slowest: {self.num_layers} layers take {self.stage_s * 1000:.1f} ms per "
            f"micro-batch{following}"
        ]
        if self.rate > 1:
            gain = 1 - self.healthy_rank_step_s / self.step_s
            lines.append(
                f"rank {self.rank} limits it: {self.rate:.2f} times slower than healthy; were it healthy, "
                f"this plan would take {self.healthy_rank_step_s:.3f} s ({gain:.1%} less)"
            )
        else:
            lines.append("its devices are healthy: what limits is how whole layers and micro-batches divide")
        if self.next_pipeline_s is not None:
            lines.append(
                f"pipeline {self.pipeline_id} takes {self.pipeline_s:.3f} s; the next slowest pipeline takes "
                f"{self.next_pipeline_s:.3f} s"
            )
        parts = {
            "steady": self.steady_s,
            "fill": self.fill_s,
            "messages": self.message_s,
            "gradients and optimizer": self.update_s,
        }
        told = [
            f"{name} {seconds:.3f} s ({seconds / self.step_s:.1%})"
            for name, seconds in parts.items()
            if seconds > 0
        ]
        lines.append(f"the step: {', '.join(told)}")
        if self.usable_bytes is not None:
            lines.append(
                f"memory: rank {self.fullest_rank} is the fullest, with {self.needed_bytes / 2**30:.1f} of "
                f"{self.usable_bytes / 2**30:.1f} GiB"
            )
        return lines


def find_reasons(plan: ParallelPlan, request: PlanRequest) -> Reasons:
    """What limits a legal plan that uses no failed rank."""
    cost = CostModel(request)
    rank = cost.limiting_rank(plan)
    position = plan.position(rank)
    assert position is not None, "the limiting rank holds layers"
    pipeline = plan.pipelines[position.pipeline_id]
    stage = pipeline.stages[position.stage_id]
    stages_s = [cost.stage_time_s(each, plan.micro_batch_size) for each in pipeline.stages]
    stages_s.sort(reverse=True)
    pipelines_s = sorted(cost.pipeline_times_s(plan), reverse=True)
    step_s = cost.step_time_s(plan)
    steady_s, fill_s = pipeline.num_micro_batches * stages_s[0], sum(stages_s[1:])
    rates = tuple(1.0 if each == rank else rate for each, rate in enumerate(request.rates))
    fullest_rank, needed_bytes, usable_bytes = _fullest(plan, request, cost)
    return Reasons(
        rank=rank,
        rate=request.rates[rank],
        pipeline_id=position.pipeline_id,
        stage_id=position.stage_id,
        stage_ranks=stage.ranks,
        num_layers=stage.num_layers,
        stage_s=stages_s[0],
        next_stage_s=stages_s[1] if len(stages_s) > 1 else None,
        pipeline_s=pipelines_s[0],
        next_pipeline_s=pipelines_s[1] if len(pipelines_s) > 1 else None,
        step_s=step_s,
        steady_s=steady_s,
        fill_s=fill_s,
        # What rounding leaves is no message.
        message_s=_rounded(pipelines_s[0] - steady_s - fill_s, step_s),
        update_s=_rounded(step_s - pipelines_s[0], step_s),
        healthy_rank_step_s=CostModel(replace(request, rates=rates)).step_time_s(plan),
        fullest_rank=fullest_rank,
        needed_bytes=needed_bytes,
        usable_bytes=usable_bytes,
    )


def _rounded(seconds: float, step_s: float) -> float:
    return 0.0 if abs(seconds) < 1e-9 * step_s else seconds


def _fullest(plan: ParallelPlan, request: PlanRequest, cost: CostModel) -> tuple[int, int, int | None]:
    """The rank with the least memory left, what it needs and may use."""
    node_of = {rank: node_id for node_id, ranks in enumerate(request.node_ranks) for rank in ranks}
    stages = [
        (
            stage.ranks[0],
            cost.stage_bytes(plan, pipeline_id, stage_id),
            request.node_memory_bytes(node_of[stage.ranks[0]]),
        )
        for pipeline_id, stage_id, stage in plan.stages()
    ]
    return max(stages, key=lambda item: item[1] - (item[2] or 0))
