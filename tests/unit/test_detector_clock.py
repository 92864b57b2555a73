from __future__ import annotations

import time

import pytest
import torch

from malleus_ds.detector.clock import CudaEventClock, HostClock, make_clock

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_host_clock_adds_the_intervals_and_not_the_time_between() -> None:
    clock = make_clock(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    for _ in range(3):
        clock.start()
        time.sleep(0.02)
        clock.stop()
        time.sleep(0.15)
    assert 0.06 <= clock.take_s() < 0.4  # 0.51 with the time between
    assert clock.take_s() == 0.0


def test_an_open_interval_belongs_to_the_take_after_its_end() -> None:
    clock = HostClock()
    clock.start()
    time.sleep(0.02)
    assert clock.take_s() == 0.0
    clock.stop()
    assert clock.take_s() >= 0.02


def test_host_clock_refuses_overlaps() -> None:
    clock = HostClock()
    with pytest.raises(RuntimeError, match="not running"):
        clock.stop()
    clock.start()
    with pytest.raises(RuntimeError, match="already running"):
        clock.start()


@needs_cuda
def test_cuda_clock_carries_unfinished_intervals_over() -> None:
    device = torch.device("cuda", 0)
    clock = make_clock(device)
    assert isinstance(clock, CudaEventClock)
    num_cycles = 400_000_000  # Some 0.2 s: the host is back long before.
    clock.start()
    torch.cuda._sleep(num_cycles)
    clock.stop()
    assert clock.take_s() == 0.0
    torch.cuda.synchronize(device)
    assert clock.take_s() > 0.05
    assert clock.take_s() == 0.0
