"""Carries one small record per rank per step, and now and then a plan, beside the training.

`ControlPlane` does the waiting, the timeouts and the errors; a carrier supplies two non-blocking
collectives on host memory.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Request = Callable[[], bool]
"""Polls a started operation: whether it has completed. Raises `ControlPlaneError` if it failed."""

# Polls are spaced out by growing sleeps: MPI makes progress only inside of them, and a busy loop
# would take the core from the training on hosts that have few.
_FIRST_SLEEP_S = 5e-5
_LONGEST_SLEEP_S = 2e-3


class ControlPlaneError(RuntimeError):
    """A peer did not answer in time or is gone."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    step: int
    receive: NDArray[np.float64]
    request: Request


class ControlPlane(ABC):
    """Collectives of all ranks on host memory. All ranks make the same calls in the same order.

    name: of the carrier, for messages; timeout_s: limit of every wait, after which
    `ControlPlaneError` names this rank, the operation and the time.
    """

    def __init__(self, rank: int, size: int, name: str, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self._timeout_s = timeout_s
        self._exchange: _Exchange | None = None

    def start_exchange(self, record: NDArray[np.float64]) -> None:
        """Send this rank's record (float64, one-dimensional, as long on all ranks) and go on.

        ``record[0]`` is the step, for messages. Raises RuntimeError while one is in flight.
        """
        if self._exchange is not None:
            raise RuntimeError(f"the exchange of step {self._exchange.step} is still in flight: finish it")
        send = np.ascontiguousarray(record, dtype=np.float64).copy()
        receive = np.empty((self.size, send.size), dtype=np.float64)
        self._exchange = _Exchange(int(send[0]), receive, self._start_all_gather(send, receive))

    def finish_exchange(self, timeout_s: float | None = None) -> NDArray[np.float64]:
        """Wait for the records of all ranks, ``[size, record_size]`` in rank order.

        timeout_s: instead of the usual one.
        Raises RuntimeError when no exchange was started.
        """
        if self._exchange is None:
            raise RuntimeError("no exchange is in flight: start one first")
        exchange = self._exchange
        self._wait(exchange.request, f"the records of step {exchange.step}", timeout_s)
        self._exchange = None  # Not after an error: the carrier may still write into the buffer.
        return exchange.receive

    def broadcast(self, payload: bytes | None, num_bytes: int, root: int = 0) -> bytes:
        """The payload of ``root`` on every rank; ``num_bytes`` is known to all, ``payload`` to root."""
        buffer = np.empty(num_bytes, dtype=np.uint8)
        if self.rank == root:
            if payload is None or len(payload) != num_bytes:
                found = "none" if payload is None else f"one of {len(payload)} bytes"
                raise ValueError(f"broadcast: root must give a payload of {num_bytes} bytes, not {found}")
            buffer[:] = np.frombuffer(payload, dtype=np.uint8)
        if num_bytes > 0:
            self._wait(self._start_broadcast(buffer, root), f"the broadcast of rank {root}")
        return buffer.tobytes()

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, in rank order; sizes may differ. For set-up, not for steps."""
        sizes = np.empty((self.size, 1), dtype=np.int64)
        own_size = np.array([len(payload)], dtype=np.int64)
        self._wait(self._start_all_gather(own_size, sizes), "the sizes of all payloads")
        longest = int(sizes.max())
        send = np.zeros(max(longest, 1), dtype=np.uint8)
        send[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        receive = np.empty((self.size, send.size), dtype=np.uint8)
        self._wait(self._start_all_gather(send, receive), "the payloads of all ranks")
        return [row[: int(size)].tobytes() for row, size in zip(receive, sizes[:, 0], strict=True)]

    @abstractmethod
    def close(self) -> None:
        """Free the communicator. All ranks call it; not after an error."""

    @abstractmethod
    def _start_all_gather(self, send: NDArray[Any], receive: NDArray[Any]) -> Request:
        """Start to gather ``send [n]`` of each rank into ``receive [size, n]``."""

    @abstractmethod
    def _start_broadcast(self, buffer: NDArray[np.uint8], root: int) -> Request:
        """Start to overwrite ``buffer`` by root's."""

    def _wait(self, request: Request, what: str, timeout_s: float | None = None) -> None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        started_s = time.monotonic()
        sleep_s = _FIRST_SLEEP_S
        while True:
            try:
                if request():
                    return
            except ControlPlaneError as error:
                raise ControlPlaneError(self._failure(what, started_s, str(error))) from error
            if time.monotonic() - started_s > limit_s:
                raise ControlPlaneError(self._failure(what, started_s, "a rank is lost or stuck"))
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _failure(self, what: str, started_s: float, cause: str) -> str:
        waited_s = time.monotonic() - started_s
        return f"rank {self.rank} waited {waited_s:.1f} s for {what} over {self.name}: {cause}"
