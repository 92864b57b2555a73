"""What `malleus-run` decides: who is lost, which devices come next, and what the planner is asked."""

from __future__ import annotations

import base64
import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from malleus_ds.cluster import ClusterError
from malleus_ds.elastic import supervise
from malleus_ds.elastic.devices import Device, first_devices, next_devices, parse_hosts
from malleus_ds.elastic.judge import Ending, judge
from malleus_ds.elastic.launchers import launches
from malleus_ds.elastic.restart_plan import RestartPlan, changed_world, renumbered
from malleus_ds.elastic.run_files import ExitNote, Verdict, read_json
from malleus_ds.elastic.run_log import RunLog
from malleus_ds.environment import PLAN_VARIABLE
from malleus_ds.errors import tells_of_lost_peer
from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage

HOSTFILE = """\
# the cluster
a slots=2
b slots=1   # spare
c slots=2
"""


def devices(text: str) -> tuple[Device, ...]:
    """``a0 a1 b0``"""
    return tuple(Device(word[0], int(word[1:])) for word in text.split())


def test_spare_hosts_are_marked_in_the_file_or_named() -> None:
    assert first_devices(parse_hosts(HOSTFILE)) == devices("a0 a1 c0 c1")
    assert first_devices(parse_hosts(HOSTFILE, ["c"])) == devices("a0 a1")
    with pytest.raises(ClusterError, match="--spare_hosts d: not in the hostfile, which has a, b, c;"):
        parse_hosts(HOSTFILE, ["d"])
    with pytest.raises(ClusterError, match="all hosts are spare"):
        parse_hosts(HOSTFILE, ["a", "c"])


def test_next_devices() -> None:
    hosts, current = parse_hosts(HOSTFILE), devices("a0 a1 c0 c1")
    text_of_a = hosts[0].text
    assert next_devices(hosts, current, {}, 4) == current
    lost = {Device("a", 1): text_of_a}
    # The spare host joins behind those in use, and stays when all are back.
    assert next_devices(hosts, current, lost, 4) == devices("a0 c0 c1 b0")
    assert next_devices(hosts, devices("a0 c0 c1 b0"), lost, 3) == devices("a0 c0 c1 b0")
    # Not needed: enough devices are left.
    assert next_devices(hosts, current, lost, 3) == devices("a0 c0 c1")
    repaired = parse_hosts(HOSTFILE.replace("a slots=2", "a slots=2 # repaired"))
    assert next_devices(repaired, devices("a0 c0 c1"), lost, 4) == devices("a0 a1 c0 c1")
    others = parse_hosts("d slots=1\nc slots=1\n")
    assert next_devices(others, current, lost, 4) == devices("c0 d0")


def note(rank: int, code: int, lost_peer: bool = False, was_stopped: bool = False) -> ExitNote:
    return ExitNote(rank, code, was_stopped, lost_peer, f"line {rank}")


