"""Point-to-point messages of a migration, counted."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class Transport:
    """Posts grouped asynchronous sends and receives, and counts the bytes that this rank sends.

    All ranks add the messages of a group in one agreed order, so each pair matches first in, first
    out, on gloo and on NCCL.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.sent_bytes = 0
        self._operations: list[dist.P2POp] = []

    def send(self, tensor: Tensor, destination: int) -> None:
        self.sent_bytes += tensor.numel() * tensor.element_size()
        self._operations.append(dist.P2POp(dist.isend, tensor, destination))

    def receive(self, tensor: Tensor, source: int) -> None:
        self._operations.append(dist.P2POp(dist.irecv, tensor, source))

    def run(self) -> None:
        """Exchange what was added since the last call, and wait for it."""
        if self._operations:
            for work in dist.batch_isend_irecv(self._operations):
                work.wait()
            self._operations = []
