"""One pipeline under 1F1B, instruction by instruction.

An instruction starts when the one before it on its stage has ended and its input is there; a message does
not hold up its sender. The order on each stage is fixed, so each instruction is looked at once.

How this compares with the formula of the cost model, ``(m - 1) * max_j t_j + sum_j t_j`` (measured over
random pipelines, and tested), for messages that take no time:

- The formula is exact when the last stage is one of the slowest, whatever the order of the others and the
  number of micro-batches: so for equal stages, for a single stage, and for one micro-batch.
- Elsewhere it is too high, never too low: the stages behind the slowest one work while it is busy, so that
  part of their time is hidden. It is too high by at most the sum over the stages j behind it of
  ``max t - t_j``.

Messages make it too low: neighbouring stages wait for each other's activation and gradient once in two
micro-batches, so that ``n`` equal stages have a pace of ``t + message_s * (n - 1) / n`` instead of ``t``. The
formula counts each message once. With slower stages behind faster ones the wait is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from malleus_ds.simulate.schedule import Direction, one_f_one_b


@dataclass(frozen=True, slots=True)
class Work:
    """One instruction of a stage. micro_batch: counted within its pipeline."""

    direction: Direction
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """What each stage did, in order."""

    stages: tuple[tuple[Work, ...], ...]

    @property
    def makespan_s(self) -> float:
        """End of the last backward: all stages wait for one in front of them, the first ends last."""
        return max(work[-1].end_s for work in self.stages)


def run_pipeline(
    stage_times_s: Sequence[float],
    num_micro_batches: int,
    message_s: float = 0.0,
    backward_ratio: float = 2.0,
) -> PipelineRun:
    """Run one step of one pipeline.

    stage_times_s: forward and backward of one micro-batch on each stage; message_s: an activation and its
    gradient across one boundary, half each; backward_ratio: backward time / forward time.
    """
    num_stages = len(stage_times_s)
    shares: dict[Direction, float] = {
        "forward": 1 / (1 + backward_ratio),
        "backward": backward_ratio / (1 + backward_ratio),
    }
    orders = [list(one_f_one_b(num_stages, stage_id, num_micro_batches)) for stage_id in range(num_stages)]
    done: list[list[Work]] = [[] for _ in range(num_stages)]
    # Each direction takes the micro-batches in order: an input is there once its list is long enough.
    ends_s: dict[Direction, list[list[float]]] = {
        "forward": [[] for _ in range(num_stages)],
        "backward": [[] for _ in range(num_stages)],
    }
    waiting = list(range(num_stages))
    while waiting:
        stage_id = waiting.pop()
        order, work, before = orders[stage_id], done[stage_id], len(done[stage_id])
        free_s = work[-1].end_s if work else 0.0
        while len(work) < len(order):
            direction, micro_batch = order[len(work)]
            source = stage_id - 1 if direction == "forward" else stage_id + 1
            start_s = free_s
            if 0 <= source < num_stages:
                arrivals = ends_s[direction][source]
                if len(arrivals) <= micro_batch:
                    break
                start_s = max(free_s, arrivals[micro_batch] + message_s / 2)
            free_s = start_s + shares[direction] * stage_times_s[stage_id]
            ends_s[direction][stage_id].append(free_s)
            work.append(Work(direction, micro_batch, start_s, free_s))
        if len(work) > before:
            waiting += [each for each in (stage_id + 1, stage_id - 1) if 0 <= each < num_stages]
    return PipelineRun(tuple(map(tuple, done)))
