from __future__ import annotations

import os
import signal
import time

import pytest

from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.planner import PlannerFailure, PlannerProcess, PlanRequest, PlanResult, make_plan

PROFILE = ModelProfile(tuple(LayerProfile("block", 1.0) for _ in range(8)))
REQUEST = PlanRequest(PROFILE, (1.0, 2.0, 1.0, 1.0), 8)


def wait(process: PlannerProcess) -> PlanResult | PlannerFailure:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        answer = process.poll()
        if answer is not None:
            return answer
        time.sleep(0.01)
    pytest.fail("no answer from the planner process within 60 s")


def test_answers_failures_and_restart() -> None:
    with PlannerProcess() as process:
        assert process.poll() is None
        process.submit(REQUEST)
        with pytest.raises(RuntimeError, match="pending"):
            process.submit(REQUEST)
        first = wait(process)
        assert isinstance(first, PlanResult)
        assert first.plan == make_plan(REQUEST).plan

        process.submit(PlanRequest(PROFILE, (float("inf"),) * 4, 8))
        refused = wait(process)
        assert isinstance(refused, PlannerFailure)
        assert "no usable device" in refused.reason

        process.submit(REQUEST)
        os.kill(process.pid, signal.SIGKILL)
        killed = wait(process)
        # The answer may have been on its way.
        assert isinstance(killed, PlanResult) or "code -9" in killed.reason

        process.submit(REQUEST)
        again = wait(process)
        assert isinstance(again, PlanResult)
        assert again.plan == first.plan


def test_killed_idle_worker_is_replaced() -> None:
    with PlannerProcess() as process:
        first_pid = process.pid
        os.kill(first_pid, signal.SIGKILL)
        time.sleep(0.1)
        process.submit(REQUEST)
        assert isinstance(wait(process), PlanResult)
        assert process.pid != first_pid


def test_stopped_worker_is_given_up() -> None:
    with PlannerProcess() as process:
        process.submit(REQUEST)
        assert isinstance(wait(process), PlanResult)
        os.kill(process.pid, signal.SIGSTOP)
        process.submit(PlanRequest(PROFILE, (1.0,) * 4, 8, time_limit_s=0.1))
        late = wait(process)
        assert isinstance(late, PlannerFailure)
        assert "within 0.2 s" in late.reason


def test_close_ends_the_worker() -> None:
    process = PlannerProcess()
    pid = process.pid
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_worker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    with PlannerProcess() as process:
        process.submit(REQUEST)
        failure = wait(process)
        assert isinstance(failure, PlannerFailure)
        assert "ended with code 1; it said:" in failure.reason


def test_nothing_blocks_while_the_worker_reads_nothing() -> None:
    profile = ModelProfile(
        tuple(LayerProfile("x" * 1000, 1.0) for _ in range(200))
    )  # Beyond a pipe's buffer.
    with PlannerProcess() as process:
        os.kill(process.pid, signal.SIGSTOP)
        process.submit(PlanRequest(profile, (1.0, 1.0), 4))
        assert process.poll() is None
        os.kill(process.pid, signal.SIGCONT)
        assert isinstance(wait(process), PlanResult)
