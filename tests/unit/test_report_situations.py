"""The report of a job, from measurements written by hand."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from malleus_ds.config import RateEvent
from malleus_ds.plan import ParallelPlan
from malleus_ds.report.demo_bars import demo_bars
from malleus_ds.report.demo_tables import print_situations
from malleus_ds.report.live import LiveView
from malleus_ds.report.measurements import (
    End,
    Event,
    MeasurementReader,
    Measurements,
    MeasurementWriter,
    Record,
    Start,
    Step,
)
from malleus_ds.report.situations import find_situations, optimum_step_s

OLD = ParallelPlan.homogeneous(num_layers=8, world_size=2, num_stages=2, num_micro_batches=4)
NEW = ParallelPlan.homogeneous(
    num_layers=8, world_size=2, num_stages=2, num_micro_batches=4, boundaries=(0, 6, 8)
)
SCRIPT = (RateEvent(step=6, rank=1, rate=3.0),)


def records(sent_bytes: int = 1000) -> list[Record]:
    """Calibrated after step 2; rank 1 slow from step 6 on; switched after step 9; 12 steps."""
    durations_s = [9.0, 9.0, 9.0, 1.0, 1.2, 1.0, 3.0, 3.1, 3.0, 7.0, 1.6, 1.5]
    found: list[Record] = [Start(world_size=2, plan=OLD.to_dict())]
    for step, duration_s in enumerate(durations_s):
        found.append(Step(step, duration_s, 5.0 - 0.1 * step, (1.0, 1.0 if step < 8 else 2.94)))
        found += [Event(step, kind, details) for kind, details in EVENTS.get(step, [])]
    return [*found, End(sent_bytes=(sent_bytes,), num_emulated_calls=100, num_overruns=2)]


EVENTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [("calibrated", {})],
    7: [("shift", {"ranks": [1], "old_rates": [1.0], "new_rates": [2.94]})],
    8: [("planned", {"rates": [1.0, 2.94], "planning_s": 0.5, "step_s": 1.4, "current_step_s": 3.0})],
    9: [
        (
            "switched",
            {"plan": NEW.to_dict(), "duration_s": 0.2, "migration": {"total_bytes": 1000, "sent_bytes": 400}},
        )
    ],
}


def measured(found: list[Record]) -> Measurements:
    measurements = Measurements()
    for record in found:
        measurements.add(record)
    return measurements


def test_optimum_is_the_harmonic_share() -> None:
    # Two devices, one of half the speed: together 1.5 healthy ones do the work of two.
    assert optimum_step_s(3.0, (1.0, 2.0)) == pytest.approx(4.0)


def test_situations() -> None:
    healthy, slow = find_situations(measured(records()), SCRIPT)
    assert (healthy.start, healthy.stop, healthy.rates) == (0, 6, (1.0, 1.0))
    assert healthy.old_step_s == 1.0  # Median of steps 3 to 5: calibration does not count.
    assert (healthy.new_step_s, healthy.steps_to_switch, healthy.ratio) == (None, None, 1.0)
    assert (slow.start, slow.stop, slow.rates, slow.changed_ranks) == (6, 12, (1.0, 3.0), (1,))
    assert slow.old_step_s == 3.0  # Median of steps 6 to 8: step 9 holds the switch.
    assert slow.new_step_s == pytest.approx(1.55)
    assert slow.optimum_s == pytest.approx(1.0 * 2 / (1 + 1 / 3))
    assert slow.ratio == pytest.approx(1.55 / 1.5)
    assert slow.steps_to_switch == 4
    assert slow.rate_error(1) == pytest.approx(0.02)
    assert (slow.plan_before, slow.switches[0].plan) == (OLD, NEW)


def test_all_bars_hold_for_a_good_run() -> None:
    measurements = measured(records())
    bars = demo_bars(measurements, find_situations(measurements, SCRIPT), 200.0, 240.0)
    assert [bar.name for bar in bars if not bar.ok] == []


def bad_names(found: list[Record]) -> list[str]:
    measurements = measured(found)
    bars = demo_bars(measurements, find_situations(measurements, SCRIPT), 200.0, 240.0)
    return [bar.name for bar in bars if not bar.ok]


def test_a_job_that_never_switches_holds_no_bar_of_the_slowdown() -> None:
    kept = [record for record in records() if not (isinstance(record, Event) and record.kind == "switched")]
    names = bad_names(kept)
    assert [name for name in names if name.startswith("step 6")] == names
    assert len(names) == 4


def test_single_faults_are_found() -> None:
    assert bad_names(records(sent_bytes=1004)) == ["step 6: bytes sent beyond the lower bound"]
    early = Event(4, "shift", {"ranks": [0], "old_rates": [1.0], "new_rates": [1.4]})
    assert bad_names([*records(), early]) == ["rates that moved in healthy steps"]
    end = End(sent_bytes=(1000,), num_emulated_calls=100, num_overruns=6)
    assert bad_names([*records()[:-1], end]) == ["share of emulated layer calls that overran"]
    worse = [
        replace(record, loss=4.0 + record.step) if isinstance(record, Step) else record
        for record in records()
    ]
    assert bad_names(worse) == ["last loss, limit: the first"]


def test_records_survive_the_file_and_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    reader = MeasurementReader(path)
    assert list(reader.new_records()) == []
    with MeasurementWriter(path) as writer:
        for record in records():
            writer.write(record)
    *first, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(first) + last[:10])
    assert list(reader.new_records()) == records()[:-1]
    path.write_bytes(b"".join(first) + last)
    assert list(reader.new_records()) == records()[-1:]


def shown(found: list[Record]) -> str:
    """What the live view prints without a terminal."""
    out = StringIO()
    with LiveView(Console(file=out, width=110), 12, SCRIPT) as view:
        for record in found:
            view.show(record)
    return out.getvalue()


def test_live_view_without_a_terminal_tells_the_story_in_order() -> None:
    text = shown(records())
    story = [
        "rank 1 becomes 3 times slower",
        "rank 1 takes 2.94 times the healthy time (before: 1.00); planning",
        "planned in 0.50 s, predicted step 1.40 s instead of 3.00 s; switching",
        "switched in 200 ms",
        "step 11  loss 3.900",
    ]
    places = [text.index(line) for line in story]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("kept", "after step 7: the old plan stays: so it is"),
        ("planning_failed", "after step 7: planning failed: so it is"),
        ("switch_failed", "after step 7: switch failed: so it is"),
    ],
)
def test_live_view_tells_why_a_plan_stays(kind: str, line: str) -> None:
    assert line in shown([Event(7, kind, {"reason": "so it is"})])


def test_tables_show_times_and_both_plans() -> None:
    console = Console(width=110)
    with console.capture() as capture:
        print_situations(console, find_situations(measured(records()), SCRIPT))
    text = capture.get()
    for expected in ("3.000 s", "1.550 s", "1.500 s", "1.033", "step 10 (+4)", "rank 1: 2.940 (injected 3)"):
        assert expected in text
    assert "layers | 0-5" in text
