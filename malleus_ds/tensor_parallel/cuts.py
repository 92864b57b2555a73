"""What of a layer tensor parallelism cuts, and the shapes before the cut."""

from __future__ import annotations

from torch import Tensor, nn

from malleus_ds.tensor_parallel.group import TensorParallelError, TensorParallelGroup
from malleus_ds.tensor_parallel.layers import TensorParallelModule


def cut_degrees(layer: nn.Module) -> dict[int, int]:
    """By ``id`` of each parameter that is cut along dim 0: into how many parts it is now (1: whole)."""
    return {
        id(getattr(module, name)): module.group.degree
        for module in layer.modules()
        if isinstance(module, TensorParallelModule)
        for name in module.cut_parameters
        if getattr(module, name) is not None
    }


def whole_shape(tensor: Tensor, degree: int | None) -> tuple[int, ...]:
    """Shape before the cut. degree: of `cut_degrees`, None for a tensor that is not cut."""
    shape = tuple(tensor.shape)
    return shape if degree is None else (shape[0] * degree, *shape[1:])


def whole_shapes(layer: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Of all parameters, before the cut."""
    degrees = cut_degrees(layer)
    return tuple(whole_shape(parameter, degrees.get(id(parameter))) for parameter in layer.parameters())


def check_units(layer: nn.Module, max_degree: int) -> None:
    """Raise `TensorParallelError` unless the units of all modules can be cut for ``max_degree``."""
    for module in layer.modules():
        if isinstance(module, TensorParallelModule) and module.units is not None:
            name, num_units = module.units
            if num_units % max_degree:
                raise TensorParallelError(
                    f"{name} of a {type(module).__name__} is {num_units}, but the job allows TP groups of "
                    f"{max_degree} ranks: give a multiple, or a smaller malleus.tensor_parallel.max_degree"
                )


def set_group(layer: nn.Module, group: TensorParallelGroup) -> None:
    """Another group of the same degree, in which this rank has the same place."""
    for module in layer.modules():
        if isinstance(module, TensorParallelModule):
            module.group = group
