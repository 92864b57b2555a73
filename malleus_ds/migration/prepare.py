"""All that can be known of a migration before anything moves: who sends what, in which order, in how much
memory. Pure, but for trying whether the memory is there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from malleus_ds.migration.errors import MigrationError
from malleus_ds.migration.order import Window, held_bytes, open_window, rounds
from malleus_ds.migration.transfers import Transfer, transfers_of
from malleus_ds.placement import PARAMETER, Placement, StateSchema
from malleus_ds.zero.precision import gradient_dtype

WINDOW_BUCKETS = 2
"""How much a rank may hold above its fuller plan, in units of its largest part of a bucket."""

_DIRECT_BYTES = 2**18
"""From this size on, packing an interval costs more than a message of its own."""
_DIRECT_SHARE = 16
"""Smaller ones are packed only where they are a small part of the largest bucket: the copies take memory."""

TensorKey = tuple[str, int, int]
"""State, first element in the bucket, number of elements with padding."""

Allocate = Callable[[int], Tensor]
"""A buffer of so many bytes."""


@dataclass(frozen=True, slots=True)
class Round:
    """Buckets that move together, and what this rank sends and receives of them."""

    buckets: tuple[int, ...]
    moves: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """One rank's part in a migration.

    rounds: those in which it has a part; direct_bytes: see `Transport`; reserve_bytes: what it needs at
    most above all that it holds now, gradients included; chunk_bytes: its largest part of a bucket.
    """

    old: Placement
    new: Placement
    rounds: tuple[Round, ...]
    window: Window
    direct_bytes: int
    total_bytes: int
    reserve_bytes: int
    chunk_bytes: int


def plan_migration(
    old: Placement, new: Placement, schema: StateSchema, rank: int, node_of: Mapping[int, int] | None = None
) -> MigrationPlan:
    """Raises `MigrationError` when nobody has what a rank lacks."""
    moves: dict[int, list[Transfer]] = defaultdict(list)
    own_transfers, total_bytes = transfers_of(rank, old, new, schema, node_of)
    for move in own_transfers:
        moves[move.bucket].append(move)
    before, after = held_bytes(old, schema), held_bytes(new, schema)
    largest_parts = np.maximum(before, after).max(axis=1, initial=0)
    direct_bytes = min(_DIRECT_BYTES, int(largest_parts.max(initial=0)) // _DIRECT_SHARE)
    own_rounds, allocated, freed = [], [], []
    own_buckets = {*old.held_by(rank), *new.held_by(rank)}  # also those without an element
    for buckets in rounds(before, after):
        if own_buckets.isdisjoint(buckets):
            continue
        own = tuple(move for index in sorted(buckets) for move in moves[index])
        own_rounds.append(Round(buckets, own))
        staging = _packed_bytes(own, schema, direct_bytes)
        changes = [_changed_bytes(old, new, index, schema, rank) for index in buckets]
        allocated.append(sum(taken for taken, _ in changes) + staging)
        freed.append(sum(given for _, given in changes) + staging)
    chunk = int(largest_parts[rank])
    held, held_after = (
        sum(sum(tensors_of(placement, index, schema, rank).values()) for index in placement.held_by(rank))
        for placement in (old, new)
    )
    # A little less, for what is not counted, such as the optimizer's scalars.
    limit = max(held, held_after) + WINDOW_BUCKETS * chunk - chunk // 64
    window = open_window(held, limit, allocated, freed)
    gradients = [gradient_sizes(placement, rank) for placement in (old, new)]
    kept = gradients[0] & gradients[1]  # a gradient is zeros, which serve any bucket of the same size
    need = max(window.peak_bytes + _num_bytes(kept), held_after + _num_bytes(gradients[1]))
    return MigrationPlan(
        old,
        new,
        tuple(own_rounds),
        window,
        direct_bytes,
        total_bytes,
        max(0, need - held - _num_bytes(gradients[0])),
        chunk,
    )


def tensors_of(placement: Placement, index: int, schema: StateSchema, rank: int) -> dict[TensorKey, int]:
    """The state tensors that ``rank`` has of a bucket, with their bytes."""
    sizes = dict(zip(schema[index].names, schema[index].itemsizes, strict=True))
    parts = placement.parts_of(index, rank)
    if not parts:
        return {}
    flat = PARAMETER, parts[0].start, placement.flat_size(index, rank)
    shards = [part.shard(rank) for part in parts] if placement.buckets[index].group is not None else []
    return {flat: flat[2] * sizes[PARAMETER]} | {
        (state, start, stop - start): (stop - start) * itemsize
        for start, stop in shards
        for state, itemsize in sizes.items()
        if state != PARAMETER
    }


def _changed_bytes(
    old: Placement, new: Placement, index: int, schema: StateSchema, rank: int
) -> tuple[int, int]:
    """Bytes that a bucket takes and gives back; a tensor that is the same under both plans does neither."""
    before, after = (tensors_of(placement, index, schema, rank) for placement in (old, new))
    return (
        sum(size for key, size in after.items() if key not in before),
        sum(size for key, size in before.items() if key not in after),
    )


def _packed_bytes(moves: tuple[Transfer, ...], schema: StateSchema, direct_bytes: int) -> int:
    """Bytes of the buffers beside the state that this rank's messages of a round need."""
    small: dict[tuple[int, int], list[int]] = defaultdict(list)
    for move in moves:
        tensors = schema[move.bucket]
        size = (move.stop - move.start) * tensors.itemsizes[tensors.names.index(move.state)]
        if size < direct_bytes:
            small[move.source, move.destination].append(size)
    return sum(sum(sizes) for sizes in small.values() if len(sizes) > 1)


def gradient_sizes(placement: Placement, rank: int) -> Counter[tuple[torch.dtype, int]]:
    """How many flat gradients of each dtype and number of elements ``rank`` has."""
    return Counter(
        (gradient_dtype(getattr(torch, placement.buckets[index].dtype)), placement.flat_size(index, rank))
        for index in placement.held_by(rank)
        if placement.buckets[index].group is not None
    )


def _num_bytes(sizes: Counter[tuple[torch.dtype, int]]) -> int:
    return sum(dtype.itemsize * num_elements * count for (dtype, num_elements), count in sizes.items())


def reserve(plan: MigrationPlan, allocate: Allocate) -> None:
    """Take the memory that the migration needs, in pieces of a bucket, and give it back.

    Torch's allocators of GPUs keep it for this process. Raises `MigrationError` when it is not there.
    """
    pieces = []
    left = plan.reserve_bytes
    try:
        while left > 0:
            pieces.append(allocate(min(left, max(plan.chunk_bytes, 1))))
            left -= pieces[-1].nbytes
    except (RuntimeError, MemoryError) as error:
        taken = sum(piece.nbytes for piece in pieces)
        raise MigrationError(
            f"the switch needs {plan.reserve_bytes / 2**20:.1f} MiB of memory above what the rank holds, but "
            f"after {taken / 2**20:.1f} MiB there is no more: leave more room, or use smaller bucket_bytes"
        ) from error
