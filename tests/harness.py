"""Tests of several processes: real ranks, a real process group, and no hang.

`DistributedTest` runs each test of a class in ranks of its own; `RankPool` keeps ranks over many calls;
`run_command` and `mpirun` start whole jobs under real launchers. Ranks are forked from a server that has
imported torch and DeepSpeed already, so they start in milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import pytest

from malleus_ds.cli.job import find_launcher, job_command
from malleus_ds.environment import free_port

REPOSITORY = Path(__file__).resolve().parent.parent
INIT_TIMEOUT_S = 60.0
_SETTLE_S = 1.0  # After a first failure or a stack dump, for the other ranks to report theirs.
_CLOSE_S = 5.0


class RanksFailedError(AssertionError):
    """Some ranks failed, died or did not finish; the text says which, where and why."""


class DistributedTest:
    """Base of test classes whose tests run in `world_size` processes each.

    Fixtures and parameters are made in pytest's process and pickled to the ranks; a parameter named
    ``world_size`` overrides the class's. The first rank that fails, fails the test.
    """

    world_size: ClassVar[int] = 2
    timeout_s: ClassVar[float] = 120.0


@dataclass(frozen=True, slots=True)
class _Reply:
    """What a rank says after a call. kind: "value", "skip" (payload: reason) or "error" (payload: text)."""

    kind: str
    payload: Any


class RankPool:
    """`world_size` processes with one process group, for many calls.

    After a failure the ranks are replaced at the next call. Use as a context manager.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Call ``fn(*args)`` on every rank; its results by rank.

        fn and args must pickle. Raises `RanksFailedError`, or skips the test when a rank skips.
        """
        call = pickle.dumps((fn, args))
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.send(call)
        replies = self._collect(time.monotonic() + timeout_s)
        skips = [reply.payload for reply in replies.values() if reply.kind == "skip"]
        failed = {rank: reply for rank, reply in replies.items() if reply.kind == "error"}
        if failed or (len(replies) < self.world_size and not skips):
            text = self._describe(replies, failed, timeout_s)
            self.kill()
            raise RanksFailedError(text)
        if skips:
            self.kill()
            pytest.skip(skips[0])
        return [replies[rank].payload for rank in range(self.world_size)]

    def _start(self) -> None:
        port = free_port()
        self._ranks = [_Rank(rank, self.world_size, port) for rank in range(self.world_size)]

    def _collect(self, deadline_s: float) -> dict[int, _Reply]:
        """Replies until all are in, the deadline passes, or one is not a value (and a moment after)."""
        replies: dict[int, _Reply] = {}
        waiting = {rank.connection: rank for rank in self._ranks}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                replies[rank.rank] = rank.receive()
                if replies[rank.rank].kind != "value":
                    deadline_s = min(deadline_s, time.monotonic() + _SETTLE_S)
        return replies

    def _describe(self, replies: dict[int, _Reply], failed: dict[int, _Reply], timeout_s: float) -> str:
        """One text of what went wrong: failures in the order in which they came, or who hangs where."""
        if failed:
            return "\n".join(
                f"rank {rank} of {self.world_size}:\n{reply.payload}" for rank, reply in failed.items()
            )
        hanging = [rank for rank in self._ranks if rank.rank not in replies]
        numbers = ", ".join(str(rank.rank) for rank in hanging)
        stacks = "\n".join(f"rank {rank.rank}:\n{rank.stack()}" for rank in hanging)
        return f"after {timeout_s} s these ranks of {self.world_size} had not finished: {numbers}\n{stacks}"

    def kill(self) -> None:
        """End all ranks and what they started, at once."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []

    def close(self) -> None:
        """Let idle ranks exit by themselves, then end what is left."""
        for rank in self._ranks:
            rank.connection.close()
        deadline_s = time.monotonic() + _CLOSE_S
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline_s - time.monotonic()))
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call ``fn(*args)`` in ``world_size`` fresh processes with a process group; its results by rank."""
    with RankPool(world_size) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)


class _Rank:
    """The parent's side of one rank."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.rank = rank
        context = _fork_server()
        self.connection, theirs = context.Pipe()
        with tempfile.NamedTemporaryFile(prefix=f"rank{rank}-", suffix=".stack", delete=False) as stack:
            self._stack_path = Path(stack.name)
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        self.process: ForkServerProcess = context.Process(
            target=_serve, args=(theirs, environment, str(self._stack_path)), name=f"rank {rank}"
        )
        self.process.start()
        theirs.close()

    def send(self, call: bytes) -> None:
        with contextlib.suppress(OSError):  # It died: receive() tells.
            self.connection.send_bytes(call)

    def receive(self) -> _Reply:
        try:
            return pickle.loads(self.connection.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self.process.join(_CLOSE_S)
            return _Reply("error", f"the process died with exit code {self.process.exitcode}")

    def stack(self) -> str:
        """Where the rank's threads are now."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(_SETTLE_S)
        return self._stack_path.read_text()

    def kill(self) -> None:
        self.connection.close()
        if self.process.pid is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()
        self.process.join(_CLOSE_S)
        self._stack_path.unlink(missing_ok=True)


@functools.cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def _serve(connection: Connection, environment: Mapping[str, str], stack_path: str) -> None:
    """The life of a rank: join the process group, then answer calls until the connection closes."""
    os.setpgid(0, 0)  # So that one signal ends the rank and all that it started.
    os.environ.clear()
    os.environ.update(environment)
    with open(stack_path, "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        ready = False
        while True:
            try:
                call = connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                return
            reply = _answer(call, initialise=not ready)
            ready = True
            connection.send_bytes(reply)


def _answer(call: bytes, initialise: bool) -> bytes:
    """Run one call; the pickled reply."""
    try:
        if initialise:
            from malleus_ds.comm import init_distributed

            init_distributed(timeout_s=INIT_TIMEOUT_S)
        fn, args = pickle.loads(call)
        return pickle.dumps(_Reply("value", fn(*args)))
    except pytest.skip.Exception as skip:
        return pickle.dumps(_Reply("skip", str(skip)))
    except BaseException:  # Also SystemExit and pytest.fail: the parent decides what they mean.
        return pickle.dumps(_Reply("error", traceback.format_exc()))


def run_command(
    command: list[str], timeout_s: float = 120.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root; its exit code, stdout and stderr.

    env: added to this process's. Fails the test when the command takes longer than ``timeout_s``; the
    command and what it started are ended then.
    """
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        out, err = _end(process)
        raise RanksFailedError(
            f"{command} took longer than {timeout_s} s\nstdout:\n{out}\nstderr:\n{err}"
        ) from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a job. SIGTERM first: mpirun passes it on to ranks that are in process groups of their own."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, sign)
        try:
            return process.communicate(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            continue
    return "", "the job's output stayed open after SIGKILL"


def mpirun(
    num_ranks: int,
    script: str | Path,
    *args: str,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script on ``num_ranks`` MPI ranks of this machine."""
    return run_command(job_command(find_launcher("mpirun"), num_ranks, Path(script), args), timeout_s, env)
