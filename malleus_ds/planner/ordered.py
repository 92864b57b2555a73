"""Dividing the layers over groups in a given order, with a price on state that moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from malleus_ds.planner.catalogue import thinned
from malleus_ds.planner.groups import GroupType
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray
from malleus_ds.planner.workload import Workload

Range = tuple[int, int]
_NUM_BOTTLENECKS = 24
# Up to so many times the bottleneck of layers in proportion to speed.
_NEAR = 1.5


@dataclass(frozen=True, slots=True)
class Division:
    """layers: of each stage; max_s, sum_s: of the stage times, messages included in the sum; moved: weight
    that the groups must receive."""

    layers: tuple[Range, ...]
    max_s: float
    sum_s: float
    moved: float

    def time_s(self, num_micro_batches: int) -> float:
        return (num_micro_batches - 1) * self.max_s + self.sum_s


@dataclass(frozen=True, slots=True)
class OrderedGroups:
    """The groups of one pipeline in stage order, in plans with ``num_pipelines`` pipelines.

    moved: ``[group, layer]`` prefix sums of what each must receive, see `Movement.prefix`.
    """

    workload: Workload
    groups: tuple[GroupType, ...]
    num_pipelines: int
    moved: FloatArray

    def divisions(self, num_micro_batches: int, upper_s: float, price_s: float) -> Iterator[Division]:
        """Least ``sum of stage times + price * moved weight`` under each bound on the stage times.

        num_micro_batches: bounds those in flight; upper_s: of the bottleneck; price_s: seconds per weight.
        """
        rates = [group.rate for group in self.groups]
        # Under less the groups cannot take all layers together.
        even_s = float(self.workload.prefix_s[-1]) / sum(1 / rate for rate in rates)
        times_s = self.workload.stage_times_s(rates, upper_s)
        near, far = np.searchsorted(times_s, [even_s * (1 - RELATIVE_SLACK), _NEAR * even_s])
        bottlenecks_s = np.concatenate(
            [thinned(times_s[near:far], _NUM_BOTTLENECKS), thinned(times_s[far:], _NUM_BOTTLENECKS // 4)]
        )
        if not bottlenecks_s.size:
            return
        costs, stops = self._solve(num_micro_batches, bottlenecks_s, price_s)
        for option in np.flatnonzero(np.isfinite(costs)).tolist():
            ranges, start = [], 0
            for stage_id in range(len(self.groups)):
                stop = int(stops[stage_id, start, option])
                ranges.append((start, stop))
                start = stop
            yield self.division(ranges)

    def division(self, ranges: Sequence[Range]) -> Division:
        """What a division costs."""
        prefix_s = self.workload.prefix_s
        times = [
            group.rate * float(prefix_s[stop] - prefix_s[start])
            for group, (start, stop) in zip(self.groups, ranges, strict=True)
        ]
        moved = sum(
            float(prefix[stop] - prefix[start])
            for prefix, (start, stop) in zip(self.moved, ranges, strict=True)
        )
        message_s = self.workload.message_s * (len(times) - 1)
        return Division(tuple(ranges), max(times), sum(times) + message_s, moved)

    def _solve(
        self, num_micro_batches: int, bottlenecks_s: FloatArray, price_s: float
    ) -> tuple[FloatArray, np.ndarray]:
        """``[option]`` least cost, and ``[stage, start, option]`` where the stage stops."""
        num_stages, num_layers, prefix_s = len(self.groups), self.workload.num_layers, self.workload.prefix_s
        costs = np.full((num_layers + 1, len(bottlenecks_s)), np.inf)
        costs[num_layers] = 0.0
        stops = np.zeros((num_stages, num_layers + 1, len(bottlenecks_s)), dtype=np.int64)
        bounds = bottlenecks_s * (1 + RELATIVE_SLACK)
        for stage_id in reversed(range(num_stages)):
            behind, group = num_stages - stage_id, self.groups[stage_id]
            in_flight = min(behind, num_micro_batches)
            fits = self.workload.fits([group], self.num_pipelines, in_flight)[0]
            before, costs = costs, np.full_like(costs, np.inf)
            for width in range(1, num_layers - num_stages + 2):
                starts = np.arange(stage_id, num_layers - behind - width + 2)
                times = group.rate * (prefix_s[starts + width] - prefix_s[starts])
                fitting = fits[self.workload.kind_of[starts, starts + width]]
                allowed = (times[:, None] <= bounds) & fitting[:, None]
                if not allowed.any():
                    break
                moved = self.moved[stage_id][starts + width] - self.moved[stage_id][starts]
                totals = (times + price_s * moved)[:, None] + before[starts + width]
                totals = np.where(allowed, totals, np.inf)
                better = totals < costs[starts]
                costs[starts] = np.where(better, totals, costs[starts])
                stops[stage_id, starts] = np.where(better, (starts + width)[:, None], stops[stage_id, starts])
        return costs[0], stops
