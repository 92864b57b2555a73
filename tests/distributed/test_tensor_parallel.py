"""Tensor-parallel layers against plain torch modules of one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from malleus_ds.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelError,
    TensorParallelGroup,
    VocabParallelEmbedding,
    cut_layer,
    vocab_parallel_cross_entropy,
)
from tests.harness import DistributedTest

VOCABULARY, FEATURES, HIDDEN = 24, 12, 16


class Shared(nn.Module):
    """Embedding, a column- and a row-parallel layer, and a column-parallel head; its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCABULARY, FEATURES)
        self.up = ColumnParallelLinear(FEATURES, HIDDEN)
        self.down = RowParallelLinear(HIDDEN, FEATURES)
        self.head = ColumnParallelLinear(FEATURES, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        features = self.embedding(tokens)
        features = features + self.down(functional.gelu(self.up(features)))
        losses = vocab_parallel_cross_entropy(self.head(features), targets, self.head.group)
        return losses.sum() / (targets != -100).sum()


def plain_loss(whole: Shared, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same model in torch's own functions, from the whole weights."""
    features = functional.embedding(tokens, whole.embedding.weight)
    hidden = functional.gelu(functional.linear(features, whole.up.weight, whole.up.bias))
    features = features + functional.linear(hidden, whole.down.weight.T, whole.down.bias)
    logits = functional.linear(features, whole.head.weight)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def whole_model(dtype: torch.dtype = torch.float64) -> Shared:
    torch.manual_seed(0)
    return Shared().to(dtype)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (3, 5), generator=generator)
    targets = torch.randint(VOCABULARY, (3, 5), generator=generator)
    targets[0, :2] = -100
    return tokens, targets


def group_of(degree: int) -> TensorParallelGroup:
    """This rank's group of so many neighbours."""
    first = dist.get_rank() // degree * degree
    handles = [
        dist.new_group(list(range(start, start + degree)))
        for start in range(0, dist.get_world_size(), degree)
    ]
    handle = handles[first // degree] if degree > 1 else None
    return TensorParallelGroup(degree, dist.get_rank() - first, handle)


class TestLayers(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("degree", [1, 2, 4])
    def test_loss_and_gradients_are_those_of_the_whole(self, degree: int) -> None:
        whole, tokens_and_targets = whole_model(), batch()
        expected = plain_loss(whole, *tokens_and_targets)
        expected.backward()
        mine, group = whole_model(), group_of(degree)
        cut_layer(mine, group)
        loss = mine(*tokens_and_targets)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        parameters = dict(mine.named_parameters())
        for name, parameter in whole.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            if name != "down.bias":
                gradient = gradient[group.part(len(gradient), name)]
            torch.testing.assert_close(parameters[name].grad, gradient)

    @pytest.mark.parametrize("degree", [2, 4])
    def test_parts_make_up_the_whole(self, degree: int) -> None:
        """In the order of the ranks, bit by bit: what migration between degrees relies on."""
        mine, group = whole_model(), group_of(degree)
        cut_layer(mine, group)
        for name, parameter in whole_model().named_parameters():
            part = dict(mine.named_parameters())[name].detach()
            parts = [torch.empty_like(part) for _ in range(degree)]
            dist.all_gather(parts, part, group=group.handle)
            if name == "down.bias":
                assert all(torch.equal(part, parameter) for part in parts)
            else:
                assert torch.equal(torch.cat(parts), parameter)

    def test_large_logits_of_low_precision(self) -> None:
        """The loss is computed in fp32, and does not overflow."""
        group = group_of(4)
        torch.manual_seed(2)
        logits = (200 * torch.randn(6, VOCABULARY)).bfloat16()
        targets = torch.randint(VOCABULARY, (6,))
        mine = logits[:, group.part(VOCABULARY, "vocabulary")].clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(mine, targets, group)
        whole = logits.float().requires_grad_()
        expected = functional.cross_entropy(whole, targets, reduction="none")
        torch.testing.assert_close(losses, expected)
        losses.sum().backward()
        expected.sum().backward()
        assert mine.grad is not None
        assert whole.grad is not None
        assert mine.grad.dtype == torch.bfloat16
        expected_part = whole.grad[:, group.part(VOCABULARY, "vocabulary")]
        torch.testing.assert_close(mine.grad.float(), expected_part, rtol=1e-2, atol=1e-5)

    def test_masked_logits(self) -> None:
        """Infinite logits of other tokens, among them the first of each rank's part."""
        group = group_of(4)
        logits = torch.zeros(2, 8).index_fill_(1, torch.tensor([0, 2, 4, 6]), -math.inf)
        targets = torch.tensor([3, -100])
        losses = vocab_parallel_cross_entropy(logits[:, group.part(8, "vocabulary")], targets, group)
        expected = functional.cross_entropy(logits, targets, reduction="none")
        torch.testing.assert_close(losses, expected)

    def test_shared_parameters_stay_shared(self) -> None:
        whole = whole_model()
        whole.head.weight = whole.embedding.weight
        cut_layer(whole, group_of(2))
        assert whole.head.weight is whole.embedding.weight
        assert len(whole.head.weight) == VOCABULARY // 2

    def test_meta_layers_are_cut_without_memory(self) -> None:
        with torch.device("meta"):
            layer = Shared()
        cut_layer(layer, group_of(2))
        assert layer.up.weight.shape == (HIDDEN // 2, FEATURES)
        assert layer.down.weight.shape == (HIDDEN // 2, FEATURES)
        assert layer.down.bias is not None
        assert layer.down.bias.shape == (FEATURES,)
        assert all(parameter.is_meta for parameter in layer.parameters())

    def test_wrong_cuts_are_refused_on_all_ranks(self) -> None:
        group = group_of(4)
        with pytest.raises(TensorParallelError, match=r"weight is 6: a TP group of 4 ranks needs a multiple"):
            ColumnParallelLinear(4, 6).cut(group)
        both = nn.ModuleList([RowParallelLinear(8, 4), RowParallelLinear(6, 4)])
        with pytest.raises(TensorParallelError, match=r"RowParallelLinear\.weight is 6"):
            cut_layer(both, group)
        assert both[0].weight.shape == (8, 4)
        layer = RowParallelLinear(8, 4)
        layer.cut(group)
        with pytest.raises(TensorParallelError, match="is cut already, into 4"):
            layer.cut(group)


def test_frozen_and_marked_parameters_stay_so() -> None:
    layer = ColumnParallelLinear(4, 4)
    layer.weight.requires_grad_(False)
    layer.weight.has_no_decay = True  # type: ignore[attr-defined]
    layer.cut(TensorParallelGroup())
    assert not layer.weight.requires_grad
    assert layer.weight.has_no_decay
    assert layer.bias is not None
    assert layer.bias.requires_grad


@pytest.mark.parametrize(("degree", "index", "words"), [(2, 2, "index is 2"), (2, 0, "needs its handle")])
def test_wrong_groups_are_refused(degree: int, index: int, words: str) -> None:
    with pytest.raises(TensorParallelError, match=words):
        TensorParallelGroup(degree, index)
