"""`malleus plan`: what it prints and writes, and how it tells mistakes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from malleus_ds.cli.main import main
from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.planner import PlanRequest, PlanResult
from malleus_ds.planner.checker import check_answer
from malleus_ds.report.waiting import counting, waiting
from tests.harness import REPOSITORY

MODEL = """\
num_micro_batches: 16
rho: {2: 1.0, 1: 1.9}
cluster: {num_nodes: 2, devices_per_node: 4}
memory: {capacity_mib: 8000}
layers: {count: 8, time_ms: 100, state_mib: 100, optimizer_mib: 60, activation_mib: 10}
"""
CURRENT = ParallelPlan(
    tuple(
        Pipeline(
            (Stage((4 * index, 4 * index + 1), (0, 4)), Stage((4 * index + 2, 4 * index + 3), (4, 8))), 8
        )
        for index in range(2)
    )
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.yaml"
    path.write_text(MODEL, encoding="utf-8")
    return str(path)


def figures(text: str) -> tuple[PlanRequest, PlanResult]:
    data = json.loads(text)
    return PlanRequest.from_dict(data["request"]), PlanResult.from_dict(data["result"])


def test_prints_picture_figures_and_reasons(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--rates", '{"0": 5.42}', "--time-limit", "5"]) == 0
    output = capsys.readouterr().out
    assert "8 layers, global batch 16; 8 devices on 2 nodes, not healthy: 0 (x5.42)" in output
    for part in (
        "pipeline 0",
        "standby:",
        "lower bound",
        "healthy optimum",
        "why",
        "alternative",
        "memory: rank",
    ):
        assert part in output, part
    assert "Traceback" not in output


def test_writes_json_svg_and_a_plan_that_answers(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: str(tmp_path / f"plan.{name}") for name in ("json", "svg", "out")}
    options = [word for name, path in paths.items() for word in (f"--{name}", path)]
    assert main(["plan", "--model", model, "--rates", '{"3": 2.57, "4": "inf"}', *options]) == 0
    assert "pipeline 0" in capsys.readouterr().out
    request, result = figures(Path(paths["json"]).read_text(encoding="utf-8"))
    assert request.rates == (1, 1, 1, 2.57, float("inf"), 1, 1, 1)
    assert ParallelPlan.load(paths["out"]) == result.plan
    assert check_answer(result.plan, request) == pytest.approx(result.step_s)
    assert 4 in result.plan.standby
    assert Path(paths["svg"]).read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize("option", [["--json"], ["--json", "-"]])
def test_json_on_stdout_is_json_alone(
    model: str, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", model, "--rates", '{"0": 2.57}', "--top", "1", *option]) == 0
    text = capsys.readouterr().out
    data = json.loads(text)
    request, result = figures(text)
    assert len(result.alternatives) <= 1
    assert data["ratio"] == pytest.approx(result.step_s / data["optimum_s"])
    assert data["optimum_s"] == pytest.approx(data["healthy_step_s"] * 8 / (7 + 1 / 2.57))
    assert data["healthy_step_s"] <= result.step_s
    assert data["reasons"]["step_s"] == pytest.approx(result.step_s)
    assert data["diff"] is None
    assert request.current is None


def test_current_plan_gives_the_difference(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    current = tmp_path / "current.json"
    CURRENT.to_json(current)
    command = ["plan", "--model", model, "--current", str(current)]
    assert main([*command, "--rates", '{"0": 5.42}']) == 0
    output = capsys.readouterr().out
    assert "from the current plan (" in output
    assert "current plan " in output
    assert main([*command, "--rates", '{"0": 5.42}', "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["diff"]
    assert data["result"]["moved_bytes"] > 0


def test_hostfile_and_cluster_file_give_the_nodes(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts, cluster = tmp_path / "hosts", tmp_path / "cluster.yaml"
    hosts.write_text("a slots=2\nb slots=4\n", encoding="utf-8")
    cluster.write_text("nodes: [{devices: 2, memory_gib: 4}, {devices: 4, memory_gib: 4}]\nrates: {1: 3}\n")
    for option, path, rate in (("--hostfile", hosts, 1.0), ("--cluster", cluster, 3.0)):
        assert main(["plan", "--model", model, option, str(path), "--json"]) == 0
        request, _ = figures(capsys.readouterr().out)
        assert request.nodes == ((0, 1), (2, 3, 4, 5))
        assert request.rates == (1.0, rate, 1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model", "7b"], ["7b", "no such model"]),
        (["--rates", '{"0": -1}'], ["--rates", "rank 0", "-1"]),
        (["--rates", '{"0": NaN}'], ["--rates", "rank 0", "nan"]),
        (["--rates", '{"8": 2}'], ["--rates", "rank 8", "8 devices"]),
        (["--rates", "no.json"], ["no.json", "no such file"]),
        (["--hostfile", "no-hosts"], ["no-hosts", "no such file"]),
        (["--cluster", "no.yaml"], ["no.yaml", "no such file"]),
        (["--current", "no.json"], ["no.json", "no such file"]),
        (["--global-batch", "0"], ["--global-batch 0", "positive"]),
        (["--max-pipelines", "-1"], ["--max-pipelines -1", "positive"]),
        (["--time-limit", "nan"], ["--time-limit nan", "positive"]),
        (["--top", "-1"], ["--top -1"]),
        (["--svg", "/no/such/folder/x.svg"], ["--svg /no/such/folder/x.svg", "folder"]),
        (["--json", "/"], ["--json /", "folder"]),
    ],
)
def test_mistakes_are_told_in_one_line(
    model: str, options: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", model, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("malleus: ")
    assert captured.err.count("\n") == 1
    assert all(part in captured.err for part in named), captured.err


@pytest.mark.parametrize(
    ("option", "content", "named"),
    [
        ("--cluster", '{"nodes": [{"devices": 2}], "speed": 3}', ["speed", "unknown key"]),
        ("--hostfile", "", ["no host"]),
        ("--hostfile", "host lots=8\n", ["'host lots=8'", "slots="]),
        ("--current", '{"pipelines": []}', ["--current", "micro_batch_size"]),
        ("--rates", '{"0": 1, "0": 2}', ["'0'", "twice"]),
    ],
)
def test_bad_files_are_told_in_one_line(
    model: str,
    tmp_path: Path,
    option: str,
    content: str,
    named: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content, encoding="utf-8")
    assert main(["plan", "--model", model, option, str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(part in error for part in [str(path), *named]), error


@pytest.mark.parametrize(
    ("options", "plan", "named"),
    [
        (["--global-batch", "20"], CURRENT, ["global batch is 16, not 20", "--global-batch 16"]),
        ([], ParallelPlan.homogeneous(7, 8, 2, 4), ["7 layers", "8 layers"]),
        (
            [],
            ParallelPlan((Pipeline((Stage((0, 1, 2, 3), (0, 8)),), 16),), 1, (4, 5, 6, 7)),
            ["TP degree 4", "rho"],
        ),
    ],
)
def test_current_plan_of_another_job_is_refused(
    model: str,
    tmp_path: Path,
    options: list[str],
    plan: ParallelPlan,
    named: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "current.json"
    plan.to_json(path)
    assert main(["plan", "--model", model, "--current", str(path), *options]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in ["current", *named]), error


def test_what_no_plan_can_do_is_told(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed = json.dumps(dict.fromkeys(range(8), "inf"))
    assert main(["plan", "--model", model, "--rates", failed]) == 2
    assert "no usable device" in capsys.readouterr().err


def test_cluster_and_hostfile_exclude_each_other(model: str) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["plan", "--model", model, "--cluster", "c.yaml", "--hostfile", "h"])
    assert leave.value.code == 2


def test_help_teaches_and_starts_quickly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["plan", "--help"])
    assert leave.value.code == 0
    text = capsys.readouterr().out
    assert text.count("  malleus plan --") == 3
    for part in ("--cluster", "lower bound", "docs/planning.md", "exit codes"):
        assert part in text
    command = [sys.executable, "-m", "malleus_ds.cli.main", "plan", "--help"]

    def start_s() -> float:
        began = time.monotonic()
        subprocess.run(command, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        return time.monotonic() - began

    assert any(start_s() < 1.0 for _ in range(30)), "on a busy machine once in a while"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--model", "70b", "--rates", '{"0": 5.42, "9": 2.57}'],
        ["simulate", "--model", "70b", "--situations", "S1", "--systems", "malleus"],
    ],
    ids=["plan", "simulate"],
)
def test_json_is_all_of_stdout(arguments: list[str]) -> None:
    """In a process of its own: solvers greet once per process, past Python's own stdout."""
    command = [sys.executable, "-m", "malleus_ds.cli.main", *arguments, "--json", "-", "--time-limit", "1"]
    done = subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True, text=True)
    assert json.loads(done.stdout)["model"] == "70b"
    assert done.stderr == ""


def appears(output: io.StringIO, text: str) -> bool:
    """Whether ``text`` is shown within half a minute."""
    deadline_s = time.monotonic() + 30
    while text not in output.getvalue() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return text in output.getvalue()


def test_waiting_shows_the_time_limit_after_a_while() -> None:
    output = io.StringIO()
    with waiting("planning", 10.0, Console(file=output, force_terminal=True, width=100), delay_s=0.05):
        assert output.getvalue() == ""
        assert appears(output, "planning")
        assert "of at most 10 s" in output.getvalue()


def test_counting_shows_the_steps_after_a_while() -> None:
    output = io.StringIO()
    with counting(
        "simulating", 4, Console(file=output, force_terminal=True, width=100), delay_s=0.05
    ) as count:
        count()
        assert output.getvalue() == ""
        assert appears(output, "simulating")
        assert " 25%" in output.getvalue()


@pytest.mark.parametrize("force_terminal", [True, False])
def test_bars_show_nothing_where_it_is_quick_or_nobody_watches(force_terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=force_terminal, width=100)
    delay_s = 10.0 if force_terminal else 0.01
    with waiting("planning", 1.0, console, delay_s), counting("simulating", 2, console, delay_s):
        time.sleep(0.1)
    assert output.getvalue() == ""
