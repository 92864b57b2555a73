"""What a switch of plans takes of the training's time, by parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Interruption:
    """Adds up the time of named parts, in seconds, on this rank. parts_s: by name, in order; a part does not
    count for the one around it."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._inner_s = 0.0
        self.parts_s: dict[str, float] = {}

    @property
    def duration_s(self) -> float:
        return time.perf_counter() - self._began_s

    def add(self, name: str, duration_s: float) -> None:
        self.parts_s[name] = self.parts_s.get(name, 0.0) + duration_s

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began, outer_s = time.perf_counter(), self._inner_s
        self._inner_s = 0.0
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - began
            self.add(name, elapsed_s - self._inner_s)
            self._inner_s = outer_s + elapsed_s


def describe_parts(parts_s: dict[str, float]) -> str:
    """The parts in one line, in milliseconds."""
    return ", ".join(f"{name} {1e3 * part_s:.0f}" for name, part_s in parts_s.items()) + " ms"
