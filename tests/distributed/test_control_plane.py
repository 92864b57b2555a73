"""One conformance suite for both carriers, on real ranks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from malleus_ds.environment import free_port
from tests.distributed.control_plane_job import (
    SHORT_TIMEOUT_S,
    payload,
    record,
    run_choice,
    run_killed,
    run_suite,
)
from tests.harness import RanksFailedError, mpirun, run_ranks

JOB = Path(__file__).with_name("control_plane_job.py")
# Far below the 60 s after which a rank would give up by itself.
SOON_S = 40


def launch(size: int, folder: Path, scenario: str) -> subprocess.CompletedProcess[str]:
    """Run a scenario of the job under mpirun."""
    env = {"MASTER_PORT": str(free_port())}
    return mpirun(size, JOB, scenario, "--report", str(folder), timeout_s=150, env=env)


def reports(folder: Path) -> dict[int, dict[str, Any]]:
    """What the ranks wrote."""
    return {int(path.stem.removeprefix("rank_")): json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("carrier", ["MPI", "gloo"])
def test_conformance(carrier: str, size: int, tmp_path: Path) -> None:
    if carrier == "MPI":
        job = launch(size, tmp_path, "suite")
        assert job.returncode == 0, job.stderr
        by_rank = reports(tmp_path)
    else:
        by_rank = dict(enumerate(run_ranks(run_suite, size, "auto")))
    assert sorted(by_rank) == list(range(size))
    last = size - 1
    for rank, seen in by_rank.items():
        assert seen["carrier"] == carrier
        assert seen["place"] == [rank, size]
        # Step by step in order, the records of all ranks bit by bit.
        assert seen["received"] == [
            [record(peer, step).tolist() for peer in range(size)] for step in range(7)
        ]
        assert seen["sums"] == [[sum(peer + step for peer in range(size))] for step in range(1, 7)]
        assert seen["double_start"].startswith("RuntimeError: the exchange of step 6 is still in flight")
        assert seen["finish_without_start"].startswith("RuntimeError: no exchange is in flight")
        assert seen["gathered"] == [payload(peer).hex() for peer in range(size)]
        assert seen["broadcast_first"] == payload(0).hex()
        assert seen["broadcast_last"] == payload(last).hex()
        assert seen["empty_broadcast"] == ""
        if rank != last:
            assert seen["lost_peer"].startswith(f"ControlPlaneError: rank {rank} waited ")
            assert f"s for the records of step 7 over {carrier}: " in seen["lost_peer"]
            # Gloo's own timer starts with the exchange, a moment before the wait does.
            assert SHORT_TIMEOUT_S - 0.5 < seen["waited_s"] < SHORT_TIMEOUT_S + 5
    assert by_rank[0]["wrong_size"].startswith("ValueError: broadcast: root must give")


def test_auto_is_gloo_where_torch_and_mpi_count_the_ranks_differently(tmp_path: Path) -> None:
    job = launch(2, tmp_path, "swapped")
    assert job.returncode == 0, job.stderr
    assert [seen["carrier"] for seen in reports(tmp_path).values()] == [["gloo"], ["gloo"]]


def test_mpi_without_mpirun_fails_on_all_ranks_and_names_the_fix() -> None:
    for seen in run_ranks(run_choice, 2, "mpi"):
        assert seen["error"] == (
            'ControlPlaneUnavailableError: malleus.detector.control_plane is "mpi", but rank 0 cannot use '
            "MPI: it was not started by an MPI launcher; start the job with mpirun -n 2, or set "
            'detector.control_plane to "gloo" or "auto"'
        )


def test_gloo_names_a_killed_rank_soon() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(run_killed, 2, "gloo", timeout_s=SOON_S)
    text = str(caught.value)
    assert "rank 1 of 2:\nthe process died with exit code -9" in text
    named = r"ControlPlaneError: rank 0 waited (\d+\.\d) s for the records of step 3 over gloo: gloo failed: "
    found = re.search(named, text)
    assert found is not None, text
    assert float(found[1]) < 10


def test_mpirun_ends_the_job_of_a_killed_rank(tmp_path: Path) -> None:
    began_s = time.monotonic()
    assert launch(2, tmp_path, "killed").returncode == signal.SIGKILL
    assert time.monotonic() - began_s < SOON_S
    assert reports(tmp_path) == {}


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 2)])
def test_an_error_on_one_rank_ends_the_mpi_job_with_its_code(how: str, code: int, tmp_path: Path) -> None:
    began_s = time.monotonic()
    job = launch(3, tmp_path, how)
    assert job.returncode == code
    assert time.monotonic() - began_s < SOON_S
    assert ("rank 1 found a fault" in job.stderr) == (how == "raise")
