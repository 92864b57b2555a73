"""The torch optimizer's state as named tensors of the shards, so that it can move between ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from malleus_ds.placement import PARAMETER, Bucket, Placement, StateTensors
from malleus_ds.zero.precision import MASTER, master_dtype
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

    Returns what each parameter group holds on this rank. Raises `OptimizerStateError`: see `describe_state`.
    """
    groups: dict[int, GroupState] = {}
    for group, shard, parameter in _stepped(storages):
        state = optimizer.state.pop(parameter, {})
        if state:
            shard.state = {name: v for name, v in state.items() if _is_elementwise(name, v, shard)}
            groups[group] = _describe(state, shard)
    return groups


def describe_state(
    optimizer: torch.optim.Optimizer, storages: Iterable[BucketStorage]
) -> dict[int, GroupState]:
    """What each parameter group holds on this rank, where it holds something.

    Raises `OptimizerStateError` for state that is neither element-wise nor a scalar: it cannot move.
    """
    groups: dict[int, GroupState] = {}
    for group, shard, parameter in _stepped(storages):
        state = optimizer.state.get(parameter, {})
        if state:
            described = _describe(state, shard)
            groups.setdefault(group, described)
    return groups


def missing_state(
    optimizer: torch.optim.Optimizer, storages: Iterable[BucketStorage], groups: Mapping[int, GroupState]
) -> str | None:
    """A state tensor of ``groups`` that this rank should hold and does not, in words."""
    for storage in storages:
        for _, shard, parameter in _stepped([storage]):
            state = optimizer.state.get(parameter, {})
            for name in state_dtypes(storage.bucket, groups):
                if name != MASTER and not isinstance(state.get(name), Tensor):
                    tensor = storage.bucket.pieces[0].tensor
                    return f"{name} of elements [{shard.start}, {shard.stop}) of {tensor!r}"
    return None


def _describe(state: Mapping[str, Any], shard: Shard) -> GroupState:
    dtypes = {
        name: str(value.dtype).removeprefix("torch.")
        for name, value in state.items()
        if _is_elementwise(name, value, shard)
    }
    return GroupState(dtypes, {name: value for name, value in state.items() if name not in dtypes})


def _stepped(storages: Iterable[BucketStorage]) -> Iterator[tuple[int, Shard, nn.Parameter]]:
    """All shards that the torch optimizer steps, with their parameter group."""
    for storage in storages:
        for shard in storage.shards:
            if storage.bucket.group is not None and shard.parameter is not None:
                yield storage.bucket.group, shard, shard.parameter


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


def state_dtypes(bucket: Bucket, groups: Mapping[int, GroupState]) -> dict[str, torch.dtype]:
    """Names and dtypes of the state tensors that are sharded over the bucket's holders."""
    if bucket.group is None:
        return {}
    master = master_dtype(bucket)
    state = groups.get(bucket.group, GroupState())
    dtypes = {name: getattr(torch, dtype) for name, dtype in state.dtypes.items()}
    return dtypes if master is None else {MASTER: master, **dtypes}


def state_schema(placement: Placement, groups: Mapping[int, GroupState]) -> tuple[StateTensors, ...]:
    """Names and item sizes of the state tensors of each bucket."""
    schema = []
    for bucket in placement.buckets:
        dtypes = state_dtypes(bucket, groups)
        itemsizes = (dtype.itemsize for dtype in dtypes.values())
        schema.append(StateTensors((PARAMETER, *dtypes), (bucket.itemsize, *itemsizes)))
    return tuple(schema)
