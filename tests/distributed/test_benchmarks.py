"""The benchmarks: small runs of their jobs on real ranks, and their evaluations on made-up measurements."""

from __future__ import annotations

import json
import random
import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import allocations
import detector
import engine_vs_deepspeed
import migration
import pytest
import ranks
import redundancy
import replan_vs_restart
import tensor_parallel
import torch

from malleus_ds.placement import LogicalTensor, make_buckets, place
from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.report.bars import Bar
from tests.harness import REPOSITORY, run_command, run_ranks

PROFILE = {
    "layers": [
        {"name": "Block", "time_s": 0.03, "state_bytes": 0, "optimizer_bytes": 0, "activation_bytes": 0}
    ]
    * 16,
    "message_bytes": 0,
}


def held(verdict: ranks.Verdict) -> dict[str, bool]:
    return {bar.name: bar.ok for bar in verdict.bars}


def comparison(
    ours: float = 1.01,
    undetected: float = 1.005,
    new_step_s: tuple[float, ...] = (2.5, 2.5),
    bare: float = 1.04,
) -> dict[str, Any]:
    """Measurements of `engine_vs_deepspeed`, where stock drifts and the others are fixed multiples of it."""
    stock_s = [2.0, 2.4, 2.2]
    return {
        "healthy_step_s": {
            "stock": stock_s,
            "ours": [ours * step_s for step_s in stock_s],
            "undetected": [undetected * step_s for step_s in stock_s],
        },
        "bare_step_s": {
            "stock": stock_s,
            "ours": [bare * s for s in stock_s],
            "undetected": [1.0] * 3,
            "blocking": [2.0] * 3,
        },
        "control_loop_s": [0.011, 0.022],
        "overrun_share": 0.0,
        "world_size": 8,
        "num_pipelines": 2,
        "num_micro_batches": 32,
        "num_blocks": 16,
        "block_s": 0.03,
        "slow_rank": 2,
        "situations": [
            {
                "rate": 4.0,
                "stock_step_s": [8.0, 8.8],
                "old_step_s": [8.0],
                "new_step_s": list(new_step_s),
                "steps_to_switch": 5,
                "events": [
                    {"kind": "calibrated", "profile": PROFILE},
                    {
                        "kind": "planned",
                        "rates": [1, 1, 4.1],
                        "step_s": 2.45,
                        "lower_bound_s": 2.4,
                        "planning_s": 1.5,
                    },
                ],
            }
        ],
    }


def test_engines_are_compared_round_by_round_and_with_the_optimum() -> None:
    verdict = engine_vs_deepspeed.evaluate(comparison())
    values = {bar.name: bar.value for bar in verdict.bars}
    # Eight devices of which one has a quarter of the speed: 7.25 healthy ones.
    optimum_s = 1.01 * 2.2 * 8 / 7.25
    assert values == pytest.approx(
        {
            "healthy: ours / stock": 1.01,
            "detector's cost / step": 1.01 / 1.005 - 1,
            "not emulated: ours / stock": 1.04,
            "rate 4.0: ours / optimum": 2.5 / optimum_s,
        }
    )
    assert all(held(verdict).values())
    assert verdict.figures["not emulated: overlapped / blocking"] == 0.5
    assert verdict.figures["healthy: ours / cost model"] == pytest.approx(1.01 * 2.2 / (19 * 0.12))
    assert verdict.figures["rate 4.0: stock / healthy stock"] == pytest.approx(8.4 / 2.2)
    # All devices but one pipeline's fill: 16 * 0.03 * (1 + 30 / 7.25).
    assert verdict.figures["rate 4.0: fill floor / optimum"] == pytest.approx(
        0.48 * (1 + 30 / 7.25) / optimum_s
    )


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"ours": 1.03, "undetected": 1.03}, "healthy: ours / stock"),
        ({"undetected": 0.99}, "detector's cost / step"),
        ({"bare": 1.06}, "not emulated: ours / stock"),
        ({"new_step_s": (2.8, 2.8)}, "rate 4.0: ours / optimum"),
        ({"new_step_s": ()}, "rate 4.0: ours / optimum"),
    ],
)
def test_a_worse_engine_breaks_its_bar(changes: dict[str, Any], broken: str) -> None:
    verdict = engine_vs_deepspeed.evaluate(comparison(**changes))
    assert [name for name, ok in held(verdict).items() if not ok] == [broken]


