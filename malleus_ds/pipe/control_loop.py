"""The loop that keeps a job fast: measure, exchange, plan beside the training, switch together."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.utils import logger

from malleus_ds.config import MalleusConfig
from malleus_ds.detector.control_plane import ControlPlane, ControlPlaneError
from malleus_ds.detector.rates import RateEstimator
from malleus_ds.detector.record import StepRecord, digest_number, ranks_with_another_plan, unpack_records
from malleus_ds.elastic.restart_plan import RestartPlan
from malleus_ds.pipe.agreement import AgreementError, SwitchFailedError
from malleus_ds.pipe.interruption import describe_parts
from malleus_ds.pipe.measurement import Measurement
from malleus_ds.plan import ParallelPlan, PlanError
from malleus_ds.planner.process import PlannerFailure, PlannerProcess
from malleus_ds.planner.types import PlanRequest, PlanResult
from malleus_ds.zero.state import OptimizerStateError


@dataclass(frozen=True, slots=True)
class LoopEvent:
    """Something that the loop saw or did, on the coordinator.

    step: the step that had just ended; kind: "calibrated", "shift", "planned", "kept",
    "planning_failed", "prepared", "switched" or "switch_failed"; details: JSON values.
    """

    step: int
    kind: str
    details: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Submission:
    """What the planner was asked: the plan to improve, the rates, and those that plan was made for."""

    plan_digest: str
    rates: tuple[float, ...]
    planned_rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Announced:
    """A plan that all ranks know of and will switch to, made for the plan ``base``.

    max_groups: how many process groups are created for it at one step boundary; received_s: how long its
    announcement took to come.
    """

    base: str
    plan: ParallelPlan
    max_groups: int
    received_s: float


_GROUPS_AT_ONCE = 16
"""Process groups that may be created at one step boundary. Waiting a step for fewer would cost more."""
_MAX_BOUNDARIES = 4
"""Step boundaries over which the creation of many groups is spread."""

_RETRY_STEPS = 20
"""Between a planning or a switch that failed and the next try."""

_LOGGED = ("ranks", "new_rates", "step_s", "current_step_s", "duration_s", "parts_s", "reason")


def most_pipelines(config: MalleusConfig, plan: ParallelPlan, restart: RestartPlan | None) -> int | None:
    """Bound on the pipelines of any plan, None for none. plan: the first of this start of the job."""
    limit = config.planner.max_pipelines
    if limit is not None or config.planner.memory_bytes is not None:
        return limit
    return len(plan.pipelines) if restart is None else restart.max_pipelines


class ControlLoop:
    """One per engine; `finish_step` after every step, on all ranks.

    Records of step s are sent without waiting at its end and complete at the end of step s+1. When
    the coordinator's record announces a plan, all ranks receive it there and switch at that step
    boundary: the announcement needs no barrier of its own.
    """

    def __init__(
        self,
        config: MalleusConfig,
        plane: ControlPlane,
        measurement: Measurement,
        nodes: tuple[tuple[int, ...], ...],
        max_pipelines: int | None,
        switch: Callable[[ParallelPlan], dict[str, Any]],
        prepare: Callable[[ParallelPlan, int], int],
    ) -> None:
        """max_pipelines: see `most_pipelines`; switch: changes the engine's plan, collectively, and returns
        what it cost, for the log; prepare: creates so many process groups for a plan, collectively, and
        returns how many are missing."""
        self._config = config
        self._plane = plane
        self._measurement = measurement
        self._nodes = nodes
        self._switch = switch
        self._prepare = prepare
        self._next: _Announced | None = None
        self._max_pipelines = max_pipelines
        self._in_flight = False
        self._is_open = True
        self._announced: bytes = b""
        self._submitted = _Submission("", (), ())
        self._quiet_until = 0
        self._step_began_s = time.perf_counter()
        self._is_coordinator = dist.get_rank() == 0
        self.estimator = RateEstimator(dist.get_world_size(), config.detector)
        self.events: list[LoopEvent] = []
        self._planner = PlannerProcess() if self._is_coordinator and config.planner.enabled else None

    def begin_step(self) -> None:
        self._step_began_s = time.perf_counter()
        self._measurement.begin_step()

    def finish_step(
        self, step: int, plan: ParallelPlan, num_micro_batches: int, can_switch: bool = True
    ) -> None:
        """Exchange records; may switch the plan. Collective over the world.

        step: the one that just ended, under ``plan``; num_micro_batches: of this rank in it;
        can_switch: whether the data follows a switch. Raises `ControlPlaneError` when a rank does not
        answer, `AgreementError` when ranks run different plans.
        """
        was_calibrated = self._measurement.profile is not None
        compute_s, expected_s = self._measurement.finish_step(num_micro_batches)
        if not was_calibrated and self._measurement.profile is not None:
            self._note(step, "calibrated", profile=self._measurement.profile.to_dict())
        record = StepRecord(step, compute_s, expected_s, digest_number(plan.digest))
        announced_bytes = self._complete_exchange(step, plan, can_switch)
        if announced_bytes:
            self._next = self._receive(announced_bytes)
        if self._next is not None:
            self._approach(self._next, step, plan)
        self._plane.start_exchange(replace(record, plan_bytes=len(self._announced)).pack())
        self._in_flight = True

    def jump(self) -> None:
        """The next step has another number than the last one plus one: a checkpoint was loaded."""
        self._quiet_until = 0
        if self._next is not None:
            self._next = None
            self._count_shift_again()

    def abandon(self) -> None:
        """A peer is lost: what is in flight will never complete."""
        self._in_flight = False
        self._is_open = False

    def close(self, patience_s: float | None = None) -> None:
        """End the planner process and complete what is in flight. All ranks call it; idempotent.

        patience_s: give up after so long, without an error.
        """
        if self._planner is not None:
            self._planner.close()
            self._planner = None
        if self._in_flight:
            self._in_flight = False
            try:
                self._plane.finish_exchange(patience_s)
            except ControlPlaneError:
                if patience_s is None:
                    raise
                self._is_open = False
        if self._is_open:
            self._is_open = False
            self._plane.close()

    def _receive(self, num_bytes: int) -> _Announced:
        """The plan that the coordinator announced."""
        began = time.perf_counter()
        announcement = json.loads(self._plane.broadcast(self._announced or None, num_bytes))
        self._announced = b""
        plan = ParallelPlan.from_dict(announcement["plan"])
        return _Announced(announcement["base"], plan, 0, time.perf_counter() - began)

    def _approach(self, announced: _Announced, step: int, plan: ParallelPlan) -> None:
        """Create process groups for the announced plan; switch to it once few are missing, unless the user
        changed the plan or the batch since it was made."""
        self._next = None
        if announced.base != plan.digest:
            self._note(step, "kept", reason="the plan or the batch changed since the plan was announced")
            self._count_shift_again()
            return
        began = time.perf_counter()
        try:
            num_missing = self._prepare(announced.plan, announced.max_groups)
            if num_missing > _GROUPS_AT_ONCE:
                at_once = announced.max_groups or max(_GROUPS_AT_ONCE, -(-num_missing // _MAX_BOUNDARIES))
                if not announced.max_groups:
                    num_missing = self._prepare(announced.plan, at_once)
                self._next = replace(announced, max_groups=at_once)
                duration_s = time.perf_counter() - began
                self._note(step, "prepared", num_missing_groups=num_missing, duration_s=duration_s)
                return
            cost = self._switch(announced.plan)
        except (AgreementError, OptimizerStateError, PlanError, SwitchFailedError) as error:  # on all ranks
            self._note(step, "switch_failed", plan=announced.plan.to_dict(), reason=str(error))
            self._try_later(step)
        else:
            cost["parts_s"] = {"announcement": announced.received_s, **cost["parts_s"]}
            cost["duration_s"] += announced.received_s
            self._note(step, "switched", plan=announced.plan.to_dict(), **cost)

    def _complete_exchange(self, step: int, plan: ParallelPlan, can_switch: bool) -> int:
        """Take in the records of the step before; returns the bytes of an announced plan, or 0."""
        if not self._in_flight:
            return 0
        self._in_flight = False
        records = unpack_records(self._plane.finish_exchange())
        strangers = ranks_with_another_plan(records)
        if strangers:
            raise AgreementError(
                f"ranks {list(strangers)} ran another plan than rank 0 in step {records[0].step}: "
                f"call reconfigure with the same plan on every rank"
            )
        if self._is_coordinator:
            self.estimator.update(records)
            self._trace_step(step)
            # A plan that was announced in this record takes effect now; the next one can wait.
            if self._planner is not None and not records[0].plan_bytes and self._next is None:
                self._announced = self._coordinate(self._planner, step, plan, can_switch)
        return records[0].plan_bytes

    def _coordinate(self, planner: PlannerProcess, step: int, plan: ParallelPlan, can_switch: bool) -> bytes:
        """Ask for a plan when rates moved; returns an announcement of a plan as JSON, else nothing."""
        answer = planner.poll()
        if answer is not None:
            return self._judge(answer, step, plan)
        shift = self.estimator.shift()
        profile = self._measurement.profile
        if planner.pending or shift is None or profile is None or step < self._quiet_until:
            return b""
        rates, planned_rates = self.estimator.rates, self.estimator.planned_rates
        self._note(step, "shift", ranks=shift.ranks, old_rates=shift.old_rates, new_rates=shift.new_rates)
        self.estimator.accept(rates)
        if not can_switch:
            self._note(step, "kept", reason="a data_iter of the user's does not follow a switch")
            return b""
        self._submitted = _Submission(plan.digest, self._without_noise(rates), planned_rates)
        planner.submit(
            PlanRequest(
                profile=profile,
                rates=self._submitted.rates,
                num_micro_batches=plan.num_micro_batches,
                micro_batch_size=plan.micro_batch_size,
                nodes=self._nodes,
                current=plan,
                memory_bytes=self._config.planner.memory_bytes,
                time_limit_s=self._config.planner.time_limit_s,
                max_pipelines=self._max_pipelines,
            )
        )
        return b""

    def _without_noise(self, rates: tuple[float, ...]) -> tuple[float, ...]:
        """Rates near 1.0 as 1.0: to the planner equal devices are interchangeable, which lets it leave
        most of them where they are; noise would tell them apart."""
        tolerance = self._config.detector.small_shift / 2
        return tuple(1.0 if abs(rate - 1.0) < tolerance else rate for rate in rates)

    def _judge(self, answer: PlanResult | PlannerFailure, step: int, plan: ParallelPlan) -> bytes:
        """Adopt a plan only for a gain that is worth a migration."""
        if isinstance(answer, PlannerFailure):
            self._note(step, "planning_failed", reason=answer.reason)
            self._try_later(step)
            return b""
        if self._submitted.plan_digest != plan.digest:
            self._note(step, "kept", reason="the plan or the batch changed while a plan was made")
            self._count_shift_again()
            return b""
        current_s = answer.current_step_s
        gain = 1.0 if current_s is None else 1.0 - answer.step_s / current_s
        is_adopted = answer.plan != plan and gain >= self._config.planner.min_gain
        details = {**answer.to_dict(), "rates": list(self._submitted.rates), "gain": gain}
        self._note(step, "planned" if is_adopted else "kept", **details)
        announcement = {"base": plan.digest, "plan": answer.plan.to_dict()}
        return json.dumps(announcement).encode() if is_adopted else b""

    def _count_shift_again(self) -> None:
        """The rates still ask for another plan."""
        if self._is_coordinator:
            self.estimator.accept(self._submitted.planned_rates)

    def _try_later(self, step: int) -> None:
        self._count_shift_again()
        self._quiet_until = step + _RETRY_STEPS

    def _note(self, step: int, kind: str, **details: Any) -> None:
        if not self._is_coordinator:
            return
        self.events.append(LoopEvent(step, kind, details))
        self._trace({"step": step, "event": kind, **details})
        told = {name: details[name] for name in _LOGGED if name in details}
        if "parts_s" in told:
            told["parts_s"] = describe_parts(told["parts_s"])
        logger.log(
            logging.WARNING if kind.endswith("failed") else logging.INFO, f"step {step}: {kind} {told}"
        )

    def _trace_step(self, step: int) -> None:
        """step: the one that just ended; the rates are as of the step before."""
        duration_s = time.perf_counter() - self._step_began_s
        self._trace({"step": step, "duration_s": duration_s, "rates": self.estimator.rates})

    def _trace(self, entry: dict[str, Any]) -> None:
        if self._config.trace is not None:
            with Path(self._config.trace).open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
