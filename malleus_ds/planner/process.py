"""Planning in a process of its own, so that training goes on meanwhile and never waits or fails for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from malleus_ds.planner.types import PlanRequest, PlanResult

_START_LIMIT_S = 60.0
_CLOSE_LIMIT_S = 5.0
_STDERR_TAIL_BYTES = 2000
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class PlannerFailure:
    """There is no plan; the old one stays. reason: for the log."""

    reason: str


class PlannerProcess:
    """A persistent worker that answers one request at a time.

    The worker starts, and imports its solvers, when the object is made. When it dies, or takes twice the time
    limit of the request, the answer is a `PlannerFailure`, and the next `submit` starts a new one. Neither
    `submit` nor `poll` blocks.
    """

    def __init__(self) -> None:
        self._limit_s: float | None = None  # Of the pending request.
        self._ready: bool
        self._start()

    @property
    def pending(self) -> bool:
        """Whether a request waits for its answer."""
        return self._limit_s is not None

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._worker.pid

    def submit(self, request: PlanRequest) -> None:
        """Hand over a request. Raises RuntimeError while another is pending."""
        if self.pending:
            raise RuntimeError("a planning request is pending: poll() for its answer first")
        if self._worker.poll() is not None:
            self._release()
            self._start()
        self._limit_s = 2 * request.time_limit_s
        self._deadline_s = time.monotonic() + self._limit_s + (0.0 if self._ready else _START_LIMIT_S)
        self._unsent = json.dumps(request.to_dict()).encode() + b"\n"
        self._send()

    def poll(self) -> PlanResult | PlannerFailure | None:
        """The answer to the pending request; None while there is none."""
        if self._limit_s is None:
            return None
        self._send()
        ended = self._worker.poll() is not None  # Before reading: what it wrote last is still read.
        while (line := self._read_line()) is not None:
            answer = self._parse(line, self._limit_s)
            if answer is not None:
                self._limit_s = None
                return answer
        if ended:
            return self._fail(f"the planner process ended with code {self._worker.returncode}")
        if time.monotonic() > self._deadline_s:
            return self._fail(f"no plan within {self._limit_s} s, twice the time limit")
        return None

    def close(self) -> None:
        """End the worker; waits a few seconds at most."""
        self._limit_s = None
        self._worker.terminate()
        try:
            self._worker.wait(_CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._worker.kill()
            self._worker.wait(_CLOSE_LIMIT_S)
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (_release closes it)
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "malleus_ds.planner.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | dict.fromkeys(_THREAD_VARIABLES, "1"),
        )
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._stdin, self._stdout = self._worker.stdin, self._worker.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._unsent = self._received = b""
        self._ready = False  # Until its first line.
        self._deadline_s = 0.0

    def _release(self) -> None:
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return  # The pipe is full; the next poll goes on.
        except BrokenPipeError:
            self._unsent = b""  # The worker is gone; poll says so.

    def _read_line(self) -> bytes | None:
        try:
            while chunk := os.read(self._stdout.fileno(), 1 << 16):
                self._received += chunk
        except BlockingIOError:
            pass
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        return line

    def _parse(self, line: bytes, limit_s: float) -> PlanResult | PlannerFailure | None:
        try:
            message = json.loads(line)
            if "ready" in message:
                self._ready = True
                self._deadline_s = time.monotonic() + limit_s
                return None
            if "error" in message:
                return PlannerFailure(message["error"])
            return PlanResult.from_dict(message["result"])
        except (ValueError, KeyError, TypeError) as error:
            return self._fail(f"the planner process wrote {line[:200]!r}, which is no answer ({error!r})")

    def _fail(self, reason: str) -> PlannerFailure:
        self._worker.kill()
        self._worker.wait(_CLOSE_LIMIT_S)
        self._limit_s = None
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip()
        return PlannerFailure(f"{reason}; it said: {tail}" if tail else reason)
