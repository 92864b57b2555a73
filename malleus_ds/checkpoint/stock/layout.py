"""The pipeline of DeepSpeed's that a checkpoint is written for: who of its ranks holds what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import Manifest
from malleus_ds.checkpoint.stock.flat_state import Run
from malleus_ds.checkpoint.stock.module import TIED
from malleus_ds.placement import LogicalTensor

_ALIGNMENT = 2
"""DeepSpeed pads a flat group to a multiple of so many elements per data-parallel rank."""


@dataclass(frozen=True, slots=True)
class StockLayout:
    """boundaries: stage s has the layers ``[boundaries[s], boundaries[s + 1])``; zero_stage: 0 or 1; None: no
    optimizer state."""

    boundaries: tuple[int, ...]
    num_replicas: int
    zero_stage: int | None

    @property
    def stages(self) -> list[tuple[int, int]]:
        return list(pairwise(self.boundaries))


def num_layers(manifest: Manifest) -> int:
    """Layers without tensors behind the last one with some are known from a plan alone."""
    stages = [stage for pipeline in manifest.plan.get("pipelines", ()) for stage in pipeline["stages"]]
    ends = [int(stage["layers"][1]) for stage in stages]
    return max([*ends, *(1 + max(tensor.layers) for tensor in manifest.tensors)])


def check_layout(layout: StockLayout, manifest: Manifest, path: object) -> None:
    """Raise `CheckpointError` unless the checkpoint at ``path`` can be written so."""
    count = num_layers(manifest)
    bounds = layout.boundaries
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != count or any(a >= b for a, b in pairwise(bounds)):
        raise CheckpointError(
            f"boundaries are {list(bounds)}: give ascending layers from 0 to {count}, the model's number of "
            f"layers, one more than stages"
        )
    if layout.num_replicas < 1:
        raise CheckpointError(f"num_replicas is {layout.num_replicas}: it must be at least 1")
    if layout.zero_stage is None:
        return
    if layout.zero_stage not in (0, 1):
        raise CheckpointError(f"zero_stage is {layout.zero_stage}: a pipeline of DeepSpeed's uses 0 or 1")
    if not manifest.groups:
        raise CheckpointError(f"{path}: has no optimizer state: write the weights only")
    if not manifest.in_order:
        raise CheckpointError(
            f"{path}: does not know the order of the parameters, or all layers of its ties, which "
            f"DeepSpeed's optimizer state needs: load and save it once in a job, import it with --tied, or "
            f"write the weights only"
        )
    low = sorted({t.dtype for t in manifest.tensors if t.group is not None and t.dtype != "float32"})
    if layout.zero_stage == 0 and low:
        raise CheckpointError(
            f"{path}: has parameters in {', '.join(low)}: without ZeRO, the layout of their masters depends "
            f"on the kind of optimizer: use zero_stage 1"
        )


def stage_tensors(tensors: Sequence[LogicalTensor], start: int, stop: int) -> list[LogicalTensor]:
    """Of the layers ``[start, stop)``, in the order of the stage's module: tied modules come first."""
    held = [(t, [layer for layer in t.layers if start <= layer < stop]) for t in tensors]
    inside = [(not tensor.name.startswith(TIED), used[0], tensor) for tensor, used in held if used]
    return [tensor for *_, tensor in sorted(inside, key=lambda entry: entry[:2])]


def groups_of(tensors: Sequence[LogicalTensor]) -> list[tuple[int, list[LogicalTensor]]]:
    """The trained tensors by parameter group; DeepSpeed drops groups without any."""
    present = sorted({tensor.group for tensor in tensors if tensor.group is not None})
    return [(group, [tensor for tensor in tensors if tensor.group == group]) for group in present]


def partition_size(num_elements: int, num_replicas: int) -> int:
    """Elements of each data-parallel rank's part of a flat group, with padding."""
    alignment = _ALIGNMENT * num_replicas
    return -(-num_elements // alignment) * _ALIGNMENT


def runs_within(tensors: Sequence[LogicalTensor], start: int, stop: int) -> Iterator[Run]:
    """What of each tensor is in the elements ``[start, stop)`` of a flat group."""
    first = 0
    for tensor in tensors:
        low, high = max(start, first), min(stop, first + tensor.num_elements)
        if low < high:
            yield Run(tensor.name, low - first, low - start, high - low)
        first += tensor.num_elements
