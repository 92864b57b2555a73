"""The planner's answer as text and as JSON. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from malleus_ds.plan import ParallelPlan, diff_plans
from malleus_ds.plan.drawing import ranks_text
from malleus_ds.planner.types import PlanRequest, PlanResult
from malleus_ds.report.plan_picture import print_plan
from malleus_ds.report.plan_reasons import find_reasons
from malleus_ds.report.plan_view import view_plan

_MAX_DIFF_LINES = 40


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """model: its name; healthy_step_s: of the plan for the same cluster with all devices healthy."""

    model: str
    request: PlanRequest
    result: PlanResult
    healthy_step_s: float

    @property
    def optimum_s(self) -> float:
        """``T_healthy * N / sum(1 / x)``: the healthy step, if the work could be spread perfectly."""
        rates = self.request.rates
        return self.healthy_step_s * len(rates) / sum(1 / rate for rate in rates)

    @property
    def ratio(self) -> float:
        """Step over the healthy optimum."""
        return self.result.step_s / self.optimum_s

    @property
    def problem(self) -> str:
        """What was planned, in a line."""
        request = self.request
        slow = [rank for rank, rate in enumerate(request.rates) if rate != 1]
        rates = dict(enumerate(request.rates))
        shown = ranks_text(slow[:8], rates) + (f" and {len(slow) - 8} more" if len(slow) > 8 else "")
        return (
            f"model {self.model}: {len(request.profile.layers)} layers, global batch "
            f"{request.global_batch_size}; {request.world_size} devices on {len(request.node_ranks)} nodes, "
            + (f"not healthy: {shown}" if slow else "all healthy")
        )

    @property
    def outcome(self) -> str:
        """How good the plan is, in a line."""
        result = self.result
        return (
            f"step {result.step_s:.3f} s, gap to the lower bound {result.gap:.1%}, "
            f"{self.ratio:.3f} x the healthy optimum"
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures; `request` and `result` can be read back by `PlanRequest` and `PlanResult`."""
        current = self.request.current
        return {
            "model": self.model,
            "request": self.request.to_dict(),
            "result": self.result.to_dict(),
            "gap": self.result.gap,
            "healthy_step_s": self.healthy_step_s,
            "optimum_s": self.optimum_s,
            "ratio": self.ratio,
            "reasons": find_reasons(self.result.plan, self.request).to_dict(),
            "diff": None if current is None else diff_plans(current, self.result.plan).lines(),
        }


def print_answer(console: Console, answer: PlanAnswer) -> None:
    """The plan as a picture, then its figures, what limits it, the alternatives and the difference."""
    result = answer.result
    console.print(Text(answer.problem))
    console.print()
    print_plan(console, view_plan(result.plan, answer.request))
    console.print()
    console.print(_figures(answer))
    _print_lines(console, "why", find_reasons(result.plan, answer.request).lines())
    if result.alternatives:
        console.print(_alternatives_table(result))
    if answer.request.current is not None:
        lines = diff_plans(answer.request.current, result.plan).lines()
        more = [f"and {len(lines) - _MAX_DIFF_LINES} more"] if len(lines) > _MAX_DIFF_LINES else []
        title = f"from the current plan ({result.moved_bytes / 2**30:.2f} GiB move)"
        _print_lines(console, title, [*lines[:_MAX_DIFF_LINES], *more] or ["nothing changes"])


def _print_lines(console: Console, title: str, lines: list[str]) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    for line in lines:
        console.print(Text(f"  {line}"), soft_wrap=not console.is_terminal)


def _figures(answer: PlanAnswer) -> Table:
    request, result = answer.request, answer.result
    table = Table.grid(padding=(0, 2))
    table.add_row("step", f"{result.step_s:.3f} s", f"planned in {result.planning_s:.2f} s")
    table.add_row(
        "lower bound",
        f"{result.lower_bound_s:.3f} s",
        f"no plan is faster: at most {result.gap:.1%} of the step can be gained",
    )
    table.add_row(
        "healthy optimum",
        f"{answer.optimum_s:.3f} s",
        f"the step is {answer.ratio:.3f} times that: healthy step {answer.healthy_step_s:.3f} s "
        f"x {request.world_size} devices / {sum(1 / rate for rate in request.rates):.2f} in effect",
    )
    if result.current_step_s is not None:
        note = "under these rates" if result.current_step_s < float("inf") else "it uses a failed device"
        table.add_row("current plan", f"{result.current_step_s:.3f} s", note)
    return table


def _alternatives_table(result: PlanResult) -> Table:
    table = Table(
        "alternative", "step", "slower by", "pipelines", "stages", "TP groups", "standby", box=box.SIMPLE
    )
    table.add_row("best", *_row(result.plan, result.step_s, result.step_s))
    for number, other in enumerate(result.alternatives, start=1):
        table.add_row(str(number), *_row(other.plan, other.step_s, result.step_s))
    return table


def _row(plan: ParallelPlan, step_s: float, best_s: float) -> tuple[str, ...]:
    degrees = Counter(stage.degree for _, _, stage in plan.stages())
    return (
        f"{step_s:.3f} s",
        f"{step_s / best_s - 1:.2%}",
        f"{len(plan.pipelines)} (m {_runs(pipeline.num_micro_batches for pipeline in plan.pipelines)})",
        _runs(len(pipeline.stages) for pipeline in plan.pipelines),
        ", ".join(f"{count} x TP{degree}" for degree, count in sorted(degrees.items(), reverse=True)),
        str(len(plan.standby)),
    )


def _runs(numbers: Iterable[int]) -> str:
    """All where they are few, else the least and the largest."""
    values = list(numbers)
    if len(set(values)) == 1:
        return str(values[0])
    return "/".join(map(str, values)) if len(values) <= 4 else f"{min(values)} to {max(values)}"
