"""What changes from one plan to another, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from malleus_ds.plan.drawing import layers_text, ranks_text
from malleus_ds.plan.types import ParallelPlan, PlanError


@dataclass(frozen=True, slots=True)
class Holder:
    """The stage that holds a layer in a pipeline."""

    stage_id: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"stage {self.stage_id} ({'rank' if len(self.ranks) == 1 else 'ranks'} {ranks_text(self.ranks)})"
        )


@dataclass(frozen=True, slots=True)
class LayerMove:
    """Neighbouring layers of a pipeline whose ranks change.

    old, new: None where the plan has no such pipeline.
    """

    pipeline_id: int
    layers: tuple[int, int]
    old: Holder | None
    new: Holder | None

    def __str__(self) -> str:
        what = f"layer{'s' if self.layers[1] - self.layers[0] > 1 else ''} {layers_text(self.layers)}"
        if self.old is None:
            return f"pipeline {self.pipeline_id} is new: {self.new} takes {what}"
        if self.new is None:
            return f"pipeline {self.pipeline_id} ends: {self.old} drops {what}"
        verb = "move" if self.layers[1] - self.layers[0] > 1 else "moves"
        return f"pipeline {self.pipeline_id}: {what} {verb} from {self.old} to {self.new}"


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """The differences of two plans; falsy when they do the same.

    num_pipelines, micro_batch_size: ``(old, new)`` where they differ; num_micro_batches:
    ``(pipeline_id, old, new)`` for pipelines of both plans.
    """

    num_pipelines: tuple[int, int] | None
    micro_batch_size: tuple[int, int] | None
    moves: tuple[LayerMove, ...]
    num_micro_batches: tuple[tuple[int, int, int], ...]
    to_standby: tuple[int, ...]
    from_standby: tuple[int, ...]

    def lines(self) -> list[str]:
        """One sentence per difference."""
        lines = []
        if self.num_pipelines is not None:
            lines.append(f"number of pipelines {self.num_pipelines[0]} -> {self.num_pipelines[1]}")
        if self.micro_batch_size is not None:
            lines.append(f"micro-batch size {self.micro_batch_size[0]} -> {self.micro_batch_size[1]}")
        lines += map(str, self.moves)
        lines += [
            f"pipeline {number}: micro-batches {old} -> {new}" for number, old, new in self.num_micro_batches
        ]
        lines += [f"rank {rank} becomes standby" for rank in self.to_standby]
        lines += [f"rank {rank} comes back" for rank in self.from_standby]
        return lines

    def __bool__(self) -> bool:
        return bool(self.lines())


def diff_plans(old: ParallelPlan, new: ParallelPlan) -> PlanDiff:
    """Compare two legal plans of one model. Pipelines are matched by their position.

    Raises `PlanError` when the plans differ in their number of layers.
    """
    if old.num_layers != new.num_layers:
        raise PlanError(
            f"cannot compare plans of {old.num_layers} and {new.num_layers} layers: use one model's"
        )
    return PlanDiff(
        num_pipelines=_pair(len(old.pipelines), len(new.pipelines)),
        micro_batch_size=_pair(old.micro_batch_size, new.micro_batch_size),
        moves=tuple(
            move
            for pipeline_id in range(max(len(old.pipelines), len(new.pipelines)))
            for move in _moves(old, new, pipeline_id)
        ),
        num_micro_batches=tuple(
            (pipeline_id, before.num_micro_batches, after.num_micro_batches)
            for pipeline_id, (before, after) in enumerate(zip(old.pipelines, new.pipelines, strict=False))
            if before.num_micro_batches != after.num_micro_batches
        ),
        to_standby=tuple(sorted(set(new.standby) - set(old.standby))),
        from_standby=tuple(sorted(set(old.standby) - set(new.standby))),
    )


def _pair(old: int, new: int) -> tuple[int, int] | None:
    return None if old == new else (old, new)


def _holders(plan: ParallelPlan, pipeline_id: int) -> list[Holder | None]:
    """The holder of each layer; None throughout when the plan has no such pipeline."""
    if pipeline_id >= len(plan.pipelines):
        return [None] * plan.num_layers
    stages = plan.pipelines[pipeline_id].stages
    return [
        Holder(stage_id, stage.ranks)
        for stage_id, stage in enumerate(stages)
        for _ in range(stage.num_layers)
    ]


def _moves(old: ParallelPlan, new: ParallelPlan, pipeline_id: int) -> Iterator[LayerMove]:
    pairs = zip(_holders(old, pipeline_id), _holders(new, pipeline_id), strict=True)
    for (before, after), run in groupby(enumerate(pairs), key=lambda item: item[1]):
        layers = [layer for layer, _ in run]
        if (before and before.ranks) != (after and after.ranks):
            yield LayerMove(pipeline_id, (layers[0], layers[-1] + 1), before, after)
