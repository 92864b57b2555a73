"""The example job as users start it: under both launchers and alone, with a lost rank and a wrong config."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from malleus_ds.cli.job import find_launcher, job_command
from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.report.measurements import MeasurementReader, Measurements
from tests.harness import REPOSITORY, run_command

NUM_RANKS = 4
NUM_STEPS = 5
SCRIPT = REPOSITORY / "launcher" / "train.py"
SMALL_MODEL = ("--num_blocks", "4", "--hidden_size", "16", "--sequence_length", "16")
KILLED_RANK = 2
END_LIMIT_S = 60.0
SURVIVOR = r"rank [013]: (PeerLostError|ControlPlaneError): rank [013] "


def train_command(launcher: str, *arguments: str) -> list[str]:
    """The script with a small model in 2 pipelines of 2 stages."""
    arguments = (*SMALL_MODEL, "--num_stages", "2", *arguments)
    return job_command(find_launcher(launcher), NUM_RANKS, SCRIPT, arguments)


def write_config(folder: Path, **malleus: Any) -> str:
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1000000,
        "malleus": malleus,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def run_steps(command: list[str], path: Path) -> list[float]:
    """Train for `NUM_STEPS`, with measurements to ``path``; the losses."""
    config = write_config(path.parent, emulation={"layer_ms": 1.0})
    arguments = ["--deepspeed_config", config, "--steps", str(NUM_STEPS), "--measurements", str(path)]
    done = run_command([*command, *arguments], timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    measurements = read(path)
    assert measurements.end is not None
    assert [step.step for step in measurements.steps] == list(range(NUM_STEPS))
    return [step.loss for step in measurements.steps]


def read(path: Path) -> Measurements:
    measurements = Measurements()
    for record in MeasurementReader(path).new_records():
        measurements.add(record)
    return measurements


def test_same_losses_under_both_launchers_with_a_plan_and_alone(tmp_path: Path) -> None:
    alone = [sys.executable, str(SCRIPT), *SMALL_MODEL, "--num_stages", "1"]
    expected = run_steps(alone, tmp_path / "alone.jsonl")
    assert expected[-1] < expected[0]
    equal_plan = run_steps(train_command("deepspeed"), tmp_path / "deepspeed.jsonl")
    assert equal_plan == pytest.approx(expected, rel=1e-5)
    plan = ParallelPlan(
        (
            Pipeline((Stage((3,), (0, 1)), Stage((0,), (1, 3)), Stage((1,), (3, 6))), num_micro_batches=5),
            Pipeline((Stage((2,), (0, 6)),), num_micro_batches=3),
        )
    )
    plan.to_json(tmp_path / "plan.json")
    command = job_command(
        find_launcher("mpirun"), NUM_RANKS, SCRIPT, (*SMALL_MODEL, "--plan", str(tmp_path / "plan.json"))
    )
    assert run_steps(command, tmp_path / "plan.jsonl") == pytest.approx(expected, rel=1e-5)
    start = read(tmp_path / "plan.jsonl").start
    assert start is not None
    assert ParallelPlan.from_dict(start.plan) == plan


def test_another_world_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Saved by four ranks, loaded by one: the losses are those of a job that never stopped."""
    config = write_config(tmp_path)
    alone = [sys.executable, str(SCRIPT), *SMALL_MODEL, "--num_stages", "1", "--deepspeed_config", config]
    four = [*train_command("mpirun"), "--deepspeed_config", config]
    kept = ["--checkpoints", str(tmp_path / "kept")]
    runs = [
        [*alone, "--steps", "4"],
        [*four, "--steps", "2", *kept, "--save_interval", "1"],
        [*alone, "--steps", "4", *kept],
    ]
    losses = []
    for index, command in enumerate(runs):
        path = tmp_path / f"{index}.jsonl"
        done = run_command([*command, "--measurements", str(path)], timeout_s=180)
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append({step.step: step.loss for step in read(path).steps})
    whole, first, second = losses
    assert (list(first), list(second)) == ([0, 1], [2, 3])
    assert first | second == pytest.approx(whole, rel=1e-5)
    tags = {path.name for path in (tmp_path / "kept").iterdir()}
    assert tags == {"latest", "global_step1", "global_step2", "global_step4"}


