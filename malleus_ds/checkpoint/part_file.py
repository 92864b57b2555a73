"""One rank's file of a checkpoint: intervals of logical tensors in the safetensors format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from malleus_ds.checkpoint.disk import Disk
from malleus_ds.checkpoint.errors import CheckpointError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """Elements ``[start, stop)`` of one state of a logical tensor, seen as one flat range.

    state: ``"parameter"`` (also of buffers), ``"master"``, or a name of the optimizer's, such as
    ``"exp_avg"``. It does not depend on plans, buckets or slices.
    """

    state: str
    tensor: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Its name in a file."""
        return f"{self.state}/{self.tensor}@{self.start}"


@dataclass(frozen=True, slots=True)
class Content:
    """An interval and its elements, one-dimensional, on any device."""

    interval: Interval
    values: Tensor


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file that was written. sha256: of all its bytes."""

    name: str
    num_bytes: int
    sha256: str
    intervals: tuple[Interval, ...]


def write_part(disk: Disk, path: Path, contents: Sequence[Content]) -> FileEntry:
    """Write a file; one interval at a time passes through the host's memory.

    The format is so simple (a JSON header, then the bytes) that it is written here: safetensors' own writer
    takes all tensors on the host at once, and its file would have to be read again for the checksum.
    SHA-256, because it is as fast as a disk, and ``sha256sum`` can repeat it.
    """
    # Large elements first, so that all are aligned.
    ordered = sorted(contents, key=lambda content: -content.values.element_size())
    digest = hashlib.sha256()
    num_bytes = 0
    with disk.create(path) as file:
        for data in chain([_header(ordered)], (_bytes_of(content.values) for content in ordered)):
            digest.update(data)
            disk.write(file, data)
            num_bytes += len(data)
    disk.sync_directory(path.parent)
    return FileEntry(path.name, num_bytes, digest.hexdigest(), tuple(c.interval for c in ordered))


def _header(contents: Sequence[Content]) -> bytes:
    entries: dict[str, object] = {}
    offset = 0
    for content in contents:
        values, key = content.values, content.interval.key
        if values.dtype not in _DTYPES:
            raise CheckpointError(f"{key} has dtype {values.dtype}, which checkpoints do not hold")
        stop = offset + values.numel() * values.element_size()
        entries[key] = {
            "dtype": _DTYPES[values.dtype],
            "shape": [values.numel()],
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(values: Tensor) -> bytes | memoryview:
    return memoryview(values.detach().cpu().contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]
