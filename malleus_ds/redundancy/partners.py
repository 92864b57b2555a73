"""Which rank keeps the second copy of which rank's share. Pure, so that all ranks agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def copy_ranks(num_bytes: Sequence[int], node_of: Mapping[int, int]) -> tuple[int | None, ...]:
    """For each rank the one that keeps its copy; None with nothing to copy, or with one node only.

    num_bytes: of each rank's share; node_of: node of each rank.

    The nodes form a ring, and all copies of a node are on the next one: so of all pairs of nodes only
    neighbours lose state when both are lost. Inside a node the largest share goes to the rank that has the
    least so far; standby ranks take part.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank in range(len(num_bytes)):
        ranks_of.setdefault(node_of[rank], []).append(rank)
    nodes = sorted(ranks_of)
    result: list[int | None] = [None] * len(num_bytes)
    if len(nodes) < 2:
        return tuple(result)
    for index, node in enumerate(nodes):
        loads = dict.fromkeys(ranks_of[nodes[(index + 1) % len(nodes)]], 0)
        for rank in sorted(ranks_of[node], key=lambda rank: (-num_bytes[rank], rank)):
            if num_bytes[rank]:
                keeper = min(loads, key=lambda other: (loads[other], other))
                loads[keeper] += num_bytes[rank]
                result[rank] = keeper
    return tuple(result)
