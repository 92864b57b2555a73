"""The simulator against steps worked out by hand; against an independent solver in tests/property."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from malleus_ds.cluster import Links
from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage
from malleus_ds.planner.types import PlanRequest
from malleus_ds.simulate.engine import simulate
from malleus_ds.simulate.pipeline import run_pipeline
from malleus_ds.simulate.schedule import one_f_one_b
from malleus_ds.simulate.trace import trace_events, write_trace


def spans_of(stage_times_s: list[float], num_micro_batches: int, message_s: float = 0.0) -> list[str]:
    run = run_pipeline(stage_times_s, num_micro_batches, message_s)
    return [
        " ".join(f"{w.direction[0]}{w.micro_batch}:{w.start_s:g}-{w.end_s:g}" for w in work)
        for work in run.stages
    ]


def test_order_of_work() -> None:
    assert " ".join(f"{kind[0]}{index}" for kind, index in one_f_one_b(4, 1, 5)) == (
        "f0 f1 f2 b0 f3 b1 f4 b2 b3 b4"
    )
    assert " ".join(f"{kind[0]}{index}" for kind, index in one_f_one_b(4, 3, 2)) == "f0 b0 f1 b1"
    assert " ".join(f"{kind[0]}{index}" for kind, index in one_f_one_b(4, 0, 2)) == "f0 f1 b0 b1"


def test_two_equal_stages() -> None:
    # Forward 1 s, backward 2 s.
    assert spans_of([3.0, 3.0], 2) == ["f0:0-1 f1:1-2 b0:4-6 b1:7-9", "f0:1-2 b0:2-4 f1:4-5 b1:5-7"]


def test_slow_stage_in_front_hides_the_one_behind() -> None:
    # Formula: 2 * 6 + 9 = 21 s. The first stage is never idle after its first forward passes.
    assert spans_of([6.0, 3.0], 3) == [
        "f0:0-2 f1:2-4 b0:5-9 f2:9-11 b1:11-15 b2:15-19",
        "f0:2-3 b0:3-5 f1:5-6 b1:6-8 f2:11-12 b2:12-14",
    ]


def test_messages_delay_the_receiver_only() -> None:
    assert spans_of([3.0, 3.0], 2, message_s=1.0) == [
        "f0:0-1 f1:1-2 b0:5-7 b1:8-10",
        "f0:1.5-2.5 b0:2.5-4.5 f1:4.5-5.5 b1:5.5-7.5",
    ]


def make_request(rates: tuple[float, ...], num_micro_batches: int, **changes: object) -> PlanRequest:
    layers = tuple(LayerProfile("block", 3.0, gradient_bytes=100, optimizer_s=0.5) for _ in range(4))
    profile = ModelProfile(layers, rho=((2, 1.0), (1, 2.0)))
    return replace(PlanRequest(profile, rates, num_micro_batches), **changes)


def equal_pair() -> ParallelPlan:
    """Two pipelines of two stages, on ranks 0 and 1, and 2 and 3."""
    stages = [(Stage((rank,), (0, 2)), Stage((rank + 1,), (2, 4))) for rank in (0, 2)]
    return ParallelPlan(tuple(Pipeline(pair, 2) for pair in stages))


def test_rates_and_degrees_stretch_work() -> None:
    plan = ParallelPlan(
        (Pipeline((Stage((0, 1), (0, 3)), Stage((2,), (3, 4))), 4),), micro_batch_size=1, standby=(3,)
    )
    result = simulate(plan, make_request((1.0, 4.0, 1.5, 1.0), 4))
    busy_s = {
        rank: sum(span.end_s - span.start_s for span in spans if span.micro_batch is not None)
        for rank, spans in result.spans().items()
    }
    assert busy_s == pytest.approx({0: 4 * 36.0, 1: 4 * 36.0, 2: 4 * 9.0, 3: 0.0})
    # One pipeline reduces nothing; the optimizer steps 3 layers of 0.5 s, or 1 layer at half the degree.
    optimizer_s = {
        rank: [span.end_s - span.start_s for span in spans if span.kind == "optimizer"]
        for rank, spans in result.spans().items()
    }
    assert optimizer_s == {
        rank: [pytest.approx(seconds)] if seconds else [] for rank, seconds in enumerate([1.5, 1.5, 1.0, 0])
    }
    assert result.makespan_s == pytest.approx(4 * 36.0 + 1.5)


@pytest.mark.parametrize(
    ("nodes", "reduction_s"), [(((0, 1), (2, 3)), 40.0), (((0, 2), (1, 3)), 4.0), (None, 4.0)]
)
def test_reduction_waits_for_all_holders(
    nodes: tuple[tuple[int, ...], ...] | None, reduction_s: float
) -> None:
    # A layer at half the degree is two slices of 100 bytes: 2 layers * 200 * 2 * (2 - 1) / 2 bytes at 10/s.
    request = make_request((1.0, 1.0, 2.0, 1.0), 4, nodes=nodes, links=Links(100.0, 10.0))
    result = simulate(equal_pair(), request)
    # Stage times 12, 12 and 24, 12. Of the second pipeline: forwards 0-8-16, backwards 20-36-52 on rank 2.
    assert [run.makespan_s for run in result.runs] == pytest.approx([36.0, 52.0])
    reduces = {
        rank: [(span.start_s, span.end_s) for span in spans if span.kind == "reduce"]
        for rank, spans in result.spans().items()
    }
    assert reduces[0] == reduces[2] == [pytest.approx((52.0, 52.0 + reduction_s))]
    last_s = 32.0  # Of rank 3; rank 1 ends after 28 s.
    assert reduces[1] == reduces[3] == [pytest.approx((last_s, last_s + reduction_s))]
    # The optimizer: 2 layers of 0.5 s at twice the share, over 2 pipelines.
    assert result.makespan_s == pytest.approx(52.0 + reduction_s + 1.0)


def test_unequal_stages_reduce_one_after_the_other() -> None:
    plan = ParallelPlan(
        (
            Pipeline((Stage((0,), (0, 1)), Stage((1,), (1, 4))), 2),
            Pipeline((Stage((2,), (0, 3)), Stage((3,), (3, 4))), 2),
        )
    )
    result = simulate(plan, make_request((1.0,) * 4, 4, links=Links(10.0, 10.0)))
    pairs = [
        (reduction.ranks.tolist(), round(reduction.end_s - reduction.start_s, 9))
        for reduction in result.update.reductions
    ]
    # Layer 0 on ranks 0 and 2, layers 1 and 2 on 1 and 2, layer 3 on 1 and 3: 20 s a layer.
    assert sorted(pairs) == [([0, 2], 20.0), ([1, 2], 40.0), ([1, 3], 20.0)]
    for spans in result.spans().values():
        assert all(span.end_s <= later.start_s + 1e-9 for span, later in pairwise(spans))


def test_slices_of_different_degrees_meet() -> None:
    plan = ParallelPlan((Pipeline((Stage((0, 1), (0, 4)),), 2), Pipeline((Stage((2,), (0, 4)),), 2)), 1, (3,))
    result = simulate(plan, make_request((1.0,) * 4, 4, links=Links(100.0, 10.0)))
    assert sorted(reduction.ranks.tolist() for reduction in result.update.reductions) == [[0, 2], [1, 2]]
    # Rank 2 takes both slices of 4 * 100 bytes, one after the other.
    assert result.update.optimizer_start_s[2] == pytest.approx(result.compute_s + 8.0)


def test_micro_batches_are_counted_over_all_pipelines() -> None:
    spans = simulate(equal_pair(), make_request((1.0,) * 4, 4)).spans()
    indices = [[span.micro_batch for span in spans[rank] if span.kind == "backward"] for rank in range(4)]
    assert indices == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_failed_rank_never_ends() -> None:
    request = make_request((1.0, math.inf, 1.0, 1.0), 4)
    result = simulate(equal_pair(), request)
    assert result.makespan_s == math.inf
    with pytest.raises(PlanError, match="failed rank"):
        trace_events(result, request)


def test_trace(tmp_path: Path) -> None:
    request = make_request((1.0, 2.5, 1.0, 1.0, 1.0), 4, nodes=((0, 1), (2, 3, 4)), links=Links(100.0, 10.0))
    result = simulate(replace(equal_pair(), standby=(4,)), request)
    write_trace(tmp_path / "trace.json", result, request)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"] for event in events if event["ph"] == "M"
    }
    assert names == {
        (0, None): "node 0",
        (0, 0): "rank 0 (pipeline 0, stage 0)",
        (0, 1): "rank 1 (pipeline 0, stage 1, x = 2.5)",
        (1, None): "node 1",
        (1, 2): "rank 2 (pipeline 1, stage 0)",
        (1, 3): "rank 3 (pipeline 1, stage 1)",
        (1, 4): "rank 4 (standby)",
    }
    work = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in work if event["tid"] == 3] == [
        *("forward 2", "backward 2", "forward 3", "backward 3"),
        *("reduce", "optimizer"),
    ]
    assert max(event["ts"] + event["dur"] for event in work) == pytest.approx(result.makespan_s * 1e6)
    assert len({event["cname"] for event in work}) == 4


def test_thousands_of_devices_in_seconds() -> None:
    num_pipelines, num_stages, degree = 256, 8, 4
    rates = tuple(1.1 + rank % 97 / 9 if rank % 31 == 0 else 1.0 for rank in range(8192))
    profile = ModelProfile(
        tuple(LayerProfile("block", 1.0, gradient_bytes=1) for _ in range(80)), rho=((8, 1.0), (4, 1.9))
    )
    nodes = tuple(tuple(range(start, start + 8)) for start in range(0, 8192, 8))
    request = PlanRequest(profile, rates, 32 * num_pipelines, nodes=nodes, links=Links(1e3, 1e2))
    groups = [tuple(range(start, start + degree)) for start in range(0, 8192, degree)]
    plan = ParallelPlan(
        tuple(
            Pipeline(
                tuple(
                    Stage(groups[index * num_stages + stage], (10 * stage, 10 * stage + 10))
                    for stage in range(num_stages)
                ),
                32,
            )
            for index in range(num_pipelines)
        )
    )
    began = time.perf_counter()
    result = simulate(plan, request)
    assert time.perf_counter() - began < 5
    # 1.9 * 10 s a stage, at the pace of the slowest of all devices.
    assert result.makespan_s > 32 * 19.0 * max(rates)
