"""Who holds what under a plan: sync groups, optimizer shards, and ownership intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from malleus_ds.placement.layout import Bucket
from malleus_ds.plan import ParallelPlan, PlanError, Stage

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


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``[start, stop)`` of a bucket that ``ranks`` hold: their sync group.

    ``ranks`` ascend, so that equal sets are equal tuples and a shard stays where it is when the set
    does not change.
    """

    start: int
    stop: int
    ranks: tuple[int, ...]

    @property
    def shard_size(self) -> int:
        """Elements per shard; the last shards may be shorter, or empty."""
        return shard_size(self.stop - self.start, len(self.ranks))

    def shard(self, rank: int) -> tuple[int, int]:
        """Elements ``[start, stop)`` of the bucket whose optimizer state ``rank`` has."""
        start = self.start + self.ranks.index(rank) * self.shard_size
        return min(start, self.stop), min(start + self.shard_size, self.stop)


@dataclass(frozen=True)
class Placement:
    """Who holds what under a plan.

    ``parts[i]`` are the parts of bucket ``i``, ascending: they cover it, and neighbours have
    different ranks. A bucket of uncut tensors is one part.
    """

    plan: ParallelPlan
    buckets: tuple[Bucket, ...]
    parts: tuple[tuple[Part, ...], ...]

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The distinct sync groups of two and more ranks, in an order all ranks agree on."""
        return tuple(sorted({part.ranks for parts in self.parts for part in parts if len(part.ranks) > 1}))

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Indices of the buckets that ``rank`` holds, or a part of them."""
        return tuple(
            index for index, parts in enumerate(self.parts) if any(rank in part.ranks for part in parts)
        )

    def parts_of(self, bucket: int, rank: int) -> tuple[Part, ...]:
        """The parts that ``rank`` holds: neighbours, so together one range of the bucket."""
        return tuple(part for part in self.parts[bucket] if rank in part.ranks)

    def flat_size(self, bucket: int, rank: int) -> int:
        """Elements of the flat buffer of what ``rank`` holds of a bucket, 0 for nothing.

        One part is padded to equal shards. Several are not, so that a cut tensor is one contiguous range.
        """
        parts = self.parts_of(bucket, rank)
        if len(parts) == 1:
            return len(parts[0].ranks) * parts[0].shard_size
        return parts[-1].stop - parts[0].start if parts else 0

    def first_holder(self, bucket: int, part: Part) -> int:
        """The holder of a part in the first pipeline, of the bucket's first layer."""
        first_layer = min(self.buckets[bucket].layers)
        return next(
            rank
            for stage in self.plan.pipelines[0].stages
            if stage.layers[0] <= first_layer < stage.layers[1]
            for rank in stage.ranks
            if rank in part.ranks
        )

    def num_cuts(self, bucket: int, rank: int) -> int:
        """Among how many ranks of the stage of ``rank`` the bucket is divided."""
        return self._degrees[rank] if self.buckets[bucket].num_slices > 1 else 1

    def copies(self, bucket: int, rank: int) -> int:
        """How many ranks of the stage of ``rank`` compute the same gradient (design 4.2)."""
        return self._degrees[rank] // self.num_cuts(bucket, rank)

    def holdings(self, bucket: int, state: str) -> tuple[Holding, ...]:
        """Disjoint ascending intervals that cover the bucket, each with the ranks that hold ``state``."""
        parts = [part for part in self.parts[bucket] if part.start < part.stop]
        if state == PARAMETER:
            return tuple(Holding(part.start, part.stop, part.ranks) for part in parts)
        if self.buckets[bucket].group is None:
            return ()
        shards = ((part.shard(rank), rank) for part in parts for rank in part.ranks)
        return tuple(Holding(start, stop, (rank,)) for (start, stop), rank in shards if start < stop)

    @cached_property
    def _degrees(self) -> dict[int, int]:
        return {rank: stage.degree for _, _, stage in self.plan.stages() for rank in stage.ranks}


def shard_size(num_elements: int, num_holders: int) -> int:
    """Elements per shard: the last one may be padded."""
    return -(-num_elements // num_holders)


def local_shape(shape: tuple[int, ...], num_cuts: int) -> tuple[int, ...]:
    """Shape of one of ``num_cuts`` equal parts along dim 0."""
    return (shape[0] // num_cuts, *shape[1:]) if num_cuts > 1 else shape


def place(plan: ParallelPlan, buckets: Sequence[Bucket]) -> Placement:
    """The holders of each bucket: in each pipeline, of each layer that uses it, the ranks of the
    stage that have the slice (all ranks of the stage where TP does not cut it).

    Raises `PlanError` for a stage whose degree does not divide the number of slices.
    """
    return Placement(plan, tuple(buckets), tuple(_parts(plan, bucket) for bucket in buckets))


def _parts(plan: ParallelPlan, bucket: Bucket) -> tuple[Part, ...]:
    stages = [
        stage
        for _, _, stage in plan.stages()
        if any(stage.layers[0] <= layer < stage.layers[1] for layer in bucket.layers)
    ]
    size = bucket.num_elements // bucket.num_slices
    parts: list[Part] = []
    for slice_id in range(bucket.num_slices):
        holders = {rank for stage in stages for rank in _slice_holders(stage, slice_id, bucket)}
        ranks, start, stop = tuple(sorted(holders)), slice_id * size, (slice_id + 1) * size
        if parts and parts[-1].ranks == ranks:
            start = parts.pop().start
        parts.append(Part(start, stop, ranks))
    return tuple(parts)


def _slice_holders(stage: Stage, slice_id: int, bucket: Bucket) -> tuple[int, ...]:
    """A rank of degree t holds ``num_slices / t`` neighbouring slices (design 4.2)."""
    if bucket.num_slices == 1:
        return stage.ranks
    if bucket.num_slices % stage.degree:
        raise PlanError(
            f"the stage of the ranks {stage.ranks} has TP degree {stage.degree}, but "
            f"{bucket.pieces[0].tensor!r} is cut into {bucket.num_slices} slices: use a degree that divides "
            f"{bucket.num_slices}"
        )
    return (stage.ranks[slice_id * stage.degree // bucket.num_slices],)
