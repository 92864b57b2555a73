"""Starts a training script on several ranks of this machine, and follows it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from malleus_ds.cli.errors import JobFailedError, UsageError
from malleus_ds.environment import free_port
from malleus_ds.errors import USER_MISTAKE
from malleus_ds.report.measurements import MeasurementReader, Record

LAUNCHERS = ("auto", "mpirun", "deepspeed")
_POLL_S = 0.1
_STOP_S = 10.0
# As `malleus_ds.launch.run_job` writes it; launchers may put a prefix before it.
_NAMED_ERROR = re.compile(r"rank \d+: \w+Error: .*")


def find_launcher(name: str) -> Path:
    """The launcher's program: beside this Python first, then on PATH. auto: mpirun, else deepspeed.

    Raises `UsageError` when it is not there.
    """
    for candidate in ("mpirun", "deepspeed") if name == "auto" else (name,):
        beside = Path(sys.executable).parent / candidate
        found = str(beside) if beside.exists() else shutil.which(candidate)
        if found is not None:
            return Path(found)
    raise UsageError(f"--launcher {name}: no such program beside {sys.executable} or on PATH; install it")


def job_command(launcher: Path, num_ranks: int, script: Path, arguments: Sequence[str]) -> list[str]:
    """The command line that runs a Python script on ``num_ranks`` ranks."""
    if launcher.name == "mpirun":
        return [str(launcher), "-n", str(num_ranks), sys.executable, str(script), *arguments]
    ranks = ["--num_accelerators", str(num_ranks), "--master_port", str(free_port())]
    return [sys.executable, str(launcher), *ranks, str(script), *arguments]


class Job:
    """A running job; leaving the context ends it.

    log_path: where all that the ranks print goes; measurements_path: what rank 0 measures.
    """

    def __init__(self, command: Sequence[str], log_path: Path, measurements_path: Path) -> None:
        self.log_path = log_path
        self._reader = MeasurementReader(measurements_path)
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Many ranks share few cores: one thread each.
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                start_new_session=True,
            )

    def records(self, patience_s: float) -> Iterator[Record | None]:
        """Records as they come, and None now and then while none comes; ends with the job.

        Raises `UsageError` when the job ended for a user's mistake, and `JobFailedError` when it ended
        by another error or measured nothing for ``patience_s``.
        """
        last_s = time.monotonic()
        is_over = False
        while not is_over:
            is_over = self._process.poll() is not None  # Before reading: what it wrote last is still read.
            for record in self._reader.new_records():
                last_s = time.monotonic()
                yield record
            if time.monotonic() - last_s > patience_s:
                raise JobFailedError(
                    f"the job gave no sign of life for {patience_s:.0f} s; see {self.log_path}"
                )
            if not is_over:
                yield None
                time.sleep(_POLL_S)
        if self._process.returncode != 0:
            raise self._failure()

    def _failure(self) -> UsageError | JobFailedError:
        code = self._process.returncode
        named = _NAMED_ERROR.search(self.log_path.read_text(encoding="utf-8", errors="replace"))
        reason = f": {named.group()}" if named else ""
        if code == USER_MISTAKE:
            return UsageError(f"the job did not start{reason} (its output: {self.log_path})")
        return JobFailedError(f"the job ended with code {code}{reason}; see {self.log_path}")

    def stop(self) -> None:
        """End the launcher and all ranks. SIGTERM first: mpirun passes it on to its ranks."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                return
            os.killpg(self._process.pid, sign)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                continue

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
