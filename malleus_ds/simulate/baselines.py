"""Systems that answer a straggler, in one simulator, so that the gain of each malleable dimension shows.

Each but the last starts from the best equal plan of the healthy cluster (`equal_plan`). None of them is given
less than its idea allows: shares and layers are chosen by exact search in the cost model.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage
from malleus_ds.planner.checker import check_answer
from malleus_ds.planner.cost_model import CostModel, pipeline_time_s
from malleus_ds.planner.types import PlanRequest
from malleus_ds.simulate.division import divide_layers
from malleus_ds.simulate.equal_plan import Layout, best_equal_plan

STRAGGLER_RATE = 1.05
"""Devices slower than this make a restart leave out their node."""

PlanMaker = Callable[[PlanRequest], ParallelPlan]


@dataclass(frozen=True, slots=True)
class System:
    """A way to answer stragglers.

    name: for tables; about: in a line; make: the plan that answers a request, which names the plan in use as
    ``current``; raises `PlanError` when there is none; restarts: whether a new plan costs a restart.
    """

    name: str
    about: str
    make: PlanMaker
    restarts: bool = False

    def answer(self, request: PlanRequest) -> ParallelPlan:
        """The system's plan, checked. Raises `PlanError` that says why it has none."""
        plan = self.make(request)
        check_answer(plan, request)
        return plan


def all_systems(static: ParallelPlan) -> tuple[System, ...]:
    """All systems, ours last. static: the equal plan of the healthy cluster, pipeline by pipeline."""

    def data(request: PlanRequest) -> ParallelPlan:
        return rebalance_data(static, request)

    def layers(request: PlanRequest) -> ParallelPlan:
        return rebalance_layers(static, request)

    return (
        System("megatron", "an equal plan, pipeline by pipeline; never changed", lambda _: static),
        System("megatron+restart", "restarts without the nodes that straggle", _restart("pipelines"), True),
        System("deepspeed", "an equal plan, data axis inner; never changed", _static("stages")),
        System("deepspeed+restart", "restarts without the nodes that straggle", _restart("stages"), True),
        System("data only", "moves micro-batches between the pipelines of megatron", data),
        System("layers only", "moves layers between the stages of megatron", layers),
        System("malleus", "devices, stages, layers and data", _malleus),
    )


def _static(layout: Layout) -> PlanMaker:
    return lambda request: best_equal_plan(request, layout)


def _restart(layout: Layout) -> PlanMaker:
    def make(request: PlanRequest) -> ParallelPlan:
        nodes = [
            ranks
            for ranks in request.node_ranks
            if all(request.rates[rank] <= STRAGGLER_RATE for rank in ranks)
        ]
        if not nodes:
            raise PlanError("every node has a straggler: none is left to restart on")
        return best_equal_plan(request, layout, nodes)

    return make


def rebalance_data(plan: ParallelPlan, request: PlanRequest) -> ParallelPlan:
    """The plan with its micro-batches shared out anew, for the least time of the slowest pipeline.

    Giving each next micro-batch to the pipeline that would end first is optimal, as the time of a pipeline
    grows with its share. Raises `PlanError` when a rank of the plan has failed.
    """
    check_answer(plan, request)
    cost = CostModel(request)
    times_s = [
        [cost.stage_time_s(stage, plan.micro_batch_size) for stage in pipeline.stages]
        for pipeline in plan.pipelines
    ]
    counts = [1] * len(times_s)
    ends_s = [(pipeline_time_s(times, 2), index) for index, times in enumerate(times_s)]
    heapq.heapify(ends_s)
    for _ in range(plan.num_micro_batches - len(counts)):
        _, index = ends_s[0]
        counts[index] += 1
        heapq.heapreplace(ends_s, (pipeline_time_s(times_s[index], counts[index] + 1), index))
    return plan.with_micro_batches(counts)


def rebalance_layers(plan: ParallelPlan, request: PlanRequest) -> ParallelPlan:
    """The plan with the layers of each pipeline divided anew over its stages, within their memory.

    Raises `PlanError` when a rank of the plan has failed.
    """
    check_answer(plan, request)
    known: dict[tuple[object, ...], tuple[int, ...] | None] = {}
    pipelines = []
    for pipeline_id, pipeline in enumerate(plan.pipelines):
        groups = [stage.ranks for stage in pipeline.stages]
        rates = [max(request.rates[rank] for rank in group) for group in groups]
        sizes = (len(plan.pipelines), pipeline.num_micro_batches, plan.micro_batch_size)
        # Where nodes differ in memory, equal rates do not make equal pipelines.
        place = pipeline_id if isinstance(request.memory_bytes, tuple) else None
        key = (place, *map(len, groups), *rates, *sizes)
        if key not in known:
            known[key] = divide_layers(request, groups, rates, *sizes)
        boundaries = known[key]
        if boundaries is None:
            raise PlanError(f"pipeline {pipeline_id}: no division of its layers fits into its memory")
        layers = pairwise(boundaries)
        pipelines.append(Pipeline(tuple(map(Stage, groups, layers)), pipeline.num_micro_batches))
    return replace(plan, pipelines=tuple(pipelines))


def _malleus(request: PlanRequest) -> ParallelPlan:
    from malleus_ds.planner.search import make_plan  # Loads the solvers.

    return make_plan(request).plan
