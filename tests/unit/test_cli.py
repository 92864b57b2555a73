"""The command line without a training job: arguments, exit codes, and following a process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import malleus_ds
from malleus_ds.cli.errors import JobFailedError, UsageError
from malleus_ds.cli.job import Job, find_launcher, job_command
from malleus_ds.cli.main import main
from malleus_ds.report.measurements import Step
from tests.harness import REPOSITORY


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["--version"])
    assert leave.value.code == 0
    assert malleus_ds.__version__ in capsys.readouterr().out


def test_starts_without_torch() -> None:
    code = "import sys, malleus_ds.cli.main; sys.exit('torch' in sys.modules or 'deepspeed' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


@pytest.mark.parametrize("arguments", [[], ["dmeo"], ["demo", "--launcher", "slurm"]])
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(arguments)
    assert leave.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--data", "/no/such/text"], "/no/such/text"),
        (["--healthy-steps", "2"], "--healthy-steps 2"),
        (["--json", "/no/such/folder/out.json"], "/no/such/folder/out.json"),
    ],
)
def test_user_mistakes_exit_with_2_and_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_missing_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match="auto"):
        find_launcher("auto")
    (tmp_path / "deepspeed").touch(mode=0o755)
    assert find_launcher("auto") == tmp_path / "deepspeed"
    with pytest.raises(UsageError, match="mpirun"):
        find_launcher("mpirun")


def test_commands() -> None:
    script, arguments = Path("train.py"), ["--steps", "3"]
    mpirun = job_command(Path("/bin/mpirun"), 8, script, arguments)
    assert mpirun == ["/bin/mpirun", "-n", "8", sys.executable, "train.py", "--steps", "3"]
    deepspeed = job_command(Path("/bin/deepspeed"), 8, script, arguments)
    assert deepspeed[:4] == [sys.executable, "/bin/deepspeed", "--num_accelerators", "8"]
    assert deepspeed[-3:] == ["train.py", "--steps", "3"]


WRITE_STEP = """
import sys, time
from malleus_ds.report.measurements import MeasurementWriter, Step
with MeasurementWriter(sys.argv[1]) as writer:
    writer.write(Step(0, 0.5, 2.0, (1.0,)))
"""


def start(folder: Path, code: str) -> Job:
    path = folder / "measurements.jsonl"
    return Job([sys.executable, "-c", code, str(path)], folder / "log", path)


def test_records_of_a_job_that_ends_well(tmp_path: Path) -> None:
    with start(tmp_path, WRITE_STEP) as job:
        records = [record for record in job.records(30.0) if record is not None]
    assert records == [Step(0, 0.5, 2.0, (1.0,))]


@pytest.mark.parametrize(("code", "kind"), [(2, UsageError), (1, JobFailedError), (7, JobFailedError)])
def test_failures_name_the_error_and_the_log(tmp_path: Path, code: int, kind: type[Exception]) -> None:
    failing = f"import sys; print('[0] rank 3: PeerLostError: gone'); sys.exit({code})"
    with start(tmp_path, failing) as job, pytest.raises(kind) as caught:
        list(job.records(30.0))
    assert "rank 3: PeerLostError: gone" in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)


def test_leaving_a_job_ends_all_its_processes(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys; c = subprocess.Popen(['sleep', '600']); print(c.pid, flush=True); c.wait()"
    )
    with start(tmp_path, parent):
        deadline_s = time.monotonic() + 30
        while not (text := (tmp_path / "log").read_text()).endswith("\n"):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        child = psutil.Process(int(text))
    child.wait(10)


def test_silent_job_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    with (
        start(tmp_path, "import time; time.sleep(600)") as job,
        pytest.raises(JobFailedError, match="no sign"),
    ):
        list(job.records(0.5))
    assert time.monotonic() - began < 10
