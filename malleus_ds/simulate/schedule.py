"""The order of a stage's work in one step of 1F1B (PipeDream-flush, Narayanan et al., 2021)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Direction = Literal["forward", "backward"]


def num_warm_up(num_stages: int, stage_id: int, num_micro_batches: int) -> int:
    """Forwards before the first backward: as many as there are stages behind, if there is data for them."""
    return min(num_stages - stage_id - 1, num_micro_batches)


def one_f_one_b(num_stages: int, stage_id: int, num_micro_batches: int) -> Iterator[tuple[Direction, int]]:
    """``(direction, micro-batch of the pipeline)`` in order: warm-up, one forward one backward, drain."""
    num_ahead = num_warm_up(num_stages, stage_id, num_micro_batches)
    for micro_batch in range(num_ahead):
        yield "forward", micro_batch
    for micro_batch in range(num_micro_batches - num_ahead):
        yield "forward", num_ahead + micro_batch
        yield "backward", micro_batch
    for micro_batch in range(num_micro_batches - num_ahead, num_micro_batches):
        yield "backward", micro_batch
