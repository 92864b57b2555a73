"""Situations, throughput over time, and `malleus simulate`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from malleus_ds.cli.main import main
from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage
from malleus_ds.planner.types import PlanRequest
from malleus_ds.simulate.baselines import System
from malleus_ds.simulate.compare import follow
from malleus_ds.simulate.scenario import Delays, ScenarioError, num_samples, throughput
from malleus_ds.simulate.situations import (
    Situation,
    SituationError,
    find_situation,
    parse_names,
    published_situations,
    tour,
)

WITHOUT_PLANNER = "megatron,megatron+restart,deepspeed,deepspeed+restart,data only,layers only"


def test_names() -> None:
    assert parse_names("S1-S3,healthy, S6") == ["S1", "S2", "S3", "healthy", "S6"]
    with pytest.raises(SituationError, match="write S2-S5"):
        parse_names("S5-S2")


def test_published_situations() -> None:
    # Optimum ratios of the published evaluation on 64 devices.
    ratios = {name: round(find_situation(name, 64).optimum_ratio, 4) for name in published_situations()}
    assert ratios == {
        "healthy": 1.0,
        "S1": 1.0096,
        "S2": 1.0129,
        "S3": 1.0228,
        "S4": 1.0349,
        "S5": 1.0349,
        "S6": 1.0827,
    }


@pytest.mark.parametrize(
    ("name", "world_size", "message"),
    [("S7", 64, "choose from healthy, S1"), ("S3", 8, "slows rank 8, but the cluster has 8 devices")],
)
def test_situations_that_do_not_exist(name: str, world_size: int, message: str) -> None:
    with pytest.raises(SituationError, match=message):
        find_situation(name, world_size)


def test_tour_starts_and_ends_healthy() -> None:
    names = ["healthy", "S1", "healthy", "S2", "healthy"]
    situations = [find_situation(name, 4) for name in names]
    assert [each.name for each in tour(situations)] == names
    assert [each.name for each in tour(situations[1:4])] == names
    assert [each.name for each in tour(situations[:1])] == ["healthy"]


def one_stage(rank: int) -> ParallelPlan:
    return ParallelPlan((Pipeline((Stage((rank,), (0, 1)),), 4),), 1, (1 - rank,))


def to_the_fastest(request: PlanRequest) -> ParallelPlan:
    if min(request.rates) > 4:
        raise PlanError("both are too slow")
    return one_stage(request.rates.index(min(request.rates)))


def scenario(system: System, delays: Delays, situation_s: float = 100.0) -> list[tuple[object, ...]]:
    """A step of one device takes 4 s; the first device is slow, then fails, then both are slow."""
    profile = ModelProfile((LayerProfile("block", 1.0, gradient_bytes=20, optimizer_bytes=60),))
    request = PlanRequest(profile, (1.0, 1.0), 4)
    situations = [
        Situation("healthy", (1.0, 1.0)),
        Situation("slow", (2.0, 1.0)),
        Situation("back", (1.0, math.inf)),
        Situation("bad", (8.0, 5.0)),
    ]
    row = follow(system, request, situations)
    segments = throughput(row, delays, situation_s, 4.0, 4)
    assert num_samples(segments) == pytest.approx(
        sum((segment.end_s - segment.start_s) * segment.samples_per_s for segment in segments)
    )
    return [(each.situation, each.phase, each.start_s, each.end_s, each.samples_per_s) for each in segments]


def test_throughput_of_a_system_that_migrates() -> None:
    system = System("fast", "", to_the_fastest)
    delays = Delays(detection_steps=2, planning_s=3.0, bandwidth_bytes_per_s=8.0)
    assert scenario(system, delays) == [
        ("healthy", "settled", 0, 100, 1.0),
        # Two steps of 8 s, planning beside training, 80 bytes at 8 per second.
        ("slow", "detection", 100, 116, 0.5),
        ("slow", "planning", 116, 119, 0.5),
        ("slow", "migration", 119, 129, 0.0),
        ("slow", "settled", 129, 200, 1.0),
        # Stands still at once; healthy steps count.
        ("back", "detection", 200, 208, 0.0),
        ("back", "planning", 208, 211, 0.0),
        ("back", "migration", 211, 221, 0.0),
        ("back", "settled", 221, 300, 1.0),
        # Without a plan it keeps the old one.
        ("bad", "settled", 300, 400, 0.125),
    ]


def test_throughput_of_a_system_that_restarts() -> None:
    system = System("restart", "", to_the_fastest, restarts=True)
    assert scenario(system, Delays(detection_steps=2, restart_s=50.0))[1:4] == [
        ("slow", "detection", 100, 116, 0.5),
        ("slow", "restart", 116, 166, 0.0),
        ("slow", "settled", 166, 200, 1.0),
    ]


def test_situation_too_short() -> None:
    system = System("restart", "", to_the_fastest, restarts=True)
    with pytest.raises(ScenarioError, match="slow lasts 20 s, but restart needs 66 s"):
        scenario(system, Delays(detection_steps=2, restart_s=50.0), situation_s=20.0)


def test_system_that_answers_with_a_wrong_plan_has_none() -> None:
    wrong = replace(one_stage(0), micro_batch_size=3)
    row = follow(
        System("wrong", "", lambda _: wrong),
        PlanRequest(ModelProfile((LayerProfile("block", 1.0),)), (1.0, 1.0), 4),
        [Situation("healthy", (1.0, 1.0))],
    )
    assert row.outcomes[0].plan is None
    assert "micro-batch size is 3" in row.outcomes[0].reason


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "plot.svg"
    arguments = ["simulate", "--model", "32b", "--situations", "S6,S4", "--systems", WITHOUT_PLANNER]
    assert main([*arguments, "--trace", str(trace), "--trace-situation", "S6", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in data["situations"]] == ["healthy", "S6", "S4", "healthy"]
    assert data["situations"][2]["rates"] == {"0": 2.57, "8": 3.75, "16": 5.42}
    found = {each["name"]: each["outcomes"] for each in data["systems"]}
    assert list(found) == WITHOUT_PLANNER.split(",")
    healthy_s = data["healthy_step_s"]
    assert found["megatron"][1]["step_s"] == pytest.approx(2.57 * healthy_s)
    assert found["data only"][1]["to_healthy"] == pytest.approx(345 / 285)
    assert found["data only"][1]["to_optimum"] == pytest.approx(345 / 285 / (32 / (24 + 8 / 2.57)))
    assert found["megatron+restart"][2]["plan"] is None
    assert "fits into their memory" in found["megatron+restart"][2]["reason"]
    assert ParallelPlan.from_dict(found["layers only"][2]["plan"]).num_layers == 60
    assert json.loads(trace.read_text())["traceEvents"]

    pytest.importorskip("matplotlib")
    assert main([*arguments, "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "data only" in shown
    assert "no plan: megatron+restart, S4: no equal plan on 8 ranks" in shown
    assert plot.read_text().count("<path") > 10


def test_own_rates_and_hostfile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=8\nb slots=8\nc slots=8\nd slots=8\ne slots=8\n")
    arguments = ["simulate", "--model", "32b", "--hostfile", str(hostfile), "--rates", '{"9": "inf"}']
    assert main([*arguments, "--systems", "megatron,deepspeed+restart", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in data["situations"]] == ["healthy", "given", "healthy"]
    static, restart = (each["outcomes"][1] for each in data["systems"])
    assert static["step_s"] is None
    assert set(range(8, 16)) <= set(restart["plan"]["standby"])


def test_given_static_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    groups = [tuple(range(start, start + 8)) for start in range(0, 64, 8)]
    stages = [Stage(group, (index % 4 * 20, index % 4 * 20 + 20)) for index, group in enumerate(groups)]
    plan = ParallelPlan((Pipeline(tuple(stages[:4]), 32), Pipeline(tuple(stages[4:]), 32)))
    path = tmp_path / "plan.json"
    plan.to_json(path)
    arguments = ["simulate", "--model", "70b", "--situations", "S1", "--systems", "megatron", "--json"]
    assert main([*arguments, "--static", str(path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["systems"][0]["outcomes"][0]["plan"] == plan.to_dict()
    assert data["healthy_step_s"] == pytest.approx(700 * 0.018)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--situations", "S9"], "situation 'S9': unknown; choose from healthy, S1"),
        (["--systems", "megatrom"], "--systems megatrom: unknown; choose from megatron"),
        (["--rates", '{"64": 2}'], "rank 64"),
        (["--rates", '{"0": -1}'], "rate of rank 0 is -1"),
        (["--restart-s", "-1"], "--restart-s -1: it must be 0 or more"),
        (["--situation-steps", "nan"], "--situation-steps nan: it must be positive"),
        (["--plot", "a.gif"], "--plot a.gif: end its name with .svg or .png"),
        (["--trace", "/nowhere/at/all.json"], "--trace /nowhere/at/all.json: not a file in an existing"),
        (["--trace-situation", "S6", "--situations", "S1"], "--trace-situation S6: not one of"),
        (["--static", "/nowhere.json"], "(--static /nowhere.json): cannot read the plan file"),
        (["--global-batch", "0"], "--global-batch 0: it must be positive"),
        (["--situation-steps", "5"], "lasts 98 s, but"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    if "--systems" not in arguments:
        arguments = [*arguments, "--systems", WITHOUT_PLANNER]
    assert main(["simulate", "--model", "110b", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_starts_without_heavy_imports() -> None:
    code = (
        "import sys\n"
        "from malleus_ds.cli.main import main\n"
        "try: main(['simulate', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'deepspeed', 'cvxpy', 'scipy', 'matplotlib', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    job = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert job.returncode == 0, job.stderr
    for word in ("S6", "examples:", "--trace", "exit codes:"):
        assert word in job.stdout
