"""Column generation: the pipelines that good plans are made of, and a bound that holds for all plans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from malleus_ds.planner.groups import Cluster
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, IntArray
from malleus_ds.planner.pipelines import Column, PipelineTable
from malleus_ds.planner.prices import PriceProgram, Prices
from malleus_ds.planner.workload import Workload

_NUM_BOTTLENECKS = 40
_MANY_STAGES = 16  # More are not looked for, but the bound holds for them too.
_MAX_ROUNDS = 40
_MAX_REFINEMENTS = 8
_NUM_HALVINGS = 12
_CONVERGED = 1e-3
_FAR = 10**6
# Of the bound by the program: a little less is proven far sooner, so that comes first.
TARGETS = (0.98, 1.0)
_NEXT = 3.5  # Times as long as the one before takes the next.
# Spans of micro-batches, and their parts.
_SPANS = (
    (1, 2, ((1, 1), (2, 2))),
    (3, 6, ((3, 3), (4, 4), (5, 6))),
    (7, _FAR, ((7, 8), (9, 12), (13, 16), (17, 24), (25, _FAR))),
)
# Weights of micro-batches that a pipeline has more or less than its groups are worth, see `_scan`.
_FACTORS = (1.0, 4.0, 0.0, 16.0)
_SLACK = 1.2
_WIDE = 1.2
# Of a harmonic price: high enough for bounds on short pipelines, low enough to matter little.
_LEAST_PRICE = 0.5


@dataclass(frozen=True, slots=True)
class Generated:
    """columns: pipelines, best first; prices: of the groups; proving: those that prove most."""

    columns: tuple[Column, ...]
    prices: Prices
    proving: Prices

    @property
    def num_pipelines(self) -> float:
        """Of the ideal, fractional plan."""
        return float(self.prices.weights.sum())


@dataclass(frozen=True, slots=True)
class Bound:
    """step_s: the bound; bottlenecks_s: where it is below the target."""

    step_s: float
    bottlenecks_s: FloatArray


@dataclass(frozen=True, slots=True)
class Generator:
    """For plans with at most ``max_pipelines`` pipelines."""

    workload: Workload
    cluster: Cluster
    max_pipelines: int
    deadline_s: float

    def table(self, rates: FloatArray, num_pipelines: int, max_stages: int = _FAR) -> PipelineTable:
        max_stages = min(max_stages, self.workload.num_layers, self.cluster.num_devices)
        return PipelineTable(self.workload, self.cluster.types, rates, num_pipelines, max_stages)

    @property
    def _unit_s(self) -> float:
        return float(self.workload.prefix_s[-1]) / self.workload.num_layers

    def run(self, num_pipelines: int) -> Generated | None:
        """Generate pipelines that fit into the memory of plans with ``num_pipelines``; None if none does."""
        table = self.table(self.cluster.rates, num_pipelines, 2 * _MANY_STAGES)
        program = self._program()
        bottlenecks_s, prices = self._bottlenecks_s(), self._even_prices()
        best = replace(prices, step_s=0.0)
        for _ in range(_MAX_REFINEMENTS):
            converged = self._converge(table, program, bottlenecks_s, prices)
            if converged is None and table.max_stages == 2 * _MANY_STAGES:
                table = self.table(self.cluster.rates, num_pipelines)  # Memory may take more stages.
                converged = self._converge(table, program, bottlenecks_s, prices)
            if converged is None:
                return None
            prices, tried = converged[0], self._within_budget(converged[1])
            scan = self._scan(table, tried, prices.step_s, self._most_in_flight, _FAR, bottlenecks_s[0])
            if scan.step_s > best.step_s:
                best = replace(tried, step_s=scan.step_s)
            if scan.step_s >= prices.step_s * (1 - 2 * _CONVERGED) or self._is_late():
                break
            found = table.solve(tried.groups, scan.bottlenecks_s, scan.bottlenecks_s, self._most_in_flight)
            limit_s = prices.step_s * (1 - _CONVERGED / 10) - (tried.pipeline - 1) * scan.bottlenecks_s
            program.add(found.columns(limit_s))
            prices = program.solve()
            bottlenecks_s = np.unique(np.concatenate([bottlenecks_s, scan.bottlenecks_s]))
        order = np.argsort([reduced_s(column, prices) for column in program.columns], kind="stable")
        weights = np.pad(prices.weights, (0, len(order) - len(prices.weights)))[order]
        return Generated(
            tuple(program.columns[index] for index in order),
            replace(prices, weights=weights),
            replace(best, step_s=prices.step_s),
        )

    def _program(self) -> PriceProgram:
        serial_s = float(self.workload.prefix_s[-1] * self.cluster.rates.max())
        return PriceProgram(
            self.cluster,
            self.workload.num_micro_batches,
            self.max_pipelines,
            _LEAST_PRICE * self.harmonic_prices().groups,
            self._unit_s,
            serial_s * (self.workload.num_micro_batches + 1)
            + self.workload.message_s * self.workload.num_layers,
        )

    def _converge(
        self,
        table: PipelineTable,
        program: PriceProgram,
        bottlenecks_s: FloatArray,
        start: Prices,
    ) -> tuple[Prices, Prices] | None:
        """Add pipelines until none under these bottlenecks is cheaper than the program thinks.

        Returns the program's prices, and the last ones tried, which are between those of the last rounds.
        """
        prices = tried = start
        share = 1.0
        for _ in range(_MAX_ROUNDS):
            is_first = not np.isfinite(prices.step_s)
            fixed_s = (tried.pipeline - 1) * bottlenecks_s
            limit_s = np.inf if is_first else prices.step_s * (1 - _CONVERGED / 10)
            solution = table.solve(
                tried.groups, bottlenecks_s, bottlenecks_s, self._most_in_flight, _SLACK, limit_s - fixed_s
            )
            least_s = float((solution.best_costs() + fixed_s).min())
            if is_first and not np.isfinite(least_s):
                return None
            # At first a wide choice, so that the program knows pipelines of all lengths.
            added = program.add(solution.columns((_WIDE * least_s if is_first else limit_s) - fixed_s))
            if least_s >= prices.step_s * (1 - _CONVERGED) or (share == 1.0 and not added):
                break
            prices = program.solve()
            if self._is_late():
                break
            # Half way from the last prices, since the program's own jump between extremes.
            share = 0.5 if not is_first and added else 1.0
            tried = replace(
                prices,
                groups=share * prices.groups + (1 - share) * tried.groups,
                pipeline=share * prices.pipeline + (1 - share) * tried.pipeline,
            )
        return prices, tried

    @property
    def _most_in_flight(self) -> int:
        return self.workload.num_micro_batches

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline_s

    def harmonic_prices(self) -> Prices:
        """Prices by speed alone: exact if layers could be split and there were no fill."""
        groups = 1 / self.cluster.rates
        groups *= self.workload.num_micro_batches / self.cluster.worth(groups)
        return Prices(groups, 0.0, np.inf, np.zeros(0))

    def _even_prices(self) -> Prices:
        """Prices as if layers could be split: all stages take as long, and each costs a micro-batch to fill.

        A pipeline of rates ``y_j`` with ``L`` layers of one second takes ``m + S - 1 = T * sum(1 / y_j) / L``
        micro-batches and stages, so a group is worth ``T / (L * y_j) - 1``.
        """
        low, high, prices = 0.0, 1.0, self.harmonic_prices()
        number, harmonic = self.workload.num_micro_batches, prices.groups

        def groups(factor: float) -> FloatArray:
            return np.maximum(factor * harmonic - 1, _LEAST_PRICE * harmonic)

        while self.cluster.worth(groups(high)) < number:
            low, high = high, 2 * high
        for _ in range(_NUM_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.cluster.worth(groups(middle)) < number else (low, middle)
        return replace(prices, groups=groups(high), pipeline=1.0)

    def _bottlenecks_s(self) -> FloatArray:
        """From a share of the layers on a fast group to the whole step at full speed, in equal ratios."""
        layers_s, rates = self.workload.prefix_s, self.cluster.rates
        least_rate, total_s = float(rates.min()), float(layers_s[-1])
        step_s = (
            total_s * self.workload.num_micro_batches / self.cluster.worth(1 / rates) + least_rate * total_s
        )
        low_s = max(least_rate * total_s / _MANY_STAGES, least_rate * float(np.diff(layers_s).max()))
        high_s = max(low_s, min(step_s, float(total_s * rates.max())))
        # And one that allows everything, for pipelines that have no choice.
        even_s = np.geomspace(low_s, high_s, _NUM_BOTTLENECKS)
        return np.unique([*even_s, high_s, float(total_s * rates.max())]) * (1 + RELATIVE_SLACK)

    def bound_s(self, prices: Prices, known_s: float = 0.0, targets: Sequence[float] = TARGETS) -> float:
        """The bound on the step that these prices prove, at most ``prices.step_s``; see `prices`.

        A pipeline with m micro-batches keeps at most m in flight, so small m are looked at apart. known_s:
        another bound; what is not above it may be given up; targets: shares of the step, one after the other.
        """
        prices = self._within_budget(prices)
        rates = np.array([kind.least_rate for kind in self.cluster.types])
        table = self.table(rates, self.max_pipelines)
        proven_s = 0.0
        for share in targets:
            target_s, began_s = share * prices.step_s, time.monotonic()
            found_s = self._proven_s(table, prices, target_s, known_s)
            took_s = time.monotonic() - began_s
            proven_s = max(proven_s, found_s)
            if found_s < target_s * (1 - _CONVERGED) or began_s + _NEXT * took_s > self.deadline_s:
                break
        return proven_s

    def _proven_s(self, table: PipelineTable, prices: Prices, target_s: float, known_s: float) -> float:
        """What the prices prove, at most the target; little matters at or below what is known."""
        for first, last, parts in _SPANS:
            if target_s <= known_s:
                break
            lowest_s = self._scan(table, prices, target_s, first, last).step_s
            if lowest_s < target_s * (1 - _CONVERGED) and not self._is_late():
                finer = [self._scan(table, prices, target_s, *part).step_s for part in parts]
                lowest_s = max(lowest_s, min(finer))
            target_s = min(target_s, lowest_s)
        return target_s

    def _scan(
        self, table: PipelineTable, prices: Prices, target_s: float, first: int, last: int, low_s: float = 0.0
    ) -> Bound:
        """The least time of a pipeline of ``first`` to ``last`` micro-batches that is worth no more of them.

        With worth ``Lambda <= m``, its time is at least ``(m - 1) * max t + sum t + w * (Lambda - m)`` for
        any ``w >= 0``; ``w = max t`` makes m vanish, and some larger ones serve small m, where memory
        allows cheap pipelines. Bottlenecks between two values are covered by the larger one (for what fits
        into a stage) and the least possible time above the smaller one (as ``max t``); intervals that do
        not reach the target are cut finer until they hold one possible time.
        """
        layer_s = float(table.rates.min() * np.diff(self.workload.prefix_s).max())
        times_s = self.workload.stage_times_s(table.rates.tolist(), target_s)
        times_s = times_s[times_s >= max(layer_s, low_s) * (1 - RELATIVE_SLACK)]
        if not times_s.size:
            return Bound(target_s, times_s)
        factors = (1.0,) if last >= _FAR else _FACTORS
        intervals = _cut(0, len(times_s), times_s)
        lowest_s, low = target_s, [np.empty(0)]
        while intervals.size:
            least_s, most_s = times_s[intervals[:, 0]], times_s[intervals[:, 1] - 1]
            found_s = np.full(len(intervals), -np.inf)
            for factor in factors:
                places = np.flatnonzero(found_s < target_s * (1 - _CONVERGED))
                weights, paces = (
                    factor * least_s[places],
                    (1 - factor) * least_s[places],
                )  # The latter times m.
                fixed_s = np.where(paces > 0, first * paces, last * paces) + weights * prices.pipeline
                fixed_s -= least_s[places]
                solution = table.solve(
                    prices.groups, most_s[places], weights, first, limits=target_s - fixed_s
                )
                costs = np.minimum(solution.best_costs() + fixed_s, target_s)
                found_s[places] = np.maximum(found_s[places], costs)
            is_done = (intervals[:, 1] - intervals[:, 0] == 1) | self._is_late()
            is_low = found_s < target_s * (1 - _CONVERGED)
            low.append(most_s[is_done & is_low])
            lowest_s = min([lowest_s, *found_s[is_done].tolist()])
            parts = [_cut(start, stop) for start, stop in intervals[is_low & ~is_done]]
            intervals = np.concatenate([np.empty((0, 2), np.int64), *parts])
        return Bound(lowest_s, np.unique(np.concatenate(low)))

    def _within_budget(self, prices: Prices) -> Prices:
        """Prices under which no plan is worth more than its micro-batches, whatever rounding did."""
        groups = np.maximum(prices.groups, 0.0)
        budget = max(0.0, self.workload.num_micro_batches - self.max_pipelines * prices.pipeline)
        return replace(prices, groups=groups * min(1.0, budget / max(self.cluster.worth(groups), 1e-300)))


def _cut(start: int, stop: int, times_s: FloatArray | None = None) -> IntArray:
    """Parts of an interval of indices: eight, or of equal ratios of the times."""
    if times_s is None:
        edges = np.linspace(start, stop, min(8, stop - start) + 1).astype(np.int64)
    else:
        edges = np.append(np.searchsorted(times_s, np.geomspace(times_s[0], times_s[-1], 33)[:-1]), stop)
    edges = np.unique(edges)
    return np.stack([edges[:-1], edges[1:]], axis=1)


def reduced_s(column: Column, prices: Prices) -> float:
    """Time of a pipeline with the micro-batches that its groups are worth."""
    worth = sum(prices.groups[type_id] * count for type_id, count in column.counts().items())
    return float((worth + prices.pipeline - 1) * column.max_s + column.sum_s)
