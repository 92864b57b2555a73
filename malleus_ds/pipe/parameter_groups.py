"""The parameter groups that a user gives, checked before an optimizer is made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from malleus_ds.config import ConfigError


def list_parameters(entries: list[Any]) -> None:
    """Replace generators in groups, which can be read once only, by lists."""
    for entry in entries:
        if isinstance(entry, dict):
            is_one = isinstance(entry["params"], Tensor)
            entry["params"] = [entry["params"]] if is_one else list(entry["params"])


def check_parameters(entries: list[Any], module: nn.Module) -> None:
    """Raise `ConfigError` for parameters of another module: they would never be trained, silently.

    entries: parameters, or groups that list them.
    """
    known = {id(parameter) for parameter in module.parameters()}
    for entry in entries:
        for parameter in entry["params"] if isinstance(entry, dict) else [entry]:
            if id(parameter) not in known:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} is given to the optimizer, but it is "
                    f"not in the module: pass parameters of this module, or none for all"
                )


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """What must be equal on all ranks: the class, and the options of each parameter group."""
    groups = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} {groups}"
