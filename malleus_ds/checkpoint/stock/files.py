"""Which files a checkpoint of DeepSpeed's pipeline engine has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from malleus_ds.checkpoint.errors import CheckpointError

_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_STAGE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_PARTITION = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")


@dataclass(frozen=True, slots=True)
class StockFiles:
    """layers: the states of each layer's module; stages: counters, schedulers and, without ZeRO, the
    optimizer of each pipeline stage; partitions: by stage, the optimizer's flat partitions, in the order of
    the data-parallel ranks (none without ZeRO)."""

    directory: Path
    layers: Mapping[int, Path]
    stages: tuple[Path, ...]
    partitions: Mapping[int, tuple[Path, ...]]


def is_stock(directory: Path) -> bool:
    """Whether it looks like a checkpoint that DeepSpeed wrote."""
    return any(_STAGE.fullmatch(path.name) for path in directory.glob("mp_rank_*"))


def find_files(directory: Path) -> StockFiles:
    """Raises `CheckpointError` for a checkpoint with missing files, or of another kind of engine."""
    layers: dict[int, Path] = {}
    stages: dict[int, Path] = {}
    partitions: dict[int, dict[int, Path]] = {}
    for path in sorted(directory.iterdir()):
        if match := _LAYER.fullmatch(path.name):
            if int(match[2] or 0) > 0:
                raise CheckpointError(
                    f"{path}: a part of a layer that was cut for tensor parallelism in a way that only its "
                    f"program knows: merge the parts and save with one rank per layer"
                )
            layers[int(match[1])] = path
        elif match := _STAGE.fullmatch(path.name):
            stages[int(match[1])] = path
        elif match := _PARTITION.fullmatch(path.name):
            partitions.setdefault(int(match[2]), {})[int(match[1])] = path
    if not layers:
        raise CheckpointError(
            f"{directory}: has no files layer_*-model_states.pt: only checkpoints of DeepSpeed's pipeline "
            f"engine (PipelineModule) can be read"
        )
    _check_numbers(directory, "mp_rank_{:02d}_model_states.pt", stages)
    for stage, files in partitions.items():
        _check_numbers(directory, f"zero_pp_rank_{{}}_mp_rank_{stage:02d}_optim_states.pt", files)
    if partitions:
        _check_numbers(directory, "zero_pp_rank_0_mp_rank_{:02d}_optim_states.pt", partitions, len(stages))
    return StockFiles(
        directory,
        layers,
        tuple(stages[stage] for stage in sorted(stages)),
        {stage: tuple(files[rank] for rank in sorted(files)) for stage, files in partitions.items()},
    )


def _check_numbers(
    directory: Path, pattern: str, numbered: Mapping[int, object], count: int | None = None
) -> None:
    """Files are numbered from 0 on, without a gap."""
    for number in range(max(numbered) + 1 if count is None else count):
        if number not in numbered:
            raise CheckpointError(f"{directory / pattern.format(number)}: is missing")
