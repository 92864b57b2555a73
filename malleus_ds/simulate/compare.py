"""Each system through a sequence of situations: its plans, and their simulated steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from malleus_ds.plan import ParallelPlan, PlanError
from malleus_ds.planner.received import received_bytes
from malleus_ds.planner.types import PlanRequest
from malleus_ds.simulate.baselines import System
from malleus_ds.simulate.engine import simulate
from malleus_ds.simulate.situations import Situation


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a system does in a situation.

    plan: its answer (None: it has none, see ``reason``, and keeps what it uses); step_s: simulated step of
    what it uses then (inf: it stands still); old_step_s: before it answers; planning_s: time to make the
    plan; moved_bytes: received by all ranks, and longest_bytes by the one that receives most; is_new:
    whether the plan differs from the one before.
    """

    situation: Situation
    plan: ParallelPlan | None
    reason: str
    step_s: float
    old_step_s: float
    planning_s: float
    moved_bytes: float
    longest_bytes: float
    is_new: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A system and its outcomes, one per situation."""

    system: System
    outcomes: tuple[Outcome, ...]


def follow(
    system: System,
    request: PlanRequest,
    situations: Iterable[Situation],
    backward_ratio: float = 2.0,
    on_step: Callable[[], None] = lambda: None,
) -> Row:
    """Take a system through the situations, each answer with the plan before it as ``current``.

    request: its rates do not matter; on_step: called after each situation.
    """
    outcomes: list[Outcome] = []
    current: ParallelPlan | None = None
    for situation in situations:
        question = replace(request, rates=situation.rates, current=current)
        outcome = _answer(system, question, situation, backward_ratio)
        outcomes.append(outcome)
        current = outcome.plan or current
        on_step()
    return Row(system, tuple(outcomes))


def compare(
    systems: Sequence[System],
    request: PlanRequest,
    situations: Sequence[Situation],
    backward_ratio: float = 2.0,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[Row, ...]:
    """One row per system; see `follow`."""
    return tuple(follow(system, request, situations, backward_ratio, on_step) for system in systems)


def _answer(system: System, request: PlanRequest, situation: Situation, backward_ratio: float) -> Outcome:
    def step_s(plan: ParallelPlan) -> float:
        return simulate(plan, request, backward_ratio).makespan_s

    current = request.current
    old_step_s = math.inf if current is None else step_s(current)
    began = time.perf_counter()
    try:
        plan = system.answer(request)
    except PlanError as error:
        reason = str(error).splitlines()[0]  # A drawing may follow.
        return Outcome(situation, None, reason, old_step_s, old_step_s, 0.0, 0.0, 0.0, False)
    planning_s = time.perf_counter() - began
    new_step_s = step_s(plan)
    if current is None or plan == current:
        return Outcome(situation, plan, "", new_step_s, new_step_s, planning_s, 0.0, 0.0, False)
    received = received_bytes(current, plan, request)
    total, longest = float(received.sum()), float(received.max())
    return Outcome(situation, plan, "", new_step_s, old_step_s, planning_s, total, longest, True)
