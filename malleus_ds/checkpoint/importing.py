"""Writing a checkpoint of ours without an engine, from what another layout holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from malleus_ds.checkpoint.directory import begin, check_tag, commit, discard
from malleus_ds.checkpoint.disk import Disk
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import Manifest
from malleus_ds.checkpoint.part_file import Content, write_part

PART_BYTES = 4 * 2**30
"""A file of the checkpoint ends when it has so much: each is checked by one rank when it is loaded."""


def write_checkpoint(
    save_dir: Path, tag: str, manifest: Manifest, contents: Iterable[Content], part_bytes: int = PART_BYTES
) -> Path:
    """Write a checkpoint, which is the latest of ``save_dir`` then, and return its directory.

    manifest: without files; contents: all elements, each once; one at a time is on the host, where they are
    mapped from files. Raises `CheckpointError`, also for a tag that is there; ``save_dir`` is as it was then.
    """
    check_tag(tag)
    if (save_dir / tag).exists():
        raise CheckpointError(f"{save_dir / tag} exists: give another directory, or remove it")
    disk = Disk()
    directory = begin(disk, save_dir, tag)
    try:
        files = tuple(
            write_part(disk, directory / f"rank_{number:05d}.safetensors", part)
            for number, part in enumerate(_parts(contents, part_bytes))
        )
        commit(disk, directory, tag, replace(manifest, files=files).to_json(), save_latest=True)
    except BaseException:
        discard(disk, directory)
        raise
    return save_dir / tag


def _parts(contents: Iterable[Content], part_bytes: int) -> Iterator[list[Content]]:
    part: list[Content] = []
    num_bytes = 0
    for content in contents:
        part.append(content)
        num_bytes += content.values.nbytes
        if num_bytes >= part_bytes:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part
