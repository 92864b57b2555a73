"""The model as logical tensors, and its cut into buckets; neither depends on a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod


class LayoutError(ValueError):
    """The ranks do not hold the same model."""


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A parameter or buffer of the whole model, independent of who holds it.

    name: global name, as in the module's state dict; shape: of the whole tensor; dtype: torch's
    name without the prefix, such as ``"float32"``; itemsize: bytes per element; layers: layers
    that use it, more than one when tied; group: index of its optimizer parameter group, None when
    it is not optimized (frozen, or a buffer); is_cut: tensor parallelism cuts it along dim 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    layers: tuple[int, ...]
    group: int | None
    is_cut: bool = False

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of a logical tensor; buckets hold whole tensors."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are reduced, stepped and moved together.

    num_slices: 1 for tensors that every rank of a TP group holds whole. More for one single tensor
    that tensor parallelism cuts along dim 0 into so many equal slices: how many of them a rank
    holds depends on the plan, and as they are neighbours, they are one range of the bucket.
    """

    index: int
    layers: tuple[int, ...]
    dtype: str
    itemsize: int
    group: int | None
    num_slices: int
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize


def merge_layouts(described: Sequence[Iterable[LogicalTensor]]) -> tuple[LogicalTensor, ...]:
    """All logical tensors, from what each rank holds (one entry per rank), in a global order.

    Raises `LayoutError` when two ranks describe the same tensor differently.
    """
    merged: dict[str, tuple[int, LogicalTensor]] = {}
    for rank, tensors in enumerate(described):
        for tensor in tensors:
            first_rank, first = merged.setdefault(tensor.name, (rank, tensor))
            if first != tensor:
                raise LayoutError(
                    f"ranks {first_rank} and {rank} hold different models: {tensor.name!r} is "
                    f"{first} there and {tensor} here; build the same layers on all ranks"
                )
    return tuple(sorted((tensor for _, tensor in merged.values()), key=lambda t: (t.layers, t.name)))


def make_buckets(
    layout: Sequence[LogicalTensor], bucket_bytes: int, num_slices: int = 1
) -> tuple[Bucket, ...]:
    """Cut the model into buckets of at most ``bucket_bytes`` (or one tensor, when that is larger).

    A bucket never spans two layers, so that it can be reduced while backward still runs and can
    leave or arrive alone. A tensor that TP cuts has a bucket of its own, so that each rank's part
    of it is one contiguous range, which one torch parameter can use.

    num_slices: the largest TP degree that the job may use; 1: nothing is cut. Raises `LayoutError`
    for a cut tensor that has no equal slices.
    """
    buckets: list[Bucket] = []
    for key, tensors in groupby(sorted(layout, key=_bucket_key), key=_bucket_key):
        layers, dtype, group, is_cut = key
        members = tuple(tensors)
        itemsize = members[0].itemsize
        slices = num_slices if is_cut else 1
        for tensor in members:
            _check_slices(tensor, slices)
        max_elements = bucket_bytes // itemsize if slices == 1 else 0
        for run in _runs((Piece(tensor.name, 0, tensor.num_elements) for tensor in members), max_elements):
            group_id = None if group < 0 else group
            buckets.append(Bucket(len(buckets), layers, dtype, itemsize, group_id, slices, run))
    return tuple(buckets)


def _bucket_key(tensor: LogicalTensor) -> tuple[tuple[int, ...], str, int, bool]:
    return tensor.layers, tensor.dtype, -1 if tensor.group is None else tensor.group, tensor.is_cut


def _check_slices(tensor: LogicalTensor, num_slices: int) -> None:
    if num_slices > 1 and (not tensor.shape or tensor.shape[0] % num_slices):
        raise LayoutError(
            f"{tensor.name!r} has shape {tensor.shape}, but tensor parallelism cuts dim 0 into {num_slices} "
            f"equal slices: make it a multiple of {num_slices}, or use a smaller TP degree"
        )


def _runs(pieces: Iterable[Piece], max_elements: int) -> Iterator[tuple[Piece, ...]]:
    """Split into runs of at most ``max_elements``, at piece boundaries."""
    run: list[Piece] = []
    size = 0
    for piece in pieces:
        piece_size = piece.stop - piece.start
        if run and size + piece_size > max_elements:
            yield tuple(run)
            run, size = [], 0
        run.append(piece)
        size += piece_size
    if run:
        yield tuple(run)
