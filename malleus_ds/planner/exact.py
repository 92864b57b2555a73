"""Small clusters: all multisets of devices as pipelines, and the best disjoint ones of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from malleus_ds.plan import ParallelPlan
from malleus_ds.planner.candidates import Candidates
from malleus_ds.planner.catalogue import Catalogue, build_catalogue
from malleus_ds.planner.drafts import Realiser, draft_of_divisions
from malleus_ds.planner.grouping import Knapsack, best_grouping, options_of
from malleus_ds.planner.groups import Cluster
from malleus_ds.planner.lattice import DeviceClasses
from malleus_ds.planner.least_change import least_change_grouping
from malleus_ds.planner.micro_batches import IntArray, share_micro_batches
from malleus_ds.planner.workload import Workload

MAX_MULTISETS = 512
_BUDGET = 1e8
# Where updates take time: groupings looked at, and those tried out.
_MAX_GROUPINGS = 300
_NUM_GROUPINGS = 10


@dataclass(frozen=True, slots=True)
class ExactSearch:
    """Searches one micro-batch size. most: pipelines possible."""

    workload: Workload
    classes: DeviceClasses
    cluster: Cluster
    candidates: Candidates
    most: int

    def run(self) -> None:
        """Offer the best plan and ones close to the current plan."""
        for numbers in self._batches():
            if self.candidates.found and self.candidates.remaining_s() < 0:
                return
            for is_local in (True, False) if self.workload.request.links else (True,):
                self._shorten_updates(numbers, is_local)

    def _shorten_updates(self, numbers: Sequence[int], is_local: bool) -> None:
        """Faster updates may be worth slower pipelines: allow stages with less and less to update, until the
        pipelines alone take as long as the best plan. Which links an update uses is a guess."""
        limit_s, pipelines_s = math.inf, 0.0
        while pipelines_s < self.candidates.best_s and (
            not self.candidates.found or self.candidates.remaining_s() > 0
        ):
            workload = replace(self.workload, max_update_s=limit_s, is_local=is_local)
            solved = self._solve(numbers, workload)
            if solved is None or not workload.has_updates:
                return
            pipelines_s, limit_s = solved

    def _batches(self) -> Iterator[Sequence[int]]:
        """Numbers of pipelines with the same memory needs, most promising first."""
        numbers = range(1, self.most + 1)
        profile = self.workload.request.profile
        has_shares = any(layer.optimizer_bytes for layer in profile.layers)
        is_limited = self.workload.request.memory_bytes is not None
        if not self.workload.has_updates and not (has_shares and is_limited):
            yield numbers
            return
        for number in sorted(numbers, key=self.bound_s):
            yield (number,)

    def bound_s(self, number: int) -> float:
        """Bound on the step of plans with so many pipelines at most; see `lower_bound`."""
        from malleus_ds.planner.lower_bound import closed_form_bound_s

        return closed_form_bound_s(self.workload, self.cluster, number)

    def _upper_s(self) -> float:
        """The best step so far; at first, all work one after another on the slowest group."""
        workload = self.workload
        fill_s = workload.message_s * workload.num_layers
        serial_s = float(self.cluster.rates.max() * workload.prefix_s[-1]) * workload.num_micro_batches
        return min(self.candidates.best_s, serial_s + fill_s)

    def _solve(self, numbers: Sequence[int], workload: Workload) -> tuple[float, float] | None:
        """Offer the best plan with one of these numbers of pipelines.

        Returns the time of its pipelines, and a limit on updates that rules it out; None if none beats
        the best.
        """
        bounds_s = (self.bound_s(max(numbers)), self._upper_s() * (1 + 1e-9))
        if bounds_s[0] > bounds_s[1]:
            return None
        max_stages = sum(self.classes.counts) - (min(numbers) - 1)
        catalogue = build_catalogue(workload, self.classes, max(numbers), max_stages, bounds_s[1], _BUDGET)
        if catalogue is None:
            return None
        knapsack = Knapsack(catalogue.lattice)
        grouping = best_grouping(catalogue.options, knapsack, numbers, workload.num_micro_batches, bounds_s)
        if grouping is None:
            return None
        realiser = Realiser(workload, self.candidates)
        plan = self._offer(realiser, catalogue, grouping.multisets)
        if workload.has_updates:
            for multisets in self._groupings(catalogue, numbers):
                self._offer(realiser, catalogue, multisets)
        if self.workload.request.current is not None:
            self._stay_close(realiser, catalogue, numbers)
        updates_s = workload.updates_s(len(plan.pipelines))
        degree = workload.request.profile.max_degree
        slowest_s = max(
            float(updates_s[workload.kind_of[stage.layers]]) * degree / stage.degree
            for _, _, stage in plan.stages()
        )
        return grouping.shares.step_s, slowest_s * (1 - 1e-6)

    def _offer(self, realiser: Realiser, catalogue: Catalogue, multisets: Sequence[int]) -> ParallelPlan:
        """Plans with these pipelines."""
        options = [options_of(catalogue.options, multiset) for multiset in multisets]
        shares = share_micro_batches(options, self.workload.num_micro_batches)
        assert shares is not None
        divisions = [
            catalogue.division(multiset, choice)
            for multiset, choice in zip(multisets, shares.choices, strict=True)
        ]
        draft = draft_of_divisions(
            self.classes, divisions, shares.counts, self.candidates.movement, self.workload.request
        )
        return realiser.offer(draft)

    def _groupings(self, catalogue: Catalogue, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Fast groupings without regard to updates, to start from: the best of the first few hundred."""
        total, lattice = self.workload.num_micro_batches, catalogue.lattice
        capacity, _ = catalogue.options.capacity(self.candidates.best_s)
        useful = np.flatnonzero(capacity >= 1).tolist()
        found: list[tuple[float, tuple[int, ...]]] = []

        def extend(chosen: tuple[int, ...], left: IntArray, first: int) -> None:
            if len(found) >= _MAX_GROUPINGS or self.candidates.remaining_s() < 0:
                return
            if len(chosen) in numbers and sum(int(capacity[multiset]) for multiset in chosen) >= total:
                options = [options_of(catalogue.options, multiset) for multiset in chosen]
                shares = share_micro_batches(options, total)
                if shares is not None:
                    found.append((shares.step_s, chosen))
            if len(chosen) < max(numbers):
                for place in range(first, len(useful)):
                    vector = lattice.vectors[useful[place]]
                    if np.all(vector <= left):
                        extend((*chosen, useful[place]), left - vector, place)

        extend((), lattice.vectors[-1], 0)
        return [multisets for _, multisets in sorted(found)[:_NUM_GROUPINGS]]

    def _stay_close(self, realiser: Realiser, catalogue: Catalogue, numbers: Sequence[int]) -> None:
        """The grouping that changes the current pipelines least, of those that are about as fast."""
        current = self.workload.request.current
        usable = set(self.workload.request.usable_ranks)
        assert current is not None
        kept = [tuple(rank for rank in pipeline.ranks if rank in usable) for pipeline in current.pipelines]
        vectors: IntArray = np.array([self.classes.counts_of(ranks) for ranks in kept if ranks])
        capacity, _ = catalogue.options.capacity(self.candidates.equal_s)
        if self.candidates.remaining_s() < 0 or not len(vectors):
            return
        replacements = least_change_grouping(
            catalogue.lattice,
            capacity,
            numbers,
            self.workload.num_micro_batches,
            vectors.reshape(-1, len(self.classes.classes)),
            self.candidates.remaining_s(),
        )
        if replacements is not None:
            self._offer(realiser, catalogue, [multiset for multiset, _ in replacements])
