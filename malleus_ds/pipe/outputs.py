"""What a stage gives to the next: a tensor, or a tuple of tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def tensors_with_gradient(value: Any) -> list[Tensor]:
    """Those of a stage's output that are part of the backward pass."""
    tensors = value if isinstance(value, tuple) else (value,)
    return [tensor for tensor in tensors if tensor.requires_grad]
