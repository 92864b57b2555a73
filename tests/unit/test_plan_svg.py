"""The pictures of a plan, in the terminal and as SVG, drawn from published plans."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from malleus_ds.cluster import Node, node_ranks
from malleus_ds.files import ClusterFile, load_model, make_request
from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.report.plan_colours import colour_of, text_colour
from malleus_ds.report.plan_picture import print_plan
from malleus_ds.report.plan_reasons import find_reasons
from malleus_ds.report.plan_svg import draw_svg
from malleus_ds.report.plan_view import PlanView, view_plan
from tests.unit.test_files_profiles import published, reference_plan, reference_request

SVG = "{http://www.w3.org/2000/svg}"


def reference_view(case: str) -> PlanView:
    return view_plan(reference_plan(case), reference_request(case))


def large_view(num_devices: int, slow: dict[int, float]) -> PlanView:
    """Equal pipelines of 4 stages of 8 devices."""
    nodes = node_ranks([Node(str(index), 8) for index in range(num_devices // 8)])
    rates = tuple(slow.get(rank, 1.0) for rank in range(num_devices))
    cluster = ClusterFile(tuple(map(str, range(len(nodes)))), nodes, rates)
    pipelines = tuple(
        Pipeline(tuple(Stage(nodes[4 * index + j], (20 * j, 20 * j + 20)) for j in range(4)), 32)
        for index in range(len(nodes) // 4)
    )
    request = make_request(load_model("110b"), cluster, global_batch_size=num_devices)
    return view_plan(ParallelPlan(pipelines), request)


def picture(view: PlanView, width: int) -> list[str]:
    output = io.StringIO()
    print_plan(Console(file=output, width=width), view)
    return output.getvalue().splitlines()


def texts(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}text"))


def test_view_has_the_published_group_rates() -> None:
    """110b/S2: rank 0 standby; its node is split, the other groups are whole and healthy."""
    view, plan = reference_view("110b/S2"), reference_plan("110b/S2")
    rho = dict(zip((8, 4, 2, 1), published()["models"]["110b"]["rho"], strict=True))
    rates = [rho[stage.degree] for _, _, stage in plan.stages()]
    assert [stage.group_rate for stage in view.stages()] == rates
    assert sum(stage.is_limiting for stage in view.stages()) == 1
    layer_s = 0.028
    assert view.step_s / layer_s == pytest.approx(published()["reference"]["110b/S2"]["step"])
    assert view.update_s == 0


def test_picture_has_a_line_per_pipeline_with_all_ranks() -> None:
    lines = picture(reference_view("32b/S1"), 120)
    assert len(lines) == 6  # 4 pipelines, standby, legend.
    assert re.match(r"pipeline 0 +7 TP1 7L x2\.00 \| .*10,11 TP2 17L .*\| +m=14 +13\.\d+ s$", lines[0]), (
        lines[0]
    )
    assert lines[4] == "standby: 0 (x2.57)"
    for _, _, stage in reference_plan("32b/S1").stages():
        label = ",".join(map(str, sorted(stage.ranks)))
        assert any(f"{label} " in line for line in lines[:4]), label
    assert sum(line.count("*") for line in lines[:4]) == 1


def test_blocks_are_as_wide_as_their_layers_are_many() -> None:
    """70b/S6 on a wide terminal: 9, 23, 24 and 24 layers of 80."""
    lines = picture(reference_view("70b/S6"), 200)
    plan = reference_plan("70b/S6")
    widths = [len(block) for block in lines[0].removeprefix("pipeline 0 ").split("|")[:-1]]
    num_layers = [stage.num_layers for stage in plan.pipelines[0].stages]
    per_layer = [width / number for width, number in zip(widths, num_layers, strict=True)]
    assert max(per_layer) / min(per_layer) < 1.1


@pytest.mark.parametrize("width", [60, 80, 120])
def test_picture_stays_within_the_console(width: int) -> None:
    for case in ("110b/S4", "32b/S5", "70b/healthy"):
        lines = picture(reference_view(case), width)
        assert all(len(line) <= width for line in lines), lines
        assert sum("micro" in line or "m=" in line for line in lines) >= len(reference_plan(case).pipelines)


def test_large_plans_share_lines() -> None:
    lines = picture(large_view(1024, {0: 3.0, 40: 5.0}), 120)
    assert len(lines) == 5
    assert lines[0].startswith("pipeline 0  ")
    assert "x3.00" in lines[0]
    assert "x5.00" in lines[1]
    assert lines[2].startswith("pipeline 2 +29 alike")


@pytest.mark.parametrize("case", ["110b/S4", "32b/S5", "70b/healthy"])
def test_svg_names_every_rank_legibly(case: str) -> None:
    svg = draw_svg(reference_view(case), "a <title> & more", "below")
    shown = [element.text or "" for element in texts(svg)]
    assert "a <title> & more" in shown
    for _, _, stage in reference_plan(case).stages():
        ranks = sorted(stage.ranks)
        is_run = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
        label = f"{ranks[0]}-{ranks[-1]}" if is_run else ",".join(map(str, ranks))
        assert label in shown
    for rank in reference_plan(case).standby:
        assert str(rank) in shown
    assert all(int(element.attrib["font-size"]) >= 9 for element in texts(svg))


def test_svg_blocks_fill_the_row_in_proportion() -> None:
    root = ElementTree.fromstring(draw_svg(reference_view("110b/S4"), "", ""))
    plan = reference_plan("110b/S4")
    groups = [
        group for group in root.iter(f"{SVG}g") if (group.findtext(f"{SVG}title") or "").startswith("ranks")
    ]
    boxes = [group.find(f"{SVG}rect") for group in groups]
    stages = [stage for _, _, stage in plan.stages()]
    assert len(boxes) == len(stages)
    scales = {
        round((float(box.attrib["width"]) + 2) / stage.num_layers, 1)
        for box, stage in zip(boxes, stages, strict=True)
        if box is not None
    }
    assert len(scales) == 1
    assert sum("stroke" in box.attrib for box in boxes if box is not None) == 1


def test_svg_of_1024_devices() -> None:
    view = replace(large_view(1024, {0: 3.0}), standby=tuple(range(100)))
    svg = draw_svg(view, "large", "")
    shown = [element.text or "" for element in texts(svg)]
    assert "1000-1007" in shown
    assert "99" in shown
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter(f"{SVG}rect"):
        assert 0 <= float(element.get("x", 0)) <= width - float(element.attrib["width"]) + 0.1
        assert 0 <= float(element.get("y", 0)) <= height - float(element.attrib["height"]) + 0.1


def test_colours_go_from_green_to_red() -> None:
    shades = [colour_of(rate) for rate in (0.9, 1.0, 1.5, 2.5, 5.0, 12.0, 100.0)]
    assert shades[0] == shades[1]
    assert shades[5] == shades[6]
    assert len(set(shades[1:6])) == 5
    assert colour_of(float("inf")) not in shades
    assert text_colour("#ffffff") != text_colour("#000000")


def test_reasons_name_the_slow_device_and_what_it_costs() -> None:
    """Without standby ranks a slow device limits: 110b, healthy plan, rank 5 is 2 times slower."""
    plan, request = reference_plan("110b/healthy"), reference_request("110b/healthy")
    request = replace(request, rates=tuple(2.0 if rank == 5 else 1.0 for rank in range(64)))
    reasons = find_reasons(plan, request)
    assert (reasons.rank, reasons.rate, reasons.pipeline_id, reasons.stage_id) == (5, 2.0, 0, 0)
    layer_s = 0.028
    assert reasons.stage_s == pytest.approx(40 * layer_s)
    assert reasons.next_stage_s == pytest.approx(20 * layer_s)
    assert reasons.step_s == pytest.approx((31 * 40 + 40 + 3 * 20) * layer_s)
    assert reasons.steady_s == pytest.approx(32 * 40 * layer_s)
    assert reasons.fill_s == pytest.approx(3 * 20 * layer_s)
    assert reasons.healthy_rank_step_s == pytest.approx((31 * 20 + 4 * 20) * layer_s)
    assert (reasons.message_s, reasons.update_s) == (0, 0)
    assert reasons.next_pipeline_s == pytest.approx(700 * layer_s)
    # The first stage keeps 4 micro-batches: 80 GiB minus the reserve hold (3068 * 20 + 500 + 4900) MiB.
    assert reasons.fullest_rank == 0
    assert reasons.needed_bytes / 2**20 == pytest.approx(3068 * 20 + 500 + 4900, abs=1)
    assert any("rank 5 limits it: 2.00 times slower" in line for line in reasons.lines())
