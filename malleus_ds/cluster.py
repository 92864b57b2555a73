"""Nodes, their devices as global ranks, and the straggling rates of the devices."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_HOST_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>-?\d+)")


class ClusterError(ValueError):
    """A hostfile or a set of straggling rates that cannot be used."""


@dataclass(frozen=True, slots=True)
class Node:
    """One line of a hostfile. num_slots: number of devices of the node."""

    host: str
    num_slots: int


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidth of one device's link to a device of its own node, and of another one, in bytes/s."""

    intra_bytes_per_s: float
    inter_bytes_per_s: float


def parse_hostfile(text: str) -> tuple[Node, ...]:
    """The nodes of a DeepSpeed hostfile: ``worker-1 slots=8`` per line, ``#`` starts a comment.

    Raises `ClusterError` with the line and its number for a malformed line, a repeated host and a
    node without slots, and for a file without hosts.
    """
    lines: dict[str, int] = {}
    nodes: list[Node] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        match = _HOST_LINE.fullmatch(content)
        if match is None:
            raise ClusterError(f"hostfile line {number}: {line!r}: write '<host> slots=<number of devices>'")
        host, num_slots = match["host"], int(match["slots"])
        if num_slots < 1:
            raise ClusterError(f"hostfile line {number}: {line!r}: slots must be at least 1")
        if host in lines:
            raise ClusterError(
                f"hostfile line {number}: {line!r}: host {host!r} is already on line {lines[host]}; "
                f"give each host one line"
            )
        lines[host] = number
        nodes.append(Node(host, num_slots))
    if not nodes:
        raise ClusterError("the hostfile names no host: add a line '<host> slots=<number of devices>'")
    return tuple(nodes)


def node_ranks(nodes: Sequence[Node]) -> tuple[tuple[int, ...], ...]:
    """Global ranks of each node: numbered node by node, as the launchers do."""
    boundaries = accumulate((node.num_slots for node in nodes), initial=0)
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(boundaries))


def check_rates(rates: Sequence[float], world_size: int) -> None:
    """Raise `ClusterError` unless there is one straggling rate in ``(0, inf]`` per rank."""
    if len(rates) != world_size:
        raise ClusterError(
            f"{len(rates)} straggling rates for {world_size} ranks: give ranks 0..{world_size - 1} one each"
        )
    for rank, rate in enumerate(rates):
        if math.isnan(rate) or rate <= 0:
            raise ClusterError(
                f"straggling rate of rank {rank} is {rate}: it must be positive (1.0 healthy, inf failed)"
            )
