"""Building a layer whose values arrive later."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FILLING = frozenset(
    {
        *("normal_", "uniform_", "trunc_normal_", "constant_", "zeros_", "ones_", "fill_", "zero_", "mul_"),
        *("xavier_normal_", "xavier_uniform_", "kaiming_normal_", "kaiming_uniform_", "orthogonal_"),
    }
)
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})


def build_without_data(spec: LayerSpec) -> nn.Module:
    """Build a layer with tensors that have a shape but no memory, where that is possible.

    A layer that reads values in its constructor, or keeps tensors outside its parameters and buffers,
    is built for real.
    """
    try:
        with torch.device("meta"), _WithoutFilling():
            module: nn.Module = spec.build()
    except Exception:  # whatever a constructor makes of tensors without values; the real one tells more
        return _build(spec)
    has_hidden = any(_has_hidden_tensor(vars(submodule)) for submodule in module.modules())
    return _build(spec) if has_hidden else module


class _WithoutFilling(TorchFunctionMode):
    """Operations that only set values do nothing to a tensor without memory, which saves most of the time of
    building a layer."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")  # as torch.nn.init names it
        if getattr(func, "__name__", None) in _FILLING and isinstance(filled, Tensor) and filled.is_meta:
            return filled
        return func(*args, **kwargs)


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
