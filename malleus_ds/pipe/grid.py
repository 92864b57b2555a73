"""DeepSpeed's topology and grid for a plan whose pipelines need not be equal."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology

from malleus_ds.placement.groups import GroupCache
from malleus_ds.plan import ParallelPlan


class Coordinates(NamedTuple):
    """Place of a rank: its stage, its pipeline, and its place in the stage's TP group."""

    pipe: int
    data: int
    model: int


class PlanTopology(ProcessTopology):  # type: ignore[misc]
    """Coordinates ``(pipe, data, model)`` of each rank under a plan; not a Cartesian product.

    Standby ranks stand in pipelines of their own behind the last one.
    """

    def __init__(self, plan: ParallelPlan, rank: int) -> None:
        self.axes = list(Coordinates._fields)
        self.ProcessCoord = Coordinates
        self.mapping = {
            Coordinates(pipe=stage_id, data=pipeline_id, model=index): stage_rank
            for pipeline_id, stage_id, stage in plan.stages()
            for index, stage_rank in enumerate(stage.ranks)
        }
        num_pipelines = len(plan.pipelines)
        for offset, standby in enumerate(plan.standby):
            self.mapping[Coordinates(pipe=0, data=num_pipelines + offset, model=0)] = standby
        position = plan.position(rank)
        stages = () if position is None else plan.pipelines[position.pipeline_id].stages
        degree = 1 if position is None else stages[position.stage_id].degree
        self.dims = [len(stages) or 1, num_pipelines, degree]

    def world_size(self) -> int:
        return len(self.mapping)


class PlanGrid(PipelineParallelGrid):  # type: ignore[misc]
    """The process grid that DeepSpeed's engine asks, answered from a plan.

    num_replicas: the nominal data-parallel size, what DeepSpeed's arithmetic of batch sizes divides
    by (see `nominal_replicas`); it stays while plans change. The number of pipelines is
    ``len(plan.pipelines)``.
    """

    def __init__(self, plan: ParallelPlan, groups: GroupCache, num_replicas: int) -> None:
        self.plan = plan
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._topo = PlanTopology(plan, self.global_rank)
        position = plan.position(self.global_rank)
        coordinates = self._topo.get_coord(self.global_rank)
        self.stages = () if position is None else plan.pipelines[position.pipeline_id].stages
        """Of this rank's pipeline; none on standby."""
        self.is_standby = position is None
        self.stage_id = coordinates.pipe
        self.data_parallel_id = coordinates.data
        self.data_parallel_size = num_replicas
        self.pipe_parallel_size = self._topo.dims[0]
        # DeepSpeed's own splitting of activations goes by the model-parallel size: ours does without it.
        self.model_parallel_size = 1
        self.slice_parallel_size = self._topo.dims[2]
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        own_pipeline: tuple[int, ...] = (self.global_rank,)
        if position is not None:
            own_pipeline = plan.pipelines[position.pipeline_id].ranks
        own_stage = (self.global_rank,) if position is None else self.stages[position.stage_id].ranks
        groups.ensure(plan_groups(plan))
        self.pp_group, self.slice_group = list(own_pipeline), list(own_stage)
        self.pp_proc_group = self.ds_model_proc_group = groups.get(own_pipeline)
        self.slice_proc_group = groups.get(own_stage) if len(own_stage) > 1 else None
        self.ds_model_rank = own_pipeline.index(self.global_rank)
        self.ds_model_world_size = len(own_pipeline)
        # Losses and batch statistics are averaged over all ranks, so that standby ranks have them.
        self.dp_group = list(range(self.world_size))
        self.dp_proc_group = dist.group.WORLD

    def stage_to_global(self, stage_id: int, **coordinates: int) -> int:
        """A rank of a stage of this pipeline: that at ``model``, by default this rank's place there."""
        if self.is_standby:  # a pipeline of its own
            return self.global_rank
        ranks = self.stages[stage_id].ranks
        index: int = coordinates.get("model", self.get_slice_parallel_rank())
        return ranks[min(index, len(ranks) - 1)]

    def get_sequence_data_parallel_rank(self) -> int:
        """DeepSpeed elects checkpoint writers by this rank: one per stage of the first pipeline."""
        return int(self.data_parallel_id)

    def get_data_parallel_rank(self) -> int:
        """For samplers: the pipeline, within the nominal number of replicas."""
        return int(self.data_parallel_id) % self.data_parallel_size


def plan_groups(plan: ParallelPlan) -> list[tuple[int, ...]]:
    """The ranks of each pipeline, each standby rank by itself, and the TP groups of several ranks."""
    pipelines = [*(pipeline.ranks for pipeline in plan.pipelines), *((rank,) for rank in plan.standby)]
    return [*pipelines, *(stage.ranks for _, _, stage in plan.stages() if stage.degree > 1)]


def nominal_replicas(plan: ParallelPlan) -> int:
    """The data-parallel size in DeepSpeed's ``train_batch == micro * accumulation * replicas``.

    The number of pipelines where their micro-batches divide by it, as with equal stages, else 1,
    which makes the accumulation steps the micro-batches of all pipelines.
    """
    num_pipelines = len(plan.pipelines)
    return num_pipelines if plan.num_micro_batches % num_pipelines == 0 else 1


def max_degree(plan: ParallelPlan) -> int:
    """The largest TP degree of its stages."""
    return max(stage.degree for _, _, stage in plan.stages())
