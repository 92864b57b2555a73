"""Who holds what under a plan: sync groups, optimizer shards, and ownership intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from malleus_ds.placement.layout import Bucket
from malleus_ds.plan import ParallelPlan, Stage

PARAMETER = "parameter"
"""The state tensor that every holder has; all others are sharded over the holders."""


@dataclass(frozen=True, slots=True)
class StateTensors:
    """Names of a bucket's state tensors, ``"parameter"`` first, and their bytes per element."""

    names: tuple[str, ...]
    itemsizes: tuple[int, ...]


StateSchema = Sequence[StateTensors]
"""One entry per bucket."""


@dataclass(frozen=True, slots=True)
class Holding:
    """``ranks`` have the elements ``[start, stop)`` of a bucket, of one state tensor."""

    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """The sync groups of a plan: for each bucket the ranks that hold it.

    ``holders[i]`` are the ranks of bucket ``i``, ascending, so that equal sets are equal tuples
    and a shard stays where it is when the set does not change.
    """

    plan: ParallelPlan
    buckets: tuple[Bucket, ...]
    holders: tuple[tuple[int, ...], ...]

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The distinct sync groups of two and more ranks, in an order all ranks agree on."""
        return tuple(sorted({ranks for ranks in self.holders if len(ranks) > 1}))

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Indices of the buckets that ``rank`` holds."""
        return tuple(i for i, ranks in enumerate(self.holders) if rank in ranks)

    def shard(self, bucket: int, rank: int) -> tuple[int, int]:
        """Elements ``[start, stop)`` of the bucket whose optimizer state ``rank`` has."""
        holders = self.holders[bucket]
        size = shard_size(self.buckets[bucket].num_elements, len(holders))
        start = holders.index(rank) * size
        end = self.buckets[bucket].num_elements
        return min(start, end), min(start + size, end)

    def holdings(self, bucket: int, state: str) -> tuple[Holding, ...]:
        """Disjoint intervals that cover the bucket, each with the ranks that hold ``state`` of it."""
        if self.buckets[bucket].num_elements == 0:
            return ()
        if state == PARAMETER:
            return (Holding(0, self.buckets[bucket].num_elements, self.holders[bucket]),)
        if self.buckets[bucket].group is None:
            return ()
        shards = ((self.shard(bucket, rank), rank) for rank in self.holders[bucket])
        return tuple(Holding(start, stop, (rank,)) for (start, stop), rank in shards if stop > start)


def shard_size(num_elements: int, num_holders: int) -> int:
    """Elements per shard: the last one may be padded."""
    return -(-num_elements // num_holders)


def place(plan: ParallelPlan, buckets: Sequence[Bucket], num_slices: int = 1) -> Placement:
    """The holders of each bucket: in each pipeline, of each layer that uses it, the ranks of the
    stage that have its slice (all ranks of the stage where TP does not cut it)."""
    holders = tuple(
        tuple(
            sorted(
                {
                    rank
                    for pipeline in plan.pipelines
                    for stage in pipeline.stages
                    if any(stage.layers[0] <= layer < stage.layers[1] for layer in bucket.layers)
                    for rank in _stage_holders(stage, bucket.slice_id, num_slices)
                }
            )
        )
        for bucket in buckets
    )
    return Placement(plan, tuple(buckets), holders)


def _stage_holders(stage: Stage, slice_id: int | None, num_slices: int) -> tuple[int, ...]:
    """A rank of degree t holds ``num_slices / t`` neighbouring slices (design 4.2)."""
    if slice_id is None:
        return stage.ranks
    return (stage.ranks[slice_id * stage.degree // num_slices],)
