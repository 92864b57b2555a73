"""Reading intervals of a generation: from this host's memory, and through other ranks from that of theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from malleus_ds.checkpoint.part_file import Interval
from malleus_ds.redundancy.errors import RedundancyError
from malleus_ds.redundancy.part import PartHeader, Section, map_part


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[start, stop)`` of a part."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Located:
    """An interval to read, as pieces in its order."""

    dtype: str
    pieces: tuple[Piece, ...]


def locate(wanted: Sequence[Interval], headers: Mapping[int, PartHeader]) -> list[Located]:
    """Where the elements of each interval are. Raises `RedundancyError` for elements that no part has.

    headers: of all parts of the generation, by source.
    """
    places: dict[tuple[str, str], list[tuple[Section, int]]] = defaultdict(list)
    for source, header in headers.items():
        for section in header.sections:
            places[section.interval.state, section.interval.tensor].append((section, source))
    for sections in places.values():
        sections.sort(key=lambda place: place[0].interval.start)
    return [_locate_one(interval, places.get((interval.state, interval.tensor), ())) for interval in wanted]


def _locate_one(wanted: Interval, places: Sequence[tuple[Section, int]]) -> Located:
    pieces = []
    position = wanted.start
    for section, source in places:
        has = section.interval
        if has.start <= position < min(has.stop, wanted.stop):
            stop = min(has.stop, wanted.stop)
            first, last = ((at - has.start) * section.itemsize for at in (position, stop))
            pieces.append(Piece(source, section.offset + first, section.offset + last))
            position = stop
    if position < wanted.stop:
        raise RedundancyError(
            f"no part has the elements [{position}, {wanted.stop}) of {wanted.state!r} of {wanted.tensor!r}"
        )
    return Located(places[0][0].dtype, tuple(pieces))


def fetch(
    wanted: Sequence[Located],
    readers: Mapping[int, Sequence[int]],
    own: Mapping[int, tuple[Path, int]],
    group: dist.ProcessGroup,
    timeout: timedelta,
) -> list[Tensor]:
    """The elements of each interval, on the host. Collective over ``group``: of all ranks, over gloo.

    readers: by source the ranks that can read its part; own: path without suffix and bytes of the parts that
    this rank can read. Each byte crosses once, and lies nowhere in between.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = {source: map_part(stem, num_bytes) for source, (stem, num_bytes) in own.items()}
    asked: dict[int, list[Piece]] = defaultdict(list)
    receives: list[tuple[Tensor, int]] = []
    values = []
    for item in wanted:
        total = torch.empty(sum(piece.stop - piece.start for piece in item.pieces), dtype=torch.uint8)
        offset = 0
        for piece in item.pieces:
            target = total[offset : offset + piece.stop - piece.start]
            if piece.source in data:
                target.copy_(data[piece.source][piece.start : piece.stop])
            else:
                able = readers[piece.source]
                reader = able[rank % len(able)]  # so that the readers share the work
                asked[reader].append(piece)
                receives.append((target, reader))
            offset += target.numel()
        values.append(total.view(getattr(torch, item.dtype)))
    requests: list[dict[int, list[Piece]]] = [{} for _ in range(world_size)]
    dist.all_gather_object(requests, dict(asked), group=group)
    works = [dist.irecv(target, reader, group=group) for target, reader in receives]
    for requester, pieces_of in enumerate(requests):
        for piece in pieces_of.get(rank, ()):
            works.append(dist.isend(data[piece.source][piece.start : piece.stop], requester, group=group))
    for work in works:
        assert work is not None, "the group has all ranks"
        work.wait(timeout)
    return values
