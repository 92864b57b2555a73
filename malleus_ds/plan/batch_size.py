"""Another global batch under the same stages. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from malleus_ds.plan import ParallelPlan, PlanError


def with_batch_size(plan: ParallelPlan, batch_size: int, shares: Sequence[int]) -> ParallelPlan:
    """``plan`` with a global batch of ``batch_size`` samples, in micro-batches of the same size.

    shares: micro-batches per pipeline that a plan chose for these stages; they give the proportions.
    Raises `PlanError` for a batch that is not whole micro-batches, or less than one per pipeline.
    """
    size, num_pipelines = plan.micro_batch_size, len(plan.pipelines)
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size % size:
        raise PlanError(
            f"train_batch_size is {batch_size!r}: give a multiple of the micro-batch size, {size} samples"
        )
    if batch_size < size * num_pipelines:
        raise PlanError(
            f"train_batch_size is {batch_size}, less than one micro-batch of {size} samples for each of "
            f"{num_pipelines} pipelines: give at least {size * num_pipelines}, or first switch to a plan "
            f"with fewer pipelines"
        )
    return plan.with_micro_batches(share_out(batch_size // size, shares))


def share_out(total: int, shares: Sequence[int]) -> list[int]:
    """``total`` micro-batches over pipelines in proportion to ``shares``, at least one each.

    Shares are as fast as pipelines are, so the largest ``count / share`` is the step; each micro-batch
    goes where it raises that least (D'Hondt 1882), which makes it minimal.
    """
    counts = [1] * len(shares)
    for _ in range(total - len(shares)):
        counts[min(range(len(shares)), key=lambda i: (counts[i] + 1) / shares[i])] += 1
    return counts
