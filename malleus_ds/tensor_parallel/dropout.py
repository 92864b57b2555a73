"""Dropout of values that a TP group shares, with masks that do not depend on the degree."""

from __future__ import annotations

import torch
from torch import Tensor

from malleus_ds.tensor_parallel.group import TensorParallelGroup


def part_dropout(values: Tensor, p: float, dim: int, group: TensorParallelGroup) -> Tensor:
    """Dropout of this rank's part of values that are cut along ``dim``, e.g. by attention heads.

    Each index of the whole dimension has a mask of its own, from a seed that the CPU's default generator
    gives. All ranks of the group must have that generator in the same state; it advances the same way on all
    and at every degree. Replicated values need no such care: use `torch.nn.functional.dropout`.
    """
    if p == 0.0:
        return values
    length = values.shape[dim]
    seeds = torch.randint(torch.iinfo(torch.int64).max, (length * group.degree,), device="cpu")
    dropped = _dropped(values.movedim(dim, 0), p, seeds[group.part(len(seeds), "dim")].tolist())
    # Autograd saves this mask of one byte per value, and not the values.
    return values.masked_fill(dropped.movedim(0, dim), 0.0) * (1 / (1 - p) if p < 1 else 1.0)


def _dropped(values: Tensor, p: float, seeds: list[int]) -> Tensor:
    """True where a value is dropped: one mask per index of dim 0, each from its seed.

    Each mask is contiguous: what a generator gives may depend on strides.
    """
    dropped = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    generator = torch.Generator(values.device)
    for mask, seed in zip(dropped, seeds, strict=True):
        mask.bernoulli_(p, generator=generator.manual_seed(seed))
    return dropped
