"""Bars: figures with a limit, which a demo or a benchmark must hold. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Bar:
    """One measured figure against its limit.

    value: the measurement, None or NaN when it could not be taken, which never holds;
    better: "lower" holds at ``value <= limit``, "higher" at ``value >= limit``.
    """

    name: str
    value: float | None
    limit: float
    better: Literal["lower", "higher"]

    @property
    def ok(self) -> bool:
        # Comparisons with NaN are false, so a measurement that failed never holds.
        if self.value is None:
            return False
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit

    def to_dict(self) -> dict[str, Any]:
        """As written to JSON, which has neither NaN nor infinity: such a value becomes null."""
        return {
            "name": self.name,
            "value": _finite(self.value),
            "limit": self.limit,
            "better": self.better,
            "ok": self.ok,
        }


def write_json(path: str | Path, details: Mapping[str, Any], bars: Iterable[Bar]) -> None:
    """Write one object: the details, and the bars under ``"bars"``."""
    content = {**_jsonable(details), "bars": [bar.to_dict() for bar in bars]}
    Path(path).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def exit_code(bars: Iterable[Bar]) -> int:
    """0 when all bars hold, else 1."""
    return 0 if all(bar.ok for bar in bars) else 1


def bars_table(bars: Iterable[Bar]) -> Table:
    """The bars as a table for a terminal."""
    table = Table(title="Bars", title_justify="left")
    table.add_column("bar")
    table.add_column("measured", justify="right")
    table.add_column("limit", justify="right")
    table.add_column("")
    for bar in bars:
        sign = "<=" if bar.better == "lower" else ">="
        value = "-" if bar.value is None else f"{bar.value:.4g}"
        verdict = "[green]ok[/green]" if bar.ok else "[red]does not hold[/red]"
        table.add_row(bar.name, value, f"{sign} {bar.limit:.4g}", verdict)
    return table


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _jsonable(value: Any) -> Any:
    """``value`` with every NaN or infinite number as None, and tuples as lists."""
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value
