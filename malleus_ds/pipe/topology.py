"""Plans from DeepSpeed's topologies, which name the place of each rank on Cartesian axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage

_AXES = ("pipe", "data", "model")


def check_topology(topology: Any, world_size: int) -> None:
    """Raise `PlanError` unless a `ProcessTopology` has axes that a plan knows, and one rank per process."""
    strange = sorted(
        axis for axis in set(topology.get_axis_names()) - set(_AXES) if topology.get_dim(axis) > 1
    )
    if strange:
        raise PlanError(f"topology has the axes {strange}: only {', '.join(_AXES)} may have several ranks")
    if topology.world_size() != world_size:
        raise PlanError(
            f"topology has {topology.world_size()} ranks, but the job has {world_size}: make them equal"
        )


def plan_of_topology(topology: Any, boundaries: Sequence[int]) -> ParallelPlan:
    """Equal pipelines with one micro-batch each; the ``model`` axis gives the TP groups.

    boundaries: of the stages, one more than the ``pipe`` axis is long.
    """
    dims = {axis: max(topology.get_dim(axis), 1) for axis in _AXES}
    names = topology.get_axis_names()

    def rank(**coordinates: int) -> int:
        return int(topology.get_rank(**{axis: coordinates.get(axis, 0) for axis in names}))

    pipelines = tuple(
        Pipeline(
            stages=tuple(
                Stage(
                    tuple(rank(pipe=pipe, data=data, model=model) for model in range(dims["model"])),
                    (boundaries[pipe], boundaries[pipe + 1]),
                )
                for pipe in range(dims["pipe"])
            ),
            num_micro_batches=1,
        )
        for data in range(dims["data"])
    )
    return ParallelPlan(pipelines)
