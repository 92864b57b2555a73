"""Inputs that fail for users of pipeline engines: each is one example of a kind, against one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.dataloader import RepeatingLoader
from torch import Tensor, nn

from malleus_ds import MalleusPipelineModule
from malleus_ds._initialize import _check_deepspeed_keys, _share_batch
from malleus_ds.config import ConfigError
from malleus_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss
from malleus_ds.plan import ParallelPlan
from tests.distributed.reference import (
    BASE_SEED,
    Result,
    Tokens,
    assert_same_training,
    build_all,
    config,
    gpt,
    make_engine,
    plan,
    single_process,
    train,
)
from tests.harness import RankPool

SIZE = 16


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


class Embed(nn.Module):
    """Tokens to hidden states, and what ``extra`` makes of them."""

    def __init__(self, extra: Callable[[Tensor], tuple[Tensor, ...]] | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(24, SIZE)
        self.extra = extra

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.table(tokens)
        return hidden if self.extra is None else (hidden, *self.extra(hidden))


class Mix(nn.Module):
    """Uses all that it is given, of any type, and passes it on."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.requires_grad_(not frozen)

    def forward(self, value: Any) -> Any:
        hidden, *others = value if isinstance(value, tuple) else (value,)
        update = torch.tanh(self.linear(hidden))
        for other in others:
            update = update.masked_fill(other, 0.0) if other.dtype == torch.bool else update * (1 + other)
        hidden = hidden + update
        return (hidden, *others) if others else hidden


class Split(Mix):
    """Puts out a second tensor that needs no gradient, made anew by each layer."""

    def forward(self, value: Any) -> Any:
        hidden = value[0] if isinstance(value, tuple) else value
        hidden = hidden + torch.tanh(self.linear(hidden))
        return hidden, hidden.detach().mean()


class Head(nn.Linear):
    def forward(self, value: Any) -> Tensor:
        return super().forward(value[0] if isinstance(value, tuple) else value)


def mask(hidden: Tensor) -> tuple[Tensor, ...]:
    return (hidden.detach() > 0.5,)


def two_and_mask(hidden: Tensor) -> tuple[Tensor, ...]:
    return hidden * 0.5, *mask(hidden)


def rotary(hidden: Tensor) -> tuple[Tensor, ...]:
    return (torch.linspace(0, 1, hidden.numel()).view(hidden.shape),)


def positions(hidden: Tensor) -> tuple[Tensor, ...]:
    return hidden.tanh(), torch.arange(hidden.shape[1])[None, :, None].expand(hidden.shape) % 3


def identity(value: Any) -> Any:
    return value


