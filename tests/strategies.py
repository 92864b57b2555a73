"""Hypothesis strategies shared by the tests."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from malleus_ds.plan import ParallelPlan, Pipeline, Stage


@st.composite
def legal_plans(
    draw: st.DrawFn,
    num_layers: int,
    world_size: int,
    max_pipelines: int | None = None,
    max_micro_batches: int = 8,
    num_micro_batches: int | None = None,
    degrees: tuple[int, ...] = (1,),
) -> ParallelPlan:
    """Legal plans: standby ranks, shuffled ranks, unequal stages and data shares.

    num_micro_batches: the total of each plan, so that plans of one batch can follow each other; then
    pipelines are at most so many. Else each pipeline takes 1 to max_micro_batches.
    degrees: tensor-parallel degrees of the stages; 1 must be one of them.
    """
    limits = [limit for limit in (max_pipelines, num_micro_batches) if limit is not None]
    ranks = draw(st.permutations(range(world_size)))
    groups = draw(_groups(ranks, degrees))
    num_active = draw(st.integers(1, len(groups)))
    num_pipelines = draw(st.integers(1, min([num_active, *limits])))
    cuts = draw(_cuts(num_active, num_pipelines))
    # A pipeline has no more stages than layers; ranks beyond that are standby.
    chains = [groups[start:stop][:num_layers] for start, stop in itertools.pairwise(cuts)]
    if num_micro_batches is None:
        shares = draw(
            st.lists(st.integers(1, max_micro_batches), min_size=num_pipelines, max_size=num_pipelines)
        )
    else:
        bounds = draw(_cuts(num_micro_batches, num_pipelines))
        shares = [stop - start for start, stop in itertools.pairwise(bounds)]
    used = {rank for chain in chains for group in chain for rank in group}
    return ParallelPlan(
        pipelines=tuple(
            Pipeline(_stages(chain, draw(_cuts(num_layers, len(chain)))), share)
            for chain, share in zip(chains, shares, strict=True)
        ),
        micro_batch_size=draw(st.integers(1, 3)) if num_micro_batches is None else 1,
        standby=tuple(rank for rank in ranks if rank not in used),
    )


@st.composite
def _groups(draw: st.DrawFn, ranks: list[int], degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All ranks, in TP groups."""
    groups: list[tuple[int, ...]] = []
    start = 0
    while start < len(ranks):
        fitting = [degree for degree in degrees if start + degree <= len(ranks)]
        degree = draw(st.sampled_from(fitting)) if len(fitting) > 1 else fitting[0]
        groups.append(tuple(ranks[start : start + degree]))
        start += degree
    return groups


def _cuts(total: int, num_parts: int) -> st.SearchStrategy[list[int]]:
    """``num_parts + 1`` rising boundaries from 0 to total: parts that are not empty."""
    inner = st.sets(st.integers(1, total - 1), min_size=num_parts - 1, max_size=num_parts - 1)
    return (inner if num_parts > 1 else st.just(set())).map(lambda cuts: [0, *sorted(cuts), total])


def _stages(groups: list[tuple[int, ...]], cuts: list[int]) -> tuple[Stage, ...]:
    return tuple(
        Stage(group, (start, stop)) for group, start, stop in zip(groups, cuts, cuts[1:], strict=False)
    )
