"""Prices of groups in micro-batches: a proven lower bound, and pipelines worth choosing from.

Give each type of group a price ``lambda >= 0`` such that no grouping of the nodes is worth more than all M
micro-batches together (with ``mu >= 0`` more for each of D pipelines at most). In any plan some pipeline
then has at least as many micro-batches as its groups are worth, ``m_i >= Lambda_i``, since both sum up to M
at most and at least. Its time, and so the step, is at least ``(Lambda_i - 1) * max_j t_ij + sum_j t_ij``.
The least such value over all possible pipelines (`pipelines`) is a lower bound on the step of every plan.

It bounds the formula of `cost_model`, which a real 1F1B schedule can undercut where the slowest stage is
not the last (by up to what the stages behind it have to spare, see `simulate`).

The best prices solve a linear program with one row per pipeline; rows are generated where the bound is
violated. Its dual solution says how many pipelines of each kind an ideal, fractional plan would have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from malleus_ds.planner.groups import Cluster
from malleus_ds.planner.micro_batches import FloatArray, IntArray
from malleus_ds.planner.pipelines import Column


@dataclass(frozen=True, slots=True)
class Prices:
    """groups: per type; pipeline: ``mu``; step_s: the bound by the rows so far (not yet a proven one);
    weights: of the columns in the fractional plan, in pipelines."""

    groups: FloatArray
    pipeline: float
    step_s: float
    weights: FloatArray


@dataclass(slots=True)
class PriceProgram:
    """The linear program.

    max_pipelines: of a plan; least: the smallest price of each type, because a group for nothing would make
    the bound on pipelines of many such groups worthless; unit_s: scale of the times; upper_s: of the bound,
    which keeps the program bounded while its columns do not make a plan.
    """

    cluster: Cluster
    num_micro_batches: int
    max_pipelines: int
    least: FloatArray
    unit_s: float
    upper_s: float
    columns: list[Column] = field(default_factory=list)
    _known: set[Column] = field(default_factory=set)

    def add(self, columns: Iterable[Column]) -> int:
        """Add those that are new; returns how many."""
        before = len(self.columns)
        for column in columns:
            if column not in self._known:
                self._known.add(column)
                self.columns.append(column)
        return len(self.columns) - before

    def solve(self) -> Prices:
        """The prices with the largest bound over the columns so far."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        rows, right = self._rows()
        num_variables = int(self._offsets()[-1])
        lengths = np.cumsum([0, *map(len, rows)])
        values = [value for row in rows for _, value in row]
        indices = [index for row in rows for index, _ in row]
        matrix = csr_matrix((values, indices, lengths), shape=(len(rows), num_variables))
        objective = np.zeros(num_variables)
        objective[0] = -1.0
        limits = [(None, self.upper_s / self.unit_s), (0, None), *((least, None) for least in self.least)]
        limits += [(0, None)] * (num_variables - len(limits))
        answer = linprog(objective, A_ub=matrix, b_ub=np.array(right), bounds=limits, method="highs")
        if answer.x is None:
            raise ArithmeticError(f"the price program: {answer.message}")
        duals = -answer.ineqlin.marginals
        shadow = max(float(duals[-1]), 1e-12)  # Of the budget: step time per micro-batch.
        max_s = np.array([column.max_s for column in self.columns]) / self.unit_s
        return Prices(
            groups=self._lifted(answer.x),
            pipeline=float(answer.x[1]),
            step_s=float(answer.x[0]) * self.unit_s,
            weights=duals[: len(self.columns)] * max_s / shadow,
        )

    def _offsets(self) -> IntArray:
        """Variables: T, mu, one price per type, then the potentials of each class's positions."""
        sizes = [node.num_devices for node in self.cluster.classes]
        return np.cumsum([2 + len(self.cluster.types), *sizes])

    def _rows(self) -> tuple[list[list[tuple[int, float]]], list[float]]:
        """``sum of coefficient * variable <= right side``: columns, links of the nodes, the budget."""
        rows: list[list[tuple[int, float]]] = []
        for column in self.columns:
            max_s = column.max_s / self.unit_s
            priced = [(2 + type_id, -max_s * count) for type_id, count in column.counts().items()]
            rows.append([(0, 1.0), (1, -max_s), *priced])
        right = [(column.sum_s - column.max_s) / self.unit_s for column in self.columns]
        budget = [(1, float(self.max_pipelines))]
        for node, offset in zip(self.cluster.classes, self._offsets().tolist(), strict=False):
            for start, stop, type_id in node.links:
                row = [(offset + stop - 1, -1.0)]
                if start:
                    row.append((offset + start - 1, 1.0))
                if type_id >= 0:
                    row.append((2 + type_id, 1.0))
                rows.append(row)
                right.append(0.0)
            budget.append((offset + node.num_devices - 1, float(len(node.nodes))))
        return [*rows, budget], [*right, float(self.num_micro_batches)]

    def _lifted(self, variables: FloatArray) -> FloatArray:
        """Each price as high as the nodes' potentials allow: the budget stays met, the bound can only rise.

        The program leaves prices of groups that no column uses anywhere between 0 and this.
        """
        lifted = np.full(len(self.cluster.types), np.inf)
        for node, offset in zip(self.cluster.classes, self._offsets().tolist(), strict=False):
            potentials = [0.0, *variables[offset : offset + node.num_devices].tolist()]
            for start, stop, type_id in node.links:
                if type_id >= 0:
                    lifted[type_id] = min(lifted[type_id], potentials[stop] - potentials[start])
        return np.asarray(np.maximum(lifted, variables[2 : 2 + len(lifted)]))