class Tied(nn.Module):
    """An embedding with its weight in a nested attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(24, SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens)


def project(module: Tied, hidden: Tensor) -> Tensor:
    return hidden @ module.inner.weight.t()


def project_frozen(module: Tied, hidden: Tensor) -> Tensor:
    """Its holder gives the tied weight no gradient."""
    return hidden @ module.inner.weight.detach().t()


def norm(module: nn.LayerNorm, hidden: Tensor) -> Tensor:
    return module(hidden)


def tied(last: Callable[..., Tensor]) -> list[Any]:
    """Two keys, whose second uses come in the other order."""
    return [
        TiedLayerSpec("embedding", Tied, tied_weight_attr="inner.weight"),
        TiedLayerSpec("norm", nn.LayerNorm, SIZE, forward_fn=norm),
        LayerSpec(Mix),
        LayerSpec(Mix),
        TiedLayerSpec("norm", nn.LayerNorm, SIZE, forward_fn=norm),
        TiedLayerSpec("embedding", Tied, forward_fn=last, tied_weight_attr="inner.weight"),
    ]


def chain(*middle: Any, extra: Callable[[Tensor], tuple[Tensor, ...]] | None = None) -> list[Any]:
    """Six layers with four in the middle."""
    return [LayerSpec(Embed, extra), *middle, LayerSpec(Head, SIZE, 24)]


CASES: dict[str, Callable[[], list[Any]]] = {
    "frozen stage": lambda: chain(LayerSpec(Mix), *[LayerSpec(Mix, frozen=True)] * 2, LayerSpec(Mix)),
    "stage without parameters": lambda: chain(LayerSpec(Mix), torch.tanh, identity, LayerSpec(Mix)),
    "bool mask comes last": lambda: chain(*[LayerSpec(Mix)] * 4, extra=mask),
    "three tensors with a mask": lambda: chain(*[LayerSpec(Mix)] * 4, extra=two_and_mask),
    "three tensors with integers": lambda: chain(*[LayerSpec(Mix)] * 4, extra=positions),
    "float without gradient": lambda: chain(*[LayerSpec(Mix)] * 4, extra=rotary),
    "second output without gradient": lambda: chain(*[LayerSpec(Split)] * 4),
    "two ties in different order": lambda: tied(project),
    "tie without gradient on one holder": lambda: tied(project_frozen),
}
OLD = plan(([(2, 0, 2), (0, 2, 4), (1, 4, 6)], 5), ([(3, 0, 6)], 3))
NEW = plan(([(1, 0, 1), (3, 1, 2), (2, 2, 6)], 8), standby=(0,))


def check_case(name: str) -> None:
    """5 steps under each of two plans, with evaluation between them."""
    specs = CASES[name]()
    expected = single_process(specs, gpt_loss, 10)
    engine = make_engine(OLD, specs, ds_config={**config(seed=BASE_SEED), "fp16": {"enabled": False}})
    first = train(engine, 5)
    assert torch.isfinite(engine.eval_batch(iter(micro_batches(0, 3)), num_micro_batches=3))
    engine.reconfigure(NEW)
    second = train(engine, 5)
    result = Result(first.losses + second.losses, first.norms + second.norms, second.parameters)
    assert_same_training(result, expected)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (result.losses, result.norms, engine.global_steps, engine.skipped_steps))
    assert gathered == gathered[:1] * len(gathered)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, ranks: RankPool) -> None:
    ranks.run(check_case, name, timeout_s=60.0)


def micro_batches(first: int, last: int, size: int = 2) -> list[tuple[Tensor, Tensor]]:
    data = Tokens()
    collate = torch.utils.data.default_collate
    return [collate([data[size * i + k] for k in range(size)]) for i in range(first, last)]


def check_number_of_micro_batches() -> None:
    """A mean, not a sum, over the global batch: however it is cut."""
    shape = GPTConfig(24, 16, 2, 6, 8, dropout=0.0)
    results = []
    for count, size in ((4, 4), (16, 1)):
        ds_config = {**config(seed=BASE_SEED), "train_batch_size": 16, "train_micro_batch_size_per_gpu": size}
        engine = make_engine(None, gpt_layers(shape), num_stages=2, ds_config=ds_config)
        assert engine.plan.num_micro_batches == count
        results.append(train(engine, 3))
    assert_same_training(*results)


def check_repeating_loader() -> None:
    """Each pipeline's own micro-batches of step 0, again and again; middle stages read nothing."""
    engine = make_engine(OLD, data=None, specs=CASES["frozen stage"]())
    start, stop = engine._micro_batch_range()
    losses = [
        engine.train_batch(iterator).item()
        for iterator in [iter(RepeatingLoader(micro_batches(start, stop)))]
        for _ in range(4)
    ]
    again = make_engine(OLD, data=None, specs=CASES["frozen stage"]())
    expected = [again.train_batch(iter(micro_batches(start, stop))).item() for _ in range(4)]
    assert losses == expected
    assert losses[-1] < losses[0]


