"""A pre-norm GPT as a list of `LayerSpec`, in the shape of GPT-2 (Radford et al., 2019).

Shapes: ``b`` samples, ``L`` positions, ``C`` hidden units, ``H`` heads of ``D = C / H``, ``V``
tokens. Layers draw their dropout from the default generator, which the engine seeds before each
layer call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.nn import functional

_INIT_STD = 0.02


class ModelConfigError(ValueError):
    """A model shape that cannot be built: names the field, the value and the fix."""


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
        for name in ("vocabulary_size", "hidden_size", "num_heads", "num_blocks", "sequence_length"):
            if getattr(self, name) < 1:
                raise ModelConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.hidden_size % self.num_heads:
            raise ModelConfigError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_heads ({self.num_heads}); "
                f"change one of them"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ModelConfigError(f"dropout is {self.dropout}; it must be in [0, 1)")


class TokenEmbedding(nn.Module):
    """Tokens int ``[b, L]`` -> ``[b, L, C]``; its weight ``[V, C]`` may also serve as the head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary_size, config.hidden_size))
        nn.init.normal_(self.weight, std=_INIT_STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.weight)


class PositionEmbedding(nn.Module):
    """Adds a learned position to ``[b, L, C]``, then dropout."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.sequence_length, config.hidden_size))
        nn.init.normal_(self.weight, std=_INIT_STD)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(hidden + self.weight[: hidden.size(1)])  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Tokens int ``[b, L]`` -> ``[b, L, C]``: token and position embedding in one layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = TokenEmbedding(config)
        self.position = PositionEmbedding(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.position(self.token(tokens))  # type: ignore[no-any-return]


class CausalSelfAttention(nn.Module):
    """``[b, L, C]`` -> ``[b, L, C]``; each position sees itself and those before it.

    The rows of the fused query-key-value weight ``[3 C, C]`` are head-major, ``[H, 3, D]``, so a
    subset of neighbouring heads is one contiguous range of rows.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.query_key_value = _linear(config.hidden_size, 3 * config.hidden_size)
        self.projection = _linear(config.hidden_size, config.hidden_size, _residual_std(config))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        fused = self.query_key_value(hidden).unflatten(-1, (self.num_heads, 3, -1))
        query, key, value = fused.permute(3, 0, 2, 1, 4)  # each [b, H, L, D]
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.projection(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """``[b, L, C]`` -> ``[b, L, C]``: attention and MLP, each normalised before and added after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = nn.Sequential(
            _linear(config.hidden_size, 4 * config.hidden_size),
            nn.GELU(),
            _linear(4 * config.hidden_size, config.hidden_size, _residual_std(config)),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))  # type: ignore[no-any-return]


class FinalNorm(nn.LayerNorm):
    """``[b, L, C]`` -> ``[b, L, C]``, before a tied head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.hidden_size)


class Head(nn.Module):
    """``[b, L, C]`` -> logits ``[b, L, V]``: final norm and a projection without bias."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.weight = nn.Parameter(torch.empty(config.vocabulary_size, config.hidden_size))
        nn.init.normal_(self.weight, std=_INIT_STD)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.norm(hidden), self.weight)


def tied_head(embedding: TokenEmbedding, hidden: torch.Tensor) -> torch.Tensor:
    """``[b, L, C]`` -> logits ``[b, L, V]`` with the weight of the token embedding."""
    return functional.linear(hidden, embedding.weight)


def gpt_layers(config: GPTConfig) -> list[LayerSpec]:
    """The layers of the model, in order; ``num_blocks + 2``, or ``num_blocks + 4`` when tied.

    Input of the first: tokens int ``[b, L]``; output of the last: logits ``[b, L, V]``.
    """
    blocks = [LayerSpec(Block, config) for _ in range(config.num_blocks)]
    if not config.tie_embeddings:
        return [LayerSpec(Embedding, config), *blocks, LayerSpec(Head, config)]
    # Tied layers hold the shared weight and nothing else: positions and final norm stand apart.
    return [
        TiedLayerSpec("token_embedding", TokenEmbedding, config),
        LayerSpec(PositionEmbedding, config),
        *blocks,
        LayerSpec(FinalNorm, config),
        TiedLayerSpec("token_embedding", TokenEmbedding, config, forward_fn=tied_head),
    ]


def gpt_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a micro-batch, in fp32; logits ``[b, L, V]``, labels int ``[b, L]``."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _linear(num_inputs: int, num_outputs: int, std: float = _INIT_STD) -> nn.Linear:
    linear = nn.Linear(num_inputs, num_outputs)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear


def _residual_std(config: GPTConfig) -> float:
    """GPT-2 scales what is added to the residual stream by 1 / sqrt(number of additions)."""
    return _INIT_STD / math.sqrt(2 * config.num_blocks)
