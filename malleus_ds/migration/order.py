"""The order in which buckets move, in rounds: pure, the same on all ranks, with a bound on the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from malleus_ds.placement import PARAMETER, Part, Placement, StateSchema


def held_bytes(placement: Placement, schema: StateSchema) -> NDArray[np.int64]:
    """Bytes that each rank holds of each bucket, ``[world_size, num_buckets]``: parameters and its shards."""
    held = np.zeros((placement.plan.world_size, len(placement.buckets)), dtype=np.int64)
    columns: dict[tuple[tuple[Part, ...], int, int], NDArray[np.int64]] = {}  # layers are alike
    for bucket, parts in zip(placement.buckets, placement.parts, strict=True):
        sizes = dict(zip(schema[bucket.index].names, schema[bucket.index].itemsizes, strict=True))
        shard_itemsize = sum(sizes.values()) - sizes[PARAMETER] if bucket.group is not None else 0
        key = parts, sizes[PARAMETER], shard_itemsize
        if key not in columns:
            columns[key] = _held_of_parts(*key, placement.plan.world_size)
        held[:, bucket.index] = columns[key]
    return held


def _held_of_parts(
    parts: Sequence[Part], itemsize: int, shard_itemsize: int, world_size: int
) -> NDArray[np.int64]:
    held = np.zeros(world_size, dtype=np.int64)
    for part in parts:
        ranks, length, size = np.array(part.ranks, dtype=np.intp), part.stop - part.start, part.shard_size
        # Shards are equal but for the last ones.
        in_shards = np.clip(length - size * np.arange(len(ranks)), 0, size)
        held[ranks] += length * itemsize + in_shards * shard_itemsize
    return held


def rounds(before: NDArray[np.int64], after: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    """The buckets that move together, in an order in which no rank holds much more than in its fuller plan.

    before, after: `held_bytes` of both plans. Buckets move together where that gives no rank more
    than its largest part of one bucket, under either plan, and does not bring it near its limit.
    Deterministic, so all ranks agree without communication.
    """
    largest = np.maximum(before, after).max(axis=1, initial=0)
    held = before.sum(axis=1)
    limit = np.maximum(held, after.sum(axis=1)) + 3 * largest // 2
    result: list[list[int]] = []
    leaving, coming = np.zeros_like(held), np.zeros_like(held)
    for index in _order(before, after):
        gone, come = before[:, index], after[:, index]
        is_large = (leaving + gone > largest) | (coming + come > largest) | (held + coming + come > limit)
        if not result or is_large.any():
            held = held + coming - leaving
            result.append([])
            leaving, coming = np.zeros_like(held), np.zeros_like(held)
        result[-1].append(index)
        leaving, coming = leaving + gone, coming + come
    return tuple(map(tuple, result))


def _order(before: NDArray[np.int64], after: NDArray[np.int64]) -> tuple[int, ...]:
    """Greedy: next comes the bucket after which the fullest rank, measured against the larger of its two
    plans, is the least full."""
    # Ranks that hold equal amounts of all buckets, such as those of a TP group, count once.
    delta, counts = np.unique(after - before, axis=0, return_counts=True)
    headroom = np.maximum(delta.sum(axis=1), 0)
    totals = counts @ delta
    remaining = np.arange(delta.shape[1])
    order = []
    while len(remaining):
        over = delta - headroom[:, None]
        over[delta == 0] = np.iinfo(np.int64).min
        worst = over.max(axis=0)
        worst[(delta == 0).all(axis=0)] = 0
        best = int(np.lexsort((remaining, totals, worst))[0])
        order.append(int(remaining[best]))
        headroom -= delta[:, best]
        remaining, totals = np.delete(remaining, best), np.delete(totals, best)
        delta = np.delete(delta, best, axis=1)
    return tuple(order)


@dataclass(frozen=True, slots=True)
class Window:
    """When one rank may start its rounds.

    num_finished: how many rounds must be over before each one starts; peak_bytes: the most that it holds.
    """

    num_finished: tuple[int, ...]
    peak_bytes: int


def open_window(held: int, limit: int, allocated: Sequence[int], freed: Sequence[int]) -> Window:
    """As many rounds under way at once as fit into ``limit`` bytes, and at least one.

    held: bytes before the first round; allocated, freed: bytes that each round takes when it starts, and
    gives back when it is over. A rank waits for its oldest round only. Of all unfinished rounds
    the first one is thus under way on all its ranks: there is no deadlock.
    """
    finished, peak = 0, held
    num_finished = []
    for index, size in enumerate(allocated):
        while finished < index and held + size > limit:
            held -= freed[finished]
            finished += 1
        held += size
        peak = max(peak, held)
        num_finished.append(finished)
    return Window(tuple(num_finished), peak)
