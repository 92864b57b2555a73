"""What a rank needs of a checkpoint, and putting it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from malleus_ds.checkpoint.contents import Span, element_states, has_master, spans
from malleus_ds.checkpoint.values import decode
from malleus_ds.placement import PARAMETER
from malleus_ds.zero.optimizer import MalleusZeroOptimizer
from malleus_ds.zero.precision import MASTER
from malleus_ds.zero.state import GroupState
from malleus_ds.zero.storage import BucketStorage, Shard


@dataclass(frozen=True, slots=True)
class Place:
    """Where a span of one state belongs. shard: position in the storage's shards; None: a parameter."""

    bucket: int
    shard: int | None
    span: Span
    state: str


def places(optimizer: MalleusZeroOptimizer, groups: Mapping[int, GroupState] | None) -> list[Place]:
    """All that this rank holds. groups: as saved; None: parameters only."""
    result = []
    for index, storage in optimizer.storages.items():
        bucket = storage.bucket
        result += [Place(index, None, span, PARAMETER) for span in spans(bucket, storage.start, storage.stop)]
        if groups is None or bucket.group is None:
            continue
        for number, shard in enumerate(storage.shards):
            result += [
                Place(index, number, span, state)
                for span in spans(bucket, shard.start, shard.stop)
                for state in groups[bucket.group].dtypes
                if state != MASTER or has_master(storage, shard)
            ]
    return result


def put_back(
    optimizer: MalleusZeroOptimizer,
    values: Sequence[tuple[Place, Tensor]],
    groups: Mapping[int, GroupState] | None,
) -> None:
    """Overwrite the state of this rank, parameters first. groups: as saved; None: parameters only, from
    which masters are made."""
    for place, tensor in values:
        if place.state == PARAMETER:
            _put_parameter(optimizer.storages[place.bucket], place.span, tensor)
    if groups is None:
        return
    for storage in optimizer.storages.values():
        group = storage.bucket.group
        if group is not None:
            for shard in storage.shards:
                _renew_state(optimizer, optimizer.param_groups[group], shard, groups[group])
    for place, tensor in values:
        if place.shard is not None:
            storage = optimizer.storages[place.bucket]
            shard = storage.shards[place.shard]
            target = element_states(optimizer, storage, shard)[place.state]
            place.span.within(target, shard.start).copy_(tensor)


def _put_parameter(storage: BucketStorage, span: Span, tensor: Tensor) -> None:
    span.within(storage.flat, storage.start).copy_(tensor)
    stop = span.offset + span.stop - span.start
    for shard in storage.shards:
        low, high = max(shard.start, span.offset), min(shard.stop, stop)
        if low < high and shard.parameter is not None and has_master(storage, shard):
            rounded = storage.flat[low - storage.start : high - storage.start]
            shard.parameter.detach()[low - shard.start : high - shard.start].copy_(rounded)


def _renew_state(
    optimizer: MalleusZeroOptimizer, options: Mapping[str, Any], shard: Shard, saved: GroupState
) -> None:
    """Zeros of the saved names and dtypes, and a copy of the shared values."""
    if shard.parameter is None:
        return
    optimizer.optimizer.state.pop(shard.parameter, None)
    # As torch: step counts are on the host, but for these two.
    on_device = options.get("fused") or options.get("capturable")
    state = {
        name: value.to(optimizer.device) if on_device and isinstance(value, Tensor) else value
        for name, value in decode(saved.shared).items()
    }
    for name, dtype in saved.dtypes.items():
        if name != MASTER:
            size, kind = shard.num_elements, getattr(torch, dtype)
            state[name] = torch.zeros(size, dtype=kind, device=optimizer.device)
    if state:
        optimizer.optimizer.state[shard.parameter] = state
