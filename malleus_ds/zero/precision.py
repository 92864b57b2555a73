"""Mixed precision: fp32 masters and fp32 gradients of parameters in bf16 or fp16."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from malleus_ds.placement import Bucket

MASTER = "master"
"""The state tensor that the torch optimizer steps, where parameters are in bf16 or fp16."""


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gradients of parameters of ``dtype`` are accumulated and reduced in: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def master_dtype(bucket: Bucket) -> torch.dtype | None:
    """dtype of a bucket's master; None when it has none: not optimized, or precise enough itself."""
    dtype: torch.dtype = getattr(torch, bucket.dtype)
    if bucket.group is None or gradient_dtype(dtype) == dtype:
        return None
    return gradient_dtype(dtype)


class GradientSinks:
    """Where the gradients of a module's parameters go: views of flat gradients."""

    def __init__(self) -> None:
        self._hooks: dict[str, RemovableHandle] = {}

    def connect(self, name: str, parameter: Tensor, sink: Tensor) -> None:
        """Let the gradients of a parameter add up in ``sink``, whatever it was connected to before."""
        self._disconnect(name)
        if parameter.dtype == sink.dtype:
            parameter.grad = sink  # autograd adds in place
            return
        parameter.grad = None
        hook = partial(_move_gradient, sink)
        self._hooks[name] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def disconnect_all(self) -> None:
        """Forget the sinks, so that their memory can be freed."""
        for name in list(self._hooks):
            self._disconnect(name)

    def _disconnect(self, name: str) -> None:
        hook = self._hooks.pop(name, None)
        if hook is not None:
            hook.remove()


def _move_gradient(sink: Tensor, parameter: nn.Parameter) -> None:
    assert parameter.grad is not None, "the hook runs after a gradient came"
    sink.add_(parameter.grad)
    parameter.grad = None
