"""The two collectives of ZeRO-1 under the names that the installed torch prefers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Collective:
    """One that runs. source: what to copy to ``target`` when it is done, where it needed padding."""

    work: dist.Work
    source: Tensor | None = None
    target: Tensor | None = None

    def wait(self) -> None:
        self.work.wait()
        if self.source is not None and self.target is not None:
            self.target.copy_(self.source)


def reduce_scatter(flat: Tensor, group: dist.ProcessGroup) -> Collective:
    """Start the sum over the group; it is complete in this rank's shard of ``flat`` only.

    Shards are equal but for the last ones: they are in place when the group's size divides ``flat``,
    and go through a padded copy otherwise. The same is true of `all_gather`.
    """
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    padded, own = _padded(flat, group)
    if padded is flat:
        return Collective(call(own, flat, group=group, async_op=True))
    padded[: flat.numel()].copy_(flat)
    target = _shard(flat, own.numel(), group)
    return Collective(call(own, padded, group=group, async_op=True), own[: target.numel()], target)


def all_gather(flat: Tensor, group: dist.ProcessGroup) -> Collective:
    """Start gathering the shards of all members into ``flat``; this rank's is there already."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    padded, own = _padded(flat, group)
    if padded is flat:
        return Collective(call(flat, own, group=group, async_op=True))
    source = _shard(flat, own.numel(), group)
    own[: source.numel()].copy_(source)
    return Collective(call(padded, own, group=group, async_op=True), padded[: flat.numel()], flat)


def _padded(flat: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """A buffer of equal shards, ``flat`` itself where it is one, and this rank's shard of it."""
    num_shards = dist.get_world_size(group)
    size = -(-flat.numel() // num_shards)
    padded = flat if size * num_shards == flat.numel() else _zeros(flat, size * num_shards)
    return padded, _shard(padded, size, group)


def _shard(flat: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's shard: shorter than ``size``, or empty, at the end of a buffer that is not padded."""
    start = dist.get_rank(group) * size
    return flat[start : start + size]


def _zeros(like: Tensor, num_elements: int) -> Tensor:
    return torch.zeros(num_elements, dtype=like.dtype, device=like.device)
