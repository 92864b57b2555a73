"""Cross entropy of logits that a TP group shares, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from malleus_ds.tensor_parallel.group import TensorParallelGroup
from malleus_ds.tensor_parallel.layers import TensorParallelModule


class VocabParallelLoss(TensorParallelModule):
    """Mean cross entropy of a micro-batch, over the labels that are not ``ignore_index``; in fp32 at least.

    The ``loss_fn`` of models whose head is column-parallel over the vocabulary, at any degree. It has no
    parameters; the engine gives it the TP group, as often as that changes. logits:
    ``[..., vocabulary / degree]``, this rank's part; labels: ``[...]`` ids in the whole vocabulary. The
    loss is the same on all ranks of the group.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.group.degree == 1:
            flat = _at_least_fp32(logits).flatten(0, -2)
            return functional.cross_entropy(flat, labels.flatten(), ignore_index=self.ignore_index)
        losses = vocab_parallel_cross_entropy(logits, labels, self.group, self.ignore_index)
        return losses.sum() / (labels != self.ignore_index).sum()


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: TensorParallelGroup, ignore_index: int = -100
) -> Tensor:
    """Loss of each token, 0 where the target is ``ignore_index``; computed in fp32 at least.

    logits: ``[..., vocabulary / degree]``, this rank's part; targets: ``[...]`` ids in the whole vocabulary,
    which are not checked: that would make the host wait.
    """
    losses: Tensor = _CrossEntropy.apply(logits, targets, group, ignore_index)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    """``log(sum(exp(logits))) - logits[target]``; the gradient is the softmax, less 1 at the target."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: TensorParallelGroup, ignore_index: int
    ) -> Tensor:
        values = _at_least_fp32(logits)
        largest = group.all_reduce(values.amax(dim=-1), dist.ReduceOp.MAX)
        values = values - largest.unsqueeze(-1)
        columns = targets - group.index * logits.shape[-1]
        is_mine = (columns >= 0) & (columns < logits.shape[-1]) & (targets != ignore_index)
        columns = columns.where(is_mine, 0).unsqueeze(-1)
        # Not multiplied: a masked logit of another token may be infinite.
        chosen = values.gather(-1, columns).squeeze(-1).where(is_mine, 0.0)
        softmax = values.exp_()
        # One message for both sums.
        sums = group.all_reduce(torch.stack([softmax.sum(dim=-1), chosen]))
        softmax /= sums[0].unsqueeze(-1)
        counts = targets != ignore_index
        ctx.save_for_backward(softmax, columns, is_mine, counts)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).where(counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, columns, is_mine, counts = ctx.saved_tensors
        scale = (gradient * counts).unsqueeze(-1)
        result = softmax * scale
        result.scatter_add_(-1, columns, -scale * is_mine.unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
