"""The plan of the next attempt: made by the planner, with the lost devices failed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from malleus_ds.elastic.devices import Device, by_host
from malleus_ds.elastic.run_files import read_json, write_json
from malleus_ds.environment import PLAN_VARIABLE
from malleus_ds.plan import ParallelPlan, PlanError
from malleus_ds.plan.types import Stage

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """What a restarted job begins with in place of its own first plan, which was for other ranks.

    max_degree: the largest TP degree of any plan of the job; max_pipelines: likewise the most pipelines
    (None: no limit).
    """

    plan: ParallelPlan
    max_degree: int
    max_pipelines: int | None

    def save(self, path: Path) -> None:
        limits = {"max_degree": self.max_degree, "max_pipelines": self.max_pipelines}
        write_json(path, {"plan": self.plan.to_dict(), **limits})

    @classmethod
    def of_environment(cls) -> RestartPlan | None:
        """The one that `malleus-run` gave this rank. Raises `PlanError` for a file that is none."""
        path = os.environ.get(PLAN_VARIABLE)
        if path is None:
            return None
        try:
            data = read_json(Path(path))
            return cls(ParallelPlan.from_dict(data["plan"]), data["max_degree"], data["max_pipelines"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{PLAN_VARIABLE} is {path}: not a plan of malleus-run ({error!r})") from error


def changed_world(request: Mapping[str, Any], old: Sequence[Device], new: Sequence[Device]) -> dict[str, Any]:
    """The question for the planner, as `PlanRequest.to_dict`, over old and new devices together.

    request: of the attempt with the old devices. Old devices that are not among the new ones have failed;
    those that join come after the old ones, healthy.
    """
    joined = [device for device in new if device not in old]
    staying = set(new)
    rates = [rate if device in staying else "inf" for rate, device in zip(request["rates"], old, strict=True)]
    union = [*old, *joined]
    hosts = by_host(union)
    current = request["current"]
    if current is not None:
        current = {**current, "standby": [*current["standby"], *range(len(old), len(union))]}
    return {
        **request,
        "rates": [*rates, *(1.0 for _ in joined)],
        "nodes": [[rank for rank, device in enumerate(union) if device.host == host] for host in hosts],
        "current": current,
    }


def renumbered(plan: ParallelPlan, old: Sequence[Device], new: Sequence[Device]) -> ParallelPlan:
    """A plan over old and joined devices (see `changed_world`) with the ranks of the new devices."""
    joined = [device for device in new if device not in old]
    ranks = {number: new.index(device) for number, device in enumerate([*old, *joined]) if device in new}

    def moved(stage: Stage) -> Stage:
        return replace(stage, ranks=tuple(ranks[rank] for rank in stage.ranks))

    pipelines = tuple(
        replace(pipeline, stages=tuple(map(moved, pipeline.stages))) for pipeline in plan.pipelines
    )
    standby = tuple(sorted(ranks[rank] for rank in plan.standby if rank in ranks))
    return replace(plan, pipelines=pipelines, standby=standby)


def make_restart_plan(
    request: Mapping[str, Any], old: Sequence[Device], new: Sequence[Device], time_limit_s: float
) -> RestartPlan:
    """Ask the planner, in a process of its own. Raises `PlanError` when there is no plan for the devices."""
    from malleus_ds.planner.process import PlannerFailure, PlannerProcess  # Here: they load numpy.
    from malleus_ds.planner.types import PlanRequest

    question = PlanRequest.from_dict({**changed_world(request, old, new), "time_limit_s": time_limit_s})
    with PlannerProcess() as planner:
        planner.submit(question)
        while (answer := planner.poll()) is None:
            time.sleep(_POLL_S)
    if isinstance(answer, PlannerFailure):
        raise PlanError(f"no plan for the {len(new)} devices that are left: {answer.reason}")
    plan = renumbered(answer.plan, old, new)
    nodes = [[rank for rank, device in enumerate(new) if device.host == host] for host in by_host(new)]
    plan.validate(len(question.profile.layers), len(new), nodes=nodes)
    return RestartPlan(plan, max(degree for degree, _ in question.profile.rho), question.max_pipelines)
