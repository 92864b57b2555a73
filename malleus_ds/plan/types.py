"""The plan: which ranks form which stages, which layers they hold, and how much data they take.

Everything here is immutable data without torch; the checks, the drawing and the diff live beside
it in files of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


class PlanError(ValueError):
    """A plan that is malformed or does not fit the model, the world or the memory."""


def check_num_stages(num_stages: int, world_size: int) -> None:
    """Raise `PlanError` unless equal pipelines of so many stages fill the world."""
    if num_stages < 1 or world_size % num_stages != 0:
        raise PlanError(
            f"num_stages ({num_stages}) must divide the world size ({world_size}): choose a divisor, or "
            f"give a plan that leaves ranks standby"
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """A tensor-parallel group and its contiguous layer range.

    ranks: global ranks, in slice order; layers: ``(start, stop)``, stop excluded.
    """

    ranks: tuple[int, ...]
    layers: tuple[int, int]

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]

    @property
    def degree(self) -> int:
        """Tensor-parallel degree."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One data-parallel replica: ordered stages that cover all layers once, and its data share."""

    stages: tuple[Stage, ...]
    num_micro_batches: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """``num_stages + 1`` layer indices, as DeepSpeed's ``PipelineModule.parts``."""
        return (self.stages[0].layers[0], *(stage.layers[1] for stage in self.stages))


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank stands in a plan."""

    pipeline_id: int
    stage_id: int
    slice_id: int


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """All pipelines, the micro-batch size (in samples) and the standby ranks."""

    pipelines: tuple[Pipeline, ...]
    micro_batch_size: int = 1
    standby: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.pipelines[0].stages[-1].layers[1]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of all pipelines in one step."""
        return sum(pipeline.num_micro_batches for pipeline in self.pipelines)

    @property
    def data_shares(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline in one step."""
        return tuple(pipeline.num_micro_batches for pipeline in self.pipelines)

    @property
    def global_batch_size(self) -> int:
        """Samples of one step."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold layers, in plan order."""
        return tuple(rank for pipeline in self.pipelines for rank in pipeline.ranks)

    @property
    def world_size(self) -> int:
        return len(self.ranks) + len(self.standby)

    def stages(self) -> Iterator[tuple[int, int, Stage]]:
        """All stages as ``(pipeline_id, stage_id, stage)``."""
        for pipeline_id, pipeline in enumerate(self.pipelines):
            for stage_id, stage in enumerate(pipeline.stages):
                yield pipeline_id, stage_id, stage

    def position(self, rank: int) -> Position | None:
        """Where ``rank`` stands; None for a standby rank (or one outside the plan)."""
        for pipeline_id, stage_id, stage in self.stages():
            if rank in stage.ranks:
                return Position(pipeline_id, stage_id, stage.ranks.index(rank))
        return None

    def layers_of(self, rank: int) -> tuple[int, int]:
        """Layer range of ``rank``; ``(0, 0)`` for a standby rank."""
        position = self.position(rank)
        if position is None:
            return (0, 0)
        return self.pipelines[position.pipeline_id].stages[position.stage_id].layers

    def micro_batch_range(self, pipeline_id: int) -> tuple[int, int]:
        """Global micro-batch indices ``[start, stop)`` that a pipeline takes in each step."""
        start = sum(pipeline.num_micro_batches for pipeline in self.pipelines[:pipeline_id])
        return start, start + self.pipelines[pipeline_id].num_micro_batches

    def with_micro_batches(self, counts: Sequence[int]) -> ParallelPlan:
        """The same plan with other data shares, one count per pipeline."""
        if len(counts) != len(self.pipelines):
            raise PlanError(f"{len(counts)} micro-batch counts for {len(self.pipelines)} pipelines")
        pipelines = tuple(
            replace(pipeline, num_micro_batches=count)
            for pipeline, count in zip(self.pipelines, counts, strict=True)
        )
        return replace(self, pipelines=pipelines)

    @classmethod
    def homogeneous(
        cls,
        num_layers: int,
        world_size: int,
        num_stages: int,
        num_micro_batches: int = 1,
        micro_batch_size: int = 1,
        boundaries: Sequence[int] | None = None,
    ) -> ParallelPlan:
        """The usual equal plan, with DeepSpeed's rank order (stage-major: the data axis is inner).

        num_micro_batches: per pipeline; boundaries: ``num_stages + 1`` layer indices, else layers
        are spread so that stage sizes differ by at most one.
        """
        check_num_stages(num_stages, world_size)
        if boundaries is None:
            if num_layers < num_stages:
                raise PlanError(
                    f"{num_layers} layers cannot fill {num_stages} stages: use at most {num_layers} "
                    f"stages, or give a plan that leaves ranks standby"
                )
            boundaries = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
        num_pipelines = world_size // num_stages
        pipelines = tuple(
            Pipeline(
                stages=tuple(
                    Stage((stage * num_pipelines + replica,), (boundaries[stage], boundaries[stage + 1]))
                    for stage in range(num_stages)
                ),
                num_micro_batches=num_micro_batches,
            )
            for replica in range(num_pipelines)
        )
        return cls(pipelines, micro_batch_size)

    def validate(
        self,
        num_layers: int,
        world_size: int,
        nodes: Sequence[Sequence[int]] | None = None,
        memory: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        """Raise `PlanError` unless the plan is legal; see `malleus_ds.plan.checks.check_plan`."""
        from malleus_ds.plan.checks import check_plan

        check_plan(self, num_layers, world_size, nodes=nodes, memory=memory)

    def to_dict(self) -> dict[str, Any]:
        return {
            "pipelines": [
                {
                    "stages": [
                        {"ranks": list(stage.ranks), "layers": list(stage.layers)}
                        for stage in pipeline.stages
                    ],
                    "num_micro_batches": pipeline.num_micro_batches,
                }
                for pipeline in self.pipelines
            ],
            "micro_batch_size": self.micro_batch_size,
            "standby": list(self.standby),
        }

    def to_json(self, path: str | Path | None = None, indent: int | None = None) -> str:
        """The plan as JSON text, also written to ``path`` when given."""
        text = json.dumps(self.to_dict(), indent=indent)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_dict(cls, data: Any) -> ParallelPlan:
        """Strict inverse of `to_dict`: unknown keys and wrong types raise `PlanError`."""
        from malleus_ds.plan.parsing import plan_from_dict

        return plan_from_dict(data)

    @classmethod
    def from_json(cls, text: str) -> ParallelPlan:
        """Parse JSON text (not a path: see `load`)."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"the plan is not valid JSON: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def load(cls, path: str | Path) -> ParallelPlan:
        """Read a plan from a JSON file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan file {str(path)!r}: {error}") from error
        return cls.from_json(text)

    @property
    def digest(self) -> str:
        """Short hash of the content; ranks compare it to know that they hold the same plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def __str__(self) -> str:
        from malleus_ds.plan.drawing import draw_plan

        return draw_plan(self)
