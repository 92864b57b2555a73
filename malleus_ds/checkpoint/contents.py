"""A rank's training state as intervals of logical tensors, and its share of what is written."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from malleus_ds.checkpoint.part_file import Content, Interval
from malleus_ds.checkpoint.values import encode
from malleus_ds.placement import PARAMETER, Bucket, LogicalTensor
from malleus_ds.zero.optimizer import MalleusZeroOptimizer
from malleus_ds.zero.precision import MASTER
from malleus_ds.zero.state import GroupState
from malleus_ds.zero.storage import BucketStorage, Shard


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``[start, stop)`` of a logical tensor, which begin at ``offset`` of a bucket."""

    tensor: str
    start: int
    stop: int
    offset: int

    def of(self, state: str) -> Interval:
        return Interval(state, self.tensor, self.start, self.stop)

    def within(self, flat: Tensor, first: int) -> Tensor:
        """The span in a tensor that begins with the element ``first`` of the bucket."""
        return flat[self.offset - first : self.offset - first + self.stop - self.start]


def spans(bucket: Bucket, start: int, stop: int) -> Iterator[Span]:
    """The elements ``[start, stop)`` of a bucket, tensor by tensor."""
    first = 0
    for piece in bucket.pieces:
        size = piece.stop - piece.start
        low, high = max(start, first), min(stop, first + size)
        if low < high:
            yield Span(piece.tensor, piece.start + low - first, piece.start + high - first, low)
        first += size


def logical_tensors(optimizer: MalleusZeroOptimizer) -> tuple[LogicalTensor, ...]:
    """The whole model, the same on all ranks."""
    assert optimizer.placement is not None, "adopt() comes first"
    return tuple(
        LogicalTensor(
            name=piece.tensor,
            shape=optimizer.shapes[piece.tensor],
            dtype=bucket.dtype,
            itemsize=bucket.itemsize,
            layers=bucket.layers,
            group=bucket.group,
            is_cut=bucket.num_slices > 1,
        )
        for bucket in optimizer.placement.buckets
        for piece in bucket.pieces
    )


def contents_to_write(optimizer: MalleusZeroOptimizer, left_out: Collection[str]) -> list[Content]:
    """This rank's share of the state; the shares of all ranks are the whole state, each element once.

    left_out: tensors that no rank writes.
    """
    return [
        content
        for storage in optimizer.storages.values()
        for shard in storage.shards
        for content in _shard_contents(optimizer, storage, shard)
        if content.interval.tensor not in left_out
    ]


def _shard_contents(
    optimizer: MalleusZeroOptimizer, storage: BucketStorage, shard: Shard
) -> Iterator[Content]:
    tensors = element_states(optimizer, storage, shard)
    for span in _written_spans(storage, shard):
        yield Content(span.of(PARAMETER), span.within(storage.flat, storage.start))
        for state, tensor in tensors.items():
            yield Content(span.of(state), span.within(tensor, shard.start))


def _written_spans(storage: BucketStorage, shard: Shard) -> list[Span]:
    """What a rank steps it also writes. Of the rest, its holders write whole tensors in turn: buffers
    may differ between them, and must not be mixed."""
    bucket, part = storage.bucket, shard.part
    if bucket.group is not None:
        return list(spans(bucket, shard.start, shard.stop))
    all_spans = enumerate(spans(bucket, part.start, part.stop), bucket.index)
    return [span for turn, span in all_spans if part.ranks[turn % len(part.ranks)] == storage.rank]


def has_master(storage: BucketStorage, shard: Shard) -> bool:
    return shard.parameter is not None and shard.parameter.dtype != storage.flat.dtype


def element_states(
    optimizer: MalleusZeroOptimizer, storage: BucketStorage, shard: Shard
) -> dict[str, Tensor]:
    """The element-wise state of a shard beside the parameter in compute dtype."""
    if shard.parameter is None:
        return {}
    state = optimizer.optimizer.state.get(shard.parameter, {})
    tensors = {name: value for name, value in state.items() if _is_elementwise(value)}
    return {MASTER: shard.parameter.detach(), **tensors} if has_master(storage, shard) else tensors


def _is_elementwise(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def group_states(optimizer: MalleusZeroOptimizer) -> dict[int, GroupState]:
    """What the shards of each parameter group hold on this rank; ``shared`` is encoded."""
    groups = {}
    for storage in optimizer.storages.values():
        for shard in storage.shards:
            if shard.parameter is None or storage.bucket.group in groups:
                continue
            tensors = element_states(optimizer, storage, shard)
            state = optimizer.optimizer.state.get(shard.parameter, {})
            groups[storage.bucket.group or 0] = GroupState(
                dtypes={name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
                shared={
                    name: encode(value, f"optimizer state {name!r}")
                    for name, value in state.items()
                    if not _is_elementwise(value)
                },
            )
    return groups
