"""A single-process reference in plain torch, and what the engine tests share.

The reference uses neither the engine nor its optimizer: it builds every layer, runs the global
batch micro-batch by micro-batch, and steps torch's AdamW. Only the keys of initialisation and
dropout (design 4.4) are the package's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from malleus_ds import MalleusPipelineEngine, MalleusPipelineModule, initialize
from malleus_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss
from malleus_ds.pipe.rng import layer_seed
from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.tensor_parallel.cuts import cut_degrees

NUM_MICRO_BATCHES = 8
MICRO_BATCH_SIZE = 2
BASE_SEED = 1234
CLIP_NORM = 0.5
LEARNING_RATE = 1e-3


def gpt(tie_embeddings: bool = False, num_heads: int = 2) -> GPTConfig:
    return GPTConfig(
        vocabulary_size=24,
        hidden_size=16,
        num_heads=num_heads,
        num_blocks=6 if not tie_embeddings else 4,
        sequence_length=8,
        dropout=0.2,
        tie_embeddings=tie_embeddings,
    )


class Tokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random tokens, the same for everyone."""

    def __init__(self, num_samples: int = 800, vocabulary_size: int = 24, length: int = 8) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, vocabulary_size, (num_samples, length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


def config(**malleus: Any) -> dict[str, Any]:
    """A DeepSpeed config; ``malleus``: keys of its section. Small buckets, so that there are many."""
    return {
        "train_batch_size": NUM_MICRO_BATCHES * MICRO_BATCH_SIZE,
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": 10**9,
        "malleus": {
            "bucket_bytes": 3000,
            "shuffle": False,
            "detector": {"enabled": False},
            **malleus,
        },
    }


def stage(ranks: int | tuple[int, ...], start: int, stop: int) -> Stage:
    return Stage((ranks,) if isinstance(ranks, int) else ranks, (start, stop))


StageEntry = tuple[int | tuple[int, ...], int, int]


def plan(*pipelines: tuple[Sequence[StageEntry], int], standby: tuple[int, ...] = ()) -> ParallelPlan:
    """A plan from ``([(rank or ranks, start, stop), ...], num_micro_batches)`` per pipeline."""
    return ParallelPlan(
        tuple(Pipeline(tuple(stage(*entry) for entry in stages), count) for stages, count in pipelines),
        MICRO_BATCH_SIZE,
        standby,
    )


@dataclass(frozen=True)
class Result:
    """Loss and gradient norm of each step, and the parameters after the last."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


def single_process(
    specs: Sequence[Any],
    loss_fn: Any,
    num_steps: int,
    num_micro_batches: Sequence[int] | None = None,
    data: Any = Tokens(),  # noqa: B008 - read only
) -> Result:
    """Train ``specs`` in this process, on the same samples with the same dropout.

    num_micro_batches: of each step, where the batch size changes.
    """
    counts = [NUM_MICRO_BATCHES] * num_steps if num_micro_batches is None else num_micro_batches
    modules, functions = build_all(specs)
    named = dict(modules.named_parameters())
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    losses, norms = [], []
    position = 0
    for step, count in enumerate(counts):
        for parameter in trained:  # as in ZeRO, a parameter without gradient in a step has a zero one
            parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        for index in range(count):
            samples = [data[position + offset] for offset in range(MICRO_BATCH_SIZE)]
            position += MICRO_BATCH_SIZE
            value = torch.stack([tokens for tokens, _ in samples])
            for layer, function in enumerate(functions):
                torch.manual_seed(layer_seed(BASE_SEED, step, index, layer))
                value = function(value)
            loss = loss_fn(value, torch.stack([labels for _, labels in samples]))
            (loss / count).backward()
            total += loss.item() / count
        norms.append(float(nn.utils.clip_grad_norm_(trained, CLIP_NORM)))
        optimizer.step()
        losses.append(total)
    tensors = {**named, **dict(modules.named_buffers())}
    return Result(losses, norms, {name: tensor.detach() for name, tensor in tensors.items()})


def build_all(specs: Sequence[Any]) -> tuple[nn.Module, list[Any]]:
    """Every layer, each from its own seed; tied modules once, from their first layer's."""
    root, tied = nn.Module(), nn.ModuleDict()
    functions: list[Any] = []
    for layer, spec in enumerate(specs):
        torch.manual_seed(BASE_SEED + layer)
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in tied:
                tied[spec.key] = spec.build()
            module = tied[spec.key]
            functions.append(module if spec.forward_fn is None else partial(spec.forward_fn, module))
        elif isinstance(spec, LayerSpec):
            module = spec.build()
            root.add_module(str(layer), module)
            functions.append(module)
        elif isinstance(spec, nn.Module):
            root.add_module(str(layer), spec)
            functions.append(spec)
        else:
            functions.append(spec)
    root.add_module("tied_modules", tied)
    return root, functions


def make_engine(
    first_plan: ParallelPlan | None,
    specs: Sequence[Any] | None = None,
    loss_fn: Any = gpt_loss,
    data: Any = Tokens(),  # noqa: B008 - read only
    ds_config: dict[str, Any] | None = None,
    **module_arguments: Any,
) -> MalleusPipelineEngine:
    module = MalleusPipelineModule(
        gpt_layers(gpt()) if specs is None else specs,
        loss_fn=loss_fn,
        plan=first_plan,
        base_seed=BASE_SEED,
        **module_arguments,
    )
    engine, *_ = initialize(model=module, training_data=data, config=ds_config or config(seed=BASE_SEED))
    return engine


def train(engine: MalleusPipelineEngine, num_steps: int) -> Result:
    """Train, and gather what all ranks hold."""
    losses, norms = [], []
    for _ in range(num_steps):
        losses.append(engine.train_batch().item())
        norms.append(float(engine.get_global_grad_norm()))
    return Result(losses, norms, gather_parameters(engine))


def gather_parameters(engine: MalleusPipelineEngine) -> dict[str, Tensor]:
    """All parameters and buffers by name, whole; asserts that all holders have the same bits."""
    tensors = {**dict(engine.module.named_parameters()), **dict(engine.module.named_buffers())}
    degrees, index = cut_degrees(engine.module), engine.module.tensor_group.index
    held = {
        name: (tensor.detach().clone(), degrees.get(id(tensor), 1), index if id(tensor) in degrees else 0)
        for name, tensor in tensors.items()
    }
    gathered: list[dict[str, tuple[Tensor, int, int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, held)
    parts: dict[str, dict[int, dict[int, Tensor]]] = {}  # by name, degree and place in the TP group
    for part in gathered:
        for name, (tensor, degree, place) in part.items():
            known = parts.setdefault(name, {}).setdefault(degree, {}).setdefault(place, tensor)
            assert torch.equal(known, tensor), f"holders of {name} differ"
    full: dict[str, Tensor] = {}
    for name, by_degree in parts.items():
        for degree, by_place in by_degree.items():
            assert sorted(by_place) == list(range(degree)), f"parts of {name} are missing"
            whole = by_place[0] if degree == 1 else torch.cat([by_place[place] for place in range(degree)])
            assert torch.equal(full.setdefault(name, whole), whole), f"degrees of {name} differ"
    return full


def assert_same_training(actual: Result, expected: Result) -> None:
    """Losses and norms to 1e-5 relative at every step, parameters to 1e-5 (design 4.4)."""
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(actual.norms, expected.norms, rtol=1e-5, atol=0)
    assert actual.parameters.keys() == expected.parameters.keys()
    for name, tensor in expected.parameters.items():
        torch.testing.assert_close(
            actual.parameters[name], tensor, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
