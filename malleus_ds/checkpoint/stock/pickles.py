"""Reading DeepSpeed's files, which are pickles, without running code that they name."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from malleus_ds.checkpoint.errors import CheckpointError


class Attributes:
    """Stands for an object of DeepSpeed's: its attributes, and none of its code."""


class LossScaler(Attributes):
    pass


class DynamicLossScaler(Attributes):
    pass


class FragmentAddress(Attributes):
    """numel: elements of a parameter in a flat partition; start: where they begin there."""

    numel: int
    start: int


_ZERO_STAGES = ("disabled", "optimizer_states", "gradients", "weights")


def _zero_stage(enumeration: type, name: str) -> int:
    """Stands for ``getattr``, by which Python 3.11.0 to 3.11.3 pickle members of enumerations.

    Knows DeepSpeed's ZeRO stages, for whose class ``int`` stands, and nothing else.
    """
    if enumeration is not int or name not in _ZERO_STAGES:
        raise pickle.UnpicklingError(f"GLOBAL getattr of {name}")
    return _ZERO_STAGES.index(name)


_STAND_INS: list[Any] = [
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_zero_stage, "__builtin__.getattr"),
    (_zero_stage, "builtins.getattr"),
]
"""What may stand in a file beside tensors and plain values, and what is made of it."""


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a file of ``torch.save``; its tensors are mapped, and read when they are used.

    Raises `CheckpointError` that names the file when it is damaged, or has objects of other classes: making
    them would run their code.
    """
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:  # whatever the bytes of a stranger lead to
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused is None:
            raise CheckpointError(f"{path}: damaged, or not a file of torch.save") from error
        raise CheckpointError(
            f"{path}: names {refused[1]}, which could run code, and was not loaded: if you trust the "
            f"checkpoint, load it with DeepSpeed and save it without"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: has a {type(content).__name__}, but DeepSpeed writes a dictionary")
    return content
