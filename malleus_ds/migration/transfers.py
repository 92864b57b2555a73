"""What must move between two ownerships: pure and minimal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from malleus_ds.migration.errors import MigrationError
from malleus_ds.placement import PARAMETER, Holding, Part, Placement, StateSchema


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements ``[start, stop)`` of one state tensor of a bucket go from ``source`` to ``destination``."""

    bucket: int
    state: str
    start: int
    stop: int
    source: int
    destination: int


_Move = tuple[int, int, int, int, int, int]
"""A `Transfer` with the position of its state in the schema: hundreds of ranks have 100,000 of them, of which
each rank needs few."""

_Missing = tuple[int, int, tuple[int, ...], int]
"""``(start, stop, sources, destination)``"""


def transfers(
    old: Placement, new: Placement, schema: StateSchema, node_of: Mapping[int, int] | None = None
) -> tuple[Transfer, ...]:
    """What each rank must receive from whom: each interval once to each new holder that lacks it,
    and nothing else, which is the lower bound of bytes (design 4.3).

    A source on the destination's node is preferred, then the one that sends the least so far.
    node_of: node of each rank; None: all on one node. Raises `MigrationError` when nobody has what a rank
    lacks.
    """
    return tuple(_as_transfer(move, schema) for move in _moves(old, new, schema, node_of))


def transfers_of(
    rank: int,
    old: Placement,
    new: Placement,
    schema: StateSchema,
    node_of: Mapping[int, int] | None = None,
) -> tuple[tuple[Transfer, ...], int]:
    """Those of `transfers` that ``rank`` sends or receives, and the bytes of all."""
    own, total_bytes = [], 0
    for move in _moves(old, new, schema, node_of):
        bucket, state, start, stop, source, destination = move
        total_bytes += (stop - start) * schema[bucket].itemsizes[state]
        if rank in (source, destination):
            own.append(_as_transfer(move, schema))
    return tuple(own), total_bytes


def _as_transfer(move: _Move, schema: StateSchema) -> Transfer:
    bucket, state, start, stop, source, destination = move
    return Transfer(bucket, schema[bucket].names[state], start, stop, source, destination)


def _moves(
    old: Placement, new: Placement, schema: StateSchema, node_of: Mapping[int, int] | None
) -> Iterator[_Move]:
    sent_bytes: dict[int, int] = defaultdict(int)
    known: dict[tuple[bool, tuple[Part, ...], tuple[Part, ...]], list[_Missing]] = {}  # layers are alike
    for bucket in old.buckets:
        tensors = schema[bucket.index]
        shards: list[_Missing] | None = None  # the same of all states but the parameter
        for state, (name, itemsize) in enumerate(zip(tensors.names, tensors.itemsizes, strict=True)):
            if shards is None or name == PARAMETER:
                key = name == PARAMETER, old.parts[bucket.index], new.parts[bucket.index]
                if key not in known:
                    before, after = (placement.holdings(bucket.index, name) for placement in (old, new))
                    known[key] = _missing(before, after, f"{name} of {bucket.pieces[0].tensor!r}")
                missing = known[key]
                shards = None if name == PARAMETER else missing
            else:
                missing = shards
            for start, stop, sources, destination in missing:
                source = sources[0]
                if len(sources) > 1:
                    source = _best_source(sources, destination, sent_bytes, node_of)
                sent_bytes[source] += (stop - start) * itemsize
                yield bucket.index, state, start, stop, source, destination


def _best_source(
    sources: Sequence[int], destination: int, sent_bytes: Mapping[int, int], node_of: Mapping[int, int] | None
) -> int:
    def cost(rank: int) -> tuple[bool, int, int]:
        is_remote = node_of is not None and node_of[rank] != node_of[destination]
        return is_remote, sent_bytes[rank], rank

    return min(sources, key=cost)


def _missing(before: Sequence[Holding], after: Sequence[Holding], what: str) -> list[_Missing]:
    """What new holders lack. Both ownerships are disjoint ascending intervals, so one merge of their cuts
    finds all."""
    missing: list[_Missing] = []
    i = 0
    for holding in after:
        while i < len(before) and before[i].stop <= holding.start:
            i += 1
        position, k = holding.start, i
        while k < len(before) and before[k].start < holding.stop:
            start, stop = max(before[k].start, holding.start), min(before[k].stop, holding.stop)
            sources = before[k].ranks
            if start > position or not sources:
                break
            missing.extend((start, stop, sources, rank) for rank in holding.ranks if rank not in sources)
            position = stop
            k += 1
        if position < holding.stop:
            raise MigrationError(
                f"no rank has elements [{position}, {holding.stop}) of the {what}, which ranks "
                f"{list(holding.ranks)} need under the new plan: load a checkpoint"
            )
    return missing


def num_bytes(moves: Sequence[Transfer], schema: StateSchema) -> int:
    """Bytes on the wire."""
    itemsizes = [dict(zip(tensors.names, tensors.itemsizes, strict=True)) for tensors in schema]
    return sum((move.stop - move.start) * itemsizes[move.bucket][move.state] for move in moves)