def check_evaluation() -> None:
    """Any number of micro-batches, twice, around training; every form of the result."""
    specs = gpt_layers(gpt())
    layers = plan(([(2, 0, 5), (0, 5, 8)], 5), ([(1, 0, 8)], 3), standby=(3,))
    expected = single_process(specs, gpt_loss, 2).losses
    engine = make_engine(layers, specs)
    modules, functions = build_all(specs)
    modules.eval()
    losses, logits = [], torch.zeros(())
    with torch.no_grad():
        for tokens, labels in micro_batches(0, 3):
            logits = tokens
            for function in functions:
                logits = function(logits)
            losses.append(gpt_loss(logits, labels).item())
    mean = pytest.approx(sum(losses) / 3, rel=1e-5)

    def evaluate(**options: Any) -> Any:
        return engine.eval_batch(iter(micro_batches(0, 3)), num_micro_batches=3, **options)

    is_last = not engine.is_standby and engine.is_last_stage()
    assert evaluate().item() == mean
    assert evaluate(bcast_loss=False).item() == mean
    loss, outputs = evaluate(return_logits=True)
    assert loss.item() == mean
    assert evaluate(compute_loss=False, reduce_output=None) is None or is_last
    each = evaluate(reduce_output=None)
    if is_last:
        torch.testing.assert_close(outputs, logits, rtol=1e-5, atol=1e-5)
        assert [value.item() for value in each] == pytest.approx(losses, rel=1e-5)
    else:
        assert outputs is None
        assert each is None
    results = [engine.train_batch().item()]
    changed = evaluate().item()
    assert changed != mean
    assert evaluate().item() == changed
    results.append(engine.train_batch().item())
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=0)


def check_all_layers_are_built() -> None:
    """Layers that stages do not divide: none is dropped or added."""
    for num_layers, num_stages in ((7, 2), (30, 4), (42, 4)):
        specs = [LayerSpec(nn.Linear, 2, 2) for _ in range(num_layers)]
        for method in ("uniform", "parameters", "type:linear"):
            module = make_module(specs, num_stages, method)
            built: list[Any] = [None] * 4
            dist.all_gather_object(built, sorted(module.local_layers()))
            assert sorted(layer for layers in built for layer in layers) == sorted(
                [*range(num_layers)] * (4 // num_stages)
            )
    module = make_module([LayerSpec(nn.Linear, 2, 2)] * 6, None, [(0, 1), (1, 6)])
    assert module.partitions() == [0, 1, 6]


def make_module(specs: Sequence[Any], num_stages: int | None, method: Any) -> MalleusPipelineModule:
    return MalleusPipelineModule(specs, num_stages=num_stages, partition_method=method)


@pytest.mark.parametrize(
    "check",
    [check_number_of_micro_batches, check_repeating_loader, check_evaluation, check_all_layers_are_built],
    ids=lambda check: check.__name__,
)
def test_use(check: Callable[[], None], ranks: RankPool) -> None:
    ranks.run(check, timeout_s=60.0)


@pytest.mark.parametrize(
    ("keys", "accumulation"),
    [
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, 4),
        ({"train_batch_size": 16}, 1),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 8}, 8),
        ({"train_micro_batch_size_per_gpu": 2}, 1),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 3),
    ],
)
def test_accumulation_comes_from_the_number_of_pipelines(keys: dict[str, int], accumulation: int) -> None:
    """8 ranks in 2 pipelines: not from the world size."""
    shared = _share_batch(ParallelPlan.homogeneous(8, 8, 4), keys)
    assert [pipeline.num_micro_batches for pipeline in shared.pipelines] == [accumulation] * 2
    assert shared.global_batch_size == keys.get(
        "train_batch_size", shared.micro_batch_size * accumulation * 2
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_2_and_3_are_refused(stage: int) -> None:
    with pytest.raises(ConfigError, match=rf"zero_optimization\.stage is {stage}: .*use 0 or 1"):
        _check_deepspeed_keys({**config(), "zero_optimization": {"stage": stage}}, optimizer=None)
