"""What each rank tells all others once per step: a small fixed-size vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One rank's record of one step.

    compute_s, expected_s: measured compute of the rank (a standby rank: of its probe) and the
    healthy time of the same work, in seconds; ``expected_s == 0``: nothing measured in this step.
    plan_digest: `digest_number` of the plan that the rank ran; ranks that differ must stop.
    plan_bytes: in the coordinator's record only. When above 0, the coordinator holds a new plan
    of that many bytes: once this record is complete, all ranks receive it by
    `ControlPlane.broadcast` and switch at that step boundary.
    failed: the device of this rank can compute no more.
    """

    step: int
    compute_s: float
    expected_s: float
    plan_digest: int
    plan_bytes: int = 0
    failed: bool = False

    def pack(self) -> NDArray[np.float64]:
        """The record as float64 ``[RECORD_SIZE]``; integers below 2**53 are exact."""
        return np.array(astuple(self), dtype=np.float64)

    @classmethod
    def unpack(cls, vector: NDArray[np.float64]) -> StepRecord:
        """Inverse of `pack`."""
        step, compute_s, expected_s, plan_digest, plan_bytes, failed = vector.tolist()
        return cls(int(step), compute_s, expected_s, int(plan_digest), int(plan_bytes), bool(failed))


RECORD_SIZE = len(fields(StepRecord))


def digest_number(digest: str) -> int:
    """First 48 bits of a hexadecimal digest (`ParallelPlan.digest`): exact in a float64."""
    return int(digest[:12], 16)


def unpack_records(matrix: NDArray[np.float64]) -> tuple[StepRecord, ...]:
    """The records of all ranks from ``[world_size, RECORD_SIZE]``, in rank order."""
    return tuple(StepRecord.unpack(vector) for vector in matrix)


def ranks_with_another_plan(records: Sequence[StepRecord]) -> tuple[int, ...]:
    """Ranks whose plan differs from the coordinator's (rank 0); empty when all agree."""
    return tuple(rank for rank, record in enumerate(records) if record.plan_digest != records[0].plan_digest)
