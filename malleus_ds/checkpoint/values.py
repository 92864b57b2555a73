"""Small state as JSON, exactly: a checkpoint holds no pickle, so loading one runs no code."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from malleus_ds.checkpoint.errors import CheckpointError

_TAG = "!"
"""Key of the objects that stand for what JSON lacks."""


def check_json(value: Any, path: str) -> None:
    """Raise `CheckpointError` unless ``value`` comes back from JSON as it is; path: its name in messages."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{path} has the key {key!r}: JSON's keys are strings")
            check_json(item, f"{path}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_json(item, f"{path}[{index}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise CheckpointError(
            f"{path} is a {type(value).__name__}, but checkpoints hold JSON and no pickle: give numbers, "
            f"strings, lists and objects"
        )


def encode(value: Any, path: str) -> Any:
    """``value`` as JSON that `decode` turns back: also tuples, counters, 0-dim tensors, and any keys.

    Raises `CheckpointError` for everything else.
    """
    if isinstance(value, dict) and type(value) is not Counter:
        if all(isinstance(key, str) and key != _TAG for key in value):
            return {key: encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        return {_TAG: "dict", "items": _pairs(value, path)}
    if isinstance(value, Counter):
        return {_TAG: "counter", "items": _pairs(value, path)}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
    if isinstance(value, Tensor) and value.dim() == 0:
        return {_TAG: "scalar", "dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    check_json(value, path)
    return value


def _pairs(value: dict[Any, Any], path: str) -> list[list[Any]]:
    return [
        [encode(key, f"a key of {path}"), encode(item, f"{path}[{key!r}]")] for key, item in value.items()
    ]


def decode(value: Any) -> Any:
    """The inverse of `encode`; every call makes new objects."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "scalar":
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
    items = decode(value["items"])
    if kind == "tuple":
        return tuple(items)
    return Counter(dict(items)) if kind == "counter" else dict(items)
