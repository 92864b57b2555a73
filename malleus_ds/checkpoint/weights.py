"""Weights as safetensors files, for other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from malleus_ds.checkpoint.directory import discard
from malleus_ds.checkpoint.disk import Disk
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.opening import Checkpoint, Reader
from malleus_ds.checkpoint.whole import read_weight
from malleus_ds.placement import LogicalTensor

SHARD_BYTES = 5 * 10**9
"""As Hugging Face's libraries do."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor and its name in the files; is_transposed: its two dimensions change places there."""

    tensor: LogicalTensor
    name: str
    is_transposed: bool = False


def own_names(checkpoint: Checkpoint) -> list[Weight]:
    """All tensors by their global names."""
    return [Weight(tensor, tensor.name) for tensor in checkpoint.manifest.tensors]


def write_weights(
    checkpoint: Checkpoint,
    target: Path,
    weights: Sequence[Weight],
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    documents: Mapping[str, Any] | None = None,
) -> None:
    """Write ``target``, a new directory, with ``model.safetensors``, or several files and their index.

    dtype: of floating-point tensors (None: as they are; fp32 takes the masters); shard_bytes: of a file,
    which is on the host at once; documents: JSON files beside them, by name. Raises `CheckpointError`.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists: give another directory, or remove it")
    disk, temporary = Disk(), target.with_name(f"{target.name}.tmp-weights")
    if temporary.exists():
        disk.remove_tree(temporary)
    disk.make_directory(temporary)
    try:
        with checkpoint.reader() as reader:
            _write_shards(reader, temporary, _shards(weights, dtype, shard_bytes), dtype)
        for name, content in (documents or {}).items():
            disk.write_file(temporary / name, _json(content))
        disk.rename(temporary, target)
    except BaseException:
        discard(disk, temporary)
        raise


def _num_bytes(weight: Weight, dtype: torch.dtype | None) -> int:
    own: torch.dtype = getattr(torch, weight.tensor.dtype)
    kept = dtype is None or not own.is_floating_point
    return weight.tensor.num_elements * (own if kept or dtype is None else dtype).itemsize


def _shards(
    weights: Sequence[Weight], dtype: torch.dtype | None, shard_bytes: int
) -> list[tuple[list[Weight], int]]:
    """Runs of weights, and their bytes: at most ``shard_bytes``, or one tensor."""
    shards: list[tuple[list[Weight], int]] = [([], 0)]
    for weight in weights:
        members, total = shards[-1]
        size = _num_bytes(weight, dtype)
        if members and total + size > shard_bytes:
            members, total = [], 0
            shards.append((members, total))
        members.append(weight)
        shards[-1] = (members, total + size)
    return shards


def _write_shards(
    reader: Reader, directory: Path, shards: Sequence[tuple[list[Weight], int]], dtype: torch.dtype | None
) -> None:
    files: dict[str, str] = {}
    for number, (members, _) in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        tensors = {}
        for weight in members:
            values = read_weight(reader, weight.tensor, dtype)
            tensors[weight.name] = (values.T if weight.is_transposed else values).contiguous()
            files[weight.name] = name
        try:
            safetensors.torch.save_file(tensors, directory / name, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{directory / name}: cannot be written ({error})") from error
    if len(shards) > 1:
        total = sum(num_bytes for _, num_bytes in shards)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        Disk().write_file(directory / INDEX, _json(index))


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
