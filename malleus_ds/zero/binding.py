"""Parameters and buffers of a module by name, and pointing them at memory that we manage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """All places of one parameter or buffer in a module tree (several when it is shared)."""

    places: tuple[tuple[nn.Module, str], ...]
    names: tuple[str, ...]
    is_parameter: bool

    @property
    def tensor(self) -> Tensor:
        module, name = self.places[0]
        table = module._parameters if self.is_parameter else module._buffers
        tensor = table[name]
        assert tensor is not None
        return tensor

    def point_at(self, view: Tensor) -> None:
        """Make the tensor use the memory of ``view`` (same shape and dtype).

        A parameter keeps its identity where torch allows it, so that references to it stay valid.
        """
        tensor = self.tensor
        if self.is_parameter and tensor.device == view.device:
            tensor.data = view
            return
        replacement = nn.Parameter(view, tensor.requires_grad) if self.is_parameter else view
        if self.is_parameter:
            replacement.__dict__.update(tensor.__dict__)
        for module, name in self.places:
            if self.is_parameter:
                module._parameters[name] = replacement  # type: ignore[assignment]
            else:
                module._buffers[name] = replacement

    def release(self) -> None:
        """Drop the memory but keep shape and dtype, for a module that the user still refers to."""
        self.point_at(torch.empty_like(self.tensor, device="meta"))


def tensor_slots(module: nn.Module) -> dict[str, TensorSlot]:
    """All parameters and buffers below ``module`` by their first name, shared ones once."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[int, list[str]] = {}
    parameters: set[int] = set()
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for is_parameter, name, tensor in _tensors(owner):
            names.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
            places.setdefault(id(tensor), []).append((owner, name))
            if is_parameter:
                parameters.add(id(tensor))
    return {
        known_as[0]: TensorSlot(tuple(places[key]), tuple(known_as), key in parameters)
        for key, known_as in names.items()
    }


def _tensors(owner: nn.Module) -> Iterator[tuple[bool, str, Tensor]]:
    for name, parameter in owner._parameters.items():
        if parameter is not None:
            yield True, name, parameter
    for name, buffer in owner._buffers.items():
        if buffer is not None:
            yield False, name, buffer
