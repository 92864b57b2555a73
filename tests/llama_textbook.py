"""A LLaMA in plain torch, head by head, from the weights of `malleus_ds.models.llama`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from malleus_ds.models import LlamaConfig


def plain_norm(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return values / (values.square().mean(dim=-1, keepdim=True) + epsilon).sqrt() * weight


def plain_rotary(values: Tensor, base: float) -> Tensor:
    """``[b, L, D]``: each pair is a complex number, multiplied by ``exp(i * position * frequency)``."""
    length, dim = values.shape[-2:]
    pairs = torch.complex(values[..., : dim // 2], values[..., dim // 2 :])
    for position in range(length):
        for pair in range(dim // 2):
            angle = position * base ** (-2 * pair / dim)
            turn = complex(math.cos(angle), math.sin(angle))
            pairs = pairs.index_put(
                (torch.arange(len(values)), torch.tensor(position), torch.tensor(pair)),
                pairs[:, position, pair] * turn,
            )
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def plain_attention(hidden: Tensor, weights: dict[str, Tensor], config: LlamaConfig) -> Tensor:
    """Head by head."""
    length, dim = hidden.shape[1], config.hidden_size // config.num_heads
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    outputs = []
    for head in range(config.num_heads):
        shared = head * config.num_kv_heads // config.num_heads
        rows, shared_rows = (slice(index * dim, (index + 1) * dim) for index in (head, shared))
        query = plain_rotary(hidden @ weights["query.weight"][rows].T, config.rope_base)
        key = plain_rotary(hidden @ weights["key.weight"][shared_rows].T, config.rope_base)
        value = hidden @ weights["value.weight"][shared_rows].T
        scores = (query @ key.transpose(1, 2) / math.sqrt(dim)).masked_fill(future, -math.inf)
        outputs.append(scores.softmax(dim=-1) @ value)
    return torch.cat(outputs, dim=-1) @ weights["output.weight"]


def below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}


def plain_logits(modules: nn.Module, tokens: Tensor, config: LlamaConfig) -> Tensor:
    weights = {name: parameter.detach() for name, parameter in modules.named_parameters()}
    is_tied = config.tie_embeddings
    embedding = weights["tied_modules.token_embedding.weight" if is_tied else "0.weight"]
    hidden, epsilon = embedding[tokens], config.norm_epsilon
    last = config.num_blocks + 1
    for index in range(1, last):
        block = below(weights, f"{index}.")
        normed = plain_norm(hidden, block["attention_norm.weight"], epsilon)
        hidden = hidden + plain_attention(normed, below(block, "attention."), config)
        normed = plain_norm(hidden, block["mlp_norm.weight"], epsilon)
        gate = normed @ block["mlp.gate.weight"].T
        inner = gate * torch.sigmoid(gate) * (normed @ block["mlp.up.weight"].T)
        hidden = hidden + inner @ block["mlp.down.weight"]
    hidden = plain_norm(hidden, weights[f"{last}.weight" if is_tied else f"{last}.norm.weight"], epsilon)
    return hidden @ (embedding if is_tied else weights[f"{last}.projection.weight"]).T
