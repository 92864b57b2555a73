"""What rank 0 tells `malleus-run` while it trains: how far it is, and what the planner needs after a loss."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from deepspeed.utils import logger

from malleus_ds.config import MalleusConfig
from malleus_ds.elastic.run_files import PROGRESS, REQUEST, Progress, attempt_path, read_json, write_json
from malleus_ds.environment import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.plan import ParallelPlan
from malleus_ds.planner.types import PlanRequest

_INTERVAL_S = 1.0
_SMALL_CHANGE = 0.05
"""Of a rate: noise, for which the request is not written again."""


class RunNotes:
    """One per engine, on rank 0 of a job that `malleus-run` started."""

    def __init__(self, run_dir: Path, attempt: int, request: PlanRequest) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._folder = attempt_path(run_dir, attempt)
        self._first_step: int | None = None
        self._next_s = 0.0
        self._request = request
        with self._warned():
            self._request = self._with_known_profile(request)
            self._write_request()

    @classmethod
    def of_environment(
        cls,
        plan: ParallelPlan,
        config: MalleusConfig,
        max_degree: int,
        nodes: tuple[tuple[int, ...], ...],
        max_pipelines: int | None,
    ) -> RunNotes | None:
        """None without `malleus-run`. plan: the first one, whose batch a restart keeps."""
        run_dir = os.environ.get(RUN_DIR_VARIABLE)
        if run_dir is None:
            return None
        layers = tuple(LayerProfile(f"layer {layer}", 1.0) for layer in range(plan.num_layers))
        rho = tuple(sorted(config.tensor_parallel.degrees(max_degree).items()))
        request = PlanRequest(
            profile=ModelProfile(layers, rho=rho),
            rates=(1.0,) * plan.world_size,
            num_micro_batches=plan.num_micro_batches,
            micro_batch_size=plan.micro_batch_size,
            nodes=nodes,
            current=plan,
            memory_bytes=config.planner.memory_bytes,
            max_pipelines=max_pipelines,
        )
        return cls(Path(run_dir), int(os.environ[ATTEMPT_VARIABLE]), request)

    def finish_step(
        self, step: int, plan: ParallelPlan, rates: Sequence[float], profile: ModelProfile | None
    ) -> None:
        """After every step; writes at most once a second.

        rates: those that the plan was made for, without noise; empty without a detector.
        """
        is_first = self._first_step is None
        if self._first_step is None:
            self._first_step = step
        if not is_first and time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _INTERVAL_S
        with self._warned():
            self._write(Progress(self._first_step, step), plan, rates, profile)

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """Training does not need the files."""
        try:
            yield
        except OSError as error:
            logger.warning(f"{self._run_dir}: cannot be written, so that a restart may know less: {error}")

    def _write(
        self, progress: Progress, plan: ParallelPlan, rates: Sequence[float], profile: ModelProfile | None
    ) -> None:
        write_json(self._folder / PROGRESS, asdict(progress))
        request = self._request
        # With another batch for a while, the plan is none for the batch that the job starts with.
        has_batch = plan.num_micro_batches == request.num_micro_batches
        updated = replace(
            request,
            current=plan if has_batch else None,
            rates=tuple(rates) if rates else request.rates,
            profile=request.profile if profile is None else profile,
        )
        if _differ(updated, request):
            self._request = updated
            self._write_request()

    def _with_known_profile(self, request: PlanRequest) -> PlanRequest:
        """Until layers are measured: as measured in the attempt before."""
        data = read_json(self._run_dir / REQUEST)
        if data is None:
            return request
        known, own = ModelProfile.from_dict(data["request"]["profile"]), request.profile
        is_same_model = (len(known.layers), known.rho) == (len(own.layers), own.rho)
        return replace(request, profile=known) if is_same_model else request

    def _write_request(self) -> None:
        data = {"attempt": self._attempt, "request": self._request.to_dict()}
        write_json(self._run_dir / REQUEST, data)


def _differ(new: PlanRequest, old: PlanRequest) -> bool:
    moved = any(abs(a - b) > _SMALL_CHANGE * b for a, b in zip(new.rates, old.rates, strict=True))
    return moved or replace(new, rates=old.rates) != old
