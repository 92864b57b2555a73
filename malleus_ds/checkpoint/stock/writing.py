"""Writing a checkpoint that DeepSpeed's own pipeline engine loads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from malleus_ds.checkpoint.directory import LATEST, check_tag, discard
from malleus_ds.checkpoint.disk import Disk
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import Manifest
from malleus_ds.checkpoint.opening import Checkpoint, Reader
from malleus_ds.checkpoint.part_file import Interval
from malleus_ds.checkpoint.stock.layout import (
    StockLayout,
    check_layout,
    groups_of,
    num_layers,
    partition_size,
    runs_within,
    stage_tensors,
)
from malleus_ds.checkpoint.stock.module import owner_of
from malleus_ds.checkpoint.stock.scalars import OWN_KEYS, UNKNOWN
from malleus_ds.checkpoint.values import decode
from malleus_ds.checkpoint.whole import read_whole
from malleus_ds.placement import PARAMETER, LogicalTensor
from malleus_ds.zero.precision import MASTER


def divide_layers(manifest: Manifest, num_stages: int, method: str) -> tuple[int, ...]:
    """Boundaries of the stages as DeepSpeed divides the layers. method: "parameters" or "uniform".

    Raises `CheckpointError`.
    """
    count = num_layers(manifest)
    if not 1 <= num_stages <= count:
        raise CheckpointError(f"num_stages is {num_stages}: give 1 to {count}, the model's number of layers")
    if method == "uniform":
        return tuple(partition_uniform(num_items=count, num_parts=num_stages))
    weights = [0] * count
    for tensor in manifest.tensors:
        for layer in tensor.layers if tensor.group is not None else ():
            weights[layer] += tensor.num_elements
    return tuple(partition_balanced(weights=weights, num_parts=num_stages))


def write_stock(checkpoint: Checkpoint, save_dir: Path, tag: str, layout: StockLayout) -> Path:
    """Write ``checkpoint`` for a job with ``layout``; returns its directory, the latest of ``save_dir`` then.

    Optimizer state of a partition (without ZeRO: of a stage) is on the host at once.
    Raises `CheckpointError`.
    """
    check_tag(tag)
    check_layout(layout, checkpoint.manifest, checkpoint.path)
    clash = sorted(OWN_KEYS & checkpoint.manifest.client_state.keys())
    if clash:
        raise CheckpointError(f"client_state has {clash}, names that DeepSpeed uses itself: rename them")
    target = save_dir / tag
    if target.exists():
        raise CheckpointError(f"{target} exists: give another directory or tag, or remove it")
    disk, temporary = Disk(), save_dir / f"{tag}.tmp-stock"
    if temporary.exists():
        disk.remove_tree(temporary)
    disk.make_directory(temporary)
    try:
        with checkpoint.reader() as reader:
            _Writer(checkpoint.manifest, reader, disk, temporary, layout).write()
        disk.sync_directory(temporary)
        disk.rename(temporary, target)
    except BaseException:
        discard(disk, temporary)
        raise
    disk.write_file(save_dir / LATEST, tag.encode())
    return target


@dataclass(frozen=True, slots=True)
class _Writer:
    manifest: Manifest
    reader: Reader
    disk: Disk
    directory: Path
    layout: StockLayout

    def write(self) -> None:
        # DeepSpeed looks for a file of every layer that is a module, with or without tensors.
        for layer in range(num_layers(self.manifest)):
            content = OrderedDict(
                (tensor.name.removeprefix(f"{owner_of(tensor.name)}."), read_whole(self.reader, tensor))
                for tensor in self.manifest.tensors
                if layer in tensor.layers
            )
            self._save(f"layer_{layer:02d}-model_states.pt", content)
        for stage, (start, stop) in enumerate(self.layout.stages):
            tensors = stage_tensors(self.manifest.tensors, start, stop)
            self._save(f"mp_rank_{stage:02d}_model_states.pt", self._stage(tensors))
            if self.layout.zero_stage == 1:
                for rank in range(self.layout.num_replicas):
                    self._write_partition(stage, rank, tensors)

    def _save(self, name: str, content: Any) -> None:
        """On the disk, before ``latest`` names it."""
        with self.disk.create(self.directory / name) as file:
            torch.save(content, file)

    def _stage(self, tensors: Sequence[LogicalTensor]) -> dict[str, Any]:
        manifest, is_zero = self.manifest, self.layout.zero_stage == 1
        scheduler = manifest.lr_scheduler
        shapes = [
            OrderedDict((tensor.name, torch.Size(tensor.shape)) for tensor in group)
            for _, group in groups_of(tensors)
        ]
        return {
            "module": None,
            "buffer_names": [],
            "optimizer": self._whole_optimizer(tensors) if self.layout.zero_stage == 0 else None,
            "param_shapes": shapes if is_zero else None,
            "frozen_param_shapes": None,
            "shared_params": {} if is_zero else None,
            "frozen_param_fragments": None,
            "lr_scheduler": None if scheduler is None else decode(scheduler.state),
            "data_sampler": None,
            "random_ltd": None,
            **{name: manifest.position[name] for name in ("skipped_steps", "global_steps", "global_samples")},
            "dp_world_size": self.layout.num_replicas,
            "mp_world_size": len(self.layout.stages),
            "ds_config": _config(manifest),
            "ds_version": version("deepspeed"),
            **manifest.client_state,
        }

    def _whole_optimizer(self, tensors: Sequence[LogicalTensor]) -> dict[str, Any]:
        """Parameters are numbered over all groups."""
        state: dict[int, dict[str, Any]] = {}
        groups = []
        for group, members in groups_of(tensors):
            numbers = range(len(state), len(state) + len(members))
            for number, tensor in zip(numbers, members, strict=True):
                state[number] = decode(self.manifest.groups[group].shared)
                for name in self._states(group):
                    state[number][name] = read_whole(self.reader, tensor, name)
            groups.append({**decode(self.manifest.groups[group].options), "params": list(numbers)})
        return {
            "state": {number: values for number, values in state.items() if values},
            "param_groups": groups,
        }

    def _states(self, group: int) -> list[str]:
        return [name for name in self.manifest.groups[group].states if name != MASTER]

    def _write_partition(self, stage: int, rank: int, tensors: Sequence[LogicalTensor]) -> None:
        masters, paddings, mappings, groups = [], [], [], []
        state: dict[int, dict[str, Any]] = {}
        for number, (group, members) in enumerate(groups_of(tensors)):
            total = sum(tensor.num_elements for tensor in members)
            size = partition_size(total, self.layout.num_replicas)
            start = rank * size
            paddings.append(min(size, max(0, start + size - total)))
            state[number] = decode(self.manifest.groups[group].shared)
            for name in self._states(group):
                state[number][name] = self._partition(name, members, start, size)
            flat = self._partition(None, members, start, size)
            masters.append(flat[: size - paddings[-1]].clone())
            mappings.append(
                OrderedDict(
                    (run.name, fragment_address(numel=run.size, start=run.offset))
                    for run in runs_within(members, start, start + size)
                )
            )
            groups.append({**decode(self.manifest.groups[group].options), "params": [number]})
        content = {
            "overflow": False,
            "base_optimizer_state": _state_dict(state, groups),
            "single_partition_of_fp32_groups": masters,
            "zero_stage": 1,
            "group_paddings": paddings,
            "partition_count": [self.layout.num_replicas] * len(groups),
            "ds_version": version("deepspeed"),
            "param_slice_mappings": mappings,
            **_loss_scaler(self.manifest),
        }
        is_bf16 = any(tensor.dtype == "bfloat16" for tensor in self.manifest.tensors)
        prefix = "bf16_" if is_bf16 else ""
        self._save(
            f"{prefix}zero_pp_rank_{rank}_mp_rank_{stage:02d}_optim_states.pt",
            {"optimizer_state_dict": content, "ds_config": {}, "ds_version": version("deepspeed")},
        )

    def _partition(
        self, state: str | None, members: Sequence[LogicalTensor], start: int, size: int
    ) -> Tensor:
        """Elements ``[start, start + size)`` of a flat group. state: None for what the optimizer steps."""
        flat = torch.zeros(size)
        for run in runs_within(members, start, start + size):
            name = state
            if name is None:
                name = MASTER if self.reader.has(MASTER, run.name) else PARAMETER
            values = self.reader.read(Interval(name, run.name, run.first, run.first + run.size))
            flat[run.offset : run.offset + run.size] = values
        return flat


def _state_dict(state: Mapping[int, dict[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """As a torch optimizer's; before the first step there is no state."""
    return {"state": {number: values for number, values in state.items() if values}, "param_groups": groups}


def _config(manifest: Manifest) -> dict[str, Any]:
    """The entries of a config that readers of the files look up."""
    scheduler = manifest.lr_scheduler
    named = {} if scheduler is None or scheduler.type == UNKNOWN else {"scheduler": {"type": scheduler.type}}
    return {"optimizer": {"type": manifest.optimizer}, **named}


def _loss_scaler(manifest: Manifest) -> Mapping[str, Any]:
    """A static scale is a setting, which the job's config gives."""
    saved = manifest.loss_scaler
    if saved is None or saved.type != DynamicLossScaler.__name__:
        return {}
    scaler = DynamicLossScaler(
        init_scale=1, scale_window=1000, min_scale=1, delayed_shift=1, consecutive_hysteresis=False
    )
    vars(scaler).update(decode(saved.state))
    return {"loss_scaler": scaler, "dynamic_loss_scale": True}
