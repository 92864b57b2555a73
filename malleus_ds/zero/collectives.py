"""The two collectives of ZeRO-1 under the names that the installed torch prefers."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def reduce_scatter(output: Tensor, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the sum over the group; this rank gets its equal part in ``output``."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = call(output, flat, group=group, async_op=True)
    return work


def all_gather(flat: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start gathering the equal parts of all members into ``flat``."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = call(flat, part, group=group, async_op=True)
    return work
