"""Small changes of a good plan, by hill climbing.

Two groups of one degree change places; two neighbouring stages change places; a layer moves to the
neighbouring stage; a micro-batch moves to another pipeline. For faster updates (who reduces with whom is
not known before ranks are), and for less movement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, permutations

from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.planner.candidates import Candidates

_NUM_STARTS = 8


def polish(candidates: Candidates) -> None:
    """Improve the fastest plans of each number of pipelines until no change helps or the time is over."""
    by_number: dict[int, list[ParallelPlan]] = {}
    for plan, _ in sorted(candidates.found.items(), key=lambda item: item[1]):
        by_number.setdefault(len(plan.pipelines), []).append(plan)
    for plans in by_number.values():
        for plan in plans[:_NUM_STARTS]:
            _climb(candidates, plan, candidates.offer)


def settle(candidates: Candidates) -> None:
    """Change plans that are about as fast as the best so that less moves from the current one."""
    limit_s, movement = candidates.equal_s, candidates.movement

    def moved(plan: ParallelPlan) -> float:
        return movement.of(plan) if candidates.offer(plan) <= limit_s else math.inf

    fast = [plan for plan, step_s in candidates.found.items() if step_s <= limit_s]
    for plan in sorted(fast, key=movement.of)[:_NUM_STARTS]:
        _climb(candidates, plan, moved)


def _climb(candidates: Candidates, plan: ParallelPlan, value: Callable[[ParallelPlan], float]) -> None:
    """Take the first change that lowers the value, again and again."""
    best = value(plan)
    improved = True
    while improved:
        improved = False
        for changed in _changes(plan):
            if candidates.remaining_s() < 0:
                return
            found = value(changed)
            if found < best * (1 - 1e-9):
                plan, best, improved = changed, found, True
                break


def _changes(plan: ParallelPlan) -> Iterator[ParallelPlan]:
    yield from _swapped_groups(plan)
    for index, pipeline in enumerate(plan.pipelines):
        for stage_id in range(len(pipeline.stages) - 1):
            for stages in _changed_pairs(pipeline.stages[stage_id], pipeline.stages[stage_id + 1]):
                changed = (*pipeline.stages[:stage_id], *stages, *pipeline.stages[stage_id + 2 :])
                yield _with(plan, index, replace(pipeline, stages=changed))
    for giver, taker in permutations(range(len(plan.pipelines)), 2):
        counts = [pipeline.num_micro_batches for pipeline in plan.pipelines]
        if counts[giver] > 1:
            counts[giver] -= 1
            counts[taker] += 1
            yield plan.with_micro_batches(counts)


def _changed_pairs(first: Stage, second: Stage) -> Iterator[tuple[Stage, Stage]]:
    """Two neighbouring stages in the other order, or with one layer moved."""
    start, middle, stop = first.layers[0], first.layers[1], second.layers[1]
    cut = start + second.num_layers
    yield Stage(second.ranks, (start, cut)), Stage(first.ranks, (cut, stop))
    for cut in (middle - 1, middle + 1):
        if start < cut < stop:
            yield Stage(first.ranks, (start, cut)), Stage(second.ranks, (cut, stop))


def _swapped_groups(plan: ParallelPlan) -> Iterator[ParallelPlan]:
    places = [(index, position, stage) for index, position, stage in plan.stages()]
    for (i, j, one), (k, m, other) in combinations(places, 2):
        if one.degree == other.degree:
            swapped = _with(plan, i, _with_ranks(plan.pipelines[i], j, other.ranks))
            yield _with(swapped, k, _with_ranks(swapped.pipelines[k], m, one.ranks))
    for index, position, stage in places:
        if stage.degree == 1:
            for rank in plan.standby:
                standby = tuple(stage.ranks[0] if other == rank else other for other in plan.standby)
                changed = _with(plan, index, _with_ranks(plan.pipelines[index], position, (rank,)))
                yield replace(changed, standby=tuple(sorted(standby)))


def _with(plan: ParallelPlan, index: int, pipeline: Pipeline) -> ParallelPlan:
    pipelines = (*plan.pipelines[:index], pipeline, *plan.pipelines[index + 1 :])
    return replace(plan, pipelines=pipelines)


def _with_ranks(pipeline: Pipeline, position: int, ranks: tuple[int, ...]) -> Pipeline:
    stage = replace(pipeline.stages[position], ranks=ranks)
    stages = (*pipeline.stages[:position], stage, *pipeline.stages[position + 1 :])
    return replace(pipeline, stages=stages)
