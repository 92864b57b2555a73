"""The torch optimizer's state as named tensors of the shards, so that it can move between ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from malleus_ds.placement import PARAMETER, Placement, StateTensors
from malleus_ds.zero.storage import BucketStorage


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
    for storage in storages:
        group = storage.bucket.group
        if group is None or storage.shard is None:
            continue
        state = optimizer.state.pop(storage.shard, {})
        if not state:
            continue
        storage.state = {
            name: value for name, value in state.items() if _is_elementwise(name, value, storage)
        }
        groups[group] = GroupState(
            dtypes={name: str(value.dtype).removeprefix("torch.") for name, value in storage.state.items()},
            shared={name: value for name, value in state.items() if name not in storage.state},
        )
    return groups


def check_state(optimizer: torch.optim.Optimizer, storages: Iterable[BucketStorage]) -> None:
    """Raise `OptimizerStateError` for state that is neither element-wise nor a scalar: it cannot move."""
    for storage in storages:
        if storage.shard is not None:
            for name, value in optimizer.state.get(storage.shard, {}).items():
                _is_elementwise(name, value, storage)


def attach_state(
    optimizer: torch.optim.Optimizer, storages: Iterable[BucketStorage], groups: Mapping[int, GroupState]
) -> None:
    """Inverse of `detach_state`, for shards that may have changed hands."""
    for storage in storages:
        state = groups.get(-1 if storage.bucket.group is None else storage.bucket.group)
        if state is None or storage.shard is None:
            continue
        # Each shard needs its own copy: torch counts the steps of every shard in place.
        shared = {name: copy.deepcopy(value) for name, value in state.shared.items()}
        optimizer.state[storage.shard] = {**shared, **storage.state}
        storage.state = {}


def _is_elementwise(name: str, value: Any, storage: BucketStorage) -> bool:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return False
    if value.shape != (storage.shard_size,):
        raise OptimizerStateError(
            f"optimizer state {name!r} has shape {tuple(value.shape)} for a shard of "
            f"{storage.shard_size} elements: use an element-wise optimizer such as Adam or SGD"
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
