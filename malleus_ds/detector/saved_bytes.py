"""How much memory autograd keeps for the backward of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def run_and_count(
    function: Callable[[Any], Any], inputs: Any, constants: Iterable[Tensor]
) -> tuple[Any, int]:
    """``function(inputs)``, and the bytes that stay for its backward.

    Counts each memory block once, whatever views of it are saved: what autograd saves, and the input,
    which stays alive at least at the start of a stage. Not the output, which is the next layer's
    input (so one that a layer passes on counts where it ends), nor the memory of ``constants``
    (parameters and buffers), which is there anyway.
    """
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.update(_blocks([tensor]))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = function(inputs)
    kept.update(_blocks(tensors_of(inputs)))
    excluded = _blocks(constants) | _blocks(tensors_of(outputs))
    return outputs, sum(size_bytes for block, size_bytes in kept.items() if block not in excluded)


def memory_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements of ``tensors``."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples and lists, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)


def _blocks(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of the memory under ``tensors``; sparse ones, which have several, left out."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
