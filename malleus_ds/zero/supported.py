"""Which optimizers ZeRO-1 over sync groups can step: those that treat every element by itself."""

from __future__ import annotations

import torch
from deepspeed.utils import logger

from malleus_ds.config import ConfigError

_NEED_WHOLE_PARAMETERS = frozenset({"lamb", "fusedlamb", "muon", "adafactor", "lbfgs", "sparseadam", "lars"})
_COMMUNICATE_THEMSELVES = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})
_ELEMENT_WISE_MODULES = ("torch.optim.", "deepspeed.ops.adam", "deepspeed.ops.lion", "deepspeed.ops.adagrad")


def check_optimizer_name(name: str) -> None:
    """Raise `ConfigError` for an ``optimizer.type`` whose step cannot run on a shard of a parameter."""
    if name.lower() in _NEED_WHOLE_PARAMETERS:
        reason = "it needs norms or factors of whole parameters, but each rank steps a part of them"
    elif name.lower() in _COMMUNICATE_THEMSELVES:
        reason = "it reduces gradients by itself, in equal data-parallel groups"
    else:
        return
    raise ConfigError(
        f"optimizer.type is {name!r}: {reason}; use Adam, AdamW, SGD or another element-wise one"
    )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """The same for an optimizer of the user's; one that we do not know gets a warning."""
    kind = type(optimizer)
    check_optimizer_name(kind.__name__)
    if not kind.__module__.startswith(_ELEMENT_WISE_MODULES):
        logger.warning(
            f"{kind.__module__}.{kind.__name__} must treat every element by itself: each rank steps a "
            f"part of each parameter"
        )
