"""The plan's checks, text and differences, on examples."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Position, Stage, diff_plans, draw_plan


def pipeline(*stages: tuple[tuple[int, ...], tuple[int, int]], m: int = 4) -> Pipeline:
    return Pipeline(tuple(Stage(ranks, layers) for ranks, layers in stages), m)


UNEVEN = ParallelPlan(
    pipelines=(
        pipeline(((4,), (0, 2)), ((1,), (2, 5)), ((3,), (5, 8)), m=5),
        pipeline(((0,), (0, 5)), ((5,), (5, 8)), m=3),
    ),
    standby=(2,),
)
TENSOR_PARALLEL = ParallelPlan((pipeline(((0, 1, 2, 3), (0, 9)), ((5, 7), (9, 16)), m=14),), standby=(4, 6))


def test_positions_and_shares() -> None:
    assert UNEVEN.position(3) == Position(0, 2, 0)
    assert TENSOR_PARALLEL.position(7) == Position(0, 1, 1)
    assert UNEVEN.position(2) is None
    assert (UNEVEN.layers_of(1), UNEVEN.layers_of(2)) == ((2, 5), (0, 0))
    assert (UNEVEN.micro_batch_range(0), UNEVEN.micro_batch_range(1)) == ((0, 5), (5, 8))
    assert UNEVEN.pipelines[0].boundaries == (0, 2, 5, 8)
    assert (UNEVEN.global_batch_size, UNEVEN.world_size, UNEVEN.num_layers) == (8, 6, 8)


def test_homogeneous_has_the_rank_order_of_deepspeed() -> None:
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    plan = ParallelPlan.homogeneous(num_layers=10, world_size=8, num_stages=4, num_micro_batches=3)
    plan.validate(10, 8)
    topology = PipeDataParallelTopology(num_pp=4, num_dp=2)
    for pipeline_id, stage_id, stage in plan.stages():
        assert stage.ranks == (topology.get_rank(pipe=stage_id, data=pipeline_id),)
    sizes = [stage.num_layers for stage in plan.pipelines[0].stages]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("num_layers", "num_stages"), [(8, 3), (3, 4), (8, 0)])
def test_homogeneous_refuses_what_does_not_divide(num_layers: int, num_stages: int) -> None:
    with pytest.raises(PlanError, match="stages"):
        ParallelPlan.homogeneous(num_layers, 8, num_stages)


FAULTS: list[tuple[ParallelPlan, str, str]] = [
    # plan, message, what the arrow is under
    (replace(UNEVEN, micro_batch_size=0), "micro_batch_size is 0", "pipeline 0"),
    (
        replace(UNEVEN, pipelines=(UNEVEN.pipelines[0], replace(UNEVEN.pipelines[1], num_micro_batches=0))),
        "pipeline 1: num_micro_batches is 0",
        "pipeline 1",
    ),
    (
        ParallelPlan((pipeline(((0,), (0, 3)), ((1,), (4, 8))),), standby=(2, 3, 4, 5)),
        "pipeline 0, stage 1 leaves out layers: it starts at layer 4, but must start at 3",
        "4-7",
    ),
    (
        ParallelPlan((pipeline(((0,), (0, 3)), ((1,), (2, 8))),), standby=(2, 3, 4, 5)),
        "pipeline 0, stage 1 repeats layers: it starts at layer 2, but must start at 3",
        "2-7",
    ),
    (
        ParallelPlan((pipeline(((0,), (0, 3)), ((1,), (3, 3)), ((2,), (3, 8))),), standby=(3, 4, 5)),
        r"pipeline 0, stage 1 is empty: its layers are \[3, 3\)",
        "none",
    ),
    (
        ParallelPlan((pipeline(((0,), (1, 8))),), standby=(1, 2, 3, 4, 5)),
        "pipeline 0, stage 0 leaves out layers",
        "1-7",
    ),
    (
        ParallelPlan((pipeline(((0,), (0, 7))),), standby=(1, 2, 3, 4, 5)),
        "pipeline 0, stage 0 stops at layer 7, but the model has 8 layers",
        "0-6",
    ),
    (
        ParallelPlan((pipeline(((0,), (0, 8))), pipeline(((0,), (0, 8)))), standby=(1, 2, 3, 4, 5)),
        "pipeline 1, stage 0: rank 0 is already in pipeline 0, stage 0",
        "0-7",
    ),
    (replace(UNEVEN, standby=(2, 3)), "standby: rank 3 is already in pipeline 0, stage 2", "standby"),
    (replace(UNEVEN, standby=(2, 6)), "standby: rank 6 is not in the world of 6", "standby"),
    (replace(UNEVEN, standby=()), r"ranks \[2\] of the world of 6 are in no stage", "standby"),
    (
        ParallelPlan((pipeline(((-1,), (0, 8))),), standby=(1, 2, 3, 4, 5)),
        "rank -1 is not in the world",
        "0-7",
    ),
    (
        ParallelPlan((pipeline(((), (0, 8))),), standby=(0, 1, 2, 3, 4, 5)),
        "pipeline 0, stage 0 has no rank",
        "0-7",
    ),
    (
        ParallelPlan((pipeline(((0, 1, 2), (0, 8))),), standby=(3, 4, 5)),
        r"pipeline 0, stage 0: ranks \[0, 1, 2\] are 3",
        "0-7",
    ),
    (ParallelPlan((), standby=(0, 1, 2, 3, 4, 5)), "has no pipeline", "standby"),
    (ParallelPlan((Pipeline((), 1),), standby=(0, 1, 2, 3, 4, 5)), "pipeline 0 has no stage", "pipeline 0"),
]


@pytest.mark.parametrize(("plan", "message", "under"), FAULTS, ids=[message for _, message, _ in FAULTS])
def test_faults_are_named_and_drawn(plan: ParallelPlan, message: str, under: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        plan.validate(8, 6)
    lines = str(caught.value).splitlines()
    (arrow,) = [number for number, line in enumerate(lines) if "^" in line]
    start, stop = lines[arrow].index("^"), len(lines[arrow])
    # The arrow stands under the second of a pipeline's two lines; its title is in the first.
    above = lines[arrow - 2] if under.startswith("pipeline") else lines[arrow - 1]
    assert above[start:stop].strip() == under


def test_tensor_parallel_groups_stay_in_a_node() -> None:
    TENSOR_PARALLEL.validate(16, 8)
    TENSOR_PARALLEL.validate(16, 8, nodes=[(0, 1, 2, 3), (4, 5, 6, 7)])
    with pytest.raises(
        PlanError, match=r"stage 1: .*inside one node, but has rank 5 on node 0, rank 7 on node 1"
    ):
        TENSOR_PARALLEL.validate(16, 8, nodes=[(0, 1, 2, 3, 4, 5), (6, 7)])
    with pytest.raises(PlanError, match=r"stage 1: ranks \[7\] are on no node"):
        TENSOR_PARALLEL.validate(16, 8, nodes=[(0, 1, 2, 3, 4, 5)])


def test_memory() -> None:
    gib = 2.0**30
    UNEVEN.validate(8, 6, memory=dict.fromkeys(range(6), (gib, gib)))
    with pytest.raises(PlanError, match=r"pipeline 1, stage 1: rank 5 needs 1536.0 MiB, but has 1024.0 MiB"):
        UNEVEN.validate(8, 6, memory={0: (gib, gib), 5: (1.5 * gib, gib)})


def test_drawing() -> None:
    assert str(UNEVEN) == "\n".join(
        [
            "pipeline 0  ranks  | 4      | 1          | 3          |  5 micro-batches",
            "            layers | 0-1    | 2-4        | 5-7        |",
            "pipeline 1  ranks  | 0                  | 5          |  3 micro-batches",
            "            layers | 0-4                | 5-7        |",
            "standby: 2",
            "micro-batch size 1, 8 samples per step",
        ]
    )


def test_drawing_shows_slow_and_failed_ranks() -> None:
    text = draw_plan(UNEVEN, rates={0: 1.0, 1: 2.57, 2: math.inf})
    assert "| 1 (x2.57)" in text
    assert "standby: 2 (failed)" in text
    assert text.count("(") == 2


def test_drawing_joins_the_ranks_of_a_group() -> None:
    text = str(TENSOR_PARALLEL)
    assert "| 0-3 " in text
    assert "| 5,7 " in text
    assert "standby: 4,6" in text


def test_drawing_wraps_long_pipelines() -> None:
    plan = ParallelPlan.homogeneous(num_layers=128, world_size=64, num_stages=64)
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 100
    boxes = [box.strip() for line in lines if " ranks " in line for box in line.split("|")[1:-1]]
    assert boxes == [str(rank) for rank in range(64)]


def good() -> dict[str, Any]:
    return UNEVEN.to_dict()


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    UNEVEN.to_json(path)
    assert ParallelPlan.load(path) == UNEVEN
    assert ParallelPlan.from_json(UNEVEN.to_json()) == UNEVEN
    assert ParallelPlan.load(path).digest == UNEVEN.digest
    assert TENSOR_PARALLEL.digest != UNEVEN.digest


BAD_DATA: list[tuple[tuple[str | int, ...], Any, str]] = [
    # where, the wrong value (... removes the key), message
    ((), [], r"plan is \[\]: write an object"),
    (("pipelines",), ..., "pipelines is missing"),
    (("standby",), ..., "standby is missing"),
    (("pipeline",), 3, r"pipeline is an unknown key \(value 3\)"),
    (("pipelines",), {}, r"pipelines is {}: write a list"),
    (("pipelines",), [], r"pipelines is \[\]: it needs at least one"),
    (("micro_batch_size",), True, "micro_batch_size is True: write an integer"),
    (("micro_batch_size",), "1", "micro_batch_size is '1': write an integer"),
    (("standby", 0), 2.0, r"standby\[0\] is 2.0: write an integer"),
    (("pipelines", 1), None, r"pipelines\[1\] is None: write an object"),
    (("pipelines", 1, "num_micro_batches"), 2.5, r"pipelines\[1\].num_micro_batches is 2.5"),
    (("pipelines", 1, "m"), 2, r"pipelines\[1\].m is an unknown key"),
    (("pipelines", 0, "stages"), [], r"pipelines\[0\].stages is \[\]"),
    (
        ("pipelines", 0, "stages", 1, "layers"),
        [1],
        r"pipelines\[0\].stages\[1\].layers is \[1\]: write \[start, stop\]",
    ),
    (("pipelines", 0, "stages", 1, "layers", 1), False, r"pipelines\[0\].stages\[1\].layers\[1\] is False"),
    (("pipelines", 0, "stages", 1, "ranks"), [], r"pipelines\[0\].stages\[1\].ranks is \[\]"),
    (("pipelines", 0, "stages", 1, "ranks"), 4, r"pipelines\[0\].stages\[1\].ranks is 4: write a list"),
    (("pipelines", 0, "stages", 1, "rank"), [4], r"pipelines\[0\].stages\[1\].rank is an unknown key"),
    (("pipelines", 0, "stages", 1, "ranks"), ..., r"pipelines\[0\].stages\[1\].ranks is missing"),
]


@pytest.mark.parametrize(("where", "value", "message"), BAD_DATA, ids=[message for *_, message in BAD_DATA])
def test_wrong_data_is_refused(where: tuple[str | int, ...], value: Any, message: str) -> None:
    data: Any = good()
    parent: Any = {"": data}
    key: str | int = ""
    for step in where:
        parent, key = parent[key], step
    if value is ...:
        del parent[key]
    else:
        parent[key] = value
    with pytest.raises(PlanError, match=message):
        ParallelPlan.from_dict(data if where else value)


def test_unreadable_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="not valid JSON"):
        ParallelPlan.from_json("{")
    with pytest.raises(PlanError, match="cannot read the plan file"):
        ParallelPlan.load(tmp_path / "none.json")


def test_diff_of_equal_plans_is_empty() -> None:
    assert not diff_plans(UNEVEN, UNEVEN)
    assert diff_plans(UNEVEN, UNEVEN).lines() == []


def test_diff_tells_moves_shares_and_standby() -> None:
    new = ParallelPlan(
        pipelines=(
            pipeline(((4,), (0, 1)), ((1,), (1, 5)), ((2,), (5, 8)), m=6),
            pipeline(((0,), (0, 4)), ((5,), (4, 8)), m=2),
        ),
        standby=(3,),
    )
    assert diff_plans(UNEVEN, new).lines() == [
        "pipeline 0: layer 1 moves from stage 0 (rank 4) to stage 1 (rank 1)",
        "pipeline 0: layers 5-7 move from stage 2 (rank 3) to stage 2 (rank 2)",
        "pipeline 1: layer 4 moves from stage 0 (rank 0) to stage 1 (rank 5)",
        "pipeline 0: micro-batches 5 -> 6",
        "pipeline 1: micro-batches 3 -> 2",
        "rank 3 becomes standby",
        "rank 2 comes back",
    ]


def test_diff_tells_new_and_ended_pipelines() -> None:
    one = ParallelPlan((UNEVEN.pipelines[0],), micro_batch_size=2, standby=(0, 2, 5))
    assert diff_plans(UNEVEN, one).lines() == [
        "number of pipelines 2 -> 1",
        "micro-batch size 1 -> 2",
        "pipeline 1 ends: stage 0 (rank 0) drops layers 0-4",
        "pipeline 1 ends: stage 1 (rank 5) drops layers 5-7",
        "rank 0 becomes standby",
        "rank 5 becomes standby",
    ]
    assert "pipeline 1 is new: stage 0 (rank 0) takes layers 0-4" in diff_plans(one, UNEVEN).lines()


def test_diff_refuses_plans_of_different_models() -> None:
    with pytest.raises(PlanError, match="8 and 16 layers"):
        diff_plans(UNEVEN, TENSOR_PARALLEL)
