"""Shows a running job in the terminal: a progress bar, and one line per event."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from malleus_ds.config import RateEvent
from malleus_ds.plan import ParallelPlan
from malleus_ds.plan.drawing import draw_plan
from malleus_ds.report.measurements import End, Event, Record, Start, Step

_VISIBLE_CHANGE = 0.1


class LiveView:
    """Feed it the records of a job. Without a terminal, it prints plain lines.

    script: the injected rates, told beside what the job finds out. Use as a context manager.
    """

    def __init__(self, console: Console, num_steps: int, script: Sequence[RateEvent]) -> None:
        self._console = console
        self._script = script
        self._rates: tuple[float, ...] = ()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=num_steps)

    def show(self, record: Record) -> None:
        match record:
            case Start():
                self._say("training started with this plan:")
                self._draw(ParallelPlan.from_dict(record.plan))
                self._announce(0)
            case Step():
                self._show_step(record)
                self._announce(record.step + 1)
            case Event():
                self._show_event(record)
            case End():
                pass

    def _show_step(self, step: Step) -> None:
        self._rates = step.rates
        text = f"loss {step.loss:.3f}  step {step.duration_s:.2f} s  {describe_rates(step.rates)}"
        self._progress.update(self._task, completed=step.step + 1, description=text)
        if not self._console.is_terminal:
            self._say(f"step {step.step}  {text}")

    def _announce(self, step: int) -> None:
        for event in self._script:
            if event.step == step:
                what = "recovers" if event.rate == 1.0 else f"becomes {event.rate:g} times slower"
                self._say(f"step {step}: the device of rank {event.rank} {what}", style="bold yellow")

    def _show_event(self, event: Event) -> None:
        details, at = event.details, f"after step {event.step}:"
        match event.kind:
            case "calibrated":
                self._say(f"{at} the healthy time of every layer is known")
            case "shift":
                found = [
                    f"rank {rank} takes {new:.2f} times the healthy time (before: {old:.2f})"
                    for rank, old, new in zip(
                        details["ranks"], details["old_rates"], details["new_rates"], strict=True
                    )
                ]
                self._say(f"{at} {', '.join(found)}; planning ...", style="yellow")
            case "planned" | "kept" if "reason" not in details:
                self._show_plan_found(event)
            case "kept" | "planning_failed" | "switch_failed":
                what = "the old plan stays" if event.kind == "kept" else event.kind.replace("_", " ")
                self._say(f"{at} {what}: {details['reason']}", style="bold red")
            case "switched":
                moved_mib = details["migration"]["total_bytes"] / 2**20
                self._say(
                    f"{at} switched in {1e3 * details['duration_s']:.0f} ms, {moved_mib:.2f} MiB moved:",
                    style="green",
                )
                self._draw(ParallelPlan.from_dict(details["plan"]))

    def _show_plan_found(self, event: Event) -> None:
        details = event.details
        verdict = "switching" if event.kind == "planned" else "not worth a switch, the old plan stays"
        self._say(
            f"after step {event.step}: planned in {details['planning_s']:.2f} s, predicted step "
            f"{details['step_s']:.2f} s instead of {details['current_step_s']:.2f} s; {verdict}"
        )

    def _draw(self, plan: ParallelPlan) -> None:
        self._console.print(
            draw_plan(plan, dict(enumerate(self._rates))), markup=False, highlight=False, soft_wrap=True
        )

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def describe_rates(rates: Sequence[float]) -> str:
    """The ranks that are not healthy."""
    slow = [
        f"rank {rank} {'failed' if math.isinf(rate) else f'{rate:.2f}x'}"
        for rank, rate in enumerate(rates)
        if abs(rate - 1) > _VISIBLE_CHANGE
    ]
    return ", ".join(slow) if slow else "all devices healthy"
