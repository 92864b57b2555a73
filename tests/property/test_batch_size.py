"""Sharing out another global batch, against every way to do it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_ds.plan import ParallelPlan, PlanError
from malleus_ds.plan.batch_size import share_out, with_batch_size

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(SHARES, st.integers(0, 8))
def test_no_other_split_has_an_earlier_end(shares: list[int], more: int) -> None:
    total = len(shares) + more
    counts = share_out(total, shares)
    every = [
        split for split in itertools.product(range(1, total + 1), repeat=len(shares)) if sum(split) == total
    ]
    assert tuple(counts) in every

    def end(split: Any) -> float:
        return max(count / share for count, share in zip(split, shares, strict=True))

    assert end(counts) == min(map(end, every))


@given(SHARES, st.integers(1, 5))
def test_multiples_keep_the_proportions(shares: list[int], factor: int) -> None:
    assert share_out(factor * sum(shares), shares) == [factor * share for share in shares]


@pytest.mark.parametrize(
    ("batch_size", "words"),
    [
        (15, "train_batch_size is 15: give a multiple of the micro-batch size, 2"),
        (2, "less than one micro-batch of 2 samples for each of 2 pipelines: give at least 4"),
        (0, "give at least 4"),
        (-8, "give at least 4"),
        (True, "train_batch_size is True"),
        (8.0, "train_batch_size is 8.0"),
    ],
)
def test_impossible_sizes_are_refused(batch_size: Any, words: str) -> None:
    plan = ParallelPlan.homogeneous(4, 4, 2, num_micro_batches=4, micro_batch_size=2)
    with pytest.raises(PlanError) as caught:
        with_batch_size(plan, batch_size, [4, 4])
    assert words in str(caught.value)
