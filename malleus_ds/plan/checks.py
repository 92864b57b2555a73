"""Whether a plan is legal for a model, a world, its nodes and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from malleus_ds.plan.drawing import Mark, draw_plan
from malleus_ds.plan.types import ParallelPlan, Pipeline, PlanError, Stage


@dataclass(frozen=True, slots=True)
class _Fault:
    """What is wrong and how to mend it; where the arrow points."""

    text: str
    mark: Mark


def check_plan(
    plan: ParallelPlan,
    num_layers: int,
    world_size: int,
    nodes: Sequence[Sequence[int]] | None = None,
    memory: Mapping[int, tuple[float, float]] | None = None,
) -> None:
    """Raise `PlanError` unless the plan is legal.

    Each pipeline covers layers ``0 .. num_layers - 1`` once and in order, without an empty stage;
    each rank of the world stands in one stage or is standby; each pipeline takes at least one
    micro-batch; tensor-parallel degrees are powers of two. nodes: ranks of each node; a
    tensor-parallel group stays inside one. memory: ``(needed, available)`` bytes by rank.

    The message names pipeline, stage, value and fix, and draws the plan with an arrow at the fault.
    """
    faults = chain(
        _batch_faults(plan),
        _layer_faults(plan, num_layers),
        _rank_faults(plan, world_size),
        _degree_faults(plan, nodes),
        _memory_faults(plan, memory or {}),
    )
    fault = next(faults, None)
    if fault is not None:
        raise PlanError(f"{fault.text}\n{draw_plan(plan, mark=fault.mark)}")


def _name(pipeline_id: int, stage_id: int) -> str:
    return f"pipeline {pipeline_id}, stage {stage_id}"


def _batch_faults(plan: ParallelPlan) -> Iterator[_Fault]:
    if not plan.pipelines:
        yield _Fault("the plan has no pipeline: give it at least one", Mark())
    if plan.micro_batch_size < 1:
        yield _Fault(f"micro_batch_size is {plan.micro_batch_size}: it must be at least 1", Mark(0))
    for pipeline_id, pipeline in enumerate(plan.pipelines):
        if pipeline.num_micro_batches < 1:
            yield _Fault(
                f"pipeline {pipeline_id}: num_micro_batches is {pipeline.num_micro_batches}: it must be at "
                f"least 1; make the ranks of a pipeline without data standby",
                Mark(pipeline_id),
            )


def _layer_faults(plan: ParallelPlan, num_layers: int) -> Iterator[_Fault]:
    for pipeline_id, pipeline in enumerate(plan.pipelines):
        yield from _coverage_faults(pipeline_id, pipeline, num_layers)


def _coverage_faults(pipeline_id: int, pipeline: Pipeline, num_layers: int) -> Iterator[_Fault]:
    if not pipeline.stages:
        yield _Fault(f"pipeline {pipeline_id} has no stage: give it at least one", Mark(pipeline_id))
    expected_start = 0
    for stage_id, stage in enumerate(pipeline.stages):
        where, mark = _name(pipeline_id, stage_id), Mark(pipeline_id, stage_id)
        start, stop = stage.layers
        if start != expected_start:
            kind = "leaves out layers" if start > expected_start else "repeats layers"
            yield _Fault(
                f"{where} {kind}: it starts at layer {start}, but must start at {expected_start}", mark
            )
        if stop <= start:
            yield _Fault(
                f"{where} is empty: its layers are [{start}, {stop}); "
                f"give it a layer, or make its ranks standby",
                mark,
            )
        expected_start = stop
    if pipeline.stages and expected_start != num_layers:
        last = len(pipeline.stages) - 1
        yield _Fault(
            f"{_name(pipeline_id, last)} stops at layer {expected_start}, but the model has {num_layers} "
            f"layers: the last stage must stop at {num_layers}",
            Mark(pipeline_id, last),
        )


def _places(plan: ParallelPlan) -> Iterator[tuple[int, str, Mark]]:
    """Each mention of a rank: the rank, the name of the place, its mark."""
    for pipeline_id, stage_id, stage in plan.stages():
        for rank in stage.ranks:
            yield rank, _name(pipeline_id, stage_id), Mark(pipeline_id, stage_id)
    for rank in plan.standby:
        yield rank, "standby", Mark()


def _rank_faults(plan: ParallelPlan, world_size: int) -> Iterator[_Fault]:
    for pipeline_id, stage_id, stage in plan.stages():
        if not stage.ranks:
            yield _Fault(
                f"{_name(pipeline_id, stage_id)} has no rank: give it one", Mark(pipeline_id, stage_id)
            )
    seen: dict[int, str] = {}
    for rank, where, mark in _places(plan):
        if not 0 <= rank < world_size:
            yield _Fault(
                f"{where}: rank {rank} is not in the world of {world_size} ranks: use 0 to {world_size - 1}",
                mark,
            )
        if rank in seen:
            yield _Fault(f"{where}: rank {rank} is already in {seen[rank]}: a rank has one place", mark)
        seen[rank] = where
    missing = sorted(set(range(world_size)) - seen.keys())
    if missing:
        yield _Fault(
            f"ranks {missing} of the world of {world_size} are in no stage: "
            f"put them in stages, or in standby",
            Mark(),
        )


def _degree_faults(plan: ParallelPlan, nodes: Sequence[Sequence[int]] | None) -> Iterator[_Fault]:
    node_of = {rank: node_id for node_id, ranks in enumerate(nodes or ()) for rank in ranks}
    for pipeline_id, stage_id, stage in plan.stages():
        where, mark = _name(pipeline_id, stage_id), Mark(pipeline_id, stage_id)
        if stage.degree & (stage.degree - 1):
            yield _Fault(
                f"{where}: ranks {list(stage.ranks)} are {stage.degree}: "
                f"a tensor-parallel degree is 1, 2, 4, 8, ...",
                mark,
            )
        if nodes is not None and stage.degree > 1:
            yield from _node_faults(stage, node_of, where, mark)


def _node_faults(stage: Stage, node_of: Mapping[int, int], where: str, mark: Mark) -> Iterator[_Fault]:
    unknown = [rank for rank in stage.ranks if rank not in node_of]
    if unknown:
        yield _Fault(f"{where}: ranks {unknown} are on no node: add them to the nodes", mark)
    elif len({node_of[rank] for rank in stage.ranks}) > 1:
        placed = ", ".join(f"rank {rank} on node {node_of[rank]}" for rank in stage.ranks)
        yield _Fault(f"{where}: a tensor-parallel group must stay inside one node, but has {placed}", mark)


def _memory_faults(plan: ParallelPlan, memory: Mapping[int, tuple[float, float]]) -> Iterator[_Fault]:
    for rank, where, mark in _places(plan):
        if rank not in memory:
            continue
        needed, available = memory[rank]
        if needed > available:
            yield _Fault(
                f"{where}: rank {rank} needs {needed / 2**20:.1f} MiB, but has {available / 2**20:.1f} MiB: "
                f"give the stage fewer layers, or the pipeline fewer micro-batches in flight",
                mark,
            )