@pytest.mark.parametrize(
    ("notes", "ending", "lost"),
    [
        ([note(0, 0), note(1, 0)], Ending.DONE, {}),
        ([note(0, 1, lost_peer=True), note(1, -9)], Ending.LOSS, {1: "SIGKILL"}),
        ([note(0, 0), note(1, -signal.SIGSEGV)], Ending.LOSS, {1: "SIGSEGV"}),
        # Gloo's threads may abort a rank that leaves for a lost peer, and it may be slow to go.
        ([note(0, -6, lost_peer=True), note(1, -15, True, True), None], Ending.LOSS, {2: "host is gone"}),
        ([note(0, 1, lost_peer=True), note(1, -9, was_stopped=True)], Ending.LOSS, {1: "hangs"}),
        ([note(0, 1, lost_peer=True), note(1, 1)], Ending.LOSS, {1: "failed with code 1: line 1"}),
        # A broken connection, and nobody is to blame.
        ([note(0, 1, lost_peer=True), note(1, 1, lost_peer=True)], Ending.LOSS, {}),
        ([note(0, 2), note(1, 1, lost_peer=True)], Ending.MISTAKE, {}),
        # It may have waited for the killed one, or for the one that made a mistake.
        ([note(0, -15, was_stopped=True), note(1, -9)], Ending.LOSS, {1: "SIGKILL"}),
        ([note(0, -15, was_stopped=True), note(1, 1)], Ending.LOSS, {1: "failed with code 1"}),
        ([note(0, -15, was_stopped=True), note(1, 2)], Ending.MISTAKE, {}),
        # Beside a killed rank, what others say does not count.
        ([note(0, 2), note(1, -9)], Ending.LOSS, {1: "SIGKILL"}),
        ([note(0, 1), note(1, 1)], Ending.BROKEN, {0: "line 0", 1: "line 1"}),
        ([None, note(1, 1)], Ending.BROKEN, {0: "gone", 1: "line 1"}),
        ([None, None], Ending.BROKEN, {}),
    ],
)
def test_judge(notes: list[ExitNote | None], ending: Ending, lost: dict[int, str]) -> None:
    judgement = judge(dict(enumerate(notes)), has_progress=False)
    assert judgement.ending is ending
    assert [each.rank for each in judgement.lost] == list(lost)
    for each in judgement.lost:
        assert lost[each.rank] in each.how


def test_an_error_that_python_ignored_is_not_the_reason() -> None:
    told = ["rank 0: PeerLostError: rank 0 lost a peer", "Exception ignored in: <function f>", "Traceback"]
    ended = supervise._note(0, 1, False, [*told, "KeyError: 3"])
    assert (ended.lost_peer, ended.reason) == (True, told[0])
    assert supervise._note(0, 1, False, [*told, "KeyError: 3", "OSError: 4"]).reason == "OSError: 4"


def test_warnings_of_threads_are_not_the_reason() -> None:
    """As NCCL's heartbeat tells of a lost store; alone, it aborts the rank."""
    told = [
        "[rank1]:[W1130 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3)",
        "Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:675 (most recent)",
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80",
    ]
    assert supervise._note(1, 1, False, ["rank 1: PeerLostError: gone", *told]).lost_peer
    assert not supervise._note(1, 1, False, ["KeyError: 3", *told]).lost_peer
    assert supervise._note(1, -6, False, told).lost_peer


def test_a_verdict_counts_when_the_launcher_ends_the_supervisor_for_it(tmp_path: Path) -> None:
    asked = supervise._Asked(to_end=True)
    assert supervise._await_verdict(tmp_path, asked, 10.0) is None
    Verdict(("a",)).save(tmp_path)
    assert supervise._await_verdict(tmp_path, asked, 10.0) == Verdict(("a",))


