"""Checkpoints in a directory: each appears at once and whole, whenever the writer dies.

``save_dir`` has one directory per tag and the file ``latest`` with the newest tag. Only one process, that of
rank 0, changes names.
"""

from __future__ import annotations

import contextlib
import glob
import uuid
from pathlib import Path

from malleus_ds.checkpoint.disk import Disk
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import FILE_NAME

LATEST = "latest"
_TEMPORARY = ".tmp-"
_REPLACED = ".replaced"
"""A checkpoint under its old name, while another takes its place."""


def check_tag(tag: str) -> None:
    """Raise `CheckpointError` for a tag that cannot be the name of a directory beside `LATEST`."""
    is_reserved = tag.startswith(LATEST) or tag.endswith(_REPLACED) or _TEMPORARY in tag
    if tag in ("", ".", "..") or "/" in tag or "\0" in tag or is_reserved:
        raise CheckpointError(
            f"tag is {tag!r}: give a name without '/' that neither starts with 'latest', nor ends with "
            f"{_REPLACED!r}, nor contains {_TEMPORARY!r}"
        )


def begin(disk: Disk, save_dir: Path, tag: str) -> Path:
    """An empty directory for the files of a new checkpoint; clears away what a crash left of this tag."""
    disk.make_directory(save_dir)
    target, replaced = save_dir / tag, save_dir / f"{tag}{_REPLACED}"
    if replaced.exists() and not target.exists():
        disk.rename(replaced, target)
    elif replaced.exists():
        disk.remove_tree(replaced)
    if target.exists() and not (target / FILE_NAME).is_file():
        raise CheckpointError(f"{target} exists and is no checkpoint of malleus_ds: remove it, or change tag")
    for stale in save_dir.glob(f"{glob.escape(tag)}{_TEMPORARY}*"):
        disk.remove_tree(stale)
    temporary = save_dir / f"{tag}{_TEMPORARY}{uuid.uuid4().hex[:8]}"
    disk.make_directory(temporary)
    return temporary


def commit(disk: Disk, temporary: Path, tag: str, manifest: bytes, save_latest: bool) -> None:
    """Make a checkpoint of a directory that has all files of all ranks."""
    save_dir = temporary.parent
    target, replaced = save_dir / tag, save_dir / f"{tag}{_REPLACED}"
    disk.write_file(temporary / FILE_NAME, manifest)
    if target.exists():
        disk.rename(target, replaced)  # `find` looks there until the next line is done
    disk.rename(temporary, target)
    disk.sync_directory(save_dir)
    if save_latest:
        disk.write_file(save_dir / LATEST, tag.encode())
    if replaced.exists():
        disk.remove_tree(replaced)


def discard(disk: Disk, temporary: Path) -> None:
    """Remove what a failed save left, as far as that is possible."""
    with contextlib.suppress(OSError):
        disk.remove_tree(temporary)


def find(load_dir: Path, tag: str) -> Path:
    """The directory of the checkpoint ``tag``. Raises `CheckpointError` when there is none."""
    check_tag(tag)
    for path in (load_dir / tag, load_dir / f"{tag}{_REPLACED}"):
        if path.is_dir():
            return path
    others = sorted(path.parent.name for path in load_dir.glob(f"*/{FILE_NAME}"))
    known = ", ".join(name for name in others if _TEMPORARY not in name) or "no checkpoint"
    raise CheckpointError(f"{load_dir / tag}: there is no such checkpoint; {load_dir} has {known}")


def latest_tag(load_dir: Path) -> str | None:
    """The tag in ``latest``; None without such a file."""
    path = load_dir / LATEST
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); give the tag") from error
