from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from malleus_ds.data import DataError, SampleOrder


def test_every_epoch_consumes_each_sample_once_in_another_order() -> None:
    order = SampleOrder(num_samples=17, seed=3)
    epochs = [order.indices(17 * epoch, 17 * (epoch + 1)).tolist() for epoch in range(5)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert epochs[0] != SampleOrder(num_samples=17, seed=4).indices(0, 17).tolist()


@pytest.mark.parametrize("shuffle", [True, False])
def test_any_cut_of_the_positions_gives_the_same_samples(shuffle: bool) -> None:
    whole = SampleOrder(7, seed=-5, shuffle=shuffle).indices(0, 60)
    order = SampleOrder(7, seed=-5, shuffle=shuffle)
    cuts = [0, 1, 5, 5, 19, 20, 60]
    parts = [order.indices(start, stop) for start, stop in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert whole.dtype == np.int64
    # Backwards, so that the epochs kept in the cache are the wrong ones each time.
    assert [int(order.indices(k, k + 1)[0]) for k in reversed(range(60))] == whole[::-1].tolist()


def test_without_shuffle_the_samples_come_in_their_own_order() -> None:
    assert SampleOrder(4, seed=1, shuffle=False).indices(2, 11).tolist() == [2, 3, 0, 1, 2, 3, 0, 1, 2]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(DataError, match="num_samples is 0"):
        SampleOrder(0, seed=1)
    with pytest.raises(DataError, match=r"\[5, 3\)"):
        SampleOrder(4, seed=1).indices(5, 3)


def test_the_order_needs_no_torch() -> None:
    code = "import sys, malleus_ds.data.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
