"""A job under `malleus-run` that loses ranks in all ways, one after the other, and trains on exactly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from malleus_ds.models.gpt import gpt_layers, gpt_loss
from malleus_ds.plan import ParallelPlan
from tests.distributed.elastic_job import Fault
from tests.distributed.reference import MICRO_BATCH_SIZE, NUM_MICRO_BATCHES, gpt, single_process
from tests.harness import REPOSITORY, run_command

NUM_STEPS = 7
JOB = REPOSITORY / "tests" / "distributed" / "elastic_job.py"
RUN = [sys.executable, "-m", "malleus_ds.cli.run"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_with(
    faults: list[Fault], folder: Path
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """A job that suffers them; what it trained, whose losses are those of a single process."""
    (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))
    (folder / "hosts").write_text("a slots=2\nb slots=2\nc slots=2 # spare\n")
    where = ["--hostfile", str(folder / "hosts"), "--local_hosts", "--run_dir", str(folder / "run")]
    limits = ["--backoff_s", "0.1", "--grace_s", "8", "--planning_s", "2"]
    done = run_command([*RUN, *where, *limits, str(JOB), str(folder), str(NUM_STEPS)], timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = single_process(gpt_layers(gpt()), gpt_loss, NUM_STEPS).losses
    steps = read_lines(folder / "losses.jsonl")
    for entry in steps:
        assert entry["loss"] == pytest.approx(expected[entry["step"]], rel=1e-5), entry
    return done, steps


def test_training_goes_on_exactly_after_every_kind_of_loss(tmp_path: Path) -> None:
    faults = [
        # The host of the coordinator, while all write the checkpoint of step 2: a spare host takes its place.
        Fault(attempt=0, step=2, rank=0, how="host", where="checkpoint"),
        # One rank in the middle of a migration.
        Fault(attempt=1, step=3, rank=3, how="kill", where="migration"),
        # The new coordinator hangs when all save, so that the others wait for it in a collective of all.
        Fault(attempt=2, step=4, rank=0, how="hang", where="save"),
    ]
    done, steps = run_with(faults, tmp_path)
    run_dir = tmp_path / "run"
    # Without a whole checkpoint of steps 2 and 4, training goes on from those before.
    assert [(entry["attempt"], entry["step"]) for entry in steps] == [
        *((0, step) for step in range(2)),
        *((1, step) for step in range(1, 3)),
        *((2, step) for step in range(3, 4)),
        *((3, step) for step in range(3, NUM_STEPS)),
    ]
    plans = {entry["attempt"]: ParallelPlan.from_dict(entry["plan"]) for entry in steps}
    assert [plan.world_size for plan in plans.values()] == [4, 4, 3, 2]
    assert {plan.global_batch_size for plan in plans.values()} == {NUM_MICRO_BATCHES * MICRO_BATCH_SIZE}

    log = read_lines(run_dir / "run.jsonl")
    lost = [(entry["attempt"], entry["host"], entry["slot"]) for entry in log if entry["event"] == "lost"]
    assert lost == [(0, "a", 0), (0, "a", 1), (1, "c", 1), (2, "b", 0)]
    hows = [entry["how"] for entry in log if entry["event"] == "lost"]
    assert [re.search("gone|SIGKILL|hangs", how)[0] for how in hows] == ["gone", "gone", "SIGKILL", "hangs"]  # type: ignore[index]
    started = [entry["hosts"] for entry in log if entry["event"] == "start"]
    assert started[1:] == [{"b": [0, 1], "c": [0, 1]}, {"b": [0, 1], "c": [0]}, {"b": [1], "c": [0]}]
    assert [entry["step"] for entry in log if entry["event"] == "training"] == [0, 1, 3, 3]
    told = [ParallelPlan.from_dict(entry["plan"]) for entry in log if entry["event"] == "plan"]
    assert told == [plans[attempt] for attempt in (1, 2, 3)]
    assert all(f"malleus-run: {entry['text'].splitlines()[0]}" in done.stderr for entry in log)
    assert re.search(r"rank \d: StateLostError: rank \d: the switch before step 3 failed", done.stderr)
    assert re.search(r"rank \d: PeerLostError: .* Timed out waiting 12000ms", done.stderr)
    check_memory(tmp_path)


def test_without_checkpoints_training_goes_on_from_memory(tmp_path: Path) -> None:
    (tmp_path / "in_memory").touch()
    faults = [
        Fault(attempt=0, step=3, rank=0, how="host"),
        Fault(attempt=1, step=5, rank=3, how="kill", where="migration"),
    ]
    _, steps = run_with(faults, tmp_path)
    assert not (tmp_path / "kept").exists()
    resumed = read_lines(tmp_path / "resumed.jsonl")
    assert [entry["source"] for entry in resumed] == ["nothing", "memory", "memory"]
    for entry, fault in zip(resumed[1:], faults, strict=True):
        # The copies of a step are made beside the next one, so those of the last step may not be whole.
        assert fault.step - 1 <= entry["step"] <= fault.step
    trained = [(entry["attempt"], entry["step"]) for entry in steps]
    assert trained == [
        *((0, step) for step in range(3)),
        *((1, step) for step in range(resumed[1]["step"], 5)),
        *((2, step) for step in range(resumed[2]["step"], NUM_STEPS)),
    ]
    assert not any(Path(entry["memory"]).exists() for entry in read_lines(tmp_path / "hosts.jsonl"))


def check_memory(folder: Path) -> None:
    """A host's memory lasts over its attempts, and is gone afterwards."""
    hosts = read_lines(folder / "hosts.jsonl")
    found = {(entry["attempt"], entry["host"]): entry["found"] for entry in hosts}
    assert found[0, "a"] == found[0, "b"] == found[1, "c"] == []
    assert found[3, "b"] == ["attempt_0", "attempt_1", "attempt_2"]
    assert found[3, "c"] == ["attempt_1", "attempt_2"]
    assert not any(Path(entry["memory"]).exists() for entry in hosts)
