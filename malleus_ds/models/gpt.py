"""A pre-norm GPT as a list of `LayerSpec`, in the shape of GPT-2 (Radford et al., 2019).

All layers can be cut for tensor parallelism (`malleus_ds.tensor_parallel.cut_layer`) at any degree that
divides heads and vocabulary. Shapes are those of `malleus_ds.models.common`. Layers draw their dropout
from the default generators, which the engine seeds before each layer call, the same on all ranks of a
TP group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.nn import functional

from malleus_ds.models.common import (
    INIT_STD,
    ModelConfigError,
    TokenEmbedding,
    VocabParallelHead,
    check_multiple,
    check_positive,
    initialised,
    residual_std,
    tied_layers,
)
from malleus_ds.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelGroup,
    VocabParallelLoss,
    part_dropout,
)


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Shape of the model; dropout is a probability. Raises `ModelConfigError`."""

    vocabulary_size: int
    hidden_size: int
    num_heads: int
    num_blocks: int
    sequence_length: int
    dropout: float
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "vocabulary_size", "hidden_size", "num_heads", "num_blocks", "sequence_length")
        check_multiple(self, "hidden_size", "num_heads")
        if not 0.0 <= self.dropout < 1.0:
            raise ModelConfigError(f"dropout is {self.dropout}; it must be in [0, 1)")


class PositionEmbedding(nn.Module):
    """Adds a learned position to ``[b, L, C]``, then dropout."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.sequence_length, config.hidden_size))
        nn.init.normal_(self.weight, std=INIT_STD)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(hidden + self.weight[: hidden.size(1)])  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Tokens int ``[b, L]`` -> ``[b, L, C]``: token and position embedding in one layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = TokenEmbedding(config)
        self.position = PositionEmbedding(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.position(self.token(tokens))  # type: ignore[no-any-return]


class CausalSelfAttention(nn.Module):
    """``[b, L, C]`` -> ``[b, L, C]``; each position sees itself and those before it.

    The rows of the fused query-key-value weight ``[3 C, C]`` are head-major, ``[H, 3, D]``, so a
    subset of neighbouring heads is one contiguous range of rows.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden_size, units = config.hidden_size, ("num_heads", config.num_heads)
        self.head_dim = hidden_size // config.num_heads
        self.dropout = config.dropout
        self.query_key_value = initialised(ColumnParallelLinear(hidden_size, 3 * hidden_size, units=units))
        self.projection = initialised(RowParallelLinear(hidden_size, hidden_size), residual_std(config))

    def forward(self, hidden: Tensor) -> Tensor:
        fused = self.query_key_value(hidden).unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = fused.permute(3, 0, 2, 1, 4)  # each [b, H / t, L, D]
        if self.training and self.dropout > 0:
            attended = causal_attention(query, key, value, self.dropout, self.query_key_value.group)
        else:
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, group: TensorParallelGroup
) -> Tensor:
    """Attention of ``[b, H / t, L, D]`` with dropout that does not depend on the degree.

    torch's fused attention draws one mask for all heads that it is given.
    """
    scores = (query / math.sqrt(query.size(-1))) @ key.transpose(-2, -1)
    is_future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(is_future, -math.inf).softmax(dim=-1)
    return part_dropout(weights, dropout, 1, group) @ value


class Block(nn.Module):
    """``[b, L, C]`` -> ``[b, L, C]``: attention and MLP, each normalised before and added after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = nn.Sequential(
            initialised(ColumnParallelLinear(config.hidden_size, 4 * config.hidden_size)),
            nn.GELU(),
            initialised(RowParallelLinear(4 * config.hidden_size, config.hidden_size), residual_std(config)),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))  # type: ignore[no-any-return]


class FinalNorm(nn.LayerNorm):
    """``[b, L, C]`` -> ``[b, L, C]``, before a tied head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.hidden_size)


class Head(VocabParallelHead):
    """``[b, L, C]`` -> logits ``[b, L, V / t]``: final norm and a projection without bias."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config, FinalNorm(config))


def gpt_layers(config: GPTConfig) -> list[LayerSpec]:
    """The layers of the model, in order; ``num_blocks + 2``, or ``num_blocks + 4`` when tied.

    Input of the first: tokens int ``[b, L]``; output of the last: logits ``[b, L, V / t]``. Train them
    with `VocabParallelLoss`.
    """
    blocks = [LayerSpec(Block, config) for _ in range(config.num_blocks)]
    if not config.tie_embeddings:
        return [LayerSpec(Embedding, config), *blocks, LayerSpec(Head, config)]
    return tied_layers(config, [LayerSpec(PositionEmbedding, config), *blocks, LayerSpec(FinalNorm, config)])


def gpt_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of a micro-batch, in fp32; whole logits ``[b, L, V]``, labels int ``[b, L]``.

    For layers that are not cut; jobs give the engine a `VocabParallelLoss`, which works at any degree.
    """
    loss: Tensor = VocabParallelLoss()(logits, labels)
    return loss
