"""Every multiset of devices as a pipeline: the divisions of the layers that it can choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from malleus_ds.planner.groups import GroupType
from malleus_ds.planner.lattice import ClassGroup, DeviceClasses, Lattice
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, Options
from malleus_ds.planner.stages import Division, Fits, StageTable, solve_stages
from malleus_ds.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Stage tables, one per number of micro-batches in flight that makes a difference to memory.

    options: of all tables side by side, ``[multiset, option]``.
    """

    classes: DeviceClasses
    lattice: Lattice
    tables: tuple[StageTable, ...]
    options: Options

    def division(self, multiset: int, option: int) -> Division:
        """The stages behind an entry of ``options``."""
        for table in self.tables:
            if option < len(table.bottlenecks_s):
                return table.division(multiset, option)
            option -= len(table.bottlenecks_s)
        raise IndexError(option)


def build_catalogue(
    workload: Workload,
    classes: DeviceClasses,
    num_pipelines: int,
    max_stages: int,
    upper_s: float,
    budget: float,
) -> Catalogue | None:
    """Solve the stages of all multisets for plans with this many pipelines.

    max_stages: longer pipelines are left out; upper_s: slower steps are of no interest; budget: array
    elements to process, about, which bounds the number of bottlenecks. None when no bottleneck is within
    ``upper_s``.
    """
    lattice = Lattice.of(classes.counts)
    max_stages = min(max_stages, int(lattice.sizes.max()), workload.num_layers)
    memories = memories_in_flight(workload, classes.groups, num_pipelines, max_stages)
    all_s = bottlenecks_s(workload, classes.groups, upper_s)
    if not all_s.size:
        return None
    cost = len(lattice) * len(classes.groups) * workload.num_layers**2 / 2 * len(memories)
    most = max(24, int(budget / cost))
    chosen_s = thinned(all_s, most)
    tables = tuple(
        solve_stages(workload, lattice, classes.groups, chosen_s, fits, limit, max_stages)
        for limit, fits in memories
    )
    options = [table.options() for table in tables]
    return Catalogue(
        classes,
        lattice,
        tables,
        Options(
            np.concatenate([option.max_s for option in options], axis=1),
            np.concatenate([option.sum_s for option in options], axis=1),
            np.concatenate([option.limit for option in options], axis=1),
        ),
    )


def memories_in_flight(
    workload: Workload, groups: Sequence[ClassGroup], num_pipelines: int, max_stages: int
) -> list[tuple[int, Fits]]:
    """``(most micro-batches, what fits)`` for pipelines of up to ``max_stages`` stages.

    A pipeline with fewer micro-batches than stages keeps fewer in flight. An entry with a lower limit is
    listed only where more fits than under the next higher one.
    """
    shapes = sorted({(group.degree, group.memory_bytes) for group in groups}, key=lambda s: (s[0], s[1] or 0))
    types = [GroupType(degree, 1.0, 1.0, memory_bytes) for degree, memory_bytes in shapes]
    by_flight = [
        workload.fits(types, num_pipelines, in_flight)[:, workload.kind_of]
        for in_flight in range(max_stages + 1)
    ]
    memories: list[tuple[int, Fits]] = []
    for limit in (workload.num_micro_batches, *range(min(max_stages, workload.num_micro_batches) - 1, 0, -1)):
        stacked = np.stack([by_flight[min(behind, limit)] for behind in range(max_stages + 1)], axis=1)
        fits = dict(zip(shapes, stacked, strict=True))
        if not memories or any(not np.array_equal(fits[shape], memories[-1][1][shape]) for shape in shapes):
            memories.append((limit, fits))
    return memories


def bottlenecks_s(workload: Workload, groups: Sequence[ClassGroup], upper_s: float) -> FloatArray:
    """Times that the slowest stage of a pipeline on these groups can take, ascending."""
    least_s = min(group.rate for group in groups) * float(np.diff(workload.prefix_s).max())
    times = workload.stage_times_s([group.rate for group in groups], upper_s * (1 + RELATIVE_SLACK))
    times = times[times >= least_s * (1 - RELATIVE_SLACK)]
    if times.size:
        # Times that differ by rounding only are one, the largest of them.
        times = times[np.append(np.diff(times) > RELATIVE_SLACK * times[:-1], True)]
    return times


def thinned(times_s: FloatArray, most: int) -> FloatArray:
    """Beyond ``most`` of them, the first in each of ``most`` equal ratios."""
    if times_s.size <= most:
        return times_s
    targets = np.geomspace(times_s[0], times_s[-1], most)
    targets[-1] = times_s[-1]
    return np.asarray(times_s[np.unique(np.searchsorted(times_s, targets))])
