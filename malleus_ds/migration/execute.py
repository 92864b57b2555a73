"""Moving the training state from one placement to another, bucket by bucket, in place."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from malleus_ds.migration.transfers import Transfer, bucket_order, num_bytes, transfers
from malleus_ds.migration.transport import Transport
from malleus_ds.placement import Placement, StateSchema
from malleus_ds.zero.binding import TensorSlot
from malleus_ds.zero.optimizer import MalleusZeroOptimizer
from malleus_ds.zero.state import GroupState, detach_state, merge_group_states, state_schema
from malleus_ds.zero.storage import BucketStorage


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """What a migration cost: bytes over all ranks, bytes that this rank sent, and its duration."""

    total_bytes: int
    sent_bytes: int
    num_transfers: int
    duration_s: float


def migrate(
    optimizer: MalleusZeroOptimizer,
    new: Placement,
    slots: Mapping[str, TensorSlot],
    node_of: Mapping[int, int] | None = None,
) -> MigrationReport:
    """Collective over the world: afterwards every rank holds exactly what ``new`` gives it.

    slots: the tensors of this rank's module under the new plan. While a bucket moves, a rank holds
    its old part and its new part; everything else it holds once, so with the order of
    `bucket_order` the peak stays within two buckets of the larger plan (design 4.3). Gradients are
    zero at a step boundary: they are freed first and allocated last.
    """
    began = time.perf_counter()
    old = optimizer.placement
    assert old is not None, "adopt() comes before migrate()"
    for slot in slots.values():
        slot.tensor.grad = None
    states = _exchange_states(optimizer)
    schema = state_schema(old, states)
    moves = transfers(old, new, schema, node_of)
    by_bucket: dict[int, list[Transfer]] = defaultdict(list)
    for move in moves:
        by_bucket[move.bucket].append(move)
    transport = Transport()
    for index in bucket_order(old, new, schema):
        before = optimizer.storages.pop(index, None)
        after = _allocate(new, index, optimizer, states)
        _move_bucket(before, after, old, new, index, schema, by_bucket[index], transport)
        if after is not None:
            optimizer.storages[index] = after
            optimizer.bind(after, slots)
    optimizer.finish_placement(new, slots, states)
    return MigrationReport(
        total_bytes=num_bytes(moves, schema),
        sent_bytes=transport.sent_bytes,
        num_transfers=len(moves),
        duration_s=time.perf_counter() - began,
    )


def _exchange_states(optimizer: MalleusZeroOptimizer) -> dict[int, GroupState]:
    """Detach this rank's optimizer state; learn names, dtypes and step counts from all ranks."""
    states = detach_state(optimizer.optimizer, optimizer.storages.values())
    for storage in optimizer.storages.values():
        storage.stop_training()
    for group in optimizer.param_groups:
        group["params"] = []  # the shards are views that would keep the old buffers alive
    gathered: list[dict[int, GroupState]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, states)
    return merge_group_states(gathered)


def _allocate(
    placement: Placement, index: int, optimizer: MalleusZeroOptimizer, states: Mapping[int, GroupState]
) -> BucketStorage | None:
    if not placement.parts_of(index, optimizer.rank):
        return None
    storage = BucketStorage.allocate(placement, index, optimizer.rank, optimizer.device)
    if storage.bucket.group is not None:
        state = states.get(storage.bucket.group, GroupState())
        for shard in storage.shards:
            shard.state = {
                name: torch.zeros(shard.num_elements, dtype=getattr(torch, dtype), device=optimizer.device)
                for name, dtype in state.dtypes.items()
            }
    return storage


def _move_bucket(
    before: BucketStorage | None,
    after: BucketStorage | None,
    old: Placement,
    new: Placement,
    index: int,
    schema: StateSchema,
    moves: list[Transfer],
    transport: Transport,
) -> None:
    """Copy what stays on this rank, send what leaves, receive what comes."""
    if before is not None and after is not None:
        for state in schema[index].names:
            _copy_kept(before, after, old, new, index, state)
    for move in moves:
        if before is not None and move.source == transport.rank:
            transport.send(before.interval(move.state, move.start, move.stop), move.destination)
        if after is not None and move.destination == transport.rank:
            transport.receive(after.interval(move.state, move.start, move.stop), move.source)
    transport.run()


def _copy_kept(
    before: BucketStorage, after: BucketStorage, old: Placement, new: Placement, index: int, state: str
) -> None:
    rank = before.rank
    for had in old.holdings(index, state):
        for has in new.holdings(index, state):
            start, stop = max(had.start, has.start), min(had.stop, has.stop)
            if start < stop and rank in had.ranks and rank in has.ranks:
                after.interval(state, start, stop).copy_(before.interval(state, start, stop))
