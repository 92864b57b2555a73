"""Logical tensors, buckets, sync groups and ownership: who holds what under a plan."""

from malleus_ds.placement.layout import Bucket, LayoutError, LogicalTensor, Piece, make_buckets, merge_layouts
from malleus_ds.placement.ownership import (
    PARAMETER,
    Holding,
    Part,
    Placement,
    StateSchema,
    StateTensors,
    local_shape,
    place,
    shard_size,
)

__all__ = [
    "PARAMETER",
    "Bucket",
    "Holding",
    "LayoutError",
    "LogicalTensor",
    "Part",
    "Piece",
    "Placement",
    "StateSchema",
    "StateTensors",
    "local_shape",
    "make_buckets",
    "merge_layouts",
    "place",
    "shard_size",
]
