"""Reading intervals from the files of a checkpoint, whatever intervals they were written as."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import FILE_NAME
from malleus_ds.checkpoint.part_file import FileEntry, Interval
from malleus_ds.checkpoint.places import Places


def files_to_check(files: Sequence[FileEntry], rank: int, world_size: int) -> list[FileEntry]:
    """This rank's share: every file is checked by one rank, and all check about as many bytes."""
    loads = [0] * world_size
    own = []
    for entry in sorted(files, key=lambda entry: (-entry.num_bytes, entry.name)):
        checker = loads.index(min(loads))
        loads[checker] += entry.num_bytes
        if checker == rank:
            own.append(entry)
    return own


def check_file(directory: Path, entry: FileEntry) -> None:
    """Raise `CheckpointError` unless the file has the bytes that were written."""
    path = directory / entry.name
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            raise CheckpointError(f"{path}: has {num_bytes} bytes, but {entry.num_bytes} were written")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if digest != entry.sha256:
        raise CheckpointError(f"{path}: damaged (its checksum is wrong)")


def check_files(directory: Path, entries: Sequence[FileEntry]) -> None:
    """`check_file` for each."""
    for entry in entries:
        check_file(directory, entry)


class IntervalReader:
    """Reads any interval of the logical tensors. A context manager: it keeps the files open."""

    def __init__(self, directory: Path, files: Sequence[FileEntry]) -> None:
        self._directory = directory
        self._opened: dict[str, Any] = {}
        self._stack = ExitStack()
        self._places = Places(
            str(directory / FILE_NAME),
            ((interval, entry.name) for entry in files for interval in entry.intervals),
        )

    def has(self, state: str, tensor: str) -> bool:
        return self._places.has(state, tensor)

    def read(self, wanted: Interval) -> Tensor:
        """Its elements, on the host. Raises `CheckpointError` for elements that no file has."""
        return self._places.read(wanted, self._slice)

    def _slice(self, name: str, interval: Interval, start: int, stop: int) -> Tensor:
        path = self._directory / name
        try:
            if name not in self._opened:
                self._opened[name] = self._stack.enter_context(safe_open(path, framework="pt"))
            values: Tensor = self._opened[name].get_slice(interval.key)[
                start - interval.start : stop - interval.start
            ]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        return values

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.close()
