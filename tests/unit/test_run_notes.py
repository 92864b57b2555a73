"""What rank 0 leaves for `malleus-run`: progress, and a question that the planner can answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from malleus_ds.config import MalleusConfig
from malleus_ds.elastic.run_files import REQUEST, Progress, attempt_path, read_json
from malleus_ds.environment import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.pipe.run_notes import RunNotes
from malleus_ds.plan import ParallelPlan
from malleus_ds.planner.types import PlanRequest

PLAN = ParallelPlan.homogeneous(num_layers=6, world_size=4, num_stages=2, num_micro_batches=3)
MEASURED = ModelProfile(tuple(LayerProfile("Block", 0.1 * layer) for layer in range(1, 7)))


def make_notes(run_dir: Path, attempt: int, monkeypatch: pytest.MonkeyPatch) -> RunNotes:
    attempt_path(run_dir, attempt).mkdir()
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(run_dir))
    monkeypatch.setenv(ATTEMPT_VARIABLE, str(attempt))
    notes = RunNotes.of_environment(PLAN, MalleusConfig(), 1, ((0, 1), (2, 3)), 2)
    assert notes is not None
    return notes


def written(run_dir: Path) -> tuple[int, PlanRequest]:
    data = read_json(run_dir / REQUEST)
    request = PlanRequest.from_dict(data["request"])
    request.check()
    return data["attempt"], request


def test_without_malleus_run_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    assert RunNotes.of_environment(PLAN, MalleusConfig(), 1, ((0, 1, 2, 3),), 2) is None


def test_request_and_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = make_notes(tmp_path, 0, monkeypatch)
    attempt, request = written(tmp_path)
    assert (attempt, request.current, request.num_micro_batches) == (0, PLAN, 6)
    assert set(request.profile.layer_times_s) == {1.0}
    assert Progress.load(attempt_path(tmp_path, 0)) is None

    doubled = PLAN.with_micro_batches([6, 6])  # another batch for a while: a restart begins with the first
    notes.finish_step(7, doubled, (1.0, 2.0, 1.0, 1.0), MEASURED)
    _, request = written(tmp_path)
    assert (request.rates, request.profile) == ((1.0, 2.0, 1.0, 1.0), MEASURED)
    assert (request.current, request.num_micro_batches) == (None, 6)
    notes.finish_step(8, PLAN, (1.0, 1.0, 1.0, 1.0), MEASURED)  # within the same second
    assert Progress.load(attempt_path(tmp_path, 0)) == Progress(7, 7)

    make_notes(tmp_path, 1, monkeypatch)
    attempt, request = written(tmp_path)
    assert (attempt, request.profile, request.rates) == (1, MEASURED, (1.0,) * 4)


def test_a_full_disk_does_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = make_notes(tmp_path, 0, monkeypatch)
    attempt_path(tmp_path, 0).rmdir()
    notes.finish_step(0, replace(PLAN), (), None)
    assert Progress.load(attempt_path(tmp_path, 0)) is None
    assert written(tmp_path)[1].current == PLAN  # what was written before is whole
