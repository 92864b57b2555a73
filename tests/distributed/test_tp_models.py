"""GPT and LLaMA cut to several tensor-parallel degrees, against the whole models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from malleus_ds.models import GPTConfig, LlamaConfig, VocabParallelLoss, gpt_layers, gpt_loss, llama_layers
from malleus_ds.models.gpt import Block, PositionEmbedding
from malleus_ds.models.llama import LlamaBlock
from malleus_ds.pipe.rng import layer_seed
from malleus_ds.tensor_parallel import RowParallelLinear, TensorParallelError, TensorParallelGroup, cut_layer
from tests.distributed.reference import build_all
from tests.distributed.test_tensor_parallel import group_of
from tests.harness import DistributedTest

VOCABULARY = 24
GPT = GPTConfig(
    vocabulary_size=VOCABULARY, hidden_size=16, num_heads=4, num_blocks=2, sequence_length=8, dropout=0.2
)
LLAMA = LlamaConfig(
    vocabulary_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=20,
    num_heads=8,
    num_kv_heads=4,
    num_blocks=2,
)
MODELS = {
    "gpt": partial(gpt_layers, GPT),
    "gpt-tied": partial(gpt_layers, replace(GPT, tie_embeddings=True)),
    "llama": partial(llama_layers, LLAMA),
    "llama-tied": partial(llama_layers, replace(LLAMA, tie_embeddings=True)),
}


def build(name: str) -> tuple[nn.Module, list[Any]]:
    """The whole model in fp64, with values large enough that every part of it counts."""
    modules, functions = build_all(MODELS[name]())
    modules = modules.double()
    generator = torch.Generator().manual_seed(0)
    for parameter in modules.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return modules, functions


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (3, 8), generator=generator)
    labels = torch.randint(VOCABULARY, (3, 8), generator=generator)
    labels[0, :3] = -100
    return tokens, labels


def seeded(layer: int, function: Any, value: Tensor) -> Tensor:
    """One layer, with the random numbers that the engine gives it."""
    torch.manual_seed(layer_seed(7, 0, 0, layer))
    result: Tensor = function(value)
    return result


def logits_of(functions: list[Any], tokens: Tensor, recompute: bool = False) -> Tensor:
    value = tokens
    for layer, function in enumerate(functions):
        run = partial(seeded, layer, function)
        value = checkpoint(run, value, use_reentrant=False) if recompute else run(value)
    return value


def is_replicated(modules: nn.Module, name: str) -> bool:
    owner = modules.get_submodule(name.rpartition(".")[0])
    is_row_bias = isinstance(owner, RowParallelLinear) and name.endswith(".bias")
    return is_row_bias or isinstance(owner, nn.LayerNorm | nn.RMSNorm | PositionEmbedding)


def assert_gradients_are_parts(mine: nn.Module, whole: nn.Module, group: TensorParallelGroup) -> None:
    parameters = dict(mine.named_parameters())
    assert parameters.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        assert gradient.abs().max() > 1e-6, name
        if not is_replicated(whole, name):
            gradient = gradient[group.part(len(gradient), name)]
        torch.testing.assert_close(
            parameters[name].grad, gradient, rtol=1e-9, atol=1e-12, msg=partial("{}: {}".format, name)
        )


class TestModels(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("degree", [1, 2, 4])
    @pytest.mark.parametrize("name", MODELS)
    def test_loss_and_gradients_are_those_of_the_whole(self, name: str, degree: int, recompute: bool) -> None:
        whole, whole_functions = build(name)
        tokens, labels = batch()
        whole_logits = logits_of(whole_functions, tokens)
        expected = functional.cross_entropy(whole_logits.flatten(0, 1), labels.flatten())
        expected.backward()

        (mine, functions), group, loss_fn = build(name), group_of(degree), VocabParallelLoss()
        cut_layer(mine, group)
        cut_layer(loss_fn, group)
        logits = logits_of(functions, tokens, recompute)
        loss = loss_fn(logits, labels)
        loss.backward()
        torch.testing.assert_close(logits, whole_logits[..., group.part(VOCABULARY, "vocabulary")])
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        assert_gradients_are_parts(mine, whole, group)

    @pytest.mark.parametrize("degree", [2, 4])
    def test_replicated_values_stay_the_same_bits(self, degree: int) -> None:
        """In fp32, with dropout: what all ranks of a group compute for themselves never drifts apart."""
        (modules, functions), group = build("gpt"), group_of(degree)
        cut_layer(modules.float(), group)
        hidden = logits_of(functions[:-1], batch()[0]).detach()
        largest = group.all_reduce(hidden.clone(), dist.ReduceOp.MAX)
        assert torch.equal(hidden, largest)

    def test_dropout_counts(self) -> None:
        """The comparison above would not see dropout that is off."""
        _, functions = build("gpt")
        hidden = logits_of(functions[:1], batch()[0])
        attention = functions[1].attention
        assert not torch.equal(seeded(1, attention, hidden), seeded(2, attention, hidden))

    def test_evaluation_uses_no_dropout(self) -> None:
        (modules, functions), group = build("gpt"), group_of(4)
        cut_layer(modules.eval(), group)
        hidden = logits_of(functions[:1], batch()[0])
        assert torch.equal(seeded(1, functions[1], hidden), seeded(2, functions[1], hidden))

    def test_the_loss_follows_its_group(self) -> None:
        """A plan may change the degree again and again."""
        loss_fn = VocabParallelLoss()
        logits, labels = torch.randn(2, 5, VOCABULARY, generator=torch.Generator().manual_seed(0)), batch()[1]
        labels = labels[:2, :5]
        for degree in (4, 1, 2):
            group = group_of(degree)
            cut_layer(loss_fn, group)
            mine = logits[..., group.part(VOCABULARY, "vocabulary")]
            torch.testing.assert_close(loss_fn(mine, labels), gpt_loss(logits, labels))

    def test_cuts_that_divide_a_unit_are_refused(self) -> None:
        group = group_of(4)
        refusals = [
            (Block(replace(GPT, num_heads=2)), "num_heads is 2: a TP group of 4 ranks needs a multiple of 4"),
            (LlamaBlock(replace(LLAMA, num_kv_heads=2)), "num_kv_heads is 2: a TP group of 4 ranks needs"),
            (LlamaBlock(replace(LLAMA, intermediate_size=6)), "intermediate_size is 6: a TP group of 4"),
            (gpt_layers(replace(GPT, vocabulary_size=6))[0].build(), "vocabulary_size is 6: a TP group of 4"),
        ]
        for layer, words in refusals:
            shapes = [parameter.shape for parameter in layer.parameters()]
            with pytest.raises(TensorParallelError, match=words):
                cut_layer(layer, group)
            assert [parameter.shape for parameter in layer.parameters()] == shapes


def test_the_loss_of_whole_logits_is_torchs() -> None:
    logits, labels = torch.randn(2, 3, 5).bfloat16(), torch.tensor([[0, 4, -100], [2, 2, 1]])
    expected = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    assert torch.equal(gpt_loss(logits, labels), expected)
    assert torch.equal(VocabParallelLoss()(logits, labels), expected)
