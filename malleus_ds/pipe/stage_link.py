"""Tensors between two neighbouring stages, whose TP groups may have different sizes.

What a stage puts out is the same on all ranks of its group, and so is the gradient that it gives back.
So each tensor is cut into as many pieces as the larger group has ranks; each piece crosses once, and the
receivers gather theirs inside their group, where links are fast. With one rank on each side, that is a
plain message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from malleus_ds.zero.collectives import all_gather

_META_SIZE = 256
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


class StageLinkError(ValueError):
    """A stage's output cannot be sent."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What the receiver must know of a tensor; has_gradient: whether the sender waits for one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


@dataclass(frozen=True, slots=True)
class Metas:
    """A stage's output: its tensors, and whether it is a tuple."""

    tensors: tuple[TensorMeta, ...]
    is_tuple: bool

    @classmethod
    def of(cls, value: Tensor | tuple[Tensor, ...]) -> Metas:
        """Raises `StageLinkError` for anything but tensors."""
        tensors = value if isinstance(value, tuple) else (value,)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise StageLinkError(
                    f"a layer puts out {type(tensor).__name__}: between stages only a tensor or a tuple of "
                    f"tensors can be sent"
                )
            if tensor.dtype not in _DTYPES:
                raise StageLinkError(f"a layer puts out {tensor.dtype}, which cannot be sent between stages")
        return cls(tuple(map(TensorMeta.of, tensors)), isinstance(value, tuple))

    def encode(self) -> Tensor:
        """int64 ``[256]``."""
        numbers = [int(self.is_tuple), len(self.tensors)]
        for meta in self.tensors:
            numbers += [_DTYPES.index(meta.dtype), int(meta.has_gradient), len(meta.shape), *meta.shape]
        if len(numbers) > _META_SIZE:
            raise StageLinkError(
                f"{len(self.tensors)} tensors between two stages are too many to describe: send fewer"
            )
        return torch.tensor(numbers + [0] * (_META_SIZE - len(numbers)))

    @classmethod
    def decode(cls, encoded: Tensor) -> Metas:
        numbers = iter(encoded.tolist())
        is_tuple, count = bool(next(numbers)), next(numbers)
        tensors = []
        for _ in range(count):
            dtype, has_gradient, num_dims = _DTYPES[next(numbers)], bool(next(numbers)), next(numbers)
            tensors.append(TensorMeta(tuple(next(numbers) for _ in range(num_dims)), dtype, has_gradient))
        return cls(tuple(tensors), is_tuple)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A tensor under way. padded: flat, with what this rank receives of it in its place."""

    meta: TensorMeta
    padded: Tensor
    works: list[dist.Work] = field(default_factory=list)


class StageLink:
    """One side of the link between two stages of a pipeline; `send` and `receive` match in their order.

    All ranks of both stages call them in the order of their schedules, so each pair of ranks has one
    agreed order of messages in each direction (design 4.8). A send waits for none but old ones, and what it
    sends is kept until then; a receive can post the next one, which then comes in beside the computation.
    """

    def __init__(
        self,
        own: Sequence[int],
        peer: Sequence[int],
        handle: dist.ProcessGroup | None,
        device: torch.device,
        towards: dist.ProcessGroup | None = None,
        back: dist.ProcessGroup | None = None,
        max_sends: int = 1,
        timeout: timedelta | None = None,
    ) -> None:
        """own, peer: ranks of the two stages; handle: group of the own ranks, None for one; towards,
        back: groups of all ranks that carry what goes to the peer and what comes from it (None: the
        default one); max_sends: how many calls of `send` may be under way behind one, 0 to wait for each
        message; timeout: of a message (None: that of its group)."""
        # A process group counts its members in ascending order.
        self._own, self._peer = sorted(own), sorted(peer)
        self._index = self._own.index(dist.get_rank())
        self._num_pieces = max(len(own), len(peer))
        self._handle = handle
        self._device = device
        self._towards, self._back = towards, back
        self._max_sends = max_sends
        self._timeout = () if timeout is None else (timeout,)
        self._posted: deque[_Arrival] = deque()
        self._sends: deque[list[tuple[dist.Work, Tensor]]] = deque([[]])
        """By call of `send`, the last of which is still to come. Not every backend tells what has left."""

    def send_metas(self, metas: Metas) -> None:
        """Describe what is sent next."""
        encoded = metas.encode().to(self._device)
        for peer in dict.fromkeys(peer for peer, _ in self._own_pieces()):
            self._post(encoded, peer)

    def receive_metas(self) -> Metas:
        encoded = torch.zeros(_META_SIZE, dtype=torch.int64, device=self._device)
        first = next(self._own_pieces())[0]
        for peer in dict.fromkeys(peer for peer, _ in self._own_pieces()):
            # Each sender describes it; one is enough to know, but all messages must be taken.
            buffer = encoded if peer == first else torch.zeros_like(encoded)
            self._irecv(buffer, peer).wait(*self._timeout)
        return Metas.decode(encoded)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """This rank's pieces of each tensor."""
        for tensor in tensors:
            flat = _as_wire(tensor.detach().contiguous().view(-1))
            for peer, piece in self._own_pieces():
                part = flat[self._range(piece, flat.numel())]
                if part.numel():
                    self._post(part, peer)
        self._sends.append([])
        self._finish(self._max_sends + 1)

    def receive(self, metas: Sequence[TensorMeta], more: bool = False) -> list[Tensor]:
        """The whole tensors, on every rank of the group. more: others of the same shapes follow."""
        arrivals = [self._posted.popleft() if self._posted else self._expect(meta) for meta in metas]
        for arrival in arrivals:
            for work in arrival.works:
                work.wait(*self._timeout)
        if more and self._max_sends:
            self._posted.extend(map(self._expect, metas))
        return list(map(self._complete, arrivals))

    def _expect(self, meta: TensorMeta) -> _Arrival:
        """Post the receives of a tensor."""
        count = math.prod(meta.shape)
        # Padded to equal pieces, which the gathering needs.
        size = self._piece_size(count) * self._num_pieces
        arrival = _Arrival(meta, torch.empty(size, dtype=meta.dtype, device=self._device))
        flat = _as_wire(arrival.padded)
        for peer, piece in self._own_pieces():
            part = flat[self._range(piece, count)]
            if part.numel():
                arrival.works.append(self._irecv(part, peer))
        return arrival

    def _irecv(self, part: Tensor, peer: int) -> dist.Work:
        work = dist.irecv(part, peer, group=self._back)
        assert work is not None, "this rank is in the group of all ranks"
        return work

    def _complete(self, arrival: _Arrival) -> Tensor:
        """Gather what the ranks of the group received."""
        count = math.prod(arrival.meta.shape)
        if self._handle is not None and count:
            all_gather(_as_wire(arrival.padded), self._handle).wait()
        return arrival.padded[:count].view(arrival.meta.shape)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self._finish(0)
        self._sends.append([])

    def _finish(self, num_left: int) -> None:
        """Wait for all but the last calls."""
        while len(self._sends) > num_left:
            for work, _ in self._sends.popleft():
                work.wait(*self._timeout)

    def _post(self, part: Tensor, peer: int) -> None:
        work = dist.isend(part, peer, group=self._towards)
        assert work is not None, "this rank is in the group of all ranks"
        self._sends[-1].append((work, part))
        if not self._max_sends:
            self.finish()

    def _own_pieces(self) -> Iterator[tuple[int, int]]:
        """``(peer, piece)`` of what this rank sends or receives: neighbouring pieces."""
        per_own = self._num_pieces // len(self._own)
        per_peer = self._num_pieces // len(self._peer)
        for piece in range(self._index * per_own, (self._index + 1) * per_own):
            yield self._peer[piece // per_peer], piece

    def _piece_size(self, num_elements: int) -> int:
        return -(-num_elements // self._num_pieces)

    def _range(self, piece: int, num_elements: int) -> slice:
        size = self._piece_size(num_elements)
        return slice(min(piece * size, num_elements), min((piece + 1) * size, num_elements))


def _as_wire(flat: Tensor) -> Tensor:
    """Booleans as bytes, which every transport takes."""
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat
