"""What must move between two ownerships: pure, minimal, and in an order that bounds the peak memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from malleus_ds.placement import Placement, StateSchema


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements ``[start, stop)`` of one state tensor of a bucket go from ``source`` to ``destination``."""

    bucket: int
    state: str
    start: int
    stop: int
    source: int
    destination: int


def transfers(
    old: Placement, new: Placement, schema: StateSchema, node_of: Mapping[int, int] | None = None
) -> tuple[Transfer, ...]:
    """What each rank must receive from whom: each interval once to each new holder that lacks it,
    and nothing else, which is the lower bound of bytes (design 4.3).

    A source on the destination's node is preferred, then the one that sends the least so far.
    node_of: node of each rank; None: all on one node.
    """
    sent_bytes: dict[int, int] = defaultdict(int)
    result: list[Transfer] = []
    for bucket in old.buckets:
        tensors = schema[bucket.index]
        for state, itemsize in zip(tensors.names, tensors.itemsizes, strict=True):
            for start, stop, sources, destination in _missing(old, new, bucket.index, state):
                source = _best_source(sources, destination, sent_bytes, node_of)
                sent_bytes[source] += (stop - start) * itemsize
                result.append(Transfer(bucket.index, state, start, stop, source, destination))
    return tuple(result)


def _best_source(
    sources: Sequence[int], destination: int, sent_bytes: Mapping[int, int], node_of: Mapping[int, int] | None
) -> int:
    def cost(rank: int) -> tuple[bool, int, int]:
        is_remote = node_of is not None and node_of[rank] != node_of[destination]
        return is_remote, sent_bytes[rank], rank

    return min(sources, key=cost)


def _missing(
    old: Placement, new: Placement, bucket: int, state: str
) -> list[tuple[int, int, tuple[int, ...], int]]:
    """``(start, stop, sources, destination)`` of what new holders lack. Both ownerships cover the
    bucket with disjoint ascending intervals, so one merge of their cuts finds all."""
    before, after = old.holdings(bucket, state), new.holdings(bucket, state)
    missing: list[tuple[int, int, tuple[int, ...], int]] = []
    i = 0
    for holding in after:
        while before[i].stop <= holding.start:
            i += 1
        k = i
        while k < len(before) and before[k].start < holding.stop:
            start, stop = max(before[k].start, holding.start), min(before[k].stop, holding.stop)
            missing.extend(
                (start, stop, before[k].ranks, rank) for rank in holding.ranks if rank not in before[k].ranks
            )
            k += 1
    return missing


def num_bytes(moves: Sequence[Transfer], schema: StateSchema) -> int:
    """Bytes on the wire."""
    return sum(
        (move.stop - move.start) * schema[move.bucket].itemsizes[schema[move.bucket].names.index(move.state)]
        for move in moves
    )


def state_bytes(placement: Placement, schema: StateSchema, rank: int) -> dict[int, int]:
    """Bytes that ``rank`` holds, by bucket: parameters and its shards."""
    result = {}
    for index in placement.held_by(rank):
        tensors = schema[index]
        result[index] = sum(
            (holding.stop - holding.start) * itemsize
            for state, itemsize in zip(tensors.names, tensors.itemsizes, strict=True)
            for holding in placement.holdings(index, state)
            if rank in holding.ranks
        )
    return result


def bucket_order(old: Placement, new: Placement, schema: StateSchema) -> tuple[int, ...]:
    """An order to move the buckets in, so that no rank holds much more than in its fuller plan.

    Greedy: next comes the bucket after which the fullest rank, measured against the larger of its
    two plans, is the least full. Deterministic, so all ranks agree on it without communication.
    """
    deltas: dict[int, dict[int, int]] = defaultdict(dict)
    headroom: dict[int, int] = {}
    for rank in sorted({*old.plan.ranks, *new.plan.ranks}):
        before, after = state_bytes(old, schema, rank), state_bytes(new, schema, rank)
        headroom[rank] = max(0, sum(after.values()) - sum(before.values()))
        for index in {*before, *after}:
            delta = after.get(index, 0) - before.get(index, 0)
            if delta:
                deltas[index][rank] = delta
    order = []
    remaining = sorted(range(len(old.buckets)))
    while remaining:
        best = min(
            remaining,
            key=lambda index: (
                max((delta - headroom[rank] for rank, delta in deltas[index].items()), default=0),
                sum(deltas[index].values()),
                index,
            ),
        )
        remaining.remove(best)
        for rank, delta in deltas[best].items():
            headroom[rank] -= delta
        order.append(best)
    return tuple(order)
