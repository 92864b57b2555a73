"""Finding the elements of an interval among intervals that were cut elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.part_file import Interval

Where = TypeVar("Where")


class Places(Generic[Where]):
    """Where the elements of each state of each tensor are.

    name: of the checkpoint, in messages.
    """

    def __init__(self, name: str, intervals: Iterable[tuple[Interval, Where]]) -> None:
        self._name = name
        self._places: dict[tuple[str, str], list[tuple[Interval, Where]]] = defaultdict(list)
        for interval, where in intervals:
            self._places[interval.state, interval.tensor].append((interval, where))
        for places in self._places.values():
            places.sort(key=lambda place: place[0].start)

    def has(self, state: str, tensor: str) -> bool:
        return (state, tensor) in self._places

    def read(self, wanted: Interval, cut: Callable[[Where, Interval, int, int], Tensor]) -> Tensor:
        """A copy of its elements. ``cut`` gives the elements ``[start, stop)`` of the tensor, which are at a
        place. Raises `CheckpointError` for elements that are nowhere."""
        parts: list[Tensor] = []
        position = wanted.start
        for interval, where in self._places.get((wanted.state, wanted.tensor), ()):
            if interval.start <= position < min(interval.stop, wanted.stop):
                stop = min(interval.stop, wanted.stop)
                parts.append(cut(where, interval, position, stop))
                position = stop
        if position < wanted.stop:
            raise CheckpointError(
                f"{self._name}: no file has the elements [{position}, {wanted.stop}) of "
                f"{wanted.state!r} of {wanted.tensor!r}"
            )
        return torch.cat(parts)  # a copy: the parts may be views of mapped files