def test_standard_error_of_the_median() -> None:
    generator = random.Random(1)
    samples = [[generator.gauss(1.0, 0.01) for _ in range(25)] for _ in range(2000)]
    true_error = statistics.stdev(map(statistics.median, samples))
    estimated = statistics.fmean(map(engine_vs_deepspeed.median_error, samples))
    assert estimated == pytest.approx(true_error, rel=0.1)


def watched(false_alarm: int | None = None, found: int | None = 12, rate: float = 3.8) -> dict[str, Any]:
    """Measurements of `detector`: rank 2 is slow from step 10 on, and ``rate`` is the estimate."""
    steps = []
    for step in range(16):
        is_found = found is not None and step >= found
        rates = [1.0, 1.02, rate if is_found else 1.0]
        shift = {"ranks": [2], "old_rates": [1.0], "new_rates": [rate]} if step == found else None
        if step == false_alarm:
            shift = {"ranks": [1], "old_rates": [1.0], "new_rates": [1.4]}
        steps.append({"step": step, "duration_s": 0.5, "rates": rates, "shift": shift})
    return {"first_slow_step": 10, "slow_rank": 2, "overrun_share": 0.0, "steps": steps}


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"false_alarm": 7}, ["shifts in healthy steps"]),
        ({"false_alarm": 11}, []),
        ({"found": 14}, ["steps to detection"]),
        ({"rate": 3.5}, ["error of the estimated rate 3.75"]),
        ({"found": None}, ["steps to detection", "error of the estimated rate 3.75"]),
    ],
)
def test_detector_bars(changes: dict[str, Any], broken: list[str]) -> None:
    verdict = detector.evaluate(watched(**changes))
    assert [name for name, ok in held(verdict).items() if not ok] == broken


def split(rate: float = 3.1, peer: float = 1.02, new_step_s: float = 1.1) -> dict[str, Any]:
    """Measurements of `tensor_parallel`: a switch at the end of the eighth step. Healthy steps take 0.9 s, of
    which the cost model knows 0.8 s."""
    rates = [1.0, peer, rate, 1.0]
    steps = [{"plan": "old", "duration_s": 3.0 if i >= 5 else 0.9, "ended": i == 7} for i in range(8)]
    steps += [{"plan": "new", "duration_s": new_step_s, "ended": False}] * 3
    planned = {"kind": "planned", "rates": rates, "step_s": 1.0, "lower_bound_s": 0.9}
    calibrated = {"kind": "calibrated", "profile": {"layers": [{"time_s": 0.05}, {"time_s": 0.15}]}}
    return {
        "steps": steps,
        "events": [calibrated, planned],
        "overrun_share": 0.0,
        "num_micro_batches": 4,
    }


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"rate": 3.2}, ["error of its rate"]),
        ({"peer": 1.06}, ["largest rate of a peer"]),
        ({"new_step_s": 1.15}, ["new step / healthy step, against the lower bound"]),
    ],
)
def test_tensor_parallel_bars(changes: dict[str, Any], broken: list[str]) -> None:
    verdict = tensor_parallel.evaluate(split(**changes))
    assert [name for name, ok in held(verdict).items() if not ok] == broken


def test_a_group_that_is_not_found_or_not_split_breaks_all_bars() -> None:
    measured = split()
    measured["steps"] = [step | {"plan": "old"} for step in measured["steps"]]
    measured["events"] = []
    assert not any(held(tensor_parallel.evaluate(measured)).values())


def moved(sent_bytes: int = 10**9, peak_bytes: int = 500, transport_s: float = 0.25) -> dict[str, Any]:
    """Measurements of `migration`: the larger plan holds 300 bytes, its largest bucket 100."""
    switch = {
        "sent_bytes": 10**9,
        "lower_bound_bytes": 10**9,
        "num_new_groups": 3,
        "duration_s": 0.4,
        "migration_s": 0.3,
        "transport_s": transport_s,
        "parts_s": {"agreement": 0.1, "wire": 0.3},
    }
    return {
        "model_state_bytes": 10**8,
        "num_buckets": 9,
        "first_switch": switch,
        "switches": [switch, switch | {"sent_bytes": sent_bytes}],
        "peaks": [
            {
                "largest_bucket_bytes": 100,
                "state": {"held_bytes": [200, 300], "peak_bytes": peak},
                "all": {"held_bytes": [300, 450], "peak_bytes": 600},
            }
            for peak in (300, peak_bytes)
        ],
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (True, True, True)),
        ({"sent_bytes": 10**9 + 4}, (False, True, True)),
        ({"peak_bytes": 501}, (True, False, True)),
        ({"transport_s": 0.1}, (True, True, False)),
    ],
)
def test_migration_bars(changes: dict[str, Any], expected: tuple[bool, ...]) -> None:
    verdict = migration.evaluate(moved(**changes))
    assert tuple(bar.ok for bar in verdict.bars) == expected
    assert verdict.figures["mean of the ranks: wire, s"] == 0.3


