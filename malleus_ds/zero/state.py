"""The torch optimizer's state as named tensors of the shards, so that it can move between ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from malleus_ds.placement import PARAMETER, Placement, StateTensors
from malleus_ds.zero.storage import BucketStorage, Shard


class OptimizerStateError(ValueError):
    """The optimizer keeps state that cannot be cut into element intervals."""


@dataclass(frozen=True)
class GroupState:
    """What one parameter group's shards hold: names and dtypes of the element-wise state tensors,
    and the values that are equal for all shards, such as the step count."""

    dtypes: dict[str, str] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


def detach_state(
    optimizer: torch.optim.Optimizer, storages: Iterable[BucketStorage]
) -> dict[int, GroupState]:
    """Take the state out of the optimizer and put its element-wise tensors into the storages.

    Returns what each parameter group holds on this rank. Raises `OptimizerStateError`: see `check_state`.
    """
    groups: dict[int, GroupState] = {}
    for group, shard, parameter in _stepped(storages):
        state = optimizer.state.pop(parameter, {})
        if not state:
            continue
        shard.state = {name: value for name, value in state.items() if _is_elementwise(name, value, shard)}
        groups[group] = GroupState(
            dtypes={name: str(value.dtype).removeprefix("torch.") for name, value in shard.state.items()},
            shared={name: value for name, value in state.items() if name not in shard.state},
        )
    return groups


def _stepped(storages: Iterable[BucketStorage]) -> Iterator[tuple[int, Shard, nn.Parameter]]:
    """All shards that the torch optimizer steps, with their parameter group."""
    for storage in storages:
        for shard in storage.shards:
            if storage.bucket.group is not None and shard.parameter is not None:
                yield storage.bucket.group, shard, shard.parameter


def check_state(optimizer: torch.optim.Optimizer, storages: Iterable[BucketStorage]) -> None:
    """Raise `OptimizerStateError` for state that is neither element-wise nor a scalar: it cannot move."""
    for _, shard, parameter in _stepped(storages):
        for name, value in optimizer.state.get(parameter, {}).items():
            _is_elementwise(name, value, shard)


def attach_state(
    optimizer: torch.optim.Optimizer, storages: Iterable[BucketStorage], groups: Mapping[int, GroupState]
) -> None:
    """Inverse of `detach_state`, for shards that may have changed hands."""
    for group, shard, parameter in _stepped(storages):
        state = groups.get(group)
        if state is None:
            continue
        # Each shard needs its own copy: torch counts the steps of every shard in place.
        shared = {name: copy.deepcopy(value) for name, value in state.shared.items()}
        optimizer.state[parameter] = {**shared, **shard.state}
        shard.state = {}


def _is_elementwise(name: str, value: Any, shard: Shard) -> bool:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return False
    if value.shape != (shard.num_elements,):
        raise OptimizerStateError(
            f"optimizer state {name!r} has shape {tuple(value.shape)} for a shard of "
            f"{shard.num_elements} elements: use an element-wise optimizer such as Adam or SGD"
        )
    return True


def merge_group_states(gathered: Iterable[Mapping[int, GroupState]]) -> dict[int, GroupState]:
    """One entry per group, from all ranks; ranks that hold no shard of a group learn it here."""
    merged: dict[int, GroupState] = {}
    for groups in gathered:
        for group, state in groups.items():
            merged.setdefault(group, state)
    return merged


def state_schema(placement: Placement, groups: Mapping[int, GroupState]) -> tuple[StateTensors, ...]:
    """Names and item sizes of the state tensors of each bucket."""
    schema = []
    for bucket in placement.buckets:
        state = groups.get(-1 if bucket.group is None else bucket.group, GroupState())
        itemsizes = (getattr(torch, dtype).itemsize for dtype in state.dtypes.values())
        schema.append(StateTensors((PARAMETER, *state.dtypes), (bucket.itemsize, *itemsizes)))
    return tuple(schema)
