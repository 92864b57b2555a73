"""Tensors between stages whose TP groups have different sizes: all arrive, and each value crosses once."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from malleus_ds.pipe.stage_link import Metas, StageLink, StageLinkError, TensorMeta
from tests.harness import DistributedTest

CPU = torch.device("cpu")


class CountingLink(StageLink):
    """Counts the elements that this rank sends."""

    num_sent = 0

    def _post(self, part: Tensor, peer: int) -> None:
        self.num_sent += part.numel()
        super()._post(part, peer)


def tensors(seed: int) -> tuple[Tensor, ...]:
    """Of several types and sizes: odd, empty, smaller than any group, not contiguous, a mask, a scalar."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3, 5, 7, generator=generator)
    return (
        values,
        values.transpose(0, 2).bfloat16(),
        values > 0,
        torch.arange(2),
        torch.empty(0, 4),
        values[0, 0, 0].double(),
    )


class TestStageLink(DistributedTest):
    world_size = 8

    @pytest.mark.parametrize("overlaps", [True, False])
    @pytest.mark.parametrize(
        ("front", "behind"),
        [([0], [1]), ([3], [5, 2]), ([6, 1, 0, 7], [4]), ([1, 0], [7, 3, 4, 2]), ([5, 4], [0, 1])],
    )
    def test_all_arrive_and_each_value_crosses_once(
        self, front: list[int], behind: list[int], overlaps: bool
    ) -> None:
        rank = dist.get_rank()
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in (front, behind)}
        own, peer = (front, behind) if rank in front else (behind, front)
        if rank not in own:
            return
        handle = groups[tuple(own)] if len(own) > 1 else None
        link = CountingLink(own, peer, handle, CPU, max_sends=2 * overlaps)
        if own is front:
            link.send_metas(Metas.of(tensors(0)))
        else:
            assert link.receive_metas() == Metas.of(tensors(0))
        num_described = link.num_sent
        metas = Metas.of(tensors(0)).tensors
        for seed in range(3):  # there, and back
            if own is front:
                link.send(tensors(seed))
                received = link.receive(metas, more=seed < 2)
            else:
                received = link.receive(metas, more=seed < 2)
                link.send(tensors(seed))
            for tensor, expected in zip(received, tensors(seed), strict=True):
                assert tensor.dtype == expected.dtype
                assert torch.equal(tensor, expected)
        link.finish()
        sent = torch.tensor(float(link.num_sent - num_described))
        if handle is not None:
            dist.all_reduce(sent, group=handle)
        assert sent.item() == 3 * sum(tensor.numel() for tensor in tensors(0))

    def test_what_was_sent_is_freed(self) -> None:
        """Also where a backend never tells that a message has left, as gloo."""
        rank = dist.get_rank()
        if rank > 1:
            return
        link = StageLink([rank], [1 - rank], None, CPU, max_sends=2)
        metas = Metas.of(torch.ones(3)).tensors
        sent = []
        for count in range(6):
            if rank == 1:
                link.receive(metas, more=count < 5)
                continue
            tensor = torch.ones(3)
            sent.append(weakref.ref(tensor.untyped_storage()))
            link.send([tensor])
            del tensor
            assert sum(reference() is not None for reference in sent) <= 2
        link.finish()
        assert not any(reference() is not None for reference in sent)


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(StageLinkError, match="puts out list"):
        Metas.of([torch.ones(1)])  # type: ignore[arg-type]
    with pytest.raises(StageLinkError, match="puts out float"):
        Metas.of((torch.ones(1), 1.0))  # type: ignore[arg-type]
    with pytest.raises(StageLinkError, match=r"torch\.uint16, which cannot be sent"):
        Metas.of(torch.ones(1).to(torch.uint16))
    with pytest.raises(StageLinkError, match="100 tensors between two stages are too many"):
        Metas.of(tuple(torch.ones(1) for _ in range(100))).encode()


def test_metas_round_trip() -> None:
    metas = Metas(
        (TensorMeta((2, 3), torch.bfloat16, True), TensorMeta((), torch.bool, False)), is_tuple=True
    )
    assert Metas.decode(metas.encode()) == metas
