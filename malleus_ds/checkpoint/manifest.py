"""``manifest.json``: what a checkpoint holds, and which file has what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.part_file import FileEntry, Interval
from malleus_ds.placement import LogicalTensor

FILE_NAME = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """A parameter group: its options (encoded), the dtypes of its element-wise state tensors, and the
    values that all its tensors share, such as the step count (encoded)."""

    options: Mapping[str, Any]
    states: Mapping[str, str]
    shared: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StateEntry:
    """The state of an object with a class, such as the LR scheduler (encoded)."""

    type: str
    state: Any


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint without its tensors' elements.

    optimizer: class of the torch optimizer; position: steps and samples so far; seeds: of dropout, sample
    order and initial weights (empty where unknown); plan: the one it was saved under, which loading does not
    need (empty where unknown); in_order: the tensors of each layer are in the order of its module, and all
    layers of ties are known, as other layouts need it.
    """

    tensors: tuple[LogicalTensor, ...]
    files: tuple[FileEntry, ...]
    optimizer: str
    groups: tuple[GroupEntry, ...]
    lr_scheduler: StateEntry | None
    loss_scaler: StateEntry | None
    position: Mapping[str, int]
    seeds: Mapping[str, int]
    plan: Mapping[str, Any]
    client_state: Mapping[str, Any]
    in_order: bool = False

    def to_json(self) -> bytes:
        content = asdict(self)
        content["files"] = [file_to_dict(file) for file in self.files]
        data = {"version": FORMAT_VERSION, "sha256": _digest(content), "content": content}
        return json.dumps(data).encode()

    @classmethod
    def parse(cls, text: bytes, path: Path) -> Manifest:
        """Raises `CheckpointError` that names the file when it is damaged, or of another version."""
        try:
            data = json.loads(text)
            version, digest, content = data["version"], data["sha256"], data["content"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged, or not a manifest of malleus_ds") from error
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format version {version!r}, but this malleus_ds reads {FORMAT_VERSION}: use the "
                f"malleus_ds that wrote it"
            )
        if digest != _digest(content):
            raise CheckpointError(f"{path}: damaged (its checksum is wrong)")
        return cls._from_content(content)

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> Manifest:
        """The checksum was right, so this was written by `to_json`."""
        return cls(
            tensors=tuple(
                LogicalTensor(**{**item, "shape": tuple(item["shape"]), "layers": tuple(item["layers"])})
                for item in content["tensors"]
            ),
            files=tuple(file_from_dict(item) for item in content["files"]),
            optimizer=content["optimizer"],
            groups=tuple(GroupEntry(**item) for item in content["groups"]),
            lr_scheduler=_state_entry(content["lr_scheduler"]),
            loss_scaler=_state_entry(content["loss_scaler"]),
            position=content["position"],
            seeds=content["seeds"],
            plan=content["plan"],
            client_state=content["client_state"],
            in_order=content.get("in_order", False),
        )


def read_manifest(directory: Path) -> bytes:
    """The text of a checkpoint's manifest."""
    path = directory / FILE_NAME
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def file_to_dict(entry: FileEntry) -> dict[str, Any]:
    """For JSON."""
    intervals = [[i.state, i.tensor, i.start, i.stop] for i in entry.intervals]
    return {
        "name": entry.name,
        "num_bytes": entry.num_bytes,
        "sha256": entry.sha256,
        "intervals": intervals,
    }


def file_from_dict(data: Mapping[str, Any]) -> FileEntry:
    """The inverse of `file_to_dict`."""
    intervals = tuple(Interval(*item) for item in data["intervals"])
    return FileEntry(data["name"], data["num_bytes"], data["sha256"], intervals)


def _state_entry(data: Mapping[str, Any] | None) -> StateEntry | None:
    return None if data is None else StateEntry(**data)


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
