"""What the checkpoint tests compare with: the state of the ranks, and of the files, element by element.

Neither uses the package's own reading or cutting of checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from malleus_ds import MalleusPipelineEngine

Pieces = list[tuple[str, str, int, Tensor]]
"""(state, tensor, first element, values) of each interval."""
Whole = dict[tuple[str, str], Tensor]
"""(state, tensor) -> all its elements."""


def held(engine: MalleusPipelineEngine) -> Pieces:
    """All that this rank holds, read from the optimizer's storages."""
    pieces: Pieces = []
    for storage in engine.optimizer.storages.values():
        offset = 0
        for piece in storage.bucket.pieces:
            size = piece.stop - piece.start
            own = [("parameter", storage.flat, storage.start, storage.start, storage.stop)]
            for shard in storage.shards:
                state = dict(engine.optimizer.state.get(shard.parameter, {}))
                if shard.parameter is not None and shard.parameter.dtype != storage.flat.dtype:
                    state["master"] = shard.parameter
                own += [
                    (name, value, shard.start, shard.start, shard.stop)
                    for name, value in state.items()
                    if isinstance(value, Tensor) and value.dim()
                ]
            for name, values, first, start, stop in own:
                low, high = max(start, offset), min(stop, offset + size)
                if low < high:
                    values = values[low - first : high - first].detach().clone()
                    pieces.append((name, piece.tensor, low - offset, values))
            offset += size
    return pieces


def gather_state(engine: MalleusPipelineEngine) -> Whole:
    """The whole state, from all ranks; asserts that holders agree bit by bit."""
    gathered: list[Pieces] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, held(engine))
    return assemble([piece for pieces in gathered for piece in pieces], engine.optimizer.shapes)


def assemble(pieces: Pieces, shapes: dict[str, tuple[int, ...]]) -> Whole:
    whole: Whole = {}
    known: Whole = {}
    for state, name, start, values in pieces:
        size = torch.Size(shapes[name]).numel()
        total = whole.setdefault((state, name), torch.zeros(size, dtype=values.dtype))
        is_known = known.setdefault((state, name), torch.zeros(size, dtype=torch.bool))
        part = slice(start, start + values.numel())
        assert torch.equal(total[part][is_known[part]], values[is_known[part]]), f"{state} of {name} differs"
        total[part], is_known[part] = values, True
    assert all(bool(mask.all()) for mask in known.values()), "elements are missing"
    return whole


def stored(directory: Path, shapes: dict[str, tuple[int, ...]]) -> Whole:
    """The whole state in the files, by their keys alone; asserts that each element is there once."""
    pieces: Pieces = []
    for path in directory.glob("*.safetensors"):
        for key, values in safetensors.torch.load_file(path).items():
            state, _, rest = key.partition("/")
            name, _, start = rest.rpartition("@")
            pieces.append((state, name, int(start), values))
    whole = assemble(pieces, shapes)
    num_stored = sum(values.numel() for _, _, _, values in pieces)
    assert num_stored == sum(values.numel() for values in whole.values()), "elements are there twice"
    return whole


def assert_same_state(actual: Whole, expected: Whole) -> None:
    """Bit by bit."""
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        assert values.dtype == actual[key].dtype, key
        assert torch.equal(actual[key].view(torch.uint8), values.view(torch.uint8)), key


def manifest_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "manifest.json").read_text())["content"]
    return content


def num_data_bytes(directory: Path) -> int:
    """Bytes of the files without their headers."""
    total = 0
    for path in directory.glob("*.safetensors"):
        header = int.from_bytes(path.read_bytes()[:8], "little")
        total += path.stat().st_size - 8 - header
    return total
