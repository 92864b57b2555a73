"""The cheapest pipelines, when each type of group has a price: dynamic program over stages and layers.

For a bottleneck ``tau`` (no stage takes longer) and prices ``lambda`` in micro-batches, a pipeline costs
``sum_j (lambda_j * tau + t_j)``, one term per stage. From the last stage to the first, because the number of
stages behind a stage sets how many micro-batches it keeps in flight; for all bottlenecks at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import as_strided

from malleus_ds.planner.groups import GroupType
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, IntArray
from malleus_ds.planner.workload import BoolArray, Workload

# Of a table of stages that is built at once.
_NUM_CELLS = 10**5


@dataclass(frozen=True, slots=True)
class Column:
    """A pipeline by types of group. stages: ``(type, start, stop)``; max_s, sum_s: of its stage times."""

    stages: tuple[tuple[int, int, int], ...]
    max_s: float
    sum_s: float

    def capacity(self, step_s: float) -> int:
        """Most micro-batches within ``step_s``."""
        return int((step_s * (1 + RELATIVE_SLACK) - self.sum_s) // self.max_s) + 1

    def counts(self) -> dict[int, int]:
        """Groups of each type."""
        counts: dict[int, int] = {}
        for type_id, _, _ in self.stages:
            counts[type_id] = counts.get(type_id, 0) + 1
        return counts


@dataclass(frozen=True, slots=True)
class PipelineTable:
    """Pipelines of a workload on some types of group.

    rates: per type; num_pipelines: of the plan, which share the optimizer's state; max_stages: longer
    pipelines are impossible.
    """

    workload: Workload
    types: tuple[GroupType, ...]
    rates: FloatArray
    num_pipelines: int
    max_stages: int
    _fits: dict[int, BoolArray] = field(default_factory=dict)
    _shapes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Types with equal memory, which differ in their rates only, have one shape."""
        shapes: dict[tuple[int, int | None], list[int]] = {}
        for type_id, kind in enumerate(self.types):
            shapes.setdefault((kind.degree, kind.memory_bytes), []).append(type_id)
        self._shapes.extend(shapes.values())

    @property
    def shape_of_type(self) -> IntArray:
        """``[type]`` index into the shapes."""
        places = {type_id: index for index, type_ids in enumerate(self._shapes) for type_id in type_ids}
        return np.array([places[type_id] for type_id in range(len(self.types))])

    def fits(self, in_flight: int) -> BoolArray:
        """``[shape, kind of range]``; see `Workload.fits`."""
        if in_flight not in self._fits:
            examples = [self.types[type_ids[0]] for type_ids in self._shapes]
            self._fits[in_flight] = self.workload.fits(examples, self.num_pipelines, in_flight)
        return self._fits[in_flight]

    def holds(self, column: Column) -> bool:
        """Whether all stages of a pipeline fit into memory."""
        shape_of, kind_of = self.shape_of_type, self.workload.kind_of
        stages = enumerate(reversed(column.stages), start=1)
        return all(
            self.fits(behind)[shape_of[type_id], kind_of[start, stop]]
            for behind, (type_id, start, stop) in stages
        )

    def column(self, stages: Sequence[tuple[int, int, int]]) -> Column:
        """The pipeline of these stages."""
        workload = self.workload
        times = [
            float(self.rates[type_id] * workload.time_s[workload.kind_of[start, stop]])
            for type_id, start, stop in stages
        ]
        return Column(tuple(stages), max(times), sum(times) + workload.message_s * (len(stages) - 1))

    def solve(
        self,
        prices: FloatArray,
        bottlenecks_s: FloatArray,
        weights_s: FloatArray,
        max_in_flight: int,
        slack: float = 1.0,
        limits: FloatArray | float = np.inf,
    ) -> Solution:
        """Cheapest pipelines for each bottleneck, by number of stages.

        prices: per type; bottlenecks_s: ascending, no stage is slower; weights_s: the times that prices are
        multiplied with (the bottlenecks themselves, or others for a bound); max_in_flight: stages further
        from the end are taken to keep no more in flight (the largest number of stages, or less for a
        bound); slack: pipelines that cost more than this times the cheapest may be missing, and those that
        cost no less than ``limits``, one per bottleneck.
        """
        num_rows, num_layers = len(bottlenecks_s), self.workload.num_layers
        costs, types = self._shape_costs(prices, bottlenecks_s, weights_s)
        per_layer = self._least_per_layer(costs)
        layers_before = np.arange(num_layers + 1)
        solution = Solution(self, types, [], [])
        rows = np.arange(num_rows)  # Those for which a longer pipeline may be cheaper.
        previous: FloatArray | None = None
        best = np.full(num_rows, np.inf)
        fits: BoolArray | None = None
        for num_stages in range(1, self.max_stages + 1):
            in_flight = min(num_stages, max_in_flight)
            if fits is None or not np.array_equal(fits, self.fits(in_flight)):
                fits = self.fits(in_flight)
                fitting = np.where(fits[:, None, :], costs[:, rows], np.inf)
                shapes = fitting.argmin(axis=0)
                kinds_cost = np.take_along_axis(fitting, shapes[None], axis=0)[0]
            current = self._extend(kinds_cost, bottlenecks_s[rows], previous)
            found = np.full(num_rows, np.inf)
            found[rows] = current[:, 0]
            solution.costs.append(found)
            solution.stages.append(_Stages(rows, current, kinds_cost, shapes))
            best[rows] = np.minimum(best[rows], current[:, 0])
            # What a longer pipeline costs at least: the start of this many stages, and all layers before.
            least = (current + per_layer[rows, None] * layers_before).min(axis=1)
            goes_on = least < np.minimum(slack * best, limits)[rows]
            if not goes_on.any():
                break
            if not goes_on.all():
                rows, current = rows[goes_on], current[goes_on]
                kinds_cost, shapes = kinds_cost[goes_on], shapes[goes_on]
            previous = current
        return solution

    def _shape_costs(
        self, prices: FloatArray, bottlenecks_s: FloatArray, weights_s: FloatArray
    ) -> tuple[FloatArray, IntArray]:
        """``[shape, bottleneck, kind]``: cost and type of the cheapest group that is fast enough."""
        time_s = self.workload.time_s
        shape = (len(self._shapes), len(bottlenecks_s), len(time_s))
        costs, types = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
        bounds = bottlenecks_s[:, None] * (1 + RELATIVE_SLACK)
        for index, type_ids in enumerate(self._shapes):
            for type_id in type_ids:
                stage_s = (self.rates[type_id] * time_s)[None, :]
                total = np.where(stage_s <= bounds, (prices[type_id] * weights_s)[:, None] + stage_s, np.inf)
                better = total < costs[index]
                costs[index][better] = total[better]
                types[index][better] = type_id
        return costs, types

    def _least_per_layer(self, costs: FloatArray) -> FloatArray:
        """``[bottleneck]`` no stage costs less per layer."""
        fitting = np.where(self.fits(1)[:, None, :], costs, np.inf).min(axis=0)
        least = (fitting / self.workload.num_layers_of_kind).min(axis=1)
        return np.asarray(np.where(np.isfinite(least), least, 0.0))

    def _extend(
        self, kinds_cost: FloatArray, bottlenecks_s: FloatArray, previous: FloatArray | None
    ) -> FloatArray:
        """One stage more in front of ``previous``: ``[bottleneck, start]`` cost; bottlenecks ascend."""
        workload, num_layers = self.workload, self.workload.num_layers
        current = np.full((len(kinds_cost), num_layers + 1), np.inf)
        if previous is None:
            current[:, :num_layers] = kinds_cost.take(workload.kind_of[:num_layers, num_layers], axis=1)
            return current
        # A longer range takes longer: so long a stage each bottleneck allows.
        longest = np.searchsorted(
            float(self.rates.min()) * workload.least_time_s, bottlenecks_s * (1 + RELATIVE_SLACK), "right"
        )
        padded = np.full((len(previous), 2 * num_layers), np.inf)
        padded[:, :num_layers] = previous[:, 1:]
        by_row, by_layer = padded.strides
        start = 0
        while start < len(kinds_cost):
            # Those that allow about as much, of as many as stay in the cache.
            stop = int(longest.searchsorted(1.5 * longest[start] + 1, "right"))
            stop = min(stop, start + max(1, _NUM_CELLS // int(num_layers * max(1, longest[stop - 1]))))
            width = int(longest[stop - 1])
            if width:
                totals = kinds_cost[start:stop].take(workload.kinds_by_width[:width], axis=1)
                shape = (stop - start, width, num_layers)
                totals += as_strided(padded[start:], shape, (by_row, by_layer, by_layer), writeable=False)
                totals.min(axis=1, out=current[start:stop, :num_layers])
            start = stop
        current += workload.message_s
        return current


@dataclass(frozen=True, slots=True)
class _Stages:
    """Pipelines of one number of stages. rows: the bottlenecks that were still tried; costs: ``[of these,
    start]``; kinds_cost, shapes: ``[of these, kind]`` cost and shape of the first stage."""

    rows: IntArray
    costs: FloatArray
    kinds_cost: FloatArray
    shapes: IntArray


@dataclass(frozen=True, slots=True)
class Solution:
    """types: ``[shape, bottleneck, kind]``; costs: per number of stages (from 1) ``[bottleneck]``, inf where
    there is no pipeline."""

    table: PipelineTable
    types: IntArray
    costs: list[FloatArray]
    stages: list[_Stages]

    def best_costs(self) -> FloatArray:
        """``[bottleneck]`` cost of the cheapest pipeline, inf where there is none."""
        return np.asarray(np.min(np.stack(self.costs), axis=0))

    def columns(self, limit_s: FloatArray, most: int = 3) -> Iterator[Column]:
        """For each bottleneck the cheapest pipelines with different numbers of stages, below the limit."""
        costs = np.stack(self.costs)
        order = np.argsort(costs, axis=0, kind="stable")[:most]
        places, rows = np.nonzero(np.take_along_axis(costs, order, axis=0) < limit_s)
        return map(self.table.column, self._stages_of(rows, order[places, rows] + 1))

    def _stages_of(self, rows: IntArray, num_stages: IntArray) -> list[list[tuple[int, int, int]]]:
        """``(type, start, stop)`` of the cheapest pipeline of so many stages under each bottleneck."""
        kind_of, num_layers = self.table.workload.kind_of, self.table.workload.num_layers
        starts = np.zeros(len(rows), dtype=np.int64)
        found: list[list[tuple[int, int, int]]] = [[] for _ in rows]
        for behind in range(int(num_stages.max(initial=0)), 0, -1):
            pipelines = np.flatnonzero(num_stages >= behind)
            row, start = rows[pipelines], starts[pipelines]
            first = self.stages[behind - 1]
            places = first.rows.searchsorted(row)
            stop = np.full(len(pipelines), num_layers)
            if behind > 1:
                rest = self.stages[behind - 2]
                totals = first.kinds_cost[places[:, None], kind_of[start]]
                totals += rest.costs[rest.rows.searchsorted(row)]
                totals[np.arange(num_layers + 1) <= start[:, None]] = np.inf
                stop = totals.argmin(axis=1)
            kinds = kind_of[start, stop]
            types = self.types[first.shapes[places, kinds], row, kinds]
            stages = zip(types.tolist(), start.tolist(), stop.tolist(), strict=True)
            for pipeline, stage in zip(pipelines.tolist(), stages, strict=True):
                found[pipeline].append(stage)
            starts[pipelines] = stop
        return found
