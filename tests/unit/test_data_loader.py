from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from malleus_ds.data import DataError, PlanInvariantLoader, SampleOrder

SAMPLES = [(torch.tensor([i, i + 100]), torch.tensor(-i)) for i in range(11)]


def make_loader(micro_batch_size: int = 3) -> PlanInvariantLoader:
    return PlanInvariantLoader(SAMPLES, micro_batch_size, SampleOrder(len(SAMPLES), seed=9))


def ids(micro_batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    return [int(i) for tokens, _ in micro_batches for i in tokens[:, 0]]


def test_a_micro_batch_is_the_collated_samples_at_its_positions() -> None:
    tokens, labels = make_loader().micro_batch(first_position=10)  # spans the end of the first epoch
    expected = SampleOrder(len(SAMPLES), seed=9).indices(10, 13).tolist()
    assert torch.equal(tokens, torch.stack([SAMPLES[i][0] for i in expected]))
    assert torch.equal(labels, torch.stack([SAMPLES[i][1] for i in expected]))


@pytest.mark.parametrize("shares", [(8,), (5, 3), (2, 6), (3, 3, 2)])
def test_pipelines_with_any_shares_consume_exactly_the_samples_of_the_step(shares: tuple[int, ...]) -> None:
    global_batch_size = 3 * sum(shares)
    for step in (0, 4):
        consumed, start = [], 0
        for share in shares:
            loader = make_loader()  # one per pipeline: none may depend on what it gave before
            consumed += ids(loader.micro_batches(step * global_batch_size, start, start + share))
            start += share
        positions = step * global_batch_size, (step + 1) * global_batch_size
        assert consumed == SampleOrder(len(SAMPLES), seed=9).indices(*positions).tolist()


def test_iteration_walks_the_order_from_its_start_without_end() -> None:
    assert ids(islice(make_loader(), 9)) == SampleOrder(len(SAMPLES), seed=9).indices(0, 27).tolist()


@pytest.mark.parametrize(("micro_batch_size", "length"), [(1, 11), (3, 4), (11, 1), (20, 1)])
def test_length_is_the_micro_batches_that_cover_an_epoch(micro_batch_size: int, length: int) -> None:
    assert len(make_loader(micro_batch_size)) == length


def test_collate_fn_makes_the_micro_batch() -> None:
    dataset = [10, 20, 30]
    loader = PlanInvariantLoader(dataset, 2, SampleOrder(3, seed=0, shuffle=False), collate_fn=sum)
    assert list(islice(loader, 3)) == [30, 40, 50]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("dataset", [Stream(), SizedStream(), iter([1, 2, 3]), {1, 2, 3}])
def test_data_sets_without_random_access_are_refused(dataset: Any) -> None:
    with pytest.raises(DataError, match=rf"a {type(dataset).__name__}, which lacks .* pass a data_iter"):
        PlanInvariantLoader(dataset, 1, SampleOrder(3, seed=0))


def test_bad_arguments_are_named() -> None:
    order = SampleOrder(3, seed=0)
    with pytest.raises(DataError, match="3 samples but the data set 2"):
        PlanInvariantLoader(TensorDataset(torch.zeros(2)), 1, order)
    with pytest.raises(DataError, match="micro_batch_size is 0"):
        PlanInvariantLoader([1, 2, 3], 0, order)
