"""What a stage gives to the next: a tensor, or a tuple of tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def contiguous(value: Any) -> Any:
    """Tensors, alone or in a tuple, without gaps."""
    if isinstance(value, tuple):
        return tuple(map(contiguous, value))
    return value.contiguous() if isinstance(value, Tensor) else value


def needs_gradient(value: Any) -> bool:
    """Whether some tensor of a stage's output is part of the backward pass."""
    tensors = value if isinstance(value, tuple) else (value,)
    return any(tensor.requires_grad for tensor in tensors)
