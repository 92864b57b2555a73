"""The memory of one bucket on one rank: flat parameter, flat gradient and the optimizer's shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from malleus_ds.placement import PARAMETER, Bucket, Part, Placement, local_shape
from malleus_ds.zero.precision import MASTER, gradient_dtype, master_dtype


@dataclass
class Shard:
    """Elements ``[start, stop)`` of a bucket: what this rank steps of one part.

    parameter: what the torch optimizer steps: an fp32 master, or (fp32) a view of the flat parameters;
    None when there is nothing to step (and while state migrates); state: element-wise state, master
    and optimizer's, kept here while state migrates.
    """

    part: Part
    start: int
    stop: int
    parameter: nn.Parameter | None = None
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


@dataclass
class BucketStorage:
    """Flat buffers of the elements ``[start, stop)`` of a bucket, which this rank holds.

    With one part, as always without tensor parallelism, the buffers are padded to equal shards;
    with several there is no room between them, so that a cut tensor is one contiguous parameter.

    num_cuts: in how many parts the rank's stage cuts the bucket; copies: ranks of the stage that
    compute the same gradient; shards: one per part, ascending; flat: parameters in compute dtype;
    gradient: accumulated sums, None for tensors that are not optimized (and while state migrates).
    """

    bucket: Bucket
    rank: int
    start: int
    stop: int
    num_cuts: int
    copies: int
    shards: tuple[Shard, ...]
    flat: Tensor
    gradient: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        placement: Placement,
        index: int,
        rank: int,
        device: torch.device,
        flat: Tensor | None = None,
    ) -> BucketStorage:
        """What ``rank`` holds of bucket ``index`` under ``placement``, without values; the padding is zero.

        flat: the flat parameters, where they are there already.
        """
        bucket, parts = placement.buckets[index], placement.parts_of(index, rank)
        start, stop = parts[0].start, parts[-1].stop
        if flat is None:
            num_elements = placement.flat_size(index, rank)
            flat = torch.empty(num_elements, dtype=getattr(torch, bucket.dtype), device=device)
            flat[stop - start :].zero_()
        return cls(
            bucket=bucket,
            rank=rank,
            start=start,
            stop=stop,
            num_cuts=placement.num_cuts(index, rank),
            copies=placement.copies(index, rank),
            shards=tuple(Shard(part, *part.shard(rank)) for part in parts),
            flat=flat,
        )

    def part(self, flat: Tensor, part: Part) -> Tensor:
        """The elements of a part in a flat buffer."""
        return flat[part.start - self.start : part.stop - self.start]

    def padded_part(self, flat: Tensor, part: Part) -> Tensor:
        """The same, with the padding behind it where there is some."""
        return flat if len(self.shards) == 1 else self.part(flat, part)

    def own(self, flat: Tensor, shard: Shard) -> Tensor:
        """The elements of a shard in a flat buffer."""
        return flat[shard.start - self.start : shard.stop - self.start]

    def prepare_training(self, zeros: list[Tensor] | None = None) -> None:
        """Allocate the gradient and make the shards' parameters, unless the bucket is not optimized.

        Masters come from the shards' state; at the start they are made of the flat parameters.
        zeros: buffers of zeros, one of which is taken for the gradient where it has the right size.
        """
        if self.bucket.group is None:
            return
        wanted = gradient_dtype(self.flat.dtype), self.flat.numel()
        zeros = [] if zeros is None else zeros
        fitting = [i for i, buffer in enumerate(zeros) if (buffer.dtype, buffer.numel()) == wanted]
        self.gradient = zeros.pop(fitting[0]) if fitting else torch.zeros_like(self.flat, dtype=wanted[0])
        for shard in self.shards:
            values = shard.state.pop(MASTER, None)
            if shard.num_elements > 0:
                if values is None:  # in fp32 this is no copy
                    values = self.own(self.flat, shard).to(self.gradient.dtype)
                shard.parameter = nn.Parameter(values)
                shard.parameter.grad = self.own(self.gradient, shard)

    def take_masters(self) -> None:
        """Round the masters, which the optimizer has stepped, to the flat parameters."""
        if master_dtype(self.bucket) is not None:
            for shard in self.shards:
                if shard.parameter is not None:
                    self.own(self.flat, shard).copy_(shard.parameter.detach())

    def stop_training(self) -> Tensor | None:
        """Give up the gradient, and free the shards' handles; parameters, masters and state stay."""
        gradient, self.gradient = self.gradient, None
        for shard in self.shards:
            if shard.parameter is not None and master_dtype(self.bucket) is not None:
                shard.state[MASTER] = shard.parameter.detach()
            shard.parameter = None
        return gradient

    def interval(self, state: str, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of the bucket, of one state tensor that this rank holds."""
        if state == PARAMETER:
            return self.flat[start - self.start : stop - self.start]
        shard = next(shard for shard in self.shards if shard.start <= start and stop <= shard.stop)
        return shard.state[state][start - shard.start : stop - shard.start]

    def views(self, flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """What this rank has of each tensor of the bucket as a view of ``flat``, by name.

        shapes: of the whole tensors.
        """
        offset = 0
        for piece in self.bucket.pieces:
            size = (piece.stop - piece.start) // self.num_cuts
            shape = local_shape(shapes[piece.tensor], self.num_cuts)
            yield piece.tensor, flat[offset : offset + size].view(shape)
            offset += size
