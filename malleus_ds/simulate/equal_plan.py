"""Equal plans, as frameworks without malleability use: one TP degree, equal pipelines, equal data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage
from malleus_ds.planner.cost_model import CostModel
from malleus_ds.planner.types import PlanRequest
from malleus_ds.simulate.division import divide_layers
from malleus_ds.simulate.engine import simulate

Layout = Literal["pipelines", "stages"]
"""Which groups stand next to each other in rank order: those of a pipeline (replicas of a stage are spread
over the nodes), or the replicas of a stage (the data axis is inner: the default order of DeepSpeed's
topology and of Megatron-LM)."""

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Shape:
    """bound_s: no equal plan of this shape is faster (whole layers only add to it)."""

    bound_s: float
    degree: int
    num_pipelines: int
    num_stages: int
    micro_batch_size: int


def best_equal_plan(
    request: PlanRequest, layout: Layout = "pipelines", nodes: Sequence[Sequence[int]] | None = None
) -> ParallelPlan:
    """The fastest equal plan on ``nodes`` (default: all) that fits the memory; other ranks are standby.

    All pipelines have the same TP degree, stages, layers and number of micro-batches; layers are divided for
    equal devices, as evenly as memory allows. Devices are taken as healthy: the plan knows no stragglers. It
    may leave groups standby where their number does not divide. Raises `PlanError` when no such plan fits.
    """
    nodes = request.node_ranks if nodes is None else nodes
    request = _equal_devices(request, nodes)
    best: ParallelPlan | None = None
    best_s = float("inf")
    for shape in sorted(_shapes(request, nodes), key=lambda shape: shape.bound_s):
        if shape.bound_s >= best_s:
            break
        plan = _build(request, shape, layout, nodes)
        step_s = float("inf") if plan is None else simulate(plan, request).makespan_s
        if step_s < best_s:
            best, best_s = plan, step_s
    if best is None:
        num_ranks = sum(map(len, nodes))
        raise PlanError(f"no equal plan on {num_ranks} ranks of {len(nodes)} nodes fits into their memory")
    return best


def healthy(request: PlanRequest) -> PlanRequest:
    """The same request before any device was slow, without a plan in use."""
    return replace(request, rates=(1.0,) * request.world_size, current=None)


def _equal_devices(request: PlanRequest, nodes: Sequence[Sequence[int]]) -> PlanRequest:
    """All healthy, with the memory of the smallest of the nodes."""
    memory_bytes = request.memory_bytes
    if isinstance(memory_bytes, tuple):
        kept = {rank for ranks in nodes for rank in ranks}
        memory_bytes = min(
            size for size, ranks in zip(memory_bytes, request.node_ranks, strict=True) if ranks[0] in kept
        )
    return replace(healthy(request), memory_bytes=memory_bytes)


def _shapes(request: PlanRequest, nodes: Sequence[Sequence[int]]) -> Iterator[_Shape]:
    cost, profile = CostModel(request), request.profile
    work_s = sum(profile.layer_times_s)
    for degree, factor in profile.rho:
        num_groups = len(_groups(nodes, degree))
        for size in request.micro_batch_sizes or (request.micro_batch_size,):
            num_micro_batches = request.global_batch_size // size
            layers_s = work_s * factor * cost.time_factor(size)
            for num_pipelines in range(
                1, min(num_groups, request.largest_num_pipelines, num_micro_batches) + 1
            ):
                if num_micro_batches % num_pipelines or request.global_batch_size % size:
                    continue
                share = num_micro_batches // num_pipelines
                for num_stages in range(1, min(num_groups // num_pipelines, len(profile.layers)) + 1):
                    pace = (share - 1) / num_stages + 1 if share > num_stages else 1.0
                    yield _Shape(layers_s * pace, degree, num_pipelines, num_stages, size)


def _groups(nodes: Sequence[Sequence[int]], degree: int) -> list[Group]:
    """TP groups in rank order; ranks of a node that do not fill a group are left out."""
    return [
        tuple(ranks[start : start + degree])
        for ranks in nodes
        for start in range(0, len(ranks) - degree + 1, degree)
    ]


def _build(
    request: PlanRequest, shape: _Shape, layout: Layout, nodes: Sequence[Sequence[int]]
) -> ParallelPlan | None:
    """The plan of a shape; None when it does not fit."""
    num_pipelines, num_stages = shape.num_pipelines, shape.num_stages
    groups = _groups(nodes, shape.degree)[: num_pipelines * num_stages]
    count = request.global_batch_size // shape.micro_batch_size // num_pipelines
    boundaries = divide_layers(
        request, groups[:num_stages], [1.0] * num_stages, num_pipelines, count, shape.micro_batch_size
    )
    if boundaries is None:
        return None
    layers = list(pairwise(boundaries))
    pipelines = []
    for pipeline_id in range(num_pipelines):
        if layout == "pipelines":
            own = groups[pipeline_id * num_stages : (pipeline_id + 1) * num_stages]
        else:
            own = groups[pipeline_id::num_pipelines]
        pipelines.append(Pipeline(tuple(map(Stage, own, layers)), count))
    used = {rank for group in groups for rank in group}
    standby = tuple(rank for rank in range(request.world_size) if rank not in used)
    return ParallelPlan(tuple(pipelines), shape.micro_batch_size, standby)
