"""What DeepSpeed's files hold beside tensors: counters, options, schedulers, and state of the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import GroupEntry, StateEntry
from malleus_ds.checkpoint.stock.flat_state import FlatState
from malleus_ds.checkpoint.values import check_json, encode

OWN_KEYS = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config",
    "ds_version", "sparse_tensor_module_names", "universal_checkpoint_info", "num_experts", "autoep_layers",
))  # fmt: skip
"""Keys of a stage's file that DeepSpeed writes; the others are client state."""
UNKNOWN = ""
"""Type of an LR scheduler or optimizer that the files do not tell: that of the job is taken."""
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


def position(stage: Mapping[str, Any]) -> dict[str, int]:
    """Steps and samples so far. A pipeline engine does not count micro-steps."""
    batch = (stage.get("ds_config") or {}).get("train_batch_size") or 0
    return {
        "global_steps": int(stage["global_steps"]),
        "global_samples": int(stage.get("global_samples", stage["global_steps"] * batch)),
        "skipped_steps": int(stage.get("skipped_steps", 0)),
        "micro_steps": 0,
    }


def client_state(stage: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The user's own entries that are JSON, and the names of the others."""
    kept: dict[str, Any] = {}
    left_out = []
    for name, value in stage.items():
        if name in OWN_KEYS:
            continue
        try:
            check_json(value, name)
            kept[name] = value
        except CheckpointError:
            left_out.append(name)
    return kept, tuple(left_out)


def lr_scheduler(stage: Mapping[str, Any], config: Mapping[str, Any]) -> StateEntry | None:
    state = stage.get("lr_scheduler")
    if state is None:
        return None
    named = (config.get("scheduler") or {}).get("type") or UNKNOWN
    return StateEntry(named, encode(dict(state), "lr_scheduler"))


def loss_scaler(stage: Mapping[str, Any], scaler: Any) -> StateEntry | None:
    """scaler: of a ZeRO partition; without ZeRO, the numbers are among the optimizer's."""
    if scaler is not None:
        numbers = {name: value for name, value in vars(scaler).items() if isinstance(value, int | float)}
        return StateEntry(type(scaler).__name__, numbers)
    optimizer = stage.get("optimizer") or {}
    if "cur_scale" not in optimizer:
        return None
    is_dynamic = bool(optimizer.get("dynamic_loss_scale"))
    numbers = {name: optimizer[name] for name in _SCALER_KEYS if name in optimizer}
    return StateEntry("DynamicLossScaler" if is_dynamic else "LossScaler", numbers)


def shared_state(state: FlatState, states: Mapping[str, str]) -> tuple[Any, Mapping[str, str], Any]:
    """Options, dtypes of the state tensors, and other state, as a `GroupEntry` has them."""
    options = encode(dict(state.options), f"param_groups[{state.group}]")
    return options, states, {name: encode(value, name) for name, value in state.shared.items()}


def optimizer_name(groups: Sequence[GroupEntry]) -> str:
    """Class of the torch optimizer, by its options, as the files do not name it; `UNKNOWN` for a rare one."""
    options = groups[0].options if groups else {}
    if "decoupled_weight_decay" in options:
        return "AdamW" if options["decoupled_weight_decay"] else "Adam"
    if "bias_correction" in options:
        return "DeepSpeedCPUAdam" if "amsgrad" in options else "FusedAdam"
    return "SGD" if "nesterov" in options else UNKNOWN
