"""The grouping that changes the current one least, as an integer program (cvxpy, HiGHS).

``n[p, i]``: how many pipelines of multiset p take the place of current pipeline i (last column: of none).

    minimise    sum n[p, i] * (size of p - 2 * devices that p shares with i)
    subject to  every class: devices used <= devices there are
                every current pipeline: replaced at most once
                sum n[p, i] * capacity of p >= number of micro-batches
                fewest <= sum n <= most pipelines

The objective counts devices that come and devices that leave, up to a constant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from malleus_ds.planner.lattice import Lattice
from malleus_ds.planner.micro_batches import IntArray
from malleus_ds.planner.solver import cvxpy, solved

# (multiset, index of the current pipeline whose place it takes or None)
Replacement = tuple[int, int | None]


def least_change_grouping(
    lattice: Lattice,
    capacity: IntArray,
    numbers: Sequence[int],
    num_micro_batches: int,
    current: IntArray,
    time_limit_s: float,
) -> tuple[Replacement, ...] | None:
    """Solve it; None when there is no grouping, or none was found in time.

    capacity: micro-batches of each multiset within the step time; numbers: the least and the largest
    number of pipelines are taken; current: ``[pipeline, class]`` device counts.
    """
    cp = cvxpy()
    patterns = np.flatnonzero(capacity >= 1)
    if not patterns.size:
        return None
    vectors = lattice.vectors[patterns]
    shared = np.minimum(vectors[:, None, :], current[None, :, :]).sum(axis=2)
    change = lattice.sizes[patterns][:, None] - 2 * np.pad(shared, ((0, 0), (0, 1)))
    count = cp.Variable(change.shape, integer=True)
    per_pattern = cp.sum(count, axis=1)
    constraints = [
        count >= 0,
        vectors.T @ per_pattern <= lattice.vectors[-1],
        cp.sum(count[:, :-1], axis=0) <= 1,
        np.minimum(capacity[patterns], num_micro_batches) @ per_pattern >= num_micro_batches,
        cp.sum(count) >= min(numbers),
        cp.sum(count) <= max(numbers),
    ]
    problem = cp.Problem(cp.Minimize(cp.sum(cp.multiply(change, count))), constraints)
    values = solved(problem, time_limit_s, count)
    if values is None:
        return None
    solution = values[0]
    if np.minimum(capacity[patterns], num_micro_batches) @ solution.sum(axis=1) < num_micro_batches:
        return None
    return tuple(
        (int(patterns[row]), int(column) if column < len(current) else None)
        for row, column in np.argwhere(solution > 0)
        for _ in range(solution[row, column])
    )
