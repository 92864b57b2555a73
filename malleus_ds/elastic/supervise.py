"""Beside each rank: starts it, waits for it, and writes how it ended.

``python -m malleus_ds.elastic.supervise --local_rank=N ATTEMPT_DIRECTORY``, started by DeepSpeed's
``deepspeed.launcher.launch`` in place of the rank. That ends all ranks of a host as soon as one fails; so the
supervisor stays until `malleus-run` has a verdict, and the others may end in order.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from malleus_ds.elastic.parents import end_with_parent
from malleus_ds.elastic.run_files import PLAN, STOP, ExitNote, Order, Verdict
from malleus_ds.environment import (
    ATTEMPT_VARIABLE,
    HOST_VARIABLE,
    MEMORY_DIR_VARIABLE,
    PLAN_VARIABLE,
    RUN_DIR_VARIABLE,
)
from malleus_ds.errors import USER_MISTAKE, tells_of_lost_peer

_POLL_S = 0.25
_END_S = 3.0
"""From SIGTERM to SIGKILL."""
_LAST_RANK_S = 86400.0
"""How long a rank may go on when another one is done."""
_TAIL_LINES = 200
_CHUNK_BYTES = 1 << 16
_ERROR_LINE = re.compile(r"(\[rank\d+\]: +|rank \d+: )?[\w.]*(Error|Exception|Interrupt|Exit)\b")
_IGNORED = "Exception ignored in"
"""Begins what Python tells of an error that ends nothing, in a finalizer."""
_IN_CPP = "Exception raised from"
"""Begins a line of torch's, also in warnings of its threads, which come after the error itself."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the rank."""
    folder, parent = Path(arguments[-1]), os.getppid()
    if not folder.is_dir():
        sys.stderr.write(f"{folder} is not here: put --run_dir on a disk that all hosts share\n")
        return USER_MISTAKE
    order, rank = Order.load(folder), int(os.environ["RANK"])
    host = order.devices[rank].host
    memory_dir = Path(order.memory_dirs[host])
    if host in order.fresh_hosts and order.local_rank(rank) == 0:
        shutil.rmtree(memory_dir, ignore_errors=True)  # of an attempt before the host was lost
    memory_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    asked = _Asked()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked.handle)
    child = _start(order, folder, rank, memory_dir)
    tail = _Tail(child.stderr)
    was_stopped = _wait(child, lambda: asked.to_end or (folder / STOP).exists() or os.getppid() != parent)
    note = _note(rank, child.returncode, was_stopped, tail.lines())
    note.save(folder)
    verdict = _await_verdict(folder, asked, order.verdict_s if note.code else _LAST_RANK_S)
    if verdict is None or host not in verdict.stays:
        shutil.rmtree(memory_dir, ignore_errors=True)
    return 128 - note.code if note.code < 0 else note.code


@dataclass(slots=True)
class _Asked:
    """Whether a signal asked this process to end."""

    to_end: bool = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.to_end = True


def _start(order: Order, folder: Path, rank: int, memory_dir: Path) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name != PLAN_VARIABLE}
    environment = inherited | {
        RUN_DIR_VARIABLE: str(folder.parent),
        ATTEMPT_VARIABLE: str(order.attempt),
        "LOCAL_RANK": str(order.local_rank(rank)),
        HOST_VARIABLE: order.devices[rank].host,
        MEMORY_DIR_VARIABLE: str(memory_dir),
    }
    if order.has_plan:
        environment[PLAN_VARIABLE] = str(folder / PLAN)
    local_rank = [f"--local_rank={order.local_rank(rank)}"] if order.passes_local_rank else []
    return subprocess.Popen(
        [sys.executable, "-u", *order.script, *local_rank, *order.arguments],
        env=environment,
        stderr=subprocess.PIPE,
        preexec_fn=end_with_parent(signal.SIGKILL),
    )


def _wait(child: subprocess.Popen[bytes], must_end: Callable[[], bool]) -> bool:
    """Until the rank has ended; whether it was stopped."""
    while True:
        try:
            child.wait(_POLL_S)
            return False
        except subprocess.TimeoutExpired:
            if must_end():
                break
    child.terminate()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return True


def _await_verdict(folder: Path, asked: _Asked, limit_s: float) -> Verdict | None:
    """None when this process was asked to end, or none comes."""
    deadline_s, parent = time.monotonic() + limit_s, os.getppid()
    while time.monotonic() < deadline_s and not asked.to_end and os.getppid() == parent:
        verdict = Verdict.load(folder)
        if verdict is not None:
            return verdict
        time.sleep(_POLL_S)
    # A supervisor that knew it first has ended, for which DeepSpeed's launcher asks the others to end.
    return Verdict.load(folder)


class _Tail:
    """Passes what the rank writes to stderr on, and keeps its last lines."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        assert stream is not None
        self._stream = stream
        self._lines: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """Once the rank has ended. Something that it started may still hold the stream open."""
        self._thread.join(1.0)
        return [line.decode(errors="replace").strip() for line in list(self._lines)]

    def _run(self) -> None:
        """Line by line; those of progress bars end with a carriage return."""
        rest = b""
        while chunk := os.read(self._stream.fileno(), _CHUNK_BYTES):
            lines = (rest + chunk).splitlines(keepends=True)
            is_whole = lines[-1].endswith((b"\n", b"\r")) or len(lines[-1]) > _CHUNK_BYTES
            rest = b"" if is_whole else lines.pop()
            self._pass_on(lines)
        self._pass_on([rest])

    def _pass_on(self, lines: Sequence[bytes]) -> None:
        self._lines.extend(lines)
        with contextlib.suppress(OSError):  # Nobody reads it; but a full pipe would stop the rank.
            sys.stderr.buffer.write(b"".join(lines))
            sys.stderr.buffer.flush()


def _note(rank: int, code: int, was_stopped: bool, lines: Sequence[str]) -> ExitNote:
    """code: negative for a signal."""
    said = [line for line in lines if line]
    errors = _error_lines(said)
    own = [line for line in errors if not line.startswith(_IN_CPP)]
    reason = (own or errors or said or [""])[-1]
    # A rank that leaves while its communication threads wait for a lost peer may abort, or take its time.
    may_be_victim = was_stopped or code > 0 or code == -signal.SIGABRT
    return ExitNote(rank, code, was_stopped, may_be_victim and tells_of_lost_peer(reason), reason)


def _error_lines(lines: Sequence[str]) -> list[str]:
    """Without those of errors that Python ignored, of which the last line follows the one that says so."""
    found: list[str] = []
    is_ignored = False
    for line in lines:
        if line.startswith(_IGNORED):
            is_ignored = True
        elif _ERROR_LINE.match(line):
            if not is_ignored:
                found.append(line)
            is_ignored = False
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