@pytest.mark.parametrize(
    ("launcher", "section", "error"),
    [
        ("mpirun", {"detektor": {}}, "ConfigError: malleus.detektor: unknown key"),
        ("deepspeed", {"detektor": {}}, "ConfigError: malleus.detektor: unknown key"),
        (
            "deepspeed",
            {"detector": {"control_plane": "mpi"}},
            'ControlPlaneUnavailableError: malleus.detector.control_plane is "mpi", but rank 0 cannot use',
        ),
    ],
    ids=["mpirun", "deepspeed", "deepspeed-without-mpi"],
)
def test_a_mistake_ends_the_job_with_code_2_and_one_line(
    launcher: str, section: dict[str, Any], error: str, tmp_path: Path
) -> None:
    config = write_config(tmp_path, **section)
    done = run_command(train_command(launcher, "--deepspeed_config", config), timeout_s=120)
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    # Each rank that comes to speak says the same line, and none shows a traceback.
    told = {line.partition(": ")[2] for line in output.splitlines() if "Error: " in line}
    assert len(told) == 1, output
    assert error.partition(": ")[2] in told.pop()
    assert f": {error}" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("launcher", "is_held", "told_by"),
    [
        ("mpirun", False, rf"{SURVIVOR}|BAD TERMINATION"),
        # The survivors must notice by themselves: what would kill them is held until one of them has spoken.
        ("mpirun", True, SURVIVOR),
        ("deepspeed", True, SURVIVOR),
    ],
    ids=["mpirun", "mpirun-held", "deepspeed-held"],
)
def test_killed_rank_ends_the_job(launcher: str, is_held: bool, told_by: str, tmp_path: Path) -> None:
    measurements_path, log_path = tmp_path / "measurements.jsonl", tmp_path / "log"
    config = write_config(tmp_path, emulation={"layer_ms": 2.0})
    arguments = ["--deepspeed_config", config, "--steps", "100000", "--measurements", str(measurements_path)]
    command = train_command(launcher, *arguments)
    if launcher == "mpirun":
        # Ranks write to the log themselves: a launcher that is held passes nothing on.
        place = command.index(sys.executable)
        command[place:place] = ["sh", "-c", 'exec "$@" >>"$0" 2>&1', str(log_path)]
    with log_path.open("ab") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY)
    try:
        wait_for_steps(measurements_path, 4, job, log_path)
        victim = rank_process(job.pid, KILLED_RANK)
        parent = victim.parent()
        assert parent is not None
        if is_held:
            parent.suspend()
        victim.kill()
        if is_held:
            wait_for_text(log_path, told_by)
            parent.resume()
        job.wait(END_LIMIT_S)
        wait_for_end(measurements_path)
    finally:
        kill_tree(job.pid)
    output = log_path.read_text()
    assert job.returncode != 0, output
    assert re.search(told_by, output), output


def wait_for_text(path: Path, pattern: str) -> None:
    deadline_s = time.monotonic() + END_LIMIT_S
    while not re.search(pattern, path.read_text()):
        assert time.monotonic() < deadline_s, path.read_text()
        time.sleep(0.1)


def wait_for_steps(path: Path, num_steps: int, job: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline_s = time.monotonic() + 120
    while len(read(path).steps) < num_steps:
        assert job.poll() is None, log_path.read_text()
        assert time.monotonic() < deadline_s, log_path.read_text()
        time.sleep(0.1)


def wait_for_end(path: Path) -> None:
    """No rank of the job, which all name the file in their command line, may survive its launcher."""
    deadline_s = time.monotonic() + END_LIMIT_S
    while survivors := [p for p in psutil.process_iter() if str(path) in " ".join(command_line(p))]:
        assert time.monotonic() < deadline_s, survivors
        time.sleep(0.1)


def rank_process(job_pid: int, rank: int) -> psutil.Process:
    """The rank's process; deepspeed says the rank in RANK, MPICH's mpirun in PMI_RANK."""
    for process in psutil.Process(job_pid).children(recursive=True):
        environment = process.environ()
        if str(rank) in (environment.get("RANK"), environment.get("PMI_RANK")):
            return process
    raise AssertionError(f"no process of rank {rank}")


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()  # type: ignore[no-any-return]
    except psutil.Error:
        return []


def kill_tree(pid: int) -> None:
    if not psutil.pid_exists(pid):
        return
    for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
        process.kill()