def replanned(switch_s: float = 0.5) -> dict[str, Any]:
    """Measurements of `replan_vs_restart`: the restart takes 11 s up to its first step."""
    switch = {
        "duration_s": switch_s,
        "parts_s": {"agreement": 0.1},
        "lower_bound_bytes": 10**8,
        "transport_s": 0.1,
        "next_step_s": 1.0,
    }
    return {
        "train": {"switches": [switch, switch | {"duration_s": 0.2}], "ended": 100.0, "saved": 101.0},
        "restart": {"started": 103.0, "joined": 106.0, "built": 110.0, "loaded": 111.0, "stepped": 112.5},
    }


def test_restart_is_compared_with_the_first_switch() -> None:
    verdict = replan_vs_restart.evaluate(replanned())
    assert held(verdict) == {"restart / re-plan in place": True}
    assert verdict.bars[0].value == pytest.approx(22.0)
    parts = [s for name, s in verdict.figures.items() if name.startswith("restart: ") and s is not None]
    assert parts == pytest.approx([1.0, 2.0, 3.0, 4.0, 1.0, 1.5])
    assert verdict.figures["in place, later switches, s"] == pytest.approx(0.2)
    assert not any(held(replan_vs_restart.evaluate(replanned(switch_s=0.6))).values())


def test_bytes_of_a_complete_exchange() -> None:
    """Two stages swap their layers: all parameters, in two copies, and all moments, in one."""
    layout = [LogicalTensor(f"{layer}.w", (5, 3), "float32", 4, (layer,), 0) for layer in range(4)]
    buckets = make_buckets(layout, bucket_bytes=1 << 20)
    old = ParallelPlan.homogeneous(4, 4, 2)
    swapped = ParallelPlan(
        tuple(Pipeline((Stage((2 + i,), (0, 2)), Stage((i,), (2, 4))), num_micro_batches=1) for i in range(2))
    )
    placements = [place(plan, buckets) for plan in (old, swapped)]
    num_bytes = 60 * 4 * (2 + 2)
    assert migration.missing_bytes(*placements) == num_bytes
    assert sum(migration.pair_bytes(*placements).values()) == num_bytes
    assert migration.missing_bytes(placements[0], placements[0]) == 0


def test_uneven_plan_is_legal_and_keeps_the_batch() -> None:
    plan = ParallelPlan.homogeneous(18, 8, 4, num_micro_batches=2)
    uneven = migration.uneven_plan(plan)
    uneven.validate(18, 8)
    assert [len(pipeline.stages) for pipeline in uneven.pipelines] == [3, 5]
    assert uneven.global_batch_size == plan.global_batch_size


def test_allocation_log_counts_storages_while_they_live() -> None:
    before = torch.zeros(100)
    log = allocations.AllocationLog([before])
    with log:
        first = torch.zeros(1000)
        view = first[10:20].view(2, 5)  # keeps the storage of `first`
        del first
        second = torch.ones(500)
        number = log.number(second)
        del view
        third = second + 1
    assert log.peak_bytes() == 4 * (100 + 1000 + 500)
    assert log.peak_bytes(left_out=[number]) == 4 * (100 + 1000)
    del before, second, third
    assert sum(num_bytes for _, num_bytes in log.events) == 0


def test_a_bar_that_does_not_hold_is_written_and_ends_with_code_1(tmp_path: Path) -> None:
    path = tmp_path / "bars.json"
    for limit, code in ((2.0, 0), (0.0, 1)):
        verdict = ranks.Verdict({"x": None}, [Bar("cost", 1.0, limit, "lower")])
        assert ranks.publish({"detail": 3}, verdict, path) == code
        content = json.loads(path.read_text())
        assert content["detail"] == 3
        assert content["bars"] == [
            {"name": "cost", "value": 1.0, "limit": limit, "better": "lower", "ok": code == 0}
        ]


