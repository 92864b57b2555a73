"""Column, row and vocabulary parallel layers, at any degree, with the group given at run time."""

from malleus_ds.tensor_parallel.cross_entropy import VocabParallelLoss, vocab_parallel_cross_entropy
from malleus_ds.tensor_parallel.dropout import part_dropout
from malleus_ds.tensor_parallel.group import TensorParallelError, TensorParallelGroup
from malleus_ds.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelModule,
    VocabParallelEmbedding,
    cut_layer,
)

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TensorParallelError",
    "TensorParallelGroup",
    "TensorParallelModule",
    "VocabParallelEmbedding",
    "VocabParallelLoss",
    "cut_layer",
    "part_dropout",
    "vocab_parallel_cross_entropy",
]
