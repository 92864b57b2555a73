"""The last word on a plan: it is checked from its definition, without anything of the search."""

from __future__ import annotations

import math

from malleus_ds.plan import ParallelPlan, PlanError
from malleus_ds.planner.cost_model import CostModel
from malleus_ds.planner.types import PlanRequest


def check_answer(plan: ParallelPlan, request: PlanRequest) -> float:
    """Step time of a plan that answers the request, in seconds. Raises `PlanError` for one that does not."""
    plan.validate(len(request.profile.layers), request.world_size, nodes=request.nodes)
    sizes = request.micro_batch_sizes or (request.micro_batch_size,)
    if plan.micro_batch_size not in sizes:
        raise PlanError(f"the plan's micro-batch size is {plan.micro_batch_size}, not one of {list(sizes)}")
    if plan.global_batch_size != request.global_batch_size:
        raise PlanError(
            f"the plan's global batch is {plan.global_batch_size} ({plan.num_micro_batches} micro-batches "
            f"of {plan.micro_batch_size}), not {request.global_batch_size}"
        )
    if request.max_pipelines is not None and len(plan.pipelines) > request.max_pipelines:
        raise PlanError(
            f"the plan has {len(plan.pipelines)} pipelines; max_pipelines is {request.max_pipelines}"
        )
    _check_degrees(plan, request)
    cost = CostModel(request)
    _check_memory(plan, request, cost)
    failed = [rank for rank in plan.ranks if math.isinf(request.rates[rank])]
    if failed:
        raise PlanError(f"the plan uses failed ranks (straggling rate inf): leave {failed} standby")
    return cost.step_time_s(plan)


def _check_degrees(plan: ParallelPlan, request: PlanRequest) -> None:
    degrees = {degree for degree, _ in request.profile.rho}
    for pipeline_id, stage_id, stage in plan.stages():
        if stage.degree not in degrees:
            raise PlanError(
                f"pipeline {pipeline_id}, stage {stage_id} has TP degree {stage.degree}; the profile "
                f"knows {sorted(degrees)}"
            )


def _check_memory(plan: ParallelPlan, request: PlanRequest, cost: CostModel) -> None:
    node_of = {rank: node_id for node_id, ranks in enumerate(request.node_ranks) for rank in ranks}
    for pipeline_id, stage_id, stage in plan.stages():
        memory_bytes = request.node_memory_bytes(node_of[stage.ranks[0]])
        if memory_bytes is None:
            continue
        needed = cost.stage_bytes(plan, pipeline_id, stage_id)
        if needed > memory_bytes:
            raise PlanError(
                f"pipeline {pipeline_id}, stage {stage_id} needs {needed} bytes; "
                f"memory_bytes is {memory_bytes}"
            )
