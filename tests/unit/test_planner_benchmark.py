"""What the benchmark of the planner judges by: the published formulas, and the clusters it draws."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from planner_cases import Situation, published_plan, published_step, random_cluster, situations
from planner_plot import plot_scale
from planner_scale import SIZES

from malleus_ds.plan import Pipeline
from malleus_ds.planner.checker import check_answer

CASES = list(situations(time_limit_s=1.0))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_published_plans_are_legal_and_take_the_published_step(case: Situation) -> None:
    plan = published_plan(case.reference)
    assert published_step(plan, case) == pytest.approx(case.reference["step"], rel=1e-6)
    assert check_answer(plan, case.request) == pytest.approx(case.reference["step"], rel=1e-6)
    ranks = case.request.rates
    optimum_ratio = len(ranks) / sum(1 / rate for rate in ranks)
    assert optimum_ratio == pytest.approx(case.reference["optimum_ratio"], abs=1e-4)


def test_a_stage_beyond_the_published_memory_is_refused() -> None:
    case = CASES[0]
    plan = published_plan(case.reference)
    first = plan.pipelines[0]
    sizes = (20, 13, 13, 14)
    edges = [sum(sizes[:index]) for index in range(5)]
    stages = tuple(
        replace(stage, layers=(edges[index], edges[index + 1])) for index, stage in enumerate(first.stages)
    )
    changed = replace(plan, pipelines=(Pipeline(stages, first.num_micro_batches), *plan.pipelines[1:]))
    with pytest.raises(ValueError, match="MiB"):
        published_step(changed, case)


def test_clusters_have_the_slow_devices_that_they_should() -> None:
    request = random_cluster(64, 8, seed=3, time_limit_s=1.0)
    slow = [rate for rate in request.rates if rate != 1.0]
    assert len(slow) == 8
    assert all(1.1 <= rate <= 12.0 for rate in slow)
    assert request == random_cluster(64, 8, seed=3, time_limit_s=1.0)
    assert request.rates != random_cluster(64, 8, seed=4, time_limit_s=1.0).rates
    assert [len(node) for node in request.node_ranks] == [8] * 8
    assert request.num_micro_batches == 64


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"num_devices": size, "planning_s": math.sqrt(size), "gap": 0.02} for size in (64, 64, 1024)]
    plot_scale(rows, [size for size in SIZES if size.has_bars], tmp_path / "cost.svg")
    text = (tmp_path / "cost.svg").read_text(encoding="utf-8")
    assert text.startswith("<?xml")
    assert len(text) > 5000
