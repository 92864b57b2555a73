"""A LLaMA as a list of `LayerSpec` (Touvron et al., 2023; grouped queries as in Ainslie et al., 2023).

No layer has biases or dropout. All layers can be cut for tensor parallelism
(`malleus_ds.tensor_parallel.cut_layer`) at any degree that divides key-value heads, intermediate size and
vocabulary. Shapes are those of `malleus_ds.models.common`, with ``G`` key-value heads and ``F``
intermediate units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.nn import functional

from malleus_ds.models.common import (
    ModelConfigError,
    TokenEmbedding,
    VocabParallelHead,
    check_multiple,
    check_positive,
    initialised,
    residual_std,
    tied_layers,
)
from malleus_ds.tensor_parallel import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of the model. Raises `ModelConfigError`.

    num_kv_heads: each key-value head serves ``num_heads / num_kv_heads`` neighbouring query heads.
    rope_base: the slowest pair of features turns by about ``1 / rope_base`` per position.
    """

    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    num_blocks: int
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "vocabulary_size", "hidden_size", "intermediate_size")
        check_positive(self, "num_heads", "num_kv_heads", "num_blocks")
        check_multiple(self, "hidden_size", "num_heads")
        check_multiple(self, "num_heads", "num_kv_heads")
        if self.head_dim % 2:
            raise ModelConfigError(
                f"hidden_size / num_heads is {self.head_dim}; rotary positions turn pairs: make it even"
            )
        for name in ("rope_base", "norm_epsilon"):
            if not getattr(self, name) > 0:
                raise ModelConfigError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Rotary:
    """Turns queries and keys by their positions: features ``i`` and ``i + D / 2`` of a head are a pair.

    Its tables are neither parameters nor buffers, so they are no part of the training state; they are
    computed when first needed, where the values are, and again when length, type or device change.
    """

    def __init__(self, base: float) -> None:
        self.base = base
        self._key: tuple[int, int, torch.dtype, torch.device] | None = None
        self._tables: tuple[Tensor, ...] = ()

    def __call__(self, values: Tensor) -> Tensor:
        """``[b, heads, L, D]`` -> the same shape."""
        key = (values.size(-2), values.size(-1) // 2, values.dtype, values.device)
        if key != self._key:
            self._tables, self._key = self._compute(*key), key
        cosine, sine = self._tables
        first, second = values.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def _compute(
        self, length: int, num_pairs: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles, each ``[L, D / 2]``."""
        precise = torch.promote_types(dtype, torch.float32)
        # Outside of inference mode: training may use the tables after an evaluation.
        with torch.inference_mode(False):
            pairs = torch.arange(num_pairs, dtype=precise, device=device)
            positions = torch.arange(length, dtype=precise, device=device)
            angles = torch.outer(positions, self.base ** (-pairs / num_pairs))
            return angles.cos().to(dtype), angles.sin().to(dtype)


class GroupedQueryAttention(nn.Module):
    """``[b, L, C]`` -> ``[b, L, C]``; each position sees itself and those before it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rotary = Rotary(config.rope_base)
        self.is_grouped = config.num_kv_heads < config.num_heads
        # Query heads are cut together with the key-value head that they share.
        units = ("num_kv_heads", config.num_kv_heads)
        hidden_size, kv_size = config.hidden_size, config.num_kv_heads * config.head_dim
        self.query = initialised(ColumnParallelLinear(hidden_size, hidden_size, False, units))
        self.key = initialised(ColumnParallelLinear(hidden_size, kv_size, False, units))
        self.value = initialised(ColumnParallelLinear(hidden_size, kv_size, False, units))
        self.output = initialised(RowParallelLinear(hidden_size, hidden_size, False), residual_std(config))

    def forward(self, hidden: Tensor) -> Tensor:
        query = self.rotary(self._heads(self.query(hidden)))  # [b, H / t, L, D]
        key = self.rotary(self._heads(self.key(hidden)))  # [b, G / t, L, D], as the values
        attended = functional.scaled_dot_product_attention(
            query, key, self._heads(self.value(hidden)), is_causal=True, enable_gqa=self.is_grouped
        )
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, features: Tensor) -> Tensor:
        """``[b, L, heads * D]`` -> ``[b, heads, L, D]``."""
        return features.view(*features.shape[:2], -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """``[b, L, C]`` -> ``[b, L, C]``: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden_size, size = config.hidden_size, config.intermediate_size
        units = ("intermediate_size", size)
        self.gate = initialised(ColumnParallelLinear(hidden_size, size, False, units))
        self.up = initialised(ColumnParallelLinear(hidden_size, size, False, units))
        self.down = initialised(RowParallelLinear(size, hidden_size, False), residual_std(config))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(hidden)) * self.up(hidden))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """``[b, L, C]`` -> ``[b, L, C]``: attention and MLP, each normalised before and added after."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = LlamaNorm(config)
        self.attention = GroupedQueryAttention(config)
        self.mlp_norm = LlamaNorm(config)
        self.mlp = SwiGLU(config)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))  # type: ignore[no-any-return]


class LlamaNorm(nn.RMSNorm):
    """``[..., C]`` -> ``[..., C]``, divided by its root mean square and scaled."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.hidden_size, eps=config.norm_epsilon)


class LlamaHead(VocabParallelHead):
    """``[b, L, C]`` -> logits ``[b, L, V / t]``: final norm and a projection without bias."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, LlamaNorm(config))


def llama_layers(config: LlamaConfig) -> list[LayerSpec]:
    """The layers of the model, in order; ``num_blocks + 2``, or ``num_blocks + 3`` when tied.

    Input of the first: tokens int ``[b, L]``; output of the last: logits ``[b, L, V / t]``. Train them
    with `malleus_ds.tensor_parallel.VocabParallelLoss`.
    """
    blocks = [LayerSpec(LlamaBlock, config) for _ in range(config.num_blocks)]
    if not config.tie_embeddings:
        return [LayerSpec(TokenEmbedding, config), *blocks, LayerSpec(LlamaHead, config)]
    return tied_layers(config, [*blocks, LayerSpec(LlamaNorm, config)])
