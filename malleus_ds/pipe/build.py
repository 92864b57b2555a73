"""Building a layer whose values arrive later."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec
from torch import Tensor, nn

_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})


def build_without_data(spec: LayerSpec) -> nn.Module:
    """Build a layer with tensors that have a shape but no memory, where that is possible.

    A layer that reads values in its constructor, or keeps tensors outside its parameters and buffers,
    is built for real.
    """
    try:
        with torch.device("meta"):
            module: nn.Module = spec.build()
    except Exception:  # whatever a constructor makes of tensors without values; the real one tells more
        return _build(spec)
    has_hidden = any(_has_hidden_tensor(vars(submodule)) for submodule in module.modules())
    return _build(spec) if has_hidden else module


def _build(spec: LayerSpec) -> nn.Module:
    module: nn.Module = spec.build()
    return module


def _has_hidden_tensor(value: Any) -> bool:
    """Whether plain attributes hold a tensor without memory, also in containers."""
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, dict):
        return any(_has_hidden_tensor(item) for key, item in value.items() if key not in _REGISTERED)
    return isinstance(value, list | tuple | set) and any(map(_has_hidden_tensor, value))
