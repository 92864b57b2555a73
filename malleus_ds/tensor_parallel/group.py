"""The ranks that share a layer, and the collectives between them that autograd knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from malleus_ds.detector.waits import CollectiveWaits


class TensorParallelError(ValueError):
    """A layer cannot be cut as asked."""


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """degree: number of ranks; index: this rank's place among them; handle: their process group, None for
    one rank; waits: where the time in collectives is noted."""

    degree: int = 1
    index: int = 0
    handle: dist.ProcessGroup | None = None
    waits: CollectiveWaits = field(default_factory=CollectiveWaits, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.degree:
            raise TensorParallelError(f"index is {self.index}: it must be at least 0 and below {self.degree}")
        if self.degree > 1 and self.handle is None:
            raise TensorParallelError(f"degree is {self.degree}: a group of several ranks needs its handle")

    def part(self, size: int, name: str) -> slice:
        """This rank's part of a dimension. Raises `TensorParallelError` when it cannot be cut evenly."""
        if size % self.degree:
            raise TensorParallelError(
                f"{name} is {size}: a TP group of {self.degree} ranks needs a multiple of {self.degree}"
            )
        length = size // self.degree
        return slice(self.index * length, (self.index + 1) * length)

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Over the group's ranks, in place."""
        if self.degree > 1:
            with self.waits.waiting():
                dist.all_reduce(values, op=op, group=self.handle)
        return values

    def spread(self, values: Tensor) -> Tensor:
        """The same values on every rank; their gradient is the sum of those of all ranks."""
        if self.degree == 1:
            return values
        spread: Tensor = _Spread.apply(values, self)  # type: ignore[no-untyped-call]
        return spread

    def gather_sum(self, values: Tensor) -> Tensor:
        """The sum of what the ranks have; every rank gets the gradient as it is."""
        if self.degree == 1:
            return values
        total: Tensor = _GatherSum.apply(values, self)  # type: ignore[no-untyped-call]
        return total


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TensorParallelGroup) -> Tensor:
        return group.all_reduce(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
