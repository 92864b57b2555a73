"""Plans from DeepSpeed's topologies."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

from malleus_ds.pipe.topology import check_topology, plan_of_topology
from malleus_ds.plan import ParallelPlan, PlanError


def test_pipe_and_data_give_the_homogeneous_plan() -> None:
    topology = PipeDataParallelTopology(num_pp=4, num_dp=2)
    check_topology(topology, 8)
    expected = ParallelPlan.homogeneous(9, 8, 4, boundaries=[0, 2, 4, 6, 9])
    assert plan_of_topology(topology, [0, 2, 4, 6, 9]) == expected


@pytest.mark.parametrize(
    "topology",
    [
        PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3),
        ProcessTopology(axes=["model", "expert", "data", "pipe"], dims=[2, 1, 3, 2]),
    ],
)
def test_every_rank_keeps_its_coordinates(topology: ProcessTopology) -> None:
    check_topology(topology, 12)
    plan = plan_of_topology(topology, [0, 1, 5])
    plan.validate(5, 12)
    for rank in range(12):
        position, coordinate = plan.position(rank), topology.get_coord(rank)
        assert position is not None
        found = (position.stage_id, position.pipeline_id, position.slice_id)
        assert found == (coordinate.pipe, coordinate.data, coordinate.model)


def test_other_axes_and_sizes_are_refused() -> None:
    with pytest.raises(PlanError, match=r"axes \['expert'\]: only pipe, data, model"):
        check_topology(ProcessTopology(axes=["pipe", "expert"], dims=[2, 2]), 4)
    with pytest.raises(PlanError, match="topology has 4 ranks, but the job has 8"):
        check_topology(PipeDataParallelTopology(num_pp=2, num_dp=2), 8)
