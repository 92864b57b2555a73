"""Clocks that add up a rank's own compute, without the waits between its pieces."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque

import torch


class ComputeClock(ABC):
    """Adds up the intervals between `start` and `stop`; they may not overlap."""

    _is_paused = False

    def pause(self) -> None:
        """Leave out what comes, until `resume`; nothing happens while no interval is open."""
        if self.is_running and not self._is_paused:
            self.stop()
            self._is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._is_paused:
            self._is_paused = False
            self.start()

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether an interval is open."""

    @abstractmethod
    def start(self) -> None:
        """Open an interval. Raises RuntimeError when one is open."""

    @abstractmethod
    def stop(self) -> None:
        """Close the open interval. Raises RuntimeError when none is open."""

    @abstractmethod
    def take_s(self) -> float:
        """Seconds of all intervals that ended since the last take."""


class HostClock(ComputeClock):
    """Host time: for devices that compute in the calling thread."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._started_s: float | None = None

    def start(self) -> None:
        if self._started_s is not None:
            raise RuntimeError("the clock is already running")
        self._started_s = time.perf_counter()

    @property
    def is_running(self) -> bool:
        return self._started_s is not None

    def stop(self) -> None:
        if self._started_s is None:
            raise RuntimeError("the clock is not running")
        self._total_s += time.perf_counter() - self._started_s
        self._started_s = None

    def take_s(self) -> float:
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class CudaEventClock(ComputeClock):
    """Device time on the current stream, by events; never synchronises.

    An interval that the device has not finished when `take_s` is called carries over to the next
    take. The lag between host and device is steady in training, so each take holds about one
    step's worth; the first is short.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: torch.cuda.Event | None = None
        self._closed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []

    def start(self) -> None:
        if self._open is not None:
            raise RuntimeError("the clock is already running")
        self._open = self._record()

    @property
    def is_running(self) -> bool:
        return self._open is not None

    def stop(self) -> None:
        if self._open is None:
            raise RuntimeError("the clock is not running")
        self._closed.append((self._open, self._record()))
        self._open = None

    def take_s(self) -> float:
        total_ms = 0.0
        while self._closed and self._closed[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._closed.popleft()
            total_ms += begin.elapsed_time(end)
            self._free += (begin, end)
        return total_ms / 1e3

    def _record(self) -> torch.cuda.Event:
        if not self._free:
            self._free.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._free.pop()
        event.record(torch.cuda.current_stream(self._device))
        return event


def make_clock(device: torch.device) -> ComputeClock:
    """The clock for compute on ``device``."""
    return CudaEventClock(device) if device.type == "cuda" else HostClock()
