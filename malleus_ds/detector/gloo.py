"""The control plane over a gloo group of `torch.distributed`, for jobs without MPI."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from malleus_ds.detector.control_plane import ControlPlane, ControlPlaneError, Request


class GlooControlPlane(ControlPlane):
    """Over a group of its own of all ranks; all ranks construct it, in the same order.

    Gloo's threads make progress by themselves. Needs an initialised ``torch.distributed``, of any
    backend.
    """

    def __init__(self, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        super().__init__(dist.get_rank(), dist.get_world_size(), "gloo", timeout_s)

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def _start_all_gather(self, send: NDArray[Any], receive: NDArray[Any]) -> Request:
        # Tensors that share the arrays' memory, so that gloo writes into the result.
        rows = list(torch.from_numpy(receive).unbind(0))
        return _polled(dist.all_gather(rows, torch.from_numpy(send), group=self._group, async_op=True))

    def _start_broadcast(self, buffer: NDArray[np.uint8], root: int) -> Request:
        return _polled(dist.broadcast(torch.from_numpy(buffer), src=root, group=self._group, async_op=True))


def _polled(work: Any) -> Request:
    def is_done() -> bool:
        try:
            if not work.is_completed():
                return False
            work.wait()  # Returns at once, and raises what went wrong.
        except RuntimeError as error:
            raise ControlPlaneError(f"gloo failed: {error}") from error
        return True

    return is_done
