"""The memory of one bucket on one rank: flat parameter, flat gradient and the optimizer shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from malleus_ds.placement import PARAMETER, Bucket, Placement, shard_size


@dataclass
class BucketStorage:
    """Flat buffers of ``num_holders * shard_size`` elements; what lies beyond the bucket is padding.

    flat: parameters in compute dtype; gradient: accumulated sums, None for tensors that are not
    optimized (and while state migrates); shard: this rank's part of ``flat``, which the torch
    optimizer steps in place (fp32: the parameter is its own master copy); state: element-wise
    optimizer state of the shard, ``shard_size`` elements each, kept here while state migrates and
    by the torch optimizer otherwise.
    """

    bucket: Bucket
    holders: tuple[int, ...]
    rank: int
    flat: Tensor
    gradient: Tensor | None = None
    shard: nn.Parameter | None = None
    state: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def allocate(cls, placement: Placement, index: int, rank: int, device: torch.device) -> BucketStorage:
        """Zeros for bucket ``index`` under ``placement``."""
        bucket, holders = placement.buckets[index], placement.holders[index]
        num_elements = len(holders) * shard_size(bucket.num_elements, len(holders))
        flat = torch.zeros(num_elements, dtype=getattr(torch, bucket.dtype), device=device)
        return cls(bucket, holders, rank, flat)

    @property
    def shard_size(self) -> int:
        return self.flat.numel() // len(self.holders)

    @property
    def shard_start(self) -> int:
        return self.holders.index(self.rank) * self.shard_size

    def own(self, flat: Tensor) -> Tensor:
        """The part of a flat buffer that is this rank's shard (padding included)."""
        return flat.narrow(0, self.shard_start, self.shard_size)

    def prepare_training(self) -> None:
        """Allocate the gradient and make the shard, unless the bucket is not optimized."""
        if self.bucket.group is None:
            return
        self.gradient = torch.zeros_like(self.flat, dtype=torch.float32)
        self.shard = nn.Parameter(self.own(self.flat))
        self.shard.grad = self.own(self.gradient)

    def stop_training(self) -> None:
        """Free the gradient and the shard's handle; parameters and state stay."""
        self.gradient = self.shard = None

    def interval(self, state: str, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of the bucket, of one state tensor that this rank holds."""
        if state == PARAMETER:
            return self.flat[start:stop]
        return self.state[state][start - self.shard_start : stop - self.shard_start]

    def views(self, flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Each logical tensor of the bucket as a view of ``flat``, by name."""
        offset = 0
        for piece in self.bucket.pieces:
            size = piece.stop - piece.start
            yield piece.tensor, flat[offset : offset + size].view(shapes[piece.tensor])
            offset += size
