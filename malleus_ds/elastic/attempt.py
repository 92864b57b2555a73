"""One start of all ranks: from the launchers to how each rank ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from malleus_ds.elastic.launchers import Launch
from malleus_ds.elastic.parents import end_with_parent
from malleus_ds.elastic.run_files import STOP, ExitNote, Progress, Verdict

_POLL_S = 0.2
_STOP_S = 8.0
"""Supervisors notice, end their ranks, and write their notes."""
_LEAVE_S = 10.0


class Attempt:
    """The running launchers of an attempt; leaving the context ends them, and all that they started here.

    on_progress: called once, after the first step.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        folder: Path,
        num_ranks: int,
        grace_s: float,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._folder = folder
        self._grace_s = grace_s
        self._on_progress = on_progress
        self._notes: dict[int, ExitNote | None] = dict.fromkeys(range(num_ranks))
        self.progress: Progress | None = None
        # Sessions of their own: Ctrl-C must not reach the ranks before a verdict does.
        self._launchers = [
            subprocess.Popen(each.command, start_new_session=True, preexec_fn=end_with_parent(signal.SIGTERM))
            for each in launches
        ]
        self._launches = launches

    def watch(self) -> dict[int, ExitNote | None]:
        """Wait for the end of all ranks, and for no longer than grace_s after the first loss; their notes.

        Stops ranks that still run then. A rank whose supervisor does not answer has no note.
        """
        deadline_s: float | None = None
        while self._awaited() and (deadline_s is None or time.monotonic() < deadline_s):
            if deadline_s is None and self._has_loss():
                is_over = all(launcher.poll() is not None for launcher in self._launchers)
                deadline_s = time.monotonic() + (min(_STOP_S, self._grace_s) if is_over else self._grace_s)
            time.sleep(_POLL_S)
        self.stop()
        return self._notes

    def stop(self) -> None:
        """End all ranks that still run; waits a few seconds for their notes."""
        (self._folder / STOP).touch()
        deadline_s = time.monotonic() + _STOP_S
        while self._awaited() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def leave(self, verdict: Verdict) -> None:
        """Tell the supervisors what comes next, and see the launchers off."""
        verdict.save(self._folder)
        for send in (None, signal.SIGTERM, signal.SIGKILL):
            for launcher in self._launchers:
                if send is not None and launcher.poll() is None:
                    launcher.send_signal(send)
            deadline_s = time.monotonic() + _LEAVE_S
            for launcher in self._launchers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(max(0.0, deadline_s - time.monotonic()))
        for launcher in self._launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)  # what a killed launcher left behind

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error, Ctrl-C among them, nothing goes on."""
        if error is not None:
            self.stop()
            self.leave(Verdict(stays=()))

    def _awaited(self) -> list[int]:
        """Ranks whose notes are not there, and may still come."""
        gone: set[int] = set()
        for launch, launcher in zip(self._launches, self._launchers, strict=True):
            if launcher.poll() is not None:  # Before reading: a note written last is still read.
                gone.update(launch.ranks)
        self._read()
        return [rank for rank, note in self._notes.items() if note is None and rank not in gone]

    def _has_loss(self) -> bool:
        """Whether a rank ended with an error, or a launcher did: a host is gone."""
        has_died = any(launcher.poll() is not None for launcher in self._launchers)
        return has_died or any(note is not None and note.code != 0 for note in self._notes.values())

    def _read(self) -> None:
        for rank, note in self._notes.items():
            if note is None:
                self._notes[rank] = ExitNote.load(self._folder, rank)
        progress = Progress.load(self._folder)
        if progress is not None and self.progress is None:
            self._on_progress(progress)
        self.progress = progress
