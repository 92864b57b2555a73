from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from malleus_ds.detector.record import (
    RECORD_SIZE,
    StepRecord,
    digest_number,
    ranks_with_another_plan,
    unpack_records,
)
from malleus_ds.plan import ParallelPlan

times = st.floats(min_value=0, max_value=1e6)
records = st.builds(
    StepRecord,
    step=st.integers(0, 2**40),
    compute_s=times,
    expected_s=times,
    plan_digest=st.integers(0, 2**48 - 1),
    plan_bytes=st.integers(0, 2**32),
    failed=st.booleans(),
)


@given(st.lists(records, min_size=1, max_size=4))
def test_records_survive_the_exchange_exactly(sent: list[StepRecord]) -> None:
    matrix = np.stack([record.pack() for record in sent])
    assert matrix.shape == (len(sent), RECORD_SIZE)
    assert matrix.dtype == np.float64
    received = unpack_records(matrix)
    assert received == tuple(sent)
    assert [type(record.step) for record in received] == [int] * len(sent)
    assert all(isinstance(record.failed, bool) for record in received)


def test_digest_number_is_the_first_48_bits() -> None:
    plan = ParallelPlan.homogeneous(num_layers=4, world_size=2, num_stages=2)
    number = digest_number(plan.digest)
    assert f"{number:012x}" == plan.digest[:12]
    assert int(float(number)) == number
    assert digest_number("f" * 16) == 2**48 - 1


def test_ranks_with_another_plan() -> None:
    digests = [5, 5, 9, 5, 7]
    records = [StepRecord(3, 1.0, 1.0, digest) for digest in digests]
    assert ranks_with_another_plan(records) == (2, 4)
    assert ranks_with_another_plan(records[:2]) == ()
