"""Column, row and vocabulary parallel layers, at any degree, with the group given at run time."""

from malleus_ds.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
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
    "cut_layer",
    "vocab_parallel_cross_entropy",
]
