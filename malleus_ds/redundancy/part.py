"""A part: one rank's share of one generation in a host's memory, as two files.

``<name>.bin`` has the bytes, mapped into the process; ``<name>.json`` says what they are. The second is there
only while the bytes are whole: it goes first, and comes back last, by a rename. So a process may be killed at
any moment, and what it leaves either counts or does not. Files in a tmpfs outlive the processes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malleus_ds.checkpoint.part_file import Content, Interval
from malleus_ds.redundancy.errors import RedundancyError


@dataclass(frozen=True, slots=True)
class Section:
    """An interval in a part. dtype: torch's name without the prefix; offset: its first byte."""

    interval: Interval
    dtype: str
    offset: int

    @property
    def itemsize(self) -> int:
        itemsize: int = getattr(torch, self.dtype).itemsize
        return itemsize


@dataclass(frozen=True, slots=True)
class PartHeader:
    """What a part holds, and what else its generation needs.

    run: of which start of the job; step: optimizer steps so far; rank: whose share it is; hosts: by rank the
    hosts that keep its share, none where a rank holds nothing; num_bytes: of the data; model: digest of the
    logical tensors; manifest: JSON of a `Manifest` without tensors and files.
    """

    run: str
    step: int
    rank: int
    hosts: tuple[tuple[str, ...], ...]
    num_bytes: int
    model: str
    sections: tuple[Section, ...]
    manifest: str

    def to_json(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "sections"}
        sections = [[*asdict(s.interval).values(), s.dtype, s.offset] for s in self.sections]
        return json.dumps({**fields, "sections": sections}).encode()

    @classmethod
    def parse(cls, text: bytes) -> PartHeader:
        """Raises `ValueError`, `KeyError` or `TypeError` for anything that `to_json` did not write."""
        data: dict[str, Any] = json.loads(text)
        sections = (
            Section(Interval(state, tensor, start, stop), dtype, offset)
            for state, tensor, start, stop, dtype, offset in data.pop("sections")
        )
        hosts = tuple(tuple(names) for names in data.pop("hosts"))
        return cls(**data, hosts=hosts, sections=tuple(sections))


def lay_out(contents: Sequence[Content]) -> tuple[tuple[Section, ...], tuple[Content, ...], int]:
    """Where each content is in a part, the contents in this order, and the bytes in all.

    Large elements come first, so that all are aligned.
    """
    ordered = tuple(sorted(contents, key=lambda content: -content.values.element_size()))
    sections, offset = [], 0
    for content in ordered:
        sections.append(Section(content.interval, str(content.values.dtype).removeprefix("torch."), offset))
        offset += content.values.nbytes
    return tuple(sections), ordered, offset


class Part:
    """A part that this process writes, again and again.

    Raises `RedundancyError` when the host's memory is full.
    """

    def __init__(self, stem: Path) -> None:
        """stem: path without the suffix."""
        self._data_path, self._header_path = _paths(stem)
        self._data: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Of the data, which this process keeps mapped."""
        return 0 if self._data is None else self._data.numel()

    def begin(self, num_bytes: int) -> Tensor:
        """From now on the part counts no more; the bytes to write, uint8 ``[num_bytes]``."""
        self._header_path.unlink(missing_ok=True)
        if self._data is None or self._data.numel() != num_bytes:
            self._data = None
            self._data_path.unlink(missing_ok=True)
            with _explained(self._data_path, num_bytes):
                self._data_path.parent.mkdir(parents=True, exist_ok=True)
                with self._data_path.open("wb") as file:
                    # Takes the memory now: a mapped page for which there is none would kill the process.
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
            self._data = map_file(self._data_path, num_bytes)
        return self._data

    def finish(self, header: bytes) -> None:
        """All bytes are written: the part counts."""
        temporary = self._header_path.with_suffix(".tmp")
        with _explained(self._header_path, len(header)):
            temporary.write_bytes(header)
            temporary.replace(self._header_path)

    def remove(self) -> None:
        self._data = None
        for path in (self._header_path, self._data_path):
            path.unlink(missing_ok=True)


def map_file(path: Path, num_bytes: int) -> Tensor:
    """The bytes of a file as memory that is shared with it."""
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def read_header(stem: Path) -> PartHeader | None:
    """Of a part that counts, else None."""
    data_path, header_path = _paths(stem)
    try:
        header = PartHeader.parse(header_path.read_bytes())
        return header if data_path.stat().st_size == header.num_bytes else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def map_part(stem: Path, num_bytes: int) -> Tensor:
    """The bytes of a part, uint8 ``[num_bytes]``."""
    return map_file(_paths(stem)[0], num_bytes)


def _paths(stem: Path) -> tuple[Path, Path]:
    return stem.with_name(f"{stem.name}.bin"), stem.with_name(f"{stem.name}.json")


@contextlib.contextmanager
def _explained(path: Path, num_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RedundancyError(
            f"{path}: cannot hold {num_bytes} bytes ({error.strerror}): give malleus.redundancy.directory "
            f"more memory, or disable malleus.redundancy"
        ) from error
