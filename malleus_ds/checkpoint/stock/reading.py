"""A checkpoint of DeepSpeed's pipeline engine, as one of ours: a manifest, and intervals to read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import GroupEntry, Manifest
from malleus_ds.checkpoint.part_file import Content, Interval
from malleus_ds.checkpoint.places import Places
from malleus_ds.checkpoint.stock.files import StockFiles, find_files
from malleus_ds.checkpoint.stock.flat_state import FlatState, WholeOptimizer, partitioned
from malleus_ds.checkpoint.stock.module import StockModule, Ties, read_module, ties_of
from malleus_ds.checkpoint.stock.pickles import read_pickle
from malleus_ds.checkpoint.stock.scalars import (
    client_state,
    loss_scaler,
    lr_scheduler,
    optimizer_name,
    position,
    shared_state,
)
from malleus_ds.checkpoint.stock.whole_optimizer import name_states
from malleus_ds.placement import PARAMETER, LogicalTensor
from malleus_ds.zero.precision import MASTER, gradient_dtype


@dataclass(frozen=True, slots=True)
class StockCheckpoint:
    """manifest: without files; contents: all elements, each once; left_out: client state that is not JSON."""

    directory: Path
    manifest: Manifest
    contents: tuple[Content, ...]
    left_out: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.directory

    @property
    def digest(self) -> str:
        """Equal on ranks that see the same checkpoint."""
        return hashlib.sha256(self.manifest.to_json()).hexdigest()

    def check_share(self, rank: int, world_size: int) -> None:
        """There are no checksums to check."""

    def reader(self) -> AbstractContextManager[StockReader]:
        return nullcontext(StockReader(self))


class StockReader:
    """Reads any interval of the logical tensors."""

    def __init__(self, checkpoint: StockCheckpoint) -> None:
        entries = ((content.interval, content.values) for content in checkpoint.contents)
        self._places = Places(str(checkpoint.directory), entries)

    def has(self, state: str, tensor: str) -> bool:
        return self._places.has(state, tensor)

    def read(self, wanted: Interval) -> Tensor:
        """Its elements, on the host. Raises `CheckpointError` for elements that no file has."""
        return self._places.read(wanted, _cut)


def _cut(values: Tensor, interval: Interval, start: int, stop: int) -> Tensor:
    return values[start - interval.start : stop - interval.start]


def open_stock(
    directory: Path,
    model: Sequence[LogicalTensor] | None = None,
    ties: Ties | None = None,
    with_optimizer: bool = True,
) -> StockCheckpoint:
    """Read what there is; elements are read later, when they are needed.

    model: the job's tensors, where there is a job; ties: layers that share a module, where there is none
    (they are found for ZeRO-1). Raises `CheckpointError` that names the file and what is wrong.
    """
    try:
        return _open(directory, model, ties, with_optimizer)
    except CheckpointError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory}: its files do not hold what DeepSpeed writes ({type(error).__name__}: {error})"
        ) from error


def _open(
    directory: Path, model: Sequence[LogicalTensor] | None, ties: Ties | None, with_optimizer: bool
) -> StockCheckpoint:
    files = find_files(directory)
    stages = [read_pickle(path) for path in files.stages]
    _check_stages(files, stages)
    known_ties = ties_of(model) if model is not None else dict(ties or {})
    buffers = {name for stage in stages for name in stage.get("buffer_names") or ()}
    states: list[list[FlatState]] = []
    if with_optimizer:
        states = [
            partitioned(files.partitions[number], stages[number].get("param_shapes"))
            for number in sorted(files.partitions)
        ]
    sizes = {name: 0 for stage in stages for group in stage.get("param_shapes") or () for name in group}
    sizes |= _sizes(states)
    module = read_module(files.layers, known_ties, sizes, buffers)
    if with_optimizer:
        _check_sizes(directory, sizes, module)
    if with_optimizer and not states and any(stage.get("optimizer") for stage in stages):
        optimizers = [
            WholeOptimizer.of(path, stage["optimizer"])
            for path, stage in zip(files.stages, stages, strict=True)
        ]
        groups = None if model is None else {t.name: t.group for t in model if t.group is not None}
        states = name_states(optimizers, module, groups)
    return _assemble(directory, stages, module, _by_group(states, model, directory))


def _check_stages(files: StockFiles, stages: Sequence[Mapping[str, Any]]) -> None:
    for path, stage in zip(files.stages, stages, strict=True):
        if "global_steps" not in stage:
            raise CheckpointError(f"{path}: has no global_steps: not a file of DeepSpeed's engine")
        if stage["global_steps"] != stages[0]["global_steps"]:
            raise CheckpointError(
                f"{path}: of step {stage['global_steps']}, but {files.stages[0].name} is of step "
                f"{stages[0]['global_steps']}: files of two checkpoints are mixed"
            )
    num_stages, num_replicas = stages[0]["mp_world_size"], stages[0]["dp_world_size"]
    counts = {f"mp_rank_{num_stages - 1:02d}_model_states.pt": (len(stages), num_stages)}
    for number, paths in files.partitions.items():
        name = f"zero_pp_rank_{num_replicas - 1}_mp_rank_{number:02d}_optim_states.pt"
        counts[name] = (len(paths), num_replicas)
    for name, (count, expected) in counts.items():
        if count != expected:
            raise CheckpointError(
                f"{files.directory / name}: is missing: {count} of {expected} such files are there"
            )


def _sizes(states: Sequence[Sequence[FlatState]]) -> dict[str, int]:
    """Elements of each parameter that the optimizers of the stages have."""
    sizes: dict[str, int] = {}
    for stage in states:
        own: dict[str, int] = {}
        for run in (run for state in stage for run in state.runs):
            own[run.name] = own.get(run.name, 0) + run.size
        sizes = {**own, **sizes}
    return sizes


def _check_sizes(directory: Path, sizes: Mapping[str, int], module: StockModule) -> None:
    """What is trained must be in the files of the layers."""
    for name, size in sizes.items():
        tensor = module.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{directory}: the optimizer has state of {name!r}, which no file layer_* has: one is missing"
            )
        if size != tensor.numel():
            raise CheckpointError(
                f"{directory}: {name!r} has {tensor.numel()} elements in the file of its layer, but {size} "
                f"in the optimizer's"
            )


@dataclass(frozen=True, slots=True)
class _Grouped:
    """state: of one stage, whose own copies of ``names`` count; group: of the whole model."""

    group: int
    state: FlatState
    names: frozenset[str]


def _by_group(
    stages: Sequence[Sequence[FlatState]], model: Sequence[LogicalTensor] | None, directory: Path
) -> list[_Grouped]:
    """A stage's groups are those of the model that it has parameters of; tied copies count once."""
    group_of = None if model is None else {tensor.name: tensor.group for tensor in model}
    counts = {1 + max((state.group for state in stage), default=-1) for stage in stages}
    if group_of is None and len(counts) > 1:
        raise CheckpointError(
            f"{directory}: its stages have {sorted(counts)} parameter groups, which have no names: load it "
            f"in a job (engine.load_checkpoint)"
        )
    grouped: list[_Grouped] = []
    taken: set[str] = set()
    for stage in stages:
        own = {run.name for state in stage for run in state.runs}
        for state in (state for state in stage if state.runs):  # others are padding alone
            groups = {group_of.get(run.name) for run in state.runs} if group_of is not None else {state.group}
            known = sorted(group for group in groups if group is not None)
            group = known[0] if known else state.group
            names = frozenset(run.name for run in state.runs) - taken
            grouped.append(_Grouped(group, state, names))
        taken |= own
    return grouped


