"""Bars and their JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from malleus_ds.report.bars import Bar, bars_table, exit_code, write_json


@pytest.mark.parametrize(
    ("value", "limit", "better", "ok"),
    [
        (1.0, 1.02, "lower", True),
        (1.02, 1.02, "lower", True),
        (1.03, 1.02, "lower", False),
        (0.9, 0.9, "higher", True),
        (0.89, 0.9, "higher", False),
        (math.nan, 1.0, "lower", False),
        (math.nan, 1.0, "higher", False),
        (None, 1.0, "lower", False),
        (None, 1.0, "higher", False),
        (math.inf, 1.0, "lower", False),
    ],
)
def test_ok(value: float | None, limit: float, better: Literal["lower", "higher"], ok: bool) -> None:
    assert Bar("a", value, limit, better).ok is ok


def test_exit_code_is_1_when_one_bar_does_not_hold() -> None:
    good, bad = Bar("a", 1.0, 2.0, "lower"), Bar("b", 3.0, 2.0, "lower")
    assert exit_code([good]) == 0
    assert exit_code([good, bad]) == 1


def test_json_holds_details_and_bars_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    bars = [Bar("a", 1.0, 2.0, "lower"), Bar("b", math.nan, 2.0, "higher")]
    write_json(path, {"rates": (1.0, math.inf), "nested": {1: [math.nan]}}, bars)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "rates": [1.0, None],
        "nested": {"1": [None]},
        "bars": [
            {"name": "a", "value": 1.0, "limit": 2.0, "better": "lower", "ok": True},
            {"name": "b", "value": None, "limit": 2.0, "better": "higher", "ok": False},
        ],
    }


def test_table_names_each_bar_and_its_verdict() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(bars_table([Bar("speed", 1.0, 2.0, "lower"), Bar("error", None, 0.05, "lower")]))
    speed, error = (line for line in capture.get().splitlines() if "<=" in line)
    assert "speed" in speed
    assert "ok" in speed
    assert "does not hold" in error