def test_a_progress_bar_is_passed_on_before_its_line_ends(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as stream:
        tail = supervise._Tail(stream)
        os.write(writing, b"one\ntwo\r 50 %\r")
        told = b""
        deadline_s = time.monotonic() + 10
        while b"50" not in told and time.monotonic() < deadline_s:
            told += capfdbinary.readouterr().err
        os.write(writing, b"100 %\nKeyErr")
        os.write(writing, b"or: 3")
        os.close(writing)
        assert tail.lines() == ["one", "two", "50 %", "100 %", "KeyError: 3"]
    assert told == b"one\ntwo\r 50 %\r"


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read_text, num_stale = tmp_path / "progress.json", Path.read_text, iter([True, True])
    path.write_text("3")

    def read(self: Path, encoding: str) -> str:
        if next(num_stale, False):
            raise OSError(errno.ESTALE, "stale")
        return read_text(self, encoding=encoding)

    monkeypatch.setattr(Path, "read_text", read)
    assert read_json(path) == 3


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunLog(tmp_path / "gone" / "run.jsonl").tell("start", "go")
    assert capsys.readouterr().err.startswith("malleus-run: go\nmalleus-run: not in the log: ")


def test_slots_are_of_the_visible_devices(tmp_path: Path) -> None:
    """DeepSpeed's launcher replaces CUDA_VISIBLE_DEVICES by what it is told."""
    launch = launches({"localhost": [0, 2]}, tmp_path, 1, False, (), ("4", "5", "GPU-6"))[0]
    world = next(word.split("=", 1)[1] for word in launch.command if word.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(world)) == {"localhost": ["4", "GPU-6"]}
    assert launch.ranks == (0, 1)


def test_all_ranks_lost_after_a_step_start_again() -> None:
    judgement = judge({0: note(0, 1), 1: None}, has_progress=True)
    assert (judgement.ending, judgement.lost) == (Ending.LOSS, ())
    assert judgement.reason == "all ranks were lost at once, the first one failed with code 1: line 0"


@pytest.mark.parametrize(
    ("line", "is_victim"),
    [
        ("rank 1: PeerLostError: rank 1 lost a peer in step 3: Connection closed by peer", True),
        ("malleus_ds.pipe.agreement.RankFailedError: rank 0 failed: KeyError: 3", True),
        ("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error", True),
        ("[rank1]: RuntimeError: Application timeout caused pair closure", True),
        ("torch.distributed.DistBackendError: NCCL error in: ...", True),
        ("[rank1]: ncclRemoteError: A call failed possibly due to a network error", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", False),
        ("KeyError: 'PeerLost'", False),
    ],
)
def test_who_ended_for_a_peer(line: str, is_victim: bool) -> None:
    assert tells_of_lost_peer(line) is is_victim


def plan(*pipelines: list[tuple[tuple[int, ...], int, int]], standby: tuple[int, ...] = ()) -> ParallelPlan:
    stages = [tuple(Stage(ranks, (start, stop)) for ranks, start, stop in stages) for stages in pipelines]
    return ParallelPlan(tuple(Pipeline(each, 2) for each in stages), 1, standby)


def test_the_planner_is_asked_about_old_and_new_devices() -> None:
    old, new = devices("a0 a1 b0 b1"), devices("a0 b0 b1 c0 c1")
    current = plan([((0, 1), 0, 3)], [((2,), 0, 3)], standby=(3,))
    request: dict[str, Any] = {"rates": [1.0, 1.0, 2.5, 1.0], "current": current.to_dict(), "nodes": None}
    asked = changed_world(request, old, new)
    assert asked["rates"] == [1.0, "inf", 2.5, 1.0, 1.0, 1.0]
    assert asked["nodes"] == [[0, 1], [2, 3], [4, 5]]
    assert asked["current"]["standby"] == [3, 4, 5]
    assert ParallelPlan.from_dict(asked["current"]).world_size == 6
    answer = plan([((2, 3), 0, 3)], [((4,), 0, 2), ((5,), 2, 3)], standby=(0, 1))
    answered = renumbered(answer, old, new)
    assert answered == plan([((1, 2), 0, 3)], [((3,), 0, 2), ((4,), 2, 3)], standby=(0,))
    answered.validate(3, len(new), nodes=[[0], [1, 2], [3, 4]])


def test_restart_plan_of_the_environment(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLAN_VARIABLE, raising=False)
    assert RestartPlan.of_environment() is None
    path = tmp_path / "plan.json"
    monkeypatch.setenv(PLAN_VARIABLE, str(path))
    restart = RestartPlan(plan([((0,), 0, 3)]), 2, None)
    restart.save(path)
    assert RestartPlan.of_environment() == restart
    path.write_text("{}")
    with pytest.raises(PlanError, match=f"{PLAN_VARIABLE} is {path}: not a plan of malleus-run"):
        RestartPlan.of_environment()
    path.unlink()
    with pytest.raises(PlanError, match="not a plan of malleus-run"):
        RestartPlan.of_environment()
