"""Pipelines whose micro-batches are whole: column generation for plans within one step.

maximise    sum n_c * micro-batches that pipeline c takes within the step, rounded down
subject to  every type: groups used <= groups that the nodes form (a flow through each node's positions)
            fewest <= sum n_c <= most pipelines

Its dual values price the groups in micro-batches, and the pipelines that take more than their groups are
worth are added. They are looked for under prices between those of fractional plans and these, which jump
from one extreme to another: the cheapest under each bottleneck, where time is worth more or less than the
bottleneck says, since which of them waste little by rounding cannot be priced.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from malleus_ds.planner.groups import Cluster
from malleus_ds.planner.micro_batches import FloatArray
from malleus_ds.planner.pipelines import Column, PipelineTable
from malleus_ds.planner.prices import Prices
from malleus_ds.planner.selection import groupings, groups_used, matrix

_MAX_ROUNDS = 16
_MAX_IDLE = 2
# Of the program's own prices, in those that pipelines are looked for under.
_SHARE = 0.1
# What a second is worth, as multiples of what the bottleneck says.
_WEIGHTS = (0.6, 1.2)
_NUM_STAGES = 2  # Different numbers of stages, of each bottleneck and weight.
_SLACK = 1.3
_LEAST_GAIN = 1e-6
# What an added pipeline may take less than its groups are worth: integer programs need a choice.
_SPARE = 0.1
_AMPLE = 1.01  # Of all micro-batches, since whole pipelines take less.


@dataclass(slots=True)
class WholePipelines:
    """numbers: fewest and most pipelines; table: of those that fit; prices: of fractional plans; pool:
    pipelines so far; deadline_s: on the monotonic clock."""

    cluster: Cluster
    numbers: tuple[int, int]
    table: PipelineTable
    prices: Prices
    bottlenecks_s: FloatArray
    deadline_s: float
    pool: dict[Column, None] = field(default_factory=dict)

    def add(self, columns: Iterable[Column]) -> None:
        """Pipelines to begin with, if they fit."""
        self.pool.update(dict.fromkeys(filter(self.table.holds, columns)))

    def generate(self, step_s: float) -> float:
        """Add pipelines; returns the micro-batches that the pool takes within the step, in fractions of
        pipelines: at least M once a plan may be among them."""
        number = self.table.workload.num_micro_batches
        bottlenecks_s = np.repeat(self.bottlenecks_s, len(_WEIGHTS))
        weights_s = bottlenecks_s * np.tile(_WEIGHTS, len(self.bottlenecks_s))
        limits_s = np.full(len(bottlenecks_s), np.inf)
        most, num_idle, tried = -np.inf, 0, self.prices.groups
        for _ in range(_MAX_ROUNDS):
            found, groups, pipeline = self._solved(step_s)
            num_idle = 0 if found > most + _LEAST_GAIN else num_idle + 1
            most = max(most, found)
            if most >= _AMPLE * number or num_idle >= _MAX_IDLE or time.monotonic() > self.deadline_s:
                break
            tried = _SHARE * groups + (1 - _SHARE) * tried
            solution = self.table.solve(tried, bottlenecks_s, weights_s, number, _SLACK)
            new = {
                column: None
                for column in solution.columns(limits_s, _NUM_STAGES)
                if column not in self.pool and self._gain(column, step_s, groups) > pipeline - _SPARE
            }
            if not new:
                break
            self.pool.update(new)
        return most

    def _gain(self, column: Column, step_s: float, groups: FloatArray) -> float:
        """Micro-batches that a pipeline takes beyond what its groups are worth."""
        worth = sum(groups[type_id] * count for type_id, count in column.counts().items())
        return float(self._taken(column, step_s) - worth)

    def _taken(self, column: Column, step_s: float) -> int:
        return min(column.capacity(step_s), self.table.workload.num_micro_batches)

    def _solved(self, step_s: float) -> tuple[float, FloatArray, float]:
        """The most micro-batches, and what groups and a pipeline are worth."""
        from scipy.optimize import linprog
        from scipy.sparse import hstack, vstack

        pool = [column for column in self.pool if column.capacity(step_s) >= 1]
        num_types = len(self.cluster.types)
        if not pool:
            return -np.inf, np.zeros(num_types), 0.0
        formed, balance, supply = groupings(self.cluster)
        num_links = formed.shape[1]
        counts = [(row, place, sign) for row, sign in ((0, 1.0), (1, -1.0)) for place in range(len(pool))]
        limits: Any = vstack(
            [
                hstack([groups_used(pool, num_types), -formed]),
                matrix(counts, (2, len(pool) + num_links)),
            ]
        )
        taken = np.array([float(self._taken(column, step_s)) for column in pool])
        fewest, most = self.numbers
        answer = linprog(
            np.concatenate([-taken, np.zeros(num_links)]),
            A_ub=limits.tocsr(),
            b_ub=np.concatenate([np.zeros(num_types), [most, -fewest]]),
            A_eq=hstack([matrix([], (len(supply), len(pool))), balance]).tocsr(),
            b_eq=supply,
            method="highs",
        )
        if answer.x is None:  # Fewer pipelines than a plan needs.
            return -np.inf, np.zeros(num_types), 0.0
        duals = -answer.ineqlin.marginals
        return -float(answer.fun), np.maximum(duals[:num_types], 0.0), float(duals[-2] - duals[-1])
