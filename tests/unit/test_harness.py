"""The harness must report failures and hangs: a harness that cannot fail would hide every bug."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import DistributedTest, RankPool, RanksFailedError, run_command, run_ranks


def rank_sum(offset: int) -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def hang_on_rank_2() -> None:
    if dist.get_rank() == 2:
        time.sleep(600)


def die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def skip() -> None:
    pytest.skip("not here")


def start_child_and_hang() -> None:
    subprocess.Popen(["sleep", "611.25"])
    time.sleep(600)


def is_running(*command: str) -> bool:
    wanted = "\0".join(command).encode() + b"\0"
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if entry.read_bytes() == wanted:
                return True
        except OSError:  # It ended meanwhile.
            continue
    return False


class TestDistributedTest(DistributedTest):
    world_size = 3

    def test_environment(self, tmp_path: Path) -> None:
        rank = dist.get_rank()
        assert dist.get_world_size() == 3
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert torch.get_num_threads() == 1
        (tmp_path / str(rank)).touch()
        dist.barrier()
        assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_world_size_parameter(self, world_size: int) -> None:
        assert dist.get_world_size() == world_size

    @pytest.mark.xfail(reason="fails on one rank", raises=pytest.fail.Exception, strict=True)
    def test_one_failing_rank_fails_the_test(self) -> None:
        fail_on_rank_1()


def test_values_by_rank_and_pool_keeps_its_processes() -> None:
    with RankPool(3) as pool:
        assert pool.run(rank_sum, 0) == [(0, 3.0), (1, 3.0), (2, 3.0)]
        before = pool.run(os.getpid)
        assert pool.run(rank_sum, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]
        assert pool.run(os.getpid) == before


def test_failure_has_the_traceback_and_ends_the_others_at_once() -> None:
    start_s = time.monotonic()
    with RankPool(2) as pool:
        with pytest.raises(RanksFailedError) as caught:
            pool.run(fail_on_rank_1)
        assert time.monotonic() - start_s < 30
        assert "rank 1 of 2" in str(caught.value)
        assert "in fail_on_rank_1" in str(caught.value)
        assert "ValueError: broken on purpose" in str(caught.value)
        assert "rank 0 of 2" not in str(caught.value)
        assert pool.run(rank_sum, 0) == [(0, 1.0), (1, 1.0)]  # With new processes.


def test_hang_names_the_rank_and_shows_where() -> None:
    start_s = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(hang_on_rank_2, 3, timeout_s=8)
    assert time.monotonic() - start_s < 30
    assert "after 8 s these ranks of 3 had not finished: 2\n" in str(caught.value)
    assert "in hang_on_rank_2" in str(caught.value)


def test_death_is_reported() -> None:
    with pytest.raises(RanksFailedError, match=r"rank 0 of 2:\nthe process died with exit code -9"):
        run_ranks(die_on_rank_0, 2)


def test_skip_in_a_rank_skips() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_ranks(skip, 2)


def test_timeout_ends_what_the_ranks_started() -> None:
    with pytest.raises(RanksFailedError):
        run_ranks(start_child_and_hang, 1, timeout_s=8)
    assert not is_running("sleep", "611.25")


def test_run_command() -> None:
    done = run_command(
        [sys.executable, "-c", "import os, sys; print(os.environ['X']); sys.exit(3)"], 30, {"X": "7"}
    )
    assert (done.returncode, done.stdout) == (3, "7\n")


def test_run_command_ends_a_hanging_job() -> None:
    with pytest.raises(RanksFailedError, match=r"took longer than 1 s\nstdout:\nhalf"):
        run_command(["sh", "-c", "echo half; sleep 612.25 & wait"], timeout_s=1)
    assert not is_running("sleep", "612.25")
