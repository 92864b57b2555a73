"""Layers that a TP group shares.

All weights are cut along dim 0, so that a slice of one is a contiguous range whatever the degree
(design 4.2). A layer is built whole, with values that do not depend on any plan, and cut afterwards: `cut`
keeps this rank's part. On the ``meta`` device that costs nothing.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from malleus_ds.tensor_parallel.group import TensorParallelError, TensorParallelGroup


class TensorParallelModule(nn.Module):
    """Base of the layers.

    cut_parameters: names of its own parameters that are cut along dim 0; the others are the same on every
    rank of the group.
    units: the name and number of equal parts of dim 0 that no cut may divide, e.g. ``("num_heads", 12)``.
    """

    cut_parameters: ClassVar[tuple[str, ...]] = ()

    def __init__(self, units: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.group = TensorParallelGroup()
        self.units = units

    def cut(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part. Raises `TensorParallelError` when it is cut already, or not evenly."""
        cut_layer(self, group)

    def part_of(self, name: str, group: TensorParallelGroup) -> slice:
        """The rank's part of one of the cut parameters."""
        if self.group.degree > 1:
            raise TensorParallelError(
                f"{type(self).__name__} is cut already, into {self.group.degree}: cut a whole layer"
            )
        if self.units is not None:
            units_name, num_units = self.units
            group.part(num_units, units_name)
        return group.part(len(getattr(self, name)), f"dim 0 of {type(self).__name__}.{name}")


def cut_layer(layer: nn.Module, group: TensorParallelGroup) -> None:
    """Cut all tensor-parallel modules of a layer, or none; parameters that modules share stay shared."""
    modules = [module for module in layer.modules() if isinstance(module, TensorParallelModule)]
    owners = [
        (module, name, module.part_of(name, group))
        for module in modules
        for name in module.cut_parameters
        if getattr(module, name) is not None
    ]
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, part in owners:
        whole = getattr(module, name)
        if whole not in parts:
            # A copy, so that the whole can be freed.
            parts[whole] = nn.Parameter(whole.detach()[part].clone(), requires_grad=whole.requires_grad)
            parts[whole].__dict__.update(whole.__dict__)  # attributes of the user's
        setattr(module, name, parts[whole])
    for module in modules:
        module.group = group


class ColumnParallelLinear(TensorParallelModule):
    """``x @ weight.T + bias``; each rank computes its part of the output features.

    weight: ``[out, in]``, bias: ``[out]``, both cut. Input: the whole features, equal on all ranks; output:
    ``[..., out / degree]``. For fused queries, keys and values put the features of a head together.
    """

    cut_parameters = ("weight", "bias")

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, units: tuple[str, int] | None = None
    ) -> None:
        super().__init__(units)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        _initialise(self.weight, self.bias, in_features)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(self.group.spread(inputs), self.weight, self.bias)


class RowParallelLinear(TensorParallelModule):
    """``x @ weight + bias``; each rank multiplies its part of the input features, and the sum is shared.

    weight: ``[in, out]``, the transpose of `torch.nn.Linear`'s, cut; bias: ``[out]``, the same on every rank.
    Input: ``[..., in / degree]``; output: the whole features, equal on all ranks.
    """

    cut_parameters = ("weight",)

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        _initialise(self.weight, self.bias, in_features)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.group.degree == 1:
            return functional.linear(inputs, self.weight.T, self.bias)
        outputs = self.group.gather_sum(inputs @ self.weight)
        return outputs if self.bias is None else outputs + self.bias


class VocabParallelEmbedding(TensorParallelModule):
    """Each rank holds the rows of its part of the vocabulary. weight: ``[vocabulary, features]``, cut."""

    cut_parameters = ("weight",)

    def __init__(self, num_embeddings: int, embedding_dim: int, units: tuple[str, int] | None = None) -> None:
        super().__init__(units)
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim))
        nn.init.normal_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Features of token ids, equal on all ranks; ids are not checked where the layer is cut."""
        if self.group.degree == 1:
            return functional.embedding(tokens, self.weight)
        rows = tokens - self.group.index * len(self.weight)
        is_mine = (rows >= 0) & (rows < len(self.weight))
        found = functional.embedding(rows.where(is_mine, 0), self.weight)
        return self.group.gather_sum(found * is_mine.unsqueeze(-1))


def _initialise(weight: Tensor, bias: Tensor | None, in_features: int) -> None:
    """Uniform within ``1 / sqrt(in_features)``, as `torch.nn.Linear`."""
    bound = 1 / math.sqrt(in_features)
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)
