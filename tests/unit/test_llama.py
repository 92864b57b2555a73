"""The LLaMA layers against the textbook."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from malleus_ds.models import LlamaConfig, ModelConfigError, VocabParallelLoss, llama_layers
from malleus_ds.models.llama import GroupedQueryAttention, LlamaBlock, LlamaHead, Rotary
from tests.distributed.reference import build_all
from tests.llama_textbook import plain_logits

CONFIG = LlamaConfig(
    vocabulary_size=31, hidden_size=24, intermediate_size=40, num_heads=6, num_kv_heads=2, num_blocks=2
)


def build(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Callable[..., Tensor]]:
    """All layers, and the function from tokens to logits."""
    modules, functions = build_all(llama_layers(config))

    def run(value: Tensor) -> Tensor:
        for function in functions:
            value = function(value)
        return value

    return modules.to(dtype), run


def batch(config: LlamaConfig, num_samples: int = 4, length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocabulary_size, (num_samples, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@st.composite
def configs(draw: st.DrawFn) -> LlamaConfig:
    num_kv_heads, num_shares, half_dim = (draw(st.integers(1, 3)) for _ in range(3))
    num_heads = num_kv_heads * num_shares
    return LlamaConfig(
        vocabulary_size=draw(st.integers(1, 9)),
        hidden_size=num_heads * 2 * half_dim,
        intermediate_size=draw(st.integers(1, 9)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_blocks=draw(st.integers(1, 3)),
        rope_base=draw(st.sampled_from([100.0, 10_000.0])),
        norm_epsilon=draw(st.sampled_from([1e-6, 1e-2])),
        tie_embeddings=draw(st.booleans()),
    )


@settings(max_examples=30, deadline=None)
@given(configs(), st.integers(1, 3), st.integers(1, 6))
def test_logits_are_those_of_the_textbook(config: LlamaConfig, num_samples: int, length: int) -> None:
    modules, run = build(config, torch.float64)
    for parameter in modules.parameters():  # Larger than at the start, so that everything counts.
        nn.init.normal_(parameter, std=0.5)
    tokens, _ = batch(config, num_samples, length)
    logits = run(tokens)
    assert logits.shape == (num_samples, length, config.vocabulary_size)
    torch.testing.assert_close(logits, plain_logits(modules, tokens, config))


def test_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary(100.0)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 12, 8)
    scores = rotary(query) @ rotary(key).transpose(-1, -2)
    for distance in range(-11, 12):
        same = scores.diagonal(distance, -2, -1)
        torch.testing.assert_close(same, same[..., :1].expand_as(same))
    assert not torch.allclose(scores[..., 0, 0], scores[..., 0, 1])


def test_rotary_follows_length_and_type() -> None:
    """Also after inference mode, whose tensors autograd refuses."""
    rotary = Rotary(100.0)
    values = torch.randn(2, 3, 7, 8)
    with torch.inference_mode():
        rotary(values)
    for used in (values, values.double(), values[:, :, :4], values.bfloat16(), values):
        used = used.clone().requires_grad_()
        turned = rotary(used)
        turned.sum().backward()
        assert turned.dtype == used.dtype
        torch.testing.assert_close(turned, Rotary(100.0)(used))


def test_layers_have_no_state_but_weights() -> None:
    with torch.device("meta"):
        block = LlamaBlock(CONFIG)
    block.to_empty(device="cpu")
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    assert block(torch.randn(2, 5, 24)).isfinite().all()
    assert not list(block.buffers())
    assert {name for name, _ in block.named_parameters() if "bias" in name} == set()


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_first_loss_and_number_of_parameters(tie_embeddings: bool) -> None:
    config = replace(CONFIG, tie_embeddings=tie_embeddings)
    modules, run = build(config)
    tokens, labels = batch(config, num_samples=64)
    assert VocabParallelLoss()(run(tokens), labels).item() == pytest.approx(math.log(31), rel=0.01)
    # Per block: queries and output C^2 each, keys and values C^2 / 3 each, 3 C F, two norms of C.
    expected = 2 * (2 * 24**2 + 2 * 24 * 8 + 3 * 24 * 40 + 2 * 24) + 24 + 31 * 24 * (2 - tie_embeddings)
    assert sum(parameter.numel() for parameter in modules.parameters()) == expected


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_one_batch_can_be_learned_by_heart(tie_embeddings: bool) -> None:
    config = replace(CONFIG, tie_embeddings=tie_embeddings)
    modules, run = build(config)
    tokens, labels = batch(config)
    loss_fn = VocabParallelLoss()
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        loss_fn(run(tokens), labels).backward()
        optimizer.step()
    assert loss_fn(run(tokens), labels).item() < 0.1


def test_layer_names() -> None:
    names = [spec.typename.__name__ for spec in llama_layers(CONFIG)]
    assert names == ["TokenEmbedding", "LlamaBlock", "LlamaBlock", "LlamaHead"]
    specs = llama_layers(replace(CONFIG, tie_embeddings=True))
    names = [spec.typename.__name__ for spec in specs]
    assert names == ["TokenEmbedding", "LlamaBlock", "LlamaBlock", "LlamaNorm", "TokenEmbedding"]
    assert specs[0].key == specs[-1].key


def test_initialisation() -> None:
    config = replace(CONFIG, hidden_size=240, intermediate_size=400, num_blocks=8)
    attention, block, head = GroupedQueryAttention(config), LlamaBlock(config), LlamaHead(config)
    for weight in (attention.query.weight, attention.key.weight, block.mlp.up.weight, head.projection.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (attention.output.weight, block.mlp.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocabulary_size", 0, "vocabulary_size is 0; it must be at least 1"),
        ("intermediate_size", -1, "intermediate_size is -1"),
        ("num_kv_heads", 0, "num_kv_heads is 0"),
        ("num_kv_heads", 4, r"num_heads \(6\) is not a multiple of num_kv_heads \(4\); change one"),
        ("hidden_size", 25, r"hidden_size \(25\) is not a multiple of num_heads \(6\)"),
        ("hidden_size", 18, r"hidden_size / num_heads is 3; .* make it even"),
        ("rope_base", 0.0, r"rope_base is 0\.0; it must be above 0"),
        ("norm_epsilon", math.nan, "norm_epsilon is nan"),
    ],
)
def test_bad_shapes_are_named(field: str, value: float, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        replace(CONFIG, **{field: value})
