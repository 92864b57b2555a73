"""The module's tensors in DeepSpeed's layer files, and what a pipeline names them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from torch import Tensor

from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.stock.pickles import read_pickle
from malleus_ds.placement import LogicalTensor

TIED = "tied_modules."
Ties = Mapping[str, tuple[int, ...]]
"""Layers that share a module, by the key of their `TiedLayerSpec`."""


@dataclass(frozen=True, slots=True)
class StockModule:
    """tensors: by global name, in the order of registration, parameters and buffers; knows_ties: the ties are
    those of the model, not only what the files show: a layer without a file may use one, too."""

    tensors: Mapping[str, Tensor]
    ties: Ties
    num_layers: int
    buffers: Collection[str]
    knows_ties: bool
    by_owner: dict[str, list[str]] = field(default_factory=dict)

    def layers_of(self, name: str) -> tuple[int, ...]:
        owner = owner_of(name)
        return self.ties[owner.removeprefix(TIED)] if owner.startswith(TIED) else (int(owner),)

    def parameters(self, start: int, stop: int) -> list[tuple[str, int]]:
        """Names and numbers of elements of the parameters of a stage, in the order of its module: ties come
        first."""
        layers = range(start, stop)
        first_use = {key: [layer for layer in used if layer in layers] for key, used in self.ties.items()}
        tied = sorted((used[0], key) for key, used in first_use.items() if used)
        owners = [f"{TIED}{key}" for _, key in tied] + [str(layer) for layer in layers]
        names = [name for owner in owners for name in self.by_owner.get(owner, ())]
        return [(name, self.tensors[name].numel()) for name in names if name not in self.buffers]


def owner_of(name: str) -> str:
    """The layer, or tied module, that a tensor is in."""
    parts = name.split(".")
    return parts[0] if parts[0].isdigit() else ".".join(parts[:2])


def ties_of(tensors: Sequence[LogicalTensor]) -> dict[str, tuple[int, ...]]:
    """The ties of a model."""
    return {
        owner_of(tensor.name).removeprefix(TIED): tensor.layers
        for tensor in tensors
        if tensor.name.startswith(TIED)
    }


def read_module(
    layers: Mapping[int, Path], ties: Ties, trained: Mapping[str, int], buffers: Collection[str]
) -> StockModule:
    """ties: as given; others are found by the names in ``trained``, the numbers of elements of what the
    optimizer's partitions name (none without ZeRO)."""
    contents = {layer: read_pickle(path) for layer, path in sorted(layers.items())}
    known = dict(ties) or _find_ties(contents, trained)
    key_of = {layer: key for key, used in known.items() for layer in used}
    tensors: dict[str, Tensor] = {}
    by_owner: dict[str, list[str]] = {}
    for layer, content in contents.items():
        owner = f"{TIED}{key_of[layer]}" if layer in key_of else str(layer)
        if owner in by_owner:
            continue  # another use of a tied module
        by_owner[owner] = []
        for name, tensor in content.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(f"{layers[layer]}: {name!r} is a {type(tensor).__name__}, not a tensor")
            tensors[f"{owner}.{name}"] = tensor.detach()
            by_owner[owner].append(f"{owner}.{name}")
    num_layers = 1 + max([*contents, *key_of])
    return StockModule(tensors, known, num_layers, buffers, known == dict(ties), by_owner)


def _find_ties(
    contents: Mapping[int, Mapping[str, Tensor]], trained: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """A layer is tied when the optimizer does not know its tensors by its number, but by a key of a tie."""
    keys: dict[str, dict[str, int]] = {}
    for name, size in trained.items():
        if name.startswith(TIED):
            owner = owner_of(name)
            keys.setdefault(owner.removeprefix(TIED), {})[name.removeprefix(f"{owner}.")] = size
    own_names = {owner_of(name) for name in trained}
    found: dict[str, tuple[int, ...]] = {}
    for layer, content in contents.items():
        if str(layer) in own_names:
            continue
        for key, sizes in keys.items():
            held = {name: prod(content[name].shape) for name in sizes.keys() & content.keys()}
            if held == sizes and (key not in found or not content.keys() - sizes.keys()):
                found[key] = (*found.get(key, ()), layer)
                break
    return found
