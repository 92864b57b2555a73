"""Start-up under every launcher: each test is a job of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from malleus_ds.cli.job import find_launcher, job_command
from malleus_ds.comm import (
    SUPPORTED_DEEPSPEED,
    UnsupportedDeepSpeedError,
    check_deepspeed_version,
)
from malleus_ds.environment import free_port
from tests.harness import mpirun, run_command

SCRIPT = """
import os, sys
import deepspeed, torch
from malleus_ds.comm import init_distributed
from malleus_ds.launch import run_job

def main():
    init_distributed(timeout_s=40)
    init_distributed(timeout_s=1)  # A second call changes nothing.
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    group = torch.distributed.group.WORLD
    timeout_s = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    line = " ".join(["up", *(os.environ[name] for name in names), str(int(total)), str(int(timeout_s))])
    sys.stdout.write(line + chr(10))

run_job(main)
"""
LAUNCHER_PREFIXES = ("PMI", "OMPI_", "MPI_", "HYDI_", "SLURM_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "up.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)


def lines(job: subprocess.CompletedProcess[str]) -> list[list[str]]:
    assert job.returncode == 0, job.stderr
    return sorted(line.split()[1:] for line in job.stdout.splitlines() if line.startswith("up "))


def test_mpirun_jobs_agree_on_a_port_that_is_not_the_default(script: Path) -> None:
    ranks = lines(mpirun(3, script))
    port = ranks[0][3]
    assert port != "29500"
    assert ranks == [[str(rank), str(rank), "3", port, "3", "40"] for rank in range(3)]


def test_mpirun_takes_the_port_of_the_environment(script: Path) -> None:
    port = str(free_port())
    assert [rank[3] for rank in lines(mpirun(2, script, env={"MASTER_PORT": port}))] == [port, port]


def test_single_process_without_launcher(script: Path) -> None:
    ((rank, local_rank, world_size, _, total, timeout_s),) = lines(run_command([sys.executable, str(script)]))
    assert (rank, local_rank, world_size, total, timeout_s) == ("0", "0", "1", "1", "40")


def test_one_slurm_task_is_no_mpi_job(script: Path) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
    ((_, _, world_size, *_),) = lines(run_command([sys.executable, str(script)], env=slurm))
    assert world_size == "1"


def assert_refused(job: subprocess.CompletedProcess[str], ranks: set[int], error: str) -> None:
    """The job ended with code 2, and each of the ranks that spoke has one line."""
    assert job.returncode == 2, job.stderr
    told = [line for line in job.stderr.splitlines() if "Error" in line]
    assert len(told) == len({line.partition(":")[0] for line in told})
    assert {int(line.removeprefix("rank ").partition(":")[0]) for line in told} <= ranks
    assert told
    assert all(error in line for line in told), told
    assert "Traceback" not in job.stderr


def test_slurm_tasks_that_mpi_does_not_see_are_refused(script: Path) -> None:
    job = run_command([sys.executable, str(script)], env={"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"})
    assert_refused(job, {3}, "LaunchError: the launcher started 4 processes, but mpi4py sees 1")


def test_half_an_environment_is_refused(script: Path) -> None:
    job = run_command([sys.executable, str(script)], env={"RANK": "1", "WORLD_SIZE": "2"})
    assert_refused(job, {1}, "LaunchError: RANK is 1, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set")


def test_mpirun_without_mpi4py_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "without_mpi4py.py"
    script.write_text(f"import sys\nsys.modules['mpi4py'] = None  # As if not installed.\n{SCRIPT}")
    refused = "LaunchError: the launcher started 2 processes, but mpi4py cannot be imported"
    assert_refused(mpirun(2, script), {0, 1}, refused)


def test_another_deepspeed_is_refused(tmp_path: Path) -> None:
    """As of a job whose environment has another version."""
    script = tmp_path / "old.py"
    script.write_text(
        "import importlib.metadata\n"
        "importlib.metadata.version = lambda name: '0.15.1'\n"
        "import malleus_ds\n"
        "from malleus_ds.launch import run_job\n"
        "run_job(malleus_ds.initialize)\n"
    )
    job = run_command([sys.executable, str(script)])
    assert_refused(
        job, {0}, "UnsupportedDeepSpeedError: malleus_ds needs deepspeed>=0.19.8,<0.20, but 0.15.1"
    )


def test_deepspeed_launcher(script: Path) -> None:
    ranks = lines(run_command(job_command(find_launcher("deepspeed"), 2, script, ())))
    port = ranks[0][3]
    assert port != "29500"
    assert ranks == [[str(rank), str(rank), "2", port, "2", "40"] for rank in range(2)]


def test_needs_neither_compiler_nor_ninja(script: Path, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    bare = {"PATH": str(empty), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "CXX": "", "CC": ""}
    ((_, _, world_size, *_),) = lines(run_command([sys.executable, str(script)], env=bare))
    assert world_size == "1"
    assert not (tmp_path / "extensions").exists()


def test_free_port_avoids_listening_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        taken.listen()
        busy = taken.getsockname()[1]
        monkeypatch.setattr("malleus_ds.environment._PORT_RANGE", (busy, busy + 2))
        assert {free_port() for _ in range(20)} == {busy + 1}


@pytest.mark.parametrize("version", ["0.19.8", "0.19.9", "0.19.8+cpu"])
def test_supported_versions(version: str) -> None:
    check_deepspeed_version(version)


@pytest.mark.parametrize("version", ["0.19.7", "0.20.0", "0.15.1"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedDeepSpeedError, match=rf"but {version} is installed") as caught:
        check_deepspeed_version(version)
    assert SUPPORTED_DEEPSPEED in str(caught.value)


def test_installed_version_is_supported() -> None:
    check_deepspeed_version()
