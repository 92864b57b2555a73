"""The file operations of a checkpoint in one place, so that a test can let any of them fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from malleus_ds.checkpoint.errors import CheckpointError


class Disk:
    """Files that are closed are on the disk, and so are names in a directory that was synchronised."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        """A new file; its bytes are on the disk at the end of the block."""
        try:
            with path.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # of a write, it does not know the file
            raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from error

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def sync_directory(self, path: Path) -> None:
        """Make new names in a directory survive a crash of the machine."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """At once; replaces a file, or an empty directory."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    # -- of the above --------------------------------------------------------------------------

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a whole file: under its name is what was there before, or all of ``data``."""
        temporary = path.with_name(f"{path.name}.tmp")
        with self.create(temporary) as file:
            self.write(file, data)
        self.rename(temporary, path)
        self.sync_directory(path.parent)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory of files."""
        for file in sorted(path.iterdir()):
            self.remove(file)
        self.remove_directory(path)
