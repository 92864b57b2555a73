"""Which pipelines form the plan: an integer program (cvxpy, HiGHS).

maximise    sum n_c * capacity of pipeline c within the step time, until it is M; then devices that stay
subject to  every type: groups used <= groups that the nodes form
            every node class: the groupings of its nodes are paths (a flow through the positions)
            fewest <= sum n_c <= most pipelines
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malleus_ds.planner.groups import Cluster
from malleus_ds.planner.pipelines import Column
from malleus_ds.planner.solver import cvxpy, solved


@dataclass(frozen=True, slots=True)
class Selection:
    """columns: the pipelines, each as often as it is used; flows: per node class, how many of its nodes use
    each of its links."""

    columns: tuple[Column, ...]
    flows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Selector:
    """The program of one cluster. numbers: fewest and most pipelines; num_micro_batches: M."""

    cluster: Cluster
    numbers: tuple[int, int]
    num_micro_batches: int

    def select(
        self,
        columns: Sequence[Column],
        step_s: float,
        time_limit_s: float,
        present: Mapping[Column, int] | None = None,
    ) -> Selection | None:
        """Pipelines that take all micro-batches within ``step_s``; None if none are found in time.

        present: pipelines of the current plan and how often it has them; as many devices as possible stay.
        """
        cp = cvxpy()
        pool = self._pool(columns, step_s, present or {})
        if not pool:
            return None
        capacities = np.array([min(self.num_micro_batches, column.capacity(step_s)) for column in pool])
        used = groups_used(pool, len(self.cluster.types))
        formed, balance, supply = groupings(self.cluster)
        count = cp.Variable(len(pool), integer=True)
        flow = cp.Variable(formed.shape[1], integer=True)
        constraints = [
            count >= 0,
            flow >= 0,
            used @ count <= formed @ flow,
            balance @ flow == supply,
            cp.sum(count) >= self.numbers[0],
            cp.sum(count) <= self.numbers[1],
        ]
        enough = math.inf
        if present:
            stays = cp.Variable(len(pool))
            constraints += [
                stays <= count,
                stays <= np.array([present.get(column, 0) for column in pool]),
                capacities @ count >= self.num_micro_batches,
            ]
            objective = np.array([float(self._num_devices(column)) for column in pool]) @ stays
        else:
            # More than enough at best, which guides the search for enough.
            objective, enough = capacities @ count, float(self.num_micro_batches)
        problem = cp.Problem(cp.Maximize(objective), constraints)
        values = solved(problem, time_limit_s, count, flow, enough=enough)
        if values is None:
            return None
        counts, flows = values
        if int(capacities @ counts) < self.num_micro_batches:
            return None
        return Selection(
            tuple(column for column, number in zip(pool, counts, strict=True) for _ in range(number)),
            flows_of_classes(self.cluster, flows),
        )

    def _pool(self, columns: Sequence[Column], step_s: float, present: Mapping[Column, int]) -> list[Column]:
        """Of the pipelines with equal groups the one that takes most micro-batches, and those present."""
        best: dict[object, Column] = {}
        for column in columns:
            if column.capacity(step_s) < 1:
                continue
            key = column if column in present else frozenset(column.counts().items())
            held = best.get(key)
            if held is None or column.capacity(step_s) > held.capacity(step_s):
                best[key] = column
        return list(best.values())

    def _num_devices(self, column: Column) -> int:
        return sum(self.cluster.types[type_id].degree for type_id, _, _ in column.stages)


def groups_used(columns: Sequence[Column], num_types: int) -> Any:
    """Groups used, ``[type, pipeline]``."""
    uses = [
        (type_id, place, number)
        for place, column in enumerate(columns)
        for type_id, number in column.counts().items()
    ]
    return matrix(uses, (num_types, len(columns)))


def paths(
    node_links: Sequence[tuple[int, int, int]], flows: Sequence[int]
) -> list[list[tuple[int, int, int]]]:
    """The groupings of a class's nodes: one list of links per node."""
    left = list(flows)
    starts: dict[int, list[int]] = {}
    for index, (start, _, _) in enumerate(node_links):
        starts.setdefault(start, []).append(index)
    found = []
    while any(left[index] for index in starts[0]):
        position, path = 0, []
        while position in starts:
            index = next(index for index in starts[position] if left[index])
            left[index] -= 1
            path.append(node_links[index])
            position = node_links[index][1]
        found.append(path)
    return found


def groupings(cluster: Cluster) -> tuple[Any, Any, NDArray[np.float64]]:
    """Groups formed ``[type, link]``; balance ``[position, link]`` and its right side.

    As many links leave a position as reach it, and one per node leaves the first.
    """
    formed: list[tuple[int, int, float]] = []
    balance: list[tuple[int, int, float]] = []
    supply: list[float] = []
    link_id = 0
    for node in cluster.classes:
        first = len(supply)
        supply.extend([float(len(node.nodes)), *[0.0] * (node.num_devices - 1)])
        for start, stop, type_id in node.links:
            if type_id >= 0:
                formed.append((type_id, link_id, 1.0))
            balance.append((first + start, link_id, 1.0))
            if stop < node.num_devices:
                balance.append((first + stop, link_id, -1.0))
            link_id += 1
    return (
        matrix(formed, (len(cluster.types), link_id)),
        matrix(balance, (len(supply), link_id)),
        np.array(supply),
    )


def flows_of_classes(cluster: Cluster, flows: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    """The uses of the links, class by class."""
    ends = np.cumsum([len(node.links) for node in cluster.classes])[:-1]
    return tuple(tuple(part.tolist()) for part in np.split(flows, ends))


def matrix(entries: Sequence[tuple[int, int, float]], shape: tuple[int, int]) -> Any:
    """A sparse matrix of (row, column, value)."""
    from scipy.sparse import csr_matrix

    rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
    return csr_matrix((np.array(values, dtype=float), (rows, columns)), shape=shape)
