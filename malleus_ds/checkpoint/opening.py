"""Opening a checkpoint for reading, whichever layout it has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from malleus_ds.checkpoint.directory import find, latest_tag
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import FILE_NAME, Manifest, read_manifest
from malleus_ds.checkpoint.part_file import Interval
from malleus_ds.checkpoint.reading import IntervalReader, check_files, files_to_check
from malleus_ds.checkpoint.stock.files import is_stock
from malleus_ds.checkpoint.stock.module import Ties
from malleus_ds.checkpoint.stock.reading import open_stock
from malleus_ds.placement import LogicalTensor


class Reader(Protocol):
    """Reads elements of the states of logical tensors."""

    def has(self, state: str, tensor: str) -> bool: ...
    def read(self, wanted: Interval) -> Tensor: ...


class Checkpoint(Protocol):
    """A checkpoint of any layout. digest: equal on ranks that see the same one; left_out: what it has and we
    cannot load."""

    @property
    def directory(self) -> Path: ...
    @property
    def path(self) -> Path:
        """What messages name."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def digest(self) -> str: ...
    @property
    def left_out(self) -> tuple[str, ...]: ...

    def check_share(self, rank: int, world_size: int) -> None:
        """Raise `CheckpointError` unless this rank's share of the files is as it was written."""

    def reader(self) -> AbstractContextManager[Reader]: ...


@dataclass(frozen=True, slots=True)
class OwnCheckpoint:
    """A checkpoint in our layout."""

    directory: Path
    manifest: Manifest
    digest: str
    left_out: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return self.directory / FILE_NAME

    def check_share(self, rank: int, world_size: int) -> None:
        check_files(self.directory, files_to_check(self.manifest.files, rank, world_size))

    def reader(self) -> AbstractContextManager[Reader]:
        return IntervalReader(self.directory, self.manifest.files)


def open_checkpoint(
    load_dir: Path,
    tag: str | None = None,
    model: Sequence[LogicalTensor] | None = None,
    ties: Ties | None = None,
    with_optimizer: bool = True,
) -> Checkpoint | None:
    """The checkpoint ``tag`` (None: the latest) in ``load_dir``; None without a tag and a file ``latest``.

    model, ties, with_optimizer: of `open_stock`, for checkpoints that DeepSpeed wrote. Raises
    `CheckpointError`.
    """
    chosen = latest_tag(load_dir) if tag is None else tag
    if chosen is None:
        return None
    directory = find(load_dir, chosen)
    if not (directory / FILE_NAME).exists() and is_stock(directory):
        return open_stock(directory, model, ties, with_optimizer)
    text = read_manifest(directory)
    manifest = Manifest.parse(text, directory / FILE_NAME)
    return OwnCheckpoint(directory, manifest, hashlib.sha256(text).hexdigest())


def open_path(path: Path, tag: str | None = None, ties: Ties | None = None) -> Checkpoint:
    """As `open_checkpoint`; ``path`` may also be the directory of the checkpoint itself.

    Raises `CheckpointError` when there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such directory")
    if tag is None and ((path / FILE_NAME).exists() or is_stock(path)):
        path, tag = path.absolute().parent, path.absolute().name
    found = open_checkpoint(path, tag, ties=ties)
    if found is None:
        raise CheckpointError(
            f"{path}: has no file 'latest': give the tag, or the checkpoint's own directory"
        )
    return found
