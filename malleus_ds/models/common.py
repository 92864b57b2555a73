"""What the models share: checks, initialisation, token embedding and head.

Shapes, here and in the models: ``b`` samples, ``L`` positions, ``C`` hidden units, ``H`` heads of
``D = C / H``, ``V`` tokens, TP degree ``t``. Hidden states are the same on all ranks of a TP group; logits
are cut along the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol, TypeVar

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

from malleus_ds.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

INIT_STD = 0.02
_Linear = TypeVar("_Linear", ColumnParallelLinear, RowParallelLinear)


class ModelConfigError(ValueError):
    """A model shape that cannot be built: names the field, the value and the fix."""


class ModelConfig(Protocol):
    """What the shared layers read of a model's config."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...


def check_positive(config: object, *names: str) -> None:
    """Raise `ModelConfigError` unless each of these fields is at least 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ModelConfigError(f"{name} is {getattr(config, name)}; it must be at least 1")


def check_multiple(config: object, name: str, unit: str) -> None:
    """Raise `ModelConfigError` unless the field ``name`` is a multiple of the field ``unit``."""
    value, divisor = getattr(config, name), getattr(config, unit)
    if value % divisor:
        raise ModelConfigError(
            f"{name} ({value}) is not a multiple of {unit} ({divisor}); change one of them"
        )


def initialised(linear: _Linear, std: float = INIT_STD) -> _Linear:
    """The layer with normal weights and without bias, as GPT-2 starts."""
    nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def residual_std(config: ModelConfig) -> float:
    """GPT-2 scales what is added to the residual stream by 1 / sqrt(number of additions)."""
    return INIT_STD / math.sqrt(2 * config.num_blocks)


class TokenEmbedding(VocabParallelEmbedding):
    """Tokens int ``[b, L]`` -> ``[b, L, C]``; its weight ``[V / t, C]`` may also serve as the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.vocabulary_size, config.hidden_size, _vocabulary(config))
        nn.init.normal_(self.weight, std=INIT_STD)


class VocabParallelHead(nn.Module):
    """``[b, L, C]`` -> logits ``[b, L, V / t]``: final norm and a projection without bias."""

    def __init__(self, config: ModelConfig, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.projection = initialised(
            ColumnParallelLinear(config.hidden_size, config.vocabulary_size, False, _vocabulary(config))
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.projection(self.norm(hidden))  # type: ignore[no-any-return]


def tied_head(embedding: VocabParallelEmbedding, hidden: Tensor) -> Tensor:
    """``[b, L, C]`` -> logits ``[b, L, V / t]`` with the weight of the token embedding."""
    return functional.linear(embedding.group.spread(hidden), embedding.weight)


def tied_layers(config: ModelConfig, between: Sequence[LayerSpec]) -> list[LayerSpec]:
    """The token embedding, the layers ``between``, and the head that shares the embedding's weight.

    Tied layers hold the shared weight and nothing else: positions and final norm belong ``between``.
    """
    token_embedding = partial(TiedLayerSpec, "token_embedding", TokenEmbedding, config)
    return [token_embedding(), *between, token_embedding(forward_fn=tied_head)]


def _vocabulary(config: ModelConfig) -> tuple[str, int]:
    return "vocabulary_size", config.vocabulary_size
