"""Whole tensors of a checkpoint, one at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from malleus_ds.checkpoint.opening import Reader
from malleus_ds.checkpoint.part_file import Interval
from malleus_ds.placement import PARAMETER, LogicalTensor
from malleus_ds.zero.precision import MASTER


def read_whole(reader: Reader, tensor: LogicalTensor, state: str = PARAMETER) -> Tensor:
    """One state of a tensor, in its shape. Raises `CheckpointError` when elements are missing."""
    if tensor.num_elements == 0:
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    return reader.read(Interval(state, tensor.name, 0, tensor.num_elements)).view(tensor.shape)


def read_weight(reader: Reader, tensor: LogicalTensor, dtype: torch.dtype | None) -> Tensor:
    """A parameter or buffer; fractions in ``dtype`` (None: as they are), of the master if that is finer."""
    if dtype is None or not getattr(torch, tensor.dtype).is_floating_point:
        return read_whole(reader, tensor)
    is_finer = dtype.itemsize > tensor.itemsize and reader.has(MASTER, tensor.name)
    return read_whole(reader, tensor, MASTER if is_finer else PARAMETER).to(dtype)
