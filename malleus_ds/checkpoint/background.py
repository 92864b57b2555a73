"""Writing a checkpoint beside training. The threads of the ranks meet on the disk: collectives belong to
the main thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from malleus_ds.checkpoint.disk import Disk
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import file_from_dict, file_to_dict
from malleus_ds.checkpoint.part_file import FileEntry

_POLL_S = 0.05
_EXIT_PATIENCE_S = 10.0
"""For the other ranks' files, once the program has ended without `MalleusPipelineEngine.destroy`."""

WritePart = Callable[[], FileEntry | None]
Commit = Callable[[Sequence[FileEntry | None]], None]


class BackgroundSave:
    """One save of one rank.

    Each rank leaves a note in the directory when its file is there; when rank 0 has the notes of all, it
    makes the checkpoint of them, so that it counts at once and not from the next save on. After
    ``timeout_s`` from its begin a save counts as failed: a disk may never answer.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        rank: int,
        world_size: int,
        write_part: WritePart,
        commit: Commit,
        timeout_s: float,
    ) -> None:
        self.directory = directory
        self._timeout_s, self._deadline_s = timeout_s, time.monotonic() + timeout_s
        self._disk = disk
        self._rank = rank
        self._notes = [directory / f"rank_{other:05d}.json" for other in range(world_size)]
        self._write_part = write_part
        self._commit = commit
        self._part_written = threading.Event()
        self._gave_up = threading.Event()
        self._part_error: str | None = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def part_ends_within(self, patience_s: float) -> bool:
        """Whether `wait_for_part` returns at once after so long; in seconds."""
        return self._part_written.wait(min(patience_s, self._left_s())) or self._left_s() == 0

    def ends_within(self, patience_s: float) -> bool:
        """The same of `wait`."""
        self._thread.join(min(patience_s, self._left_s()))
        return self.is_over or self._left_s() == 0

    def wait_for_part(self) -> str | None:
        """Until this rank's file is written; what went wrong."""
        if not self._part_written.wait(self._left_s()):
            return self._too_late("was not written")
        return self._part_error

    def give_up(self) -> None:
        """Another rank failed, is lost, or was too late: do not wait for its file, and make no checkpoint."""
        self._gave_up.set()

    def wait(self) -> str | None:
        """Until all is done; what went wrong."""
        self._thread.join(self._left_s())
        if self._thread.is_alive():
            self.give_up()
            return self._too_late("was not finished")
        return self._error

    @property
    def is_over(self) -> bool:
        """Nothing writes any more."""
        return not self._thread.is_alive()

    def _left_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 0.0)

    def _too_late(self, what: str) -> str:
        return (
            f"{self.directory}: rank {self._rank}'s part {what} within {self._timeout_s:g} s: use a faster "
            f"disk, or raise malleus.checkpoint.timeout_s"
        )

    def _run(self) -> None:
        try:
            try:
                entry = self._write_part()
                note = None if entry is None else file_to_dict(entry)
                self._disk.write_file(self._notes[self._rank], json.dumps(note).encode())
            except Exception as error:
                self._part_error = _describe(error)
                raise
            finally:
                self._part_written.set()
            if self._rank == 0:
                entries = self._entries()
                if self._gave_up.is_set():  # a newer save may have been made since
                    raise CheckpointError(f"{self.directory}: was given up before it was finished")
                self._commit(entries)
        except Exception as error:
            self._error = _describe(error)

    def _entries(self) -> list[FileEntry | None]:
        """The files of all ranks, once all are there; removes the notes."""
        patience_s = _EXIT_PATIENCE_S
        while not all(note.exists() for note in self._notes):
            if self._gave_up.is_set() or min(patience_s, self._left_s()) <= 0:
                raise CheckpointError(f"{self.directory}: another rank did not write its file")
            time.sleep(_POLL_S)
            patience_s -= 0.0 if threading.main_thread().is_alive() else _POLL_S
        entries = [json.loads(note.read_bytes()) for note in self._notes]
        for note in self._notes:
            self._disk.remove(note)
        return [None if entry is None else file_from_dict(entry) for entry in entries]


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"
