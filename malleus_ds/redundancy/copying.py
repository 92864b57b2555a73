"""Copying one generation in the background: the own share to this host's memory, and on to the partner."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from malleus_ds.checkpoint.part_file import Content
from malleus_ds.redundancy.part import Part


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank keeps of itself.

    contents: in the order of the part; header: makes the part's, as JSON; partner: who keeps the copy.
    """

    contents: Sequence[Content]
    num_bytes: int
    header: Callable[[], bytes]
    part: Part
    partner: int | None


class Copying:
    """One generation of one rank; begins at once, in a thread.

    The share is read from the live state, which must not change before `wait` has returned. What is sent
    and received lies in the parts themselves, so it takes no other memory of the host.
    """

    def __init__(
        self,
        parts: Callable[[], tuple[Share | None, Mapping[int, Part]]],
        group: dist.ProcessGroup,
        timeout: timedelta,
        device: torch.device,
    ) -> None:
        """parts: called in the thread, once all ranks have met: this rank's share, None where it holds
        nothing, and the copies that it keeps, by the rank whose share comes; group: of all ranks, over gloo,
        and used by these threads alone."""
        self._parts = parts
        self._copies: Mapping[int, Part] = {}
        self._group = group
        self._timeout = timeout
        self._device = device
        # What the thread reads on a device comes after all that was asked of it so far.
        self._ready = None if device.type == "cpu" else get_accelerator().Event()
        if self._ready is not None:
            self._ready.record()
        self._error: Exception | None = None
        self.copy_bytes = 0
        self.duration_s = 0.0
        # At the end of a program that lost its peers nobody waits for it.
        self._thread = threading.Thread(target=self._run, name="redundancy", daemon=True)
        self._thread.start()

    def wait(self, patience_s: float | None = None) -> None:
        """Until all is written and sealed, at most ``patience_s``. Raises what went wrong."""
        self._thread.join(patience_s)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._copy()
        except Exception as error:
            self._error = error
        self.duration_s = time.perf_counter() - began

    def _copy(self) -> None:
        if self._ready is not None:
            # A device's collectives do not hold up the host: only now has the step's reduction ended, so that
            # the generation before is whole on all ranks, and the one before that may go.
            self._ready.synchronize()
        share, self._copies = self._parts()
        sends: list[tuple[dist.Work, Tensor]] = []
        if share is not None:
            data = share.part.begin(share.num_bytes)
            self._read(share.contents, data)
            header = share.header()
            share.part.finish(header)
            if share.partner is not None:
                text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
                sizes = torch.tensor([text.numel(), data.numel()])
                sends = [(self._isend(tensor, share.partner), tensor) for tensor in (sizes, text, data)]
        self._receive()
        for work, _ in sends:
            work.wait(self._timeout)

    def _read(self, contents: Sequence[Content], data: Tensor) -> None:
        """From the device to the host, beside what the device computes."""
        with self._beside():
            offset = 0
            for content in contents:
                stop = offset + content.values.nbytes
                data[offset:stop].copy_(content.values.detach().view(torch.uint8))
                offset = stop

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """A stream of its own, where the device has them."""
        if self._ready is None:
            yield
            return
        accelerator = get_accelerator()
        accelerator.set_device(self._device.index)
        stream = accelerator.Stream()
        stream.wait_event(self._ready)
        with accelerator.stream(stream):
            yield
        stream.synchronize()

    def _receive(self) -> None:
        """All messages of all sources under way at once."""
        sizes = {source: torch.zeros(2, dtype=torch.int64) for source in self._copies}
        self._wait([self._irecv(tensor, source) for source, tensor in sizes.items()])
        headers, works = {}, []
        for source, part in self._copies.items():
            num_header, num_data = sizes[source].tolist()
            headers[source] = torch.empty(num_header, dtype=torch.uint8)
            works += [
                self._irecv(headers[source], source),
                self._irecv(part.begin(num_data), source),
            ]
            self.copy_bytes += num_data
        self._wait(works)
        for source, part in self._copies.items():
            part.finish(headers[source].numpy().tobytes())

    def _isend(self, tensor: Tensor, partner: int) -> dist.Work:
        work = dist.isend(tensor, partner, group=self._group)
        assert work is not None, "the group has all ranks"
        return work

    def _irecv(self, tensor: Tensor, source: int) -> dist.Work:
        work = dist.irecv(tensor, source, group=self._group)
        assert work is not None, "the group has all ranks"
        return work

    def _wait(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait(self._timeout)
