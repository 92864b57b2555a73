from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from malleus_ds.models.gpt import causal_attention
from malleus_ds.tensor_parallel import TensorParallelGroup, part_dropout

WHOLE = TensorParallelGroup()
NO_HANDLE: Any = object()  # Nothing is sent.


def dropped_after(seed: int, values: Tensor, dim: int, group: TensorParallelGroup = WHOLE) -> Tensor:
    torch.manual_seed(seed)
    return part_dropout(values, 0.3, dim, group)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("degree", [2, 4])
def test_parts_have_the_masks_of_the_whole(degree: int, dim: int) -> None:
    """And all ranks leave the generator as the whole does."""
    values = torch.randn(8, 8, 8)
    expected = dropped_after(3, values, dim)
    following = torch.rand(5)
    parts = []
    for index, part in enumerate(values.chunk(degree, dim)):
        parts.append(dropped_after(3, part, dim, TensorParallelGroup(degree, index, NO_HANDLE)))
        assert torch.equal(torch.rand(5), following)
    assert torch.equal(torch.cat(parts, dim), expected)


def test_strides_do_not_matter() -> None:
    values = torch.randn(6, 7, 4)
    expected = dropped_after(0, values, 1)
    transposed = values.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(dropped_after(0, transposed, 1), expected)


def test_rate_scale_and_gradient() -> None:
    values = torch.ones(4, 100, 100, requires_grad=True)
    result = dropped_after(0, values, 0)
    kept = result != 0
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.01)
    torch.testing.assert_close(result[kept], torch.full_like(result[kept], 1 / 0.7))
    result.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, result)


def test_masks_differ_by_index_and_by_call() -> None:
    values = torch.ones(4, 10, 10)
    torch.manual_seed(0)
    masks = [mask for _ in range(2) for mask in part_dropout(values, 0.5, 0, WHOLE)]
    for index, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:index])


def test_recomputation_draws_the_same() -> None:
    values = torch.randn(4, 10, requires_grad=True)

    def twice(values: Tensor) -> Tensor:
        return part_dropout(part_dropout(values, 0.3, 0, WHOLE).exp(), 0.3, 0, WHOLE)

    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(twice(values).sum(), values)
    torch.manual_seed(0)
    (gradient,) = torch.autograd.grad(checkpoint(twice, values, use_reentrant=False).sum(), values)
    assert torch.equal(gradient, expected)


def test_without_dropout_nothing_is_drawn() -> None:
    values = torch.randn(4, 4)
    state = torch.get_rng_state()
    assert part_dropout(values, 0.0, 0, WHOLE) is values
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_without_dropout_is_torchs() -> None:
    query, key, value = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(causal_attention(query, key, value, 0.0, WHOLE), expected)


def test_attention_drops_weights_without_bias() -> None:
    """The mean over many draws is the attention without dropout."""
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    torch.manual_seed(0)
    draws = [causal_attention(query, key, value, 0.2, WHOLE) for _ in range(4000)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(torch.stack(draws).mean(dim=0), expected, rtol=0, atol=0.05)


def test_all_may_be_dropped() -> None:
    values = torch.ones(4, 2)
    assert torch.equal(part_dropout(values, 1.0, 0, WHOLE), nn.functional.dropout(values, 1.0))
