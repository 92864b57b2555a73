"""What DeepSpeed's ``"bf16"``, ``"fp16"`` and ``"data_types"`` sections ask for."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScalerBase

from malleus_ds.config import ConfigError

_FP32 = (None, "fp32", "float32", "float", "torch.float32")


def check_precision(config: Any) -> None:
    """Raise `ConfigError` for what is not supported of a `DeepSpeedConfig`.

    Masters, optimizer state and accumulated gradients are in fp32.
    """
    for section, options, keys in (
        ("bf16", config.bfloat16_config, ("bf16_master_weights_and_grads", "bf16_optimizer_states")),
        ("fp16", config.float16_config, ("fp16_master_weights_and_grads",)),
    ):
        for key in keys:
            if getattr(options, key):
                raise ConfigError(
                    f"{section}.{key} is True: masters and optimizer state are kept in fp32; leave it out"
                )
    if config.grad_accum_dtype not in _FP32:
        raise ConfigError(
            f"data_types.grad_accum_dtype is {config.grad_accum_dtype!r}: gradients are accumulated in fp32; "
            f'give "fp32", or leave it out'
        )


def make_loss_scaler(config: Any) -> LossScalerBase | None:
    """DeepSpeed's loss scaler, static or dynamic, for fp16; None otherwise."""
    options = config.float16_config
    if not options.enabled:
        return None
    return CreateLossScaler(
        dtype=torch.half,
        static_loss_scale=options.loss_scale,
        dynamic_scaling=options.loss_scale == 0,
        dynamic_loss_args=options.dynamic_loss_scale_args(),
    )


def skips_overflow(config: Any) -> bool:
    """Whether a step with a gradient that is not finite changes nothing, as in DeepSpeed."""
    bf16 = config.bfloat16_config
    return bool(config.float16_config.enabled or (bf16.enabled and bf16.check_grad_overflow))
