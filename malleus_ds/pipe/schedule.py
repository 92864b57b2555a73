"""The schedule of a rank that holds no layer."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import OptimizerStep, PipeInstruction, PipeSchedule, ReduceGrads


class StandbySchedule(PipeSchedule):  # type: ignore[misc]
    """Only what all ranks do together: it keeps step counts and LR schedules equal everywhere."""

    def __init__(self) -> None:
        super().__init__(micro_batches=0, stages=1, stage_id=0)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        yield [ReduceGrads(), OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        return 0
