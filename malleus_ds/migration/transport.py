"""Point-to-point messages of a migration: large intervals straight from where they are to where they belong,
small ones packed together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from malleus_ds.migration.transfers import Transfer


@dataclass(slots=True)
class Message:
    """What one message carries between this rank and a peer.

    parts: bytes of the intervals, uint8 ``[n]``; buffer: what goes over the wire, once it is posted.
    """

    peer: int
    is_sent: bool
    parts: list[Tensor] = field(default_factory=list)
    buffer: Tensor | None = None

    def pack(self) -> Tensor:
        """The interval itself, where it is one; else a copy of all, or room for them."""
        if len(self.parts) == 1:
            self.buffer = self.parts[0]
        elif self.is_sent:
            self.buffer = torch.cat(self.parts)
            self.parts = []  # what they are views of may be freed
        else:
            self.buffer = self.parts[0].new_empty(sum(part.numel() for part in self.parts))
        return self.buffer

    def unpack(self) -> None:
        if len(self.parts) > 1 and not self.is_sent:
            assert self.buffer is not None, "pack() comes before unpack()"
            sizes = [part.numel() for part in self.parts]
            torch._foreach_copy_(self.parts, list(torch.split(self.buffer, sizes)))


@dataclass(frozen=True, slots=True)
class Flight:
    """Messages under way."""

    messages: list[Message]
    works: list[dist.Work]


class Transport:
    """Posts grouped asynchronous sends and receives; takes the time, and counts what this rank sends.

    All ranks build the messages of a group in one agreed order, so those of each pair match first in,
    first out, on gloo and on NCCL.
    """

    def __init__(self, direct_bytes: int) -> None:
        """direct_bytes: intervals from this size on are sent by themselves."""
        self.rank = dist.get_rank()
        self._direct_bytes = direct_bytes
        self.sent_bytes = 0
        self.packing_s = 0.0
        self.wire_s = 0.0
        """Time of waiting for messages, beside what was packed and copied meanwhile."""
        self.unpacking_s = 0.0

    def messages(
        self,
        moves: Iterable[Transfer],
        taken: Callable[[Transfer], Tensor],
        put: Callable[[Transfer], Tensor],
    ) -> list[Message]:
        """Of this rank's transfers in one round. taken, put: the interval at its source, its destination."""
        result: list[Message] = []
        packed: dict[tuple[int, int], Message] = {}
        for move in moves:
            is_sent = move.source == self.rank
            part = (taken if is_sent else put)(move).view(torch.uint8)
            peer = move.destination if is_sent else move.source
            if part.numel() >= self._direct_bytes:
                result.append(Message(peer, is_sent, [part]))
                continue
            pair = move.source, move.destination
            if pair not in packed:
                packed[pair] = Message(peer, is_sent)
                result.append(packed[pair])
            packed[pair].parts.append(part)
        return result

    def post(self, messages: list[Message]) -> Flight:
        """Start to exchange them."""
        began = time.perf_counter()
        operations = []
        for message in messages:
            buffer = message.pack()
            self.sent_bytes += buffer.nbytes if message.is_sent else 0
            operations.append(dist.P2POp(dist.isend if message.is_sent else dist.irecv, buffer, message.peer))
        works = dist.batch_isend_irecv(operations) if operations else []
        self.packing_s += time.perf_counter() - began
        return Flight(messages, works)

    def finish(self, flight: Flight) -> None:
        """Wait for all of them, and bring what came to its place."""
        began = time.perf_counter()
        for work in flight.works:
            work.wait()
        arrived = time.perf_counter()
        for message in flight.messages:
            message.unpack()
        self.wire_s += arrived - began
        self.unpacking_s += time.perf_counter() - arrived
