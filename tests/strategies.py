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
) -> ParallelPlan:
    """Legal plans of tensor-parallel degree 1: standby ranks, shuffled ranks, unequal stages and data shares.

    num_micro_batches: the total of each plan, so that plans of one batch can follow each other; then
    pipelines are at most so many. Else each pipeline takes 1 to max_micro_batches.
    """
    limits = [limit for limit in (max_pipelines, num_micro_batches) if limit is not None]
    ranks = draw(st.permutations(range(world_size)))
    num_active = draw(st.integers(1, world_size))
    num_pipelines = draw(st.integers(1, min([num_active, *limits])))
    cuts = draw(_cuts(num_active, num_pipelines))
    # A pipeline has no more stages than layers; ranks beyond that are standby.
    chains = [ranks[start:stop][:num_layers] for start, stop in itertools.pairwise(cuts)]
    if num_micro_batches is None:
        shares = draw(
            st.lists(st.integers(1, max_micro_batches), min_size=num_pipelines, max_size=num_pipelines)
        )
    else:
        bounds = draw(_cuts(num_micro_batches, num_pipelines))
        shares = [stop - start for start, stop in itertools.pairwise(bounds)]
    used = {rank for chain in chains for rank in chain}
    return ParallelPlan(
        pipelines=tuple(
            Pipeline(_stages(chain, draw(_cuts(num_layers, len(chain)))), share)
            for chain, share in zip(chains, shares, strict=True)
        ),
        micro_batch_size=draw(st.integers(1, 3)) if num_micro_batches is None else 1,
        standby=tuple(rank for rank in ranks if rank not in used),
    )


def _cuts(total: int, num_parts: int) -> st.SearchStrategy[list[int]]:
    """``num_parts + 1`` rising boundaries from 0 to total: parts that are not empty."""
    inner = st.sets(st.integers(1, total - 1), min_size=num_parts - 1, max_size=num_parts - 1)
    return (inner if num_parts > 1 else st.just(set())).map(lambda cuts: [0, *sorted(cuts), total])


def _stages(ranks: list[int], cuts: list[int]) -> tuple[Stage, ...]:
    return tuple(
        Stage((rank,), (start, stop)) for rank, start, stop in zip(ranks, cuts, cuts[1:], strict=False)
    )