def test_engine_vs_deepspeed_on_four_ranks() -> None:
    args = Namespace(steps=2, slow_steps=1, layer_ms=2.0, rates=(4.0,), quick=False)
    measured, *others = run_ranks(engine_vs_deepspeed.job, 4, args, timeout_s=240)
    assert others == [None] * 3
    assert {name: len(step_s) for name, step_s in measured["healthy_step_s"].items()} == dict.fromkeys(
        ("stock", "ours", "undetected"), 2
    )
    # Below the emulated time of the cost model, and nothing was emulated.
    floor_s = engine_vs_deepspeed._model_step_s(measured)
    assert all(min(step_s) > 0.98 * floor_s for step_s in measured["healthy_step_s"].values())
    (situation,) = measured["situations"]
    assert situation["rate"] == 4.0
    assert min(situation["stock_step_s"]) > 2 * floor_s
    verdict = engine_vs_deepspeed.evaluate(json.loads(json.dumps(measured)))
    assert len(verdict.bars) == 4
    assert len(measured["bare_step_s"]["blocking"]) == 2


def test_detector_on_four_ranks() -> None:
    args = Namespace(steps=3, slow_steps=4, layer_ms=2.0, quick=False)
    measured, *others = run_ranks(detector.job, 4, args, timeout_s=240)
    assert others == [None] * 3
    assert [step["step"] for step in measured["steps"]] == list(range(3 + 3 + 4))
    assert measured["steps"][-1]["rates"][detector.SLOW_RANK] > 2
    assert held(detector.evaluate(json.loads(json.dumps(measured))))["steps to detection"]


def test_migration_from_its_command_line(tmp_path: Path) -> None:
    path = tmp_path / "migration.json"
    script = REPOSITORY / "benchmarks" / "migration.py"
    done = run_command([sys.executable, str(script), "--quick", "--json", str(path)], timeout_s=240)
    # Its bars are bytes and peak memory, which do not depend on how busy the machine is.
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert len(content["bars"]) == 2
    assert len(content["switches"]) == 2
    assert len(content["peaks"]) == 3 * ranks.NUM_RANKS
    assert content["machine"]["num_cores"] >= 1


def copied(
    kept_s: float = 2.08, held_bytes: int = 500, on_disk_bytes: int = 1000, num_different: int = 0
) -> dict[str, Any]:
    """Measurements of `redundancy`: 500 bytes of state, two ranks, which keep it twice in two generations."""
    cost = {
        "num_generations": 2,
        "own_bytes": 250,
        "copy_bytes": 250,
        "start_s": 0.01,
        "wait_s": 0.03,
        "background_s": 0.2,
    }
    rank = {"source": "memory", "lost_steps": 0}
    return {
        "steps": [{"plain": 9.0, "kept": 99.0}, *[{"plain": 2.0, "kept": kept_s}] * 3],
        "ranks": [
            rank | {"cost": cost | {"held_bytes": 1500}, "num_different": 0},
            rank | {"cost": cost | {"held_bytes": held_bytes}, "num_different": num_different},
        ],
        "on_disk_bytes": [1000, on_disk_bytes],
        "model_state_bytes": 500,
        "resume_s": 1.0,
        "overrun_share": 0.0,
    }


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"kept_s": 2.12}, ["step with / without"]),
        ({"held_bytes": 600}, ["bytes held beyond two copies of two generations"]),
        ({"on_disk_bytes": 900}, ["bytes held beyond two copies of two generations"]),
        ({"num_different": 1}, ["tensors with other bits after the loss"]),
    ],
)
def test_redundancy_bars(changes: dict[str, Any], broken: list[str]) -> None:
    verdict = redundancy.evaluate(copied(**changes))
    assert [name for name, ok in held(verdict).items() if not ok] == broken
    assert verdict.figures["the step's wait for it, mean of ranks, share"] == pytest.approx(0.01)


def test_a_loss_that_memory_does_not_mend_breaks_its_bar() -> None:
    measured = copied()
    measured["ranks"][0]["source"] = "nothing"
    assert not held(redundancy.evaluate(measured))["tensors with other bits after the loss"]