def _assemble(
    directory: Path, stages: Sequence[Mapping[str, Any]], module: StockModule, grouped: Sequence[_Grouped]
) -> StockCheckpoint:
    group_of = {name: item.group for item in grouped for name in item.names}
    tensors = tuple(
        LogicalTensor(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            itemsize=tensor.element_size(),
            layers=module.layers_of(name),
            group=group_of.get(name),
        )
        for name, tensor in module.tensors.items()
    )
    contents = (*_parameters(module), *_states(module, grouped))
    first = stages[0]
    config = first.get("ds_config")
    config = config if isinstance(config, dict) else {}
    groups = _group_entries(module, grouped, directory)
    kept, left_out = client_state(first)
    scheduler = lr_scheduler(first, config)
    manifest = Manifest(
        tensors=tensors,
        files=(),
        optimizer=optimizer_name(groups),
        groups=groups,
        lr_scheduler=scheduler,
        loss_scaler=loss_scaler(first, grouped[0].state.loss_scaler if grouped else None),
        position=position(first),
        seeds={},
        plan={},
        client_state=kept,
        in_order=module.knows_ties,
    )
    return StockCheckpoint(directory, manifest, contents, left_out)


def _parameters(module: StockModule) -> Iterator[Content]:
    for name, tensor in module.tensors.items():
        if tensor.numel() > 0:
            yield Content(Interval(PARAMETER, name, 0, tensor.numel()), tensor.reshape(-1))


def _states(module: StockModule, grouped: Sequence[_Grouped]) -> Iterator[Content]:
    """Masters only of parameters that have some: in fp32 they are the parameters themselves."""
    for item in grouped:
        for content in item.state.contents():
            name = content.interval.tensor
            if name in item.names and (content.interval.state != MASTER or _has_master(module, name)):
                yield content


def _has_master(module: StockModule, name: str) -> bool:
    dtype = module.tensors[name].dtype if name in module.tensors else torch.float32
    return gradient_dtype(dtype) != dtype


def _group_entries(
    module: StockModule, grouped: Sequence[_Grouped], directory: Path
) -> tuple[GroupEntry, ...]:
    """Of all groups, from the first stage that has each."""
    entries: dict[int, GroupEntry] = {}
    for item in grouped:
        states = {
            name: str(tensor.dtype).removeprefix("torch.")
            for name, tensor in item.state.tensors.items()
            if name != MASTER or any(_has_master(module, run.name) for run in item.state.runs)
        }
        entry = GroupEntry(*shared_state(item.state, states))
        if entry.options != entries.setdefault(item.group, entry).options:
            raise CheckpointError(
                f"{directory}: parameter group {item.group} has other options in another stage: load it in a "
                f"job (engine.load_checkpoint), which knows the groups"
            )
        if not entries[item.group].states:
            entries[item.group] = entry
    return tuple(entries[group] for group in sorted(entries))
