"""Straggling rates by rank, from a text, a file or a mapping."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from malleus_ds.files.reading import FileError, parse_json, read_mapping, shown


def parse_rates(
    source: str | Path | Mapping[Any, Any], world_size: int, where: str = "--rates"
) -> tuple[float, ...]:
    """The straggling rate of each rank; a rank that is not named is healthy (1.0).

    source: a mapping of ranks to rates, JSON text of one (``{"0": 5.42, "3": "inf"}``), or the path of a
    YAML or JSON file with one; where: what to name in errors about a mapping or a text. Raises `FileError`
    for a rank outside the world and a rate that is not in ``(0, inf]``.
    """
    if isinstance(source, Mapping):
        data: Mapping[Any, Any] = source
    elif isinstance(source, str) and source.lstrip().startswith("{"):
        data = parse_json(source, where)
    else:
        data, where = read_mapping(source), str(source)
    rates = dict[int, float]()
    for key, value in data.items():
        rank = _rank(key, value, world_size, where)
        if rank in rates:
            raise FileError(
                f"{where}: rank {rank} is there twice, last with {shown(value)}; keep one of them"
            )
        rates[rank] = _rate(rank, value, where)
    return tuple(rates.get(rank, 1.0) for rank in range(world_size))


def _rank(key: Any, value: Any, world_size: int, where: str) -> int:
    is_number = isinstance(key, int) and not isinstance(key, bool)
    if not is_number and not (isinstance(key, str) and re.fullmatch(r"-?\d+", key)):
        raise FileError(
            f"{where}: key {shown(key)} (value {shown(value)}) is not a rank; use 0 to {world_size - 1}"
        )
    rank = int(key)
    if not 0 <= rank < world_size:
        raise FileError(
            f"{where}: rank {rank} (rate {shown(value)}) is not in the cluster of {world_size} devices; "
            f"use 0 to {world_size - 1}"
        )
    return rank


def _rate(rank: int, value: Any, where: str) -> float:
    rate = math.inf if value == "inf" else value
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise FileError(
            f"{where}: rate of rank {rank} is {shown(value)}, not a number; "
            f"write how much slower the device is (1.0 healthy), or inf (failed)"
        )
    if math.isnan(rate) or rate <= 0:
        raise FileError(
            f"{where}: rate of rank {rank} is {shown(value)}; it must be positive (1.0 healthy, inf failed)"
        )
    return float(rate)
