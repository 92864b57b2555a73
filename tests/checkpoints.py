"""Checkpoints that tests make and read without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from malleus_ds.checkpoint.importing import write_checkpoint
from malleus_ds.checkpoint.manifest import GroupEntry, Manifest, StateEntry
from malleus_ds.checkpoint.part_file import Content, Interval
from malleus_ds.checkpoint.values import encode
from malleus_ds.placement import PARAMETER, LogicalTensor

ADAM_STATES = ("exp_avg", "exp_avg_sq")


def write_own(
    modules: nn.Module,
    save_dir: Path,
    ties: Mapping[str, tuple[int, ...]] | None = None,
    has_optimizer: bool = False,
    frozen: str = "",
    **fields: object,
) -> Path:
    """A checkpoint ``step3`` of modules that are named as a pipeline names them, with Adam's state, whose
    elements are the parameters' plus 1 and plus 2. frozen: name of one without; fields: of the manifest."""
    tensors, contents = [], []
    for name, parameter in modules.named_parameters():
        values = parameter.detach().reshape(-1)
        key = name.split(".")[1]
        layers = (ties or {})[key] if name.startswith("tied_modules.") else (int(name.split(".")[0]),)
        kind, size = str(values.dtype).removeprefix("torch."), values.element_size()
        group = 0 if has_optimizer and name != frozen else None
        tensors.append(LogicalTensor(name, tuple(parameter.shape), kind, size, layers, group))
        contents.append(Content(Interval(PARAMETER, name, 0, len(values)), values))
        if group is not None:
            states = {state: values.float() + 1 + index for index, state in enumerate(ADAM_STATES)}
            if values.dtype != torch.float32:
                states["master"] = values.float()
            contents += [Content(Interval(state, name, 0, len(values)), v) for state, v in states.items()]
    options = {
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decoupled_weight_decay": True,
    }
    shared = {"step": encode(torch.tensor(3.0), "step")}
    entry = GroupEntry(encode(options, "options"), dict.fromkeys(ADAM_STATES, "float32"), shared)
    manifest = Manifest(
        tensors=tuple(tensors),
        files=(),
        optimizer="AdamW" if has_optimizer else "",
        groups=(entry,) if has_optimizer else (),
        lr_scheduler=StateEntry("WarmupLR", {"last_batch_iteration": 2}),
        loss_scaler=None,
        position={"global_steps": 3, "global_samples": 48, "skipped_steps": 0, "micro_steps": 0},
        seeds={},
        plan={},
        client_state={"epoch": 1},
        in_order=True,
    )
    return write_checkpoint(save_dir, "step3", replace(manifest, **fields), contents)  # type: ignore[arg-type]


def stored_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors in safetensors files; those of a checkpoint of ours by name, whole, and one-dimensional
    unless their manifest gives their shape."""
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        for key, values in safetensors.torch.load_file(path).items():
            tensors[key.removeprefix(f"{PARAMETER}/").removesuffix("@0")] = values
    if (directory / "manifest.json").exists():
        manifest = Manifest.parse((directory / "manifest.json").read_bytes(), directory)
        shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
        tensors = {name: values.view(shapes[name]) for name, values in tensors.items() if name in shapes}
    return tensors
