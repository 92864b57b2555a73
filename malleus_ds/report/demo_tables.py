"""The end of the demo as text: step times, switches and plans. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from malleus_ds.plan.drawing import draw_plan
from malleus_ds.report.live import describe_rates
from malleus_ds.report.situations import Situation


def print_situations(console: Console, situations: Sequence[Situation]) -> None:
    console.print(_step_times(situations))
    console.print(_switches(situations))
    for situation in situations:
        _print_plans(console, situation)


def _step_times(situations: Sequence[Situation]) -> Table:
    table = Table(title="Time of a step (medians)", title_justify="left")
    table.add_column("from step", justify="right")
    table.add_column("devices")
    for name in ("old plan", "new plan", "optimum", "to optimum"):
        table.add_column(name, justify="right")
    for situation in situations:
        table.add_row(
            str(situation.start),
            describe_rates(situation.rates),
            _seconds(situation.old_step_s),
            _seconds(situation.new_step_s),
            _seconds(situation.optimum_s),
            "-" if situation.ratio is None else f"{situation.ratio:.3f}",
        )
    table.caption = "optimum: healthy step * N / sum(1 / rate)"
    table.caption_justify = "left"
    return table


def _switches(situations: Sequence[Situation]) -> Table:
    table = Table(title="Switches", title_justify="left")
    for name in ("change at step", "estimated rates", "new plan from", "planning", "switch", "moved"):
        table.add_column(name, justify="left" if name == "estimated rates" else "right")
    for situation in situations:
        for switch in situation.switches:
            estimates = (
                f"rank {rank}: {switch.rates[rank]:.3f} (injected {situation.rates[rank]:g})"
                for rank in situation.changed_ranks
            )
            table.add_row(
                str(situation.start),
                ", ".join(estimates),
                f"step {switch.first_step} (+{switch.first_step - situation.start})",
                f"{switch.planning_s:.2f} s",
                f"{1e3 * switch.migration_s:.0f} ms",
                f"{switch.moved_mib:.2f} MiB",
            )
    return table


def _print_plans(console: Console, situation: Situation) -> None:
    rates = dict(enumerate(situation.rates))
    plans = [("before", situation.plan_before), *(("after", switch.plan) for switch in situation.switches)]
    if not situation.switches:
        return
    for when, plan in plans:
        console.print(f"step {situation.start}, plan {when}:", highlight=False, soft_wrap=True)
        console.print(draw_plan(plan, rates), markup=False, highlight=False, soft_wrap=True)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
