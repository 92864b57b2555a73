from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.nn import functional

from malleus_ds.models import GPTConfig, ModelConfigError, gpt_layers, gpt_loss
from malleus_ds.models.common import TokenEmbedding, tied_head
from malleus_ds.models.gpt import Block, CausalSelfAttention, Head

CONFIG = GPTConfig(
    vocabulary_size=31, hidden_size=24, num_heads=3, num_blocks=2, sequence_length=10, dropout=0.0
)


class TiedHead(nn.Module):
    def __init__(self, embedding: TokenEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return tied_head(self.embedding, hidden)


def build(config: GPTConfig, seed: int = 0) -> nn.Sequential:
    """The model in one process: the layers in order, tied layers built once."""
    torch.manual_seed(seed)
    tied: dict[str, nn.Module] = {}
    modules: list[nn.Module] = []
    for spec in gpt_layers(config):
        if not isinstance(spec, TiedLayerSpec):
            modules.append(spec.build())
            continue
        if spec.key not in tied:
            tied[spec.key] = spec.build()
        embedding = tied[spec.key]
        assert isinstance(embedding, TokenEmbedding)
        modules.append(embedding if spec.forward_fn is None else TiedHead(embedding))
    return nn.Sequential(*modules)


def batch(config: GPTConfig, num_samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (num_samples, config.sequence_length + 1)
    tokens = torch.randint(config.vocabulary_size, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_a_later_token_changes_no_earlier_logits(tie_embeddings: bool) -> None:
    model = build(replace(CONFIG, tie_embeddings=tie_embeddings))
    tokens, _ = batch(CONFIG)
    logits = model(tokens)
    assert logits.shape == (4, 10, 31)
    for position in range(10):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % CONFIG.vocabulary_size
        differs = (model(changed) != logits).any(dim=-1)
        assert not differs[:, :position].any()
        assert differs[:, position].all()


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_the_first_loss_is_that_of_a_uniform_guess(tie_embeddings: bool) -> None:
    config = replace(CONFIG, tie_embeddings=tie_embeddings)
    tokens, labels = batch(config, num_samples=64)
    assert gpt_loss(build(config)(tokens), labels).item() == pytest.approx(math.log(31), rel=0.01)


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    logits, labels = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    by_hand = [-logits[b, i].log_softmax(-1)[labels[b, i]] for b in range(2) for i in range(3)]
    torch.testing.assert_close(gpt_loss(logits, labels), torch.stack(by_hand).mean())


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_one_batch_can_be_learned_by_heart(tie_embeddings: bool) -> None:
    config = replace(CONFIG, tie_embeddings=tie_embeddings, dropout=0.05)
    model = build(config)
    tokens, labels = batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        gpt_loss(model(tokens), labels).backward()
        optimizer.step()
    assert gpt_loss(model.eval()(tokens), labels).item() < 0.1


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_number_of_parameters(tie_embeddings: bool) -> None:
    model = build(replace(CONFIG, tie_embeddings=tie_embeddings))
    vocabulary, hidden, length, blocks = 31, 24, 10, 2
    # Per block: 12 C^2 weights; biases 3C + C + 4C + C; two norms of 2C.
    expected = blocks * (12 * hidden**2 + 13 * hidden) + (vocabulary + length) * hidden + 2 * hidden
    expected += 0 if tie_embeddings else vocabulary * hidden
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_tied_layers_share_one_weight_and_add_their_gradients() -> None:
    config = replace(CONFIG, tie_embeddings=True)
    specs = gpt_layers(config)
    assert [spec.typename.__name__ for spec in specs] == [
        "TokenEmbedding", "PositionEmbedding", "Block", "Block", "FinalNorm", "TokenEmbedding",
    ]  # fmt: skip
    assert specs[0].key == specs[-1].key
    tied, untied = build(config), build(config)
    embedding = untied[0]
    untied[-1] = TiedHead(TokenEmbedding(config))
    untied[-1].load_state_dict({"embedding.weight": embedding.weight.detach()})
    tokens, labels = batch(config)
    for model in (tied, untied):
        gpt_loss(model(tokens), labels).backward()
    both = embedding.weight.grad + untied[-1].embedding.weight.grad
    torch.testing.assert_close(tied[0].weight.grad, both)


def test_untied_layers() -> None:
    specs = gpt_layers(CONFIG)
    assert [spec.typename.__name__ for spec in specs] == ["Embedding", "Block", "Block", "Head"]
    assert all(type(spec) is LayerSpec for spec in specs)


@pytest.mark.parametrize("heads", [(0, 1), (1, 3), (0, 3)])
def test_a_row_range_of_the_fused_weight_is_a_range_of_heads(heads: tuple[int, int]) -> None:
    attention = CausalSelfAttention(CONFIG)
    nn.init.normal_(attention.query_key_value.bias)
    hidden = torch.randn(2, 10, 24)
    attended: list[torch.Tensor] = []
    attention.projection.register_forward_pre_hook(lambda _, inputs: attended.append(inputs[0]))
    attention(hidden)

    first, last = heads
    rows = slice(first * 3 * 8, last * 3 * 8)  # head_dim is 8
    fused = functional.linear(
        hidden, attention.query_key_value.weight[rows], attention.query_key_value.bias[rows]
    )
    for head in range(last - first):
        query, key, value = fused[..., head * 24 : (head + 1) * 24].split(8, dim=-1)
        scores = query @ key.transpose(1, 2) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(10, 10, dtype=torch.bool).triu(1), -math.inf)
        expected = scores.softmax(-1) @ value
        columns = slice((first + head) * 8, (first + head + 1) * 8)
        torch.testing.assert_close(attended[0][..., columns], expected)


def test_dropout_follows_the_generator_and_stops_in_evaluation() -> None:
    block = Block(replace(CONFIG, dropout=0.3))
    hidden = torch.randn(2, 10, 24)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        result: torch.Tensor = block(hidden)
        return result

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    block.eval()
    assert torch.equal(run(1), run(2))


def test_attention_weights_are_dropped_too() -> None:
    attention = CausalSelfAttention(replace(CONFIG, dropout=0.5))
    hidden = torch.randn(2, 10, 24)
    assert not torch.equal(attention(hidden), attention(hidden))


def test_initialisation_has_the_standard_deviations_of_gpt2() -> None:
    config = replace(CONFIG, hidden_size=240, num_blocks=8)
    block, head = Block(config), Head(config)
    assert block.attention.query_key_value.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert head.projection.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for residual in (block.attention.projection, block.mlp[2]):
        assert residual.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
        assert not residual.bias.any()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocabulary_size", 0, "vocabulary_size is 0"),
        ("num_blocks", -1, "num_blocks is -1"),
        ("sequence_length", 0, "sequence_length is 0"),
        ("num_heads", 5, r"hidden_size \(24\) is not a multiple of num_heads \(5\)"),
        ("dropout", 1.0, "dropout is 1.0"),
        ("dropout", -0.1, "dropout is -0.1"),
    ],
)
def test_bad_shapes_are_named(field: str, value: float, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        replace(CONFIG, **{field: value})
