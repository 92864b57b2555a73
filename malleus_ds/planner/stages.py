"""Dividing the layers into the stages of one pipeline, for every multiset of devices at once.

Dynamic program from the last stage to the first, because the number of stages behind a stage sets how
many micro-batches it keeps in flight: the least total time of layers ``[start, num_layers)`` in exactly so
many stages on exactly a given multiset of devices, in the best order, with no stage above a bottleneck. Each
number of stages extends the one before by one TP group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from malleus_ds.planner.lattice import ClassGroup, Lattice
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, IntArray, Options
from malleus_ds.planner.workload import BoolArray, Workload

# (TP group, layer range) of each stage, first stage first.
Division = tuple[tuple[ClassGroup, tuple[int, int]], ...]
# (degree, memory of a device) -> ``[stages from this one to the last, start, stop]`` what fits.
Fits = Mapping[tuple[int, int | None], BoolArray]


@dataclass(frozen=True, slots=True)
class StageTable:
    """The solved program.

    bottlenecks_s: ``[option]``; members: per number of stages, the multisets that make so many; sums_s: per
    number of stages ``[member, start, option]``, inf where impossible; limit: most micro-batches.
    """

    workload: Workload
    lattice: Lattice
    groups: tuple[ClassGroup, ...]
    bottlenecks_s: FloatArray
    fits: Fits
    limit: int
    members: tuple[IntArray, ...]
    sums_s: tuple[FloatArray, ...]

    def options(self) -> Options:
        """Options of every multiset, ``[multiset, option]``."""
        sums_s = np.full((len(self.lattice), len(self.bottlenecks_s)), np.inf)
        for members, sums in zip(self.members[1:], self.sums_s[1:], strict=True):
            sums_s[members] = np.minimum(sums_s[members], sums[:, 0])
        return Options(
            np.broadcast_to(self.bottlenecks_s, sums_s.shape),
            sums_s,
            np.full(sums_s.shape, self.limit, dtype=np.int64),
        )

    def division(self, multiset: int, option: int) -> Division:
        """The stages behind an entry of ``options``; among equals a slow group comes first."""
        num_stages = int(np.argmin([self._sum_s(k, multiset, 0, option) for k in range(len(self.members))]))
        stages: list[tuple[ClassGroup, tuple[int, int]]] = []
        start = 0
        for behind in range(num_stages, 0, -1):
            group, stop = self._first_stage(behind, multiset, start, option)
            stages.append((group, (start, stop)))
            multiset -= self.lattice.number(group.counts)
            start = stop
        return tuple(stages)

    def _sum_s(self, num_stages: int, multiset: int, start: int, option: int) -> float:
        members = self.members[num_stages]
        place = int(np.searchsorted(members, multiset))
        if place == len(members) or members[place] != multiset:
            return np.inf
        return float(self.sums_s[num_stages][place, start, option])

    def _first_stage(self, behind: int, multiset: int, start: int, option: int) -> tuple[ClassGroup, int]:
        best: tuple[float, ClassGroup | None, int] = (np.inf, None, 0)
        prefix_s = self.workload.prefix_s
        for group in sorted(self.groups, key=lambda group: -group.rate):
            if np.any(self.lattice.vectors[multiset] < group.counts):
                continue
            before = multiset - self.lattice.number(group.counts)
            members = self.members[behind - 1]
            place = int(np.searchsorted(members, before))
            if place == len(members) or members[place] != before:
                continue
            times = group.rate * (prefix_s - prefix_s[start])
            allowed = times <= self.bottlenecks_s[option] * (1 + RELATIVE_SLACK)
            allowed &= self.fits[group.degree, group.memory_bytes][behind, start]
            allowed &= np.arange(len(times)) > start
            totals = np.where(allowed, times + self.sums_s[behind - 1][place, :, option], np.inf)
            stop = int(totals.argmin())
            if best[1] is None or totals[stop] < best[0] * (1 - RELATIVE_SLACK):
                best = (float(totals[stop]), group, stop)
        assert best[1] is not None
        return best[1], best[2]


def solve_stages(
    workload: Workload,
    lattice: Lattice,
    groups: Sequence[ClassGroup],
    bottlenecks_s: FloatArray,
    fits: Fits,
    limit: int,
    max_stages: int,
) -> StageTable:
    """Fill the table; arguments as in `StageTable`."""
    num_layers = workload.num_layers
    first = np.full((1, num_layers + 1, len(bottlenecks_s)), np.inf)
    first[0, num_layers] = 0.0
    members, sums_s = [np.zeros(1, dtype=np.int64)], [first]
    numbers = [lattice.number(group.counts) for group in groups]
    for num_stages in range(1, max_stages + 1):
        before = members[-1]
        extended = [
            np.flatnonzero(np.all(lattice.vectors[before] + group.counts <= lattice.vectors[-1], axis=1))
            for group in groups
        ]
        reached = np.unique(
            np.concatenate([before[rows] + number for rows, number in zip(extended, numbers, strict=True)])
        )
        if not reached.size:
            break
        table = np.full((len(reached), num_layers + 1, len(bottlenecks_s)), np.inf)
        for group, rows, number in zip(groups, extended, numbers, strict=True):
            targets = np.searchsorted(reached, before[rows] + number)
            fitting = fits[group.degree, group.memory_bytes][num_stages]
            _extend(
                workload, group.rate, num_stages, fitting, bottlenecks_s, sums_s[-1][rows], table, targets
            )
        members.append(reached)
        sums_s.append(table)
    return StageTable(
        workload, lattice, tuple(groups), bottlenecks_s, fits, limit, tuple(members), tuple(sums_s)
    )


def _extend(
    workload: Workload,
    rate: float,
    num_stages: int,
    fits: BoolArray,
    bottlenecks_s: FloatArray,
    behind: FloatArray,
    table: FloatArray,
    targets: IntArray,
) -> None:
    """Put a stage of a group of this rate in front of ``behind``; lower the entries of ``table``."""
    if not targets.size:
        return
    num_layers, prefix_s = workload.num_layers, workload.prefix_s
    bounds = bottlenecks_s * (1 + RELATIVE_SLACK)
    message_s = workload.message_s if num_stages > 1 else 0.0
    for width in range(1, num_layers - num_stages + 2):
        starts = np.arange(num_layers - num_stages - width + 2)  # Each later stage takes a layer.
        if num_stages == 1:
            starts = starts[-1:]
        times = rate * (prefix_s[starts + width] - prefix_s[starts])
        allowed = (times[:, None] <= bounds) & fits[starts, starts + width][:, None]
        if not allowed.any():
            if num_stages == 1:
                continue
            break  # Longer ranges take and need more.
        times_s = np.where(allowed, times[:, None] + message_s, np.inf)
        totals = behind[:, starts + width] + times_s
        table[np.ix_(targets, starts)] = np.minimum(table[np.ix_(targets, starts)], totals)
