"""What a checkpoint holds of an engine beside tensors: describing it, comparing it, and putting it back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.utils import logger

from malleus_ds.checkpoint.contents import logical_tensors
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import GroupEntry, Manifest, StateEntry
from malleus_ds.checkpoint.stock.scalars import UNKNOWN
from malleus_ds.checkpoint.values import decode, encode
from malleus_ds.pipe.evaluation import Evaluation
from malleus_ds.placement import LogicalTensor
from malleus_ds.zero.state import GroupState

_POSITION = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how to compute a step, not which one: the job's own stay."""
_NUM_NAMES = 3
"""Tensors that a message names."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to load beside parameters and buffers. strict: the checkpoint must have the same tensors."""

    strict: bool
    optimizer: bool
    lr_scheduler: bool
    position: bool


def describe(
    engine: Evaluation,
    groups: Mapping[int, GroupState],
    client_state: Mapping[str, Any],
    left_out: Collection[str],
) -> Manifest:
    """The manifest of a checkpoint, without files. groups: merged over the ranks."""
    scheduler, scaler = engine.lr_scheduler, engine.optimizer.loss_scaler
    entries = []
    for index, group in enumerate(engine.optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        held = groups.get(index, GroupState())
        entries.append(GroupEntry(encode(options, f"param_groups[{index}]"), held.dtypes, held.shared))
    kept = [tensor for tensor in logical_tensors(engine.optimizer) if tensor.name not in left_out]
    order = {name: position for position, name in enumerate(engine.registration_order)}
    return Manifest(
        tensors=tuple(sorted(kept, key=lambda tensor: (tensor.layers, order[tensor.name]))),
        files=(),
        optimizer=type(engine.optimizer.optimizer).__name__,
        groups=tuple(entries),
        lr_scheduler=None if scheduler is None else _entry(scheduler, scheduler.state_dict()),
        loss_scaler=None if scaler is None else _entry(scaler, _scaler_state(scaler)),
        position={name: getattr(engine, name) for name in _POSITION},
        seeds=_seeds(engine),
        plan=engine.plan.to_dict(),
        client_state=client_state,
        in_order=True,
    )


def _entry(thing: Any, state: Any) -> StateEntry:
    kind = type(thing).__name__
    return StateEntry(kind, encode(state, kind))


def _scaler_state(scaler: Any) -> dict[str, Any]:
    """DeepSpeed's loss scalers are plain numbers."""
    return {name: value for name, value in vars(scaler).items() if isinstance(value, int | float)}


def _seeds(engine: Evaluation) -> dict[str, int]:
    return {"seed": engine.malleus_config.seed, "base_seed": engine.module.base_seed}


def check(engine: Evaluation, manifest: Manifest, wanted: Wanted, path: str) -> None:
    """Raise `CheckpointError`, which names ``path``, unless the checkpoint fits this job."""
    if wanted.optimizer and not manifest.groups:
        raise CheckpointError(f"{path}: has weights alone: load it with load_module_only=True")
    _check_tensors(manifest.tensors, logical_tensors(engine.optimizer), wanted, path)
    kind, num_groups = type(engine.optimizer.optimizer).__name__, len(engine.optimizer.param_groups)
    is_other = manifest.optimizer not in (UNKNOWN, kind) or len(manifest.groups) != num_groups
    if wanted.optimizer and is_other:
        raise CheckpointError(
            f"{path}: has {manifest.optimizer} with {len(manifest.groups)} parameter groups, but the job has "
            f"{kind} with {num_groups}: use the same, or load_optimizer_states=False"
        )
    scheduler, saved = engine.lr_scheduler, manifest.lr_scheduler
    if wanted.lr_scheduler and scheduler is not None:
        saved_type = "no LR scheduler" if saved is None else saved.type
        if saved_type not in (UNKNOWN, type(scheduler).__name__):
            raise CheckpointError(
                f"{path}: has {saved_type}, but the job has {type(scheduler).__name__}: use the same, or "
                f"load_lr_scheduler_states=False"
            )


def _check_tensors(
    saved: Collection[LogicalTensor], own: Collection[LogicalTensor], wanted: Wanted, path: str
) -> None:
    by_name = {tensor.name: tensor for tensor in saved}
    missing = [tensor.name for tensor in own if tensor.name not in by_name]
    unknown = sorted(by_name.keys() - {tensor.name for tensor in own})
    if wanted.strict and (missing or unknown):
        raise CheckpointError(
            f"{path}: of another model: it lacks {len(missing)} tensors {missing[:_NUM_NAMES]} and has "
            f"{len(unknown)} unknown ones {unknown[:_NUM_NAMES]}: build the same layers, or pass "
            f"load_module_strict=False"
        )
    for tensor in own:
        other = by_name.get(tensor.name, tensor)
        for what in ("shape", "dtype", *(("group",) if wanted.optimizer else ())):
            if getattr(tensor, what) != getattr(other, what):
                raise CheckpointError(
                    f"{path}: of another model: {what} of {tensor.name!r} is {getattr(other, what)}, but "
                    f"{getattr(tensor, what)} in the job: make them equal"
                )


def put_back_scalars(engine: Evaluation, manifest: Manifest, wanted: Wanted) -> None:
    """Set the engine to where the checkpoint was taken."""
    if wanted.lr_scheduler and engine.lr_scheduler is not None and manifest.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(decode(manifest.lr_scheduler.state))
    if wanted.optimizer:
        for group, entry in zip(engine.optimizer.param_groups, manifest.groups, strict=True):
            options = decode(entry.options).items()
            group.update({name: value for name, value in options if name not in _IMPLEMENTATION})
        _put_back_scaler(engine.optimizer.loss_scaler, manifest.loss_scaler)
    if not wanted.position:
        return
    for name in _POSITION:
        setattr(engine, name, manifest.position[name])
    seeds = _seeds(engine)
    if manifest.seeds not in ({}, seeds) and engine.global_rank == 0:
        logger.warning(
            f"the checkpoint has the seeds {manifest.seeds}, but the job has {seeds}: dropout and the order "
            f"of the samples go on differently"
        )


def _put_back_scaler(scaler: Any, saved: StateEntry | None) -> None:
    """A static scale is a setting, which the job's config gives."""
    if saved is not None and saved.type == type(scaler).__name__ and scaler.dynamic:
        vars(scaler).update(decode(saved.state))
