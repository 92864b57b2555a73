"""`malleus-run` with scripts that need no torch: restarts, exit codes, mistakes."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from malleus_ds.cli.run import main
from tests.harness import REPOSITORY, run_command

RUN = [sys.executable, "-m", "malleus_ds.cli.run", "--backoff_s", "0.1", "--grace_s", "3"]

ONE_IS_LOST = """
if rank == 1:
    os.abort()
sys.exit("PeerLostError: rank 1 is gone")
"""

PDSH = """\
#!/bin/bash
# pdsh -S -f N -w HOST,HOST command...
hosts=$5; shift 5; number=0; ended=0
for host in ${hosts//,/ }; do
    command="$*"; bash -c "${command//%n/$number}" & started[$number]=$!; number=$((number + 1))
done
for one in ${started[@]}; do wait $one || ended=$?; done
exit $ended
"""


def write_script(folder: Path, body: str) -> str:
    """A script that knows its ``rank``, its ``attempt`` and its ``folder``."""
    path = folder / "script.py"
    path.write_text(
        "import os, pathlib, signal, sys, time\n"
        "rank, attempt = int(os.environ['RANK']), int(os.environ['MALLEUS_ATTEMPT'])\n"
        f"folder = pathlib.Path({str(folder)!r})\n{body}"
    )
    return str(path)


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "run.jsonl").read_text().splitlines()]


def started(folder: Path) -> list[dict[str, list[int]]]:
    return [entry["hosts"] for entry in events(folder) if entry["event"] == "start"]


def test_the_hostfile_is_read_again_at_each_restart(tmp_path: Path) -> None:
    """A host joins, and a lost device comes back once the line of its host has changed."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\n")
    body = f"""
hostfile = pathlib.Path({str(hostfile)!r})
told = {{name: os.environ[name] for name in ("MALLEUS_HOST", "MALLEUS_RUN_DIR", "LOCAL_RANK", "WORLD_SIZE")}}
assert sys.argv[1:] == ["--local_rank=" + told["LOCAL_RANK"], "--text", "two words"], sys.argv
(folder / f"told_{{attempt}}_{{rank}}").write_text(" ".join(told.values()))
while len(list(folder.glob(f"told_{{attempt}}_*"))) < int(told["WORLD_SIZE"]):
    time.sleep(0.05)
if attempt == 0 and rank == 1:
    hostfile.write_text("a slots=2\\nb slots=1\\n")
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 1 and rank == 1:
    hostfile.write_text("a slots=2 # repaired\\nb slots=1\\n")
    raise MemoryError("too large")
if attempt < 2:
    sys.exit("PeerLostError: rank 1 is gone")
"""
    script = write_script(tmp_path, body)
    where = ["--hostfile", str(hostfile), "--local_hosts", "--run_dir", str(tmp_path / "run")]
    done = run_command([*RUN, *where, script, "--text", "two words"], timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert started(tmp_path) == [{"a": [0, 1]}, {"a": [0], "b": [0]}, {"a": [0, 1]}]
    lost = [(entry["host"], entry["slot"], entry["how"]) for entry in events(tmp_path) if "how" in entry]
    assert lost == [("a", 1, "was ended by SIGKILL"), ("b", 0, "failed with code 1: MemoryError: too large")]
    told = {path.name: path.read_text() for path in tmp_path.glob("told_*")}
    run_dir = tmp_path / "run"
    assert told["told_0_1"] == f"a {run_dir} 1 2"
    assert told["told_1_1"] == f"b {run_dir} 0 2"


@pytest.mark.parametrize(
    ("body", "options", "code", "text"),
    [
        ("sys.exit(2)", [], 2, "not started again, for a mistake"),
        ("raise KeyError(rank)", [], 3, "failed before the first step: failed with code 1: KeyError"),
        (ONE_IS_LOST, ["--min_ranks", "2"], 4, "1 ranks are left; --min_ranks is 2"),
        (ONE_IS_LOST, ["--max_restarts", "0"], 3, "of --max_restarts 0"),
    ],
    ids=["mistake", "broken", "too-few", "no-restarts"],
)
def test_exit_codes_without_a_restart(
    body: str, options: list[str], code: int, text: str, tmp_path: Path
) -> None:
    where = ["--num_accelerators", "2", "--run_dir", str(tmp_path / "run")]
    done = run_command([*RUN, *where, *options, write_script(tmp_path, body)], timeout_s=60)
    assert done.returncode == code, done.stderr
    assert started(tmp_path) == [{"localhost": [0, 1]}]
    assert text in events(tmp_path)[-1]["text"]
    assert events(tmp_path)[-1]["code"] == code
    assert f"malleus-run: {events(tmp_path)[-1]['text']}" in done.stderr


def test_several_hosts_over_pdsh(tmp_path: Path) -> None:
    """Through DeepSpeed's runner; pdsh and ssh only pass on what they are asked to run elsewhere."""
    script = write_script(
        tmp_path,
        "names = 'MALLEUS_HOST', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR'\n"
        "told = ' '.join(os.environ[name] for name in names)\n"
        "(folder / f'told_{rank}').write_text(' '.join([told, *sys.argv[1:]]))\n",
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "pdsh").write_text(PDSH)
    (programs / "ssh").write_text("#!/bin/sh\n")
    for program in programs.iterdir():
        program.chmod(0o700)
    (tmp_path / "hosts").write_text("127.0.0.2 slots=1\n127.0.0.3 slots=2\n")
    where = ["--hostfile", str(tmp_path / "hosts"), "--run_dir", str(tmp_path / "run"), "--no_local_rank"]
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    done = run_command([*RUN, *where, script, "two words"], timeout_s=60, env={"PATH": path})
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"told_{rank}").read_text() for rank in range(3)] == [
        "127.0.0.2 0 3 127.0.0.2 two words",
        "127.0.0.3 0 3 127.0.0.2 two words",
        "127.0.0.3 1 3 127.0.0.2 two words",
    ]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)], ids=["SIGTERM", "SIGKILL"]
)
def test_its_end_ends_all_ranks_and_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    body = """
pathlib.Path(os.environ["MALLEUS_MEMORY_DIR"], "state").touch()
(folder / f"here_{rank}").write_text(f"{os.getpid()} {os.getppid()} " + os.environ["MALLEUS_MEMORY_DIR"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(100)
"""
    where = ["--num_accelerators", "2", "--run_dir", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    job = subprocess.Popen([*RUN, *where, write_script(tmp_path, body)], env=environment)
    try:
        notes = wait_for(tmp_path / "here_0").split() + wait_for(tmp_path / "here_1").split()
        job.send_signal(number)
        assert job.wait(40) == code
    finally:
        job.kill()
    pids = [int(word) for word in notes if word.isdigit()]
    assert len(pids) == 4
    deadline_s = time.monotonic() + (0 if code == 130 else 30)
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert not any(Path(word).exists() for word in notes if not word.isdigit())


def test_a_closed_terminal_during_the_backoff_leaves_nothing(tmp_path: Path) -> None:
    body = """
(folder / f"here_{rank}").write_text(os.environ["MALLEUS_MEMORY_DIR"])
while len(list(folder.glob("here_*"))) < 2:
    time.sleep(0.05)
"""
    where = ["--num_accelerators", "2", "--run_dir", str(tmp_path / "run"), "--backoff_s", "100"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    job = subprocess.Popen(
        [*RUN, *where, write_script(tmp_path, body + ONE_IS_LOST)],
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )
    try:
        memory = Path(wait_for(tmp_path / "here_0"))
        deadline_s = time.monotonic() + 40
        while not any(entry["event"] == "plan" for entry in events(tmp_path)):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert memory.exists()
        job.send_signal(signal.SIGHUP)
        assert job.wait(30) == 130
    finally:
        job.kill()
    assert not memory.exists()


def wait_for(path: Path) -> str:
    deadline_s = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline_s, path
        time.sleep(0.05)
    return path.read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--num_accelerators", "2", "{}/none.py"], "/none.py: no such script; give the path of a Python"),
        (["--num_accelerators", "2", "--module", "no.such"], "--module no.such: no such module"),
        (["--num_accelerators", "0", "{}/ok.py"], "--num_accelerators 0: give at least 1"),
        (["--max_restarts", "-1", "{}/ok.py"], "--max_restarts -1: give at least 0"),
        (["--backoff_s", "nan", "{}/ok.py"], "--backoff_s nan: give at least 0"),
        (
            ["--num_accelerators", "2", "--min_ranks", "3", "{}/ok.py"],
            "--min_ranks 3: the hosts that",
        ),
        (["--hostfile", "{}/none", "{}/ok.py"], "/none: no such file; give the path of an existing one"),
        (["--hostfile", "{}/bad", "{}/ok.py"], "hostfile line 2: 'b slot=2': write '<host> slots="),
        (["--hostfile", "{}/good", "--spare_hosts", "c", "{}/ok.py"], "--spare_hosts c: not in the hostfile"),
        (["--num_accelerators", "3", "{}/ok.py"], "CUDA_VISIBLE_DEVICES is 4,5; give at most 2, or unset"),
        (["--num_accelerators", "2", "--runner_args", "'", "{}/ok.py"], "No closing quotation; write it as"),
        (["--num_accelerators", "1", "--spare_hosts", "c", "{}/ok.py"], "--spare_hosts: give the hosts with"),
        (["--num_accelerators", "1", "--local_hosts", "{}/ok.py"], "--local_hosts: give the hosts with"),
        (["--num_accelerators", "1", "--run_dir", "{}/old", "{}/ok.py"], "has the files of another run;"),
    ],
)
def test_mistakes_start_nothing(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    (tmp_path / "ok.py").touch()
    (tmp_path / "good").write_text("a slots=1\n")
    (tmp_path / "bad").write_text("a slots=1\nb slot=2\n")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.jsonl").touch()
    if "--run_dir" not in arguments:
        arguments = ["--run_dir", "{}/run", *arguments]
    assert main([word.format(tmp_path) for word in arguments]) == 2
    told = capsys.readouterr().err
    assert text in told
    assert told.count("malleus-run: ") == 1


def test_help_and_start_are_light(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out
    assert "exit codes:" in told
    assert "examples:" in told
    heavy = {"torch", "deepspeed", "numpy", "cvxpy", "pydantic"}
    code = "import malleus_ds.cli.run, malleus_ds.elastic.supervise, sys; print(sorted(sys.modules))"
    done = run_command([sys.executable, "-c", code], timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert not heavy & set(ast.literal_eval(done.stdout))
