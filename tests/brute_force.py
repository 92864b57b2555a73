"""The optimum of a small planning problem by its definition, in plain Python.

All groups of each node's devices, all partitions of groups into pipelines, all orders, all divisions of the
layers, all micro-batch shares and sizes are looked at; the only things skipped are copies of what was seen
(devices with equal rates on one node are interchangeable) and what a bound of one line rules out. Nothing of
the planner's search is used; its cost model and checker only judge the plan found.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, permutations, product
from typing import NamedTuple

from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.planner.checker import check_answer
from malleus_ds.planner.types import PlanRequest


class Group(NamedTuple):
    """What matters of a TP group: two equal ones may be exchanged.

    rate: ``rho(degree) * max rate``; node_id: 0 for all where the plan's cost does not depend on nodes.
    """

    rate: float
    degree: int
    memory_bytes: float
    node_id: int


class Choice(NamedTuple):
    """One order of a pipeline's groups and one division of the layers.

    slowest_s, fill_s: largest and summed stage time (fill with messages); update_s: largest gradient
    reduction and optimizer step of a stage; edges: first layer of each stage, and the number of layers.
    """

    slowest_s: float
    fill_s: float
    update_s: float
    groups: tuple[Group, ...]
    edges: tuple[int, ...]

    def time_s(self, num_micro_batches: int) -> float:
        return (num_micro_batches - 1) * self.slowest_s + self.fill_s


Groups = tuple[Group, ...]
Grouping = tuple[tuple[Group, tuple[int, ...]], ...]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as a sum of ``parts`` positive integers, in order."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))


def device_groups(ranks: tuple[int, ...], degrees: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """All sets of disjoint groups of the ranks with these sizes; ranks may be left out."""
    if not ranks:
        yield []
        return
    first, rest = ranks[0], ranks[1:]
    yield from device_groups(rest, degrees)
    for degree in degrees:
        for others in combinations(rest, degree - 1):
            remaining = tuple(rank for rank in rest if rank not in others)
            for groups in device_groups(remaining, degrees):
                yield [(first, *others), *groups]


def set_partitions(items: Sequence[Group]) -> Iterator[list[Groups]]:
    """All partitions of the items into non-empty parts."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in set_partitions(rest):
        yield [(first,), *parts]
        for index, part in enumerate(parts):
            yield [*parts[:index], (first, *part), *parts[index + 1 :]]


def brute_force(request: PlanRequest) -> ParallelPlan | None:
    """A plan of the least step time (without regard to the current plan), or None if no plan is legal."""
    best: tuple[float, ParallelPlan | None] = (math.inf, None)
    for size in request.micro_batch_sizes or (request.micro_batch_size,):
        if request.global_batch_size % size == 0:
            search = _Search(request, size, best[0])
            step_s, plan = search.run()
            if step_s < best[0]:
                best = (step_s, plan)
    step_s, plan = best
    if plan is not None:
        checked_s = check_answer(plan, request)
        assert math.isclose(checked_s, step_s, rel_tol=1e-9), (checked_s, step_s)
    return plan


@dataclass
class _Search:
    """The search for one micro-batch size. best_s: only plans below it are of interest."""

    request: PlanRequest
    micro_batch_size: int
    best_s: float
    _choices: dict[tuple[Groups, int, int], list[Choice]] = field(default_factory=dict)
    _fit: dict[tuple[Group, tuple[int, int], int, int], bool] = field(default_factory=dict)
    _best: tuple[tuple[int, ...], tuple[Choice, ...]] | None = None

    def run(self) -> tuple[float, ParallelPlan | None]:
        request = self.request
        total_s, count = sum(self.times_s), self.num_micro_batches
        most = count if request.max_pipelines is None else min(count, request.max_pipelines)
        # A device works at most the whole step, so a step with these groups cannot be shorter.
        bounds = {
            parts: count * total_s / sum(1 / group.rate for part in parts for group in part)
            for parts in self.partitions
            if len(parts) <= most
        }
        for parts in sorted(bounds, key=lambda parts: bounds[parts]):
            if bounds[parts] >= self.best_s:
                break
            for shares in compositions(count, len(parts)):
                self._try(parts, shares)
        return (self.best_s, None if self._best is None else self._plan())

    @cached_property
    def num_micro_batches(self) -> int:
        return self.request.global_batch_size // self.micro_batch_size

    @cached_property
    def size_factor(self) -> float:
        return self.micro_batch_size / self.request.micro_batch_size

    @cached_property
    def times_s(self) -> list[float]:
        tau = {**dict(self.request.profile.tau), self.request.micro_batch_size: 1.0}
        return [layer.time_s * tau[self.micro_batch_size] for layer in self.request.profile.layers]

    @cached_property
    def depends_on_nodes(self) -> bool:
        return self.request.links is not None

    @cached_property
    def partitions(self) -> dict[tuple[Groups, ...], Grouping]:
        """Each set of pipelines that the devices can form (in sorted order), with one way to form it."""
        request, profile = self.request, self.request.profile
        degrees = [degree for degree, _ in profile.rho]
        by_node: list[dict[Groups, Grouping]] = []
        for node_id, node in enumerate(request.node_ranks):
            memory_bytes = request.node_memory_bytes(node_id)
            found: dict[Groups, Grouping] = {}
            for groups in device_groups(
                tuple(rank for rank in node if request.rates[rank] < math.inf), degrees
            ):
                grouping = tuple(
                    (
                        Group(
                            profile.relative_time(len(ranks)) * max(request.rates[rank] for rank in ranks),
                            len(ranks),
                            math.inf if memory_bytes is None else memory_bytes,
                            node_id if self.depends_on_nodes else 0,
                        ),
                        ranks,
                    )
                    for ranks in groups
                )
                found.setdefault(tuple(sorted(group for group, _ in grouping)), grouping)
            by_node.append(found)
        whole: dict[Groups, Grouping] = {}
        for parts in product(*(found.items() for found in by_node)):
            key = tuple(sorted(group for groups, _ in parts for group in groups))
            whole.setdefault(key, tuple(pair for _, grouping in parts for pair in grouping))
        partitions: dict[tuple[Groups, ...], Grouping] = {}
        for items, grouping in whole.items():
            for pipelines in set_partitions(items) if items else ():
                partitions.setdefault(tuple(sorted(pipelines)), grouping)
        return partitions

    def _updates_s(self, num_pipelines: int) -> list[float]:
        """The least update of each layer at the largest TP degree: exact unless it is joint."""
        links = self.request.links
        updates_s = []
        for layer in self.request.profile.layers:
            seconds = layer.optimizer_s / num_pipelines
            if links is not None:
                bandwidth = links.intra_bytes_per_s
                if self._is_joint(num_pipelines):
                    bandwidth = max(bandwidth, links.inter_bytes_per_s)
                seconds += 2 * (num_pipelines - 1) / num_pipelines * layer.gradient_bytes / bandwidth
            updates_s.append(seconds)
        return updates_s

    def choices(self, groups: Groups, count: int, num_pipelines: int) -> list[Choice]:
        """All orders and divisions of a pipeline that fit the memory."""
        key = (groups, min(count, len(groups)), num_pipelines)
        if key not in self._choices:
            updates_s = self._updates_s(num_pipelines)
            self._choices[key] = [
                choice
                for order in set(permutations(groups))
                for choice in self._divisions(order, count, num_pipelines, updates_s)
            ]
            if not self._is_joint(num_pipelines):
                self._choices[key] = undominated(self._choices[key])
        return self._choices[key]

    def _divisions(
        self, order: Groups, count: int, num_pipelines: int, updates_s: list[float]
    ) -> Iterator[Choice]:
        num_layers, num_stages = len(self.times_s), len(order)
        max_degree = self.request.profile.max_degree

        def extend(
            edges: tuple[int, ...], slowest_s: float, fill_s: float, update_s: float
        ) -> Iterator[Choice]:
            stage_id, start = len(edges) - 1, edges[-1]
            if stage_id == num_stages:
                yield Choice(slowest_s, fill_s, update_s, order, edges)
                return
            group, num_left = order[stage_id], num_stages - stage_id - 1
            in_flight = min(num_stages - stage_id, count)
            for stop in range(start + 1, num_layers - num_left + 1) if num_left else (num_layers,):
                if not self._fits(group, (start, stop), in_flight, num_pipelines):
                    return  # more layers need no less
                time_s = group.rate * sum(self.times_s[start:stop])
                stage_update_s = sum(updates_s[start:stop]) * max_degree / group.degree
                yield from extend(
                    (*edges, stop), max(slowest_s, time_s), fill_s + time_s, max(update_s, stage_update_s)
                )

        message_s = self.request.message_s * self.size_factor
        return extend((0,), 0.0, message_s * (num_stages - 1), 0.0)

    def _fits(self, group: Group, layers: tuple[int, int], in_flight: int, num_pipelines: int) -> bool:
        key = (group, layers, in_flight, num_pipelines)
        if key not in self._fit:
            needed_bytes = self._needed_bytes(*layers, group.degree, in_flight, num_pipelines)
            self._fit[key] = needed_bytes <= group.memory_bytes
        return self._fit[key]

    def _needed_bytes(self, start: int, stop: int, degree: int, in_flight: int, num_pipelines: int) -> int:
        profile = self.request.profile
        layers = profile.layers[start:stop]
        needed = sum(layer.state_bytes for layer in layers)
        needed += math.ceil(sum(layer.optimizer_bytes for layer in layers) / num_pipelines)
        needed += round(self.size_factor * sum(layer.activations(in_flight) for layer in layers))
        return profile.device_bytes + needed * profile.max_degree // degree

    def _is_joint(self, num_pipelines: int) -> bool:
        """Whether the update of one pipeline depends on where the others hold the layer."""
        return self.depends_on_nodes and num_pipelines > 1 and len(self.request.node_ranks) > 1

    def _try(self, parts: tuple[Groups, ...], shares: tuple[int, ...]) -> None:
        total_s = sum(self.times_s)
        for groups, count in zip(parts, shares, strict=True):
            bottleneck_s = total_s / sum(1 / group.rate for group in groups)
            if (count - 1) * bottleneck_s + total_s * min(group.rate for group in groups) >= self.best_s:
                return
        options = [
            self.choices(groups, count, len(parts)) for groups, count in zip(parts, shares, strict=True)
        ]
        if not all(options):
            return
        if self._is_joint(len(parts)):
            self._try_jointly(options, shares)
            return
        for cap_s in {choice.update_s for pipeline in options for choice in pipeline}:
            allowed = [[choice for choice in pipeline if choice.update_s <= cap_s] for pipeline in options]
            if all(allowed):
                self._keep(tuple(map(fastest, allowed, shares)), shares, cap_s)

    def _keep(self, chosen: tuple[Choice, ...], shares: tuple[int, ...], update_s: float) -> None:
        slowest_s = max(choice.time_s(count) for choice, count in zip(chosen, shares, strict=True))
        if slowest_s + update_s < self.best_s:
            self.best_s = slowest_s + update_s
            self._best = (shares, chosen)

    def _try_jointly(self, options: list[list[Choice]], shares: tuple[int, ...]) -> None:
        """All combinations; those that are too slow even with the faster link everywhere are skipped."""
        promising = [
            [choice for choice in pipeline if choice.time_s(count) + choice.update_s < self.best_s]
            for pipeline, count in zip(options, shares, strict=True)
        ]
        for chosen in product(*promising):
            slowest_s = max(choice.time_s(count) for choice, count in zip(chosen, shares, strict=True))
            if slowest_s + max(choice.update_s for choice in chosen) < self.best_s:
                self._keep(chosen, shares, self._joint_update_s(chosen))

    def _joint_update_s(self, chosen: tuple[Choice, ...]) -> float:
        profile, links, number = self.request.profile, self.request.links, len(chosen)
        assert links is not None
        nodes = [[group.node_id for group, a, b in _stages(choice) for _ in range(a, b)] for choice in chosen]
        updates_s = [
            layer.optimizer_s / number
            + 2
            * (number - 1)
            / number
            * layer.gradient_bytes
            / (links.intra_bytes_per_s if len(set(holders)) == 1 else links.inter_bytes_per_s)
            for layer, holders in zip(profile.layers, zip(*nodes, strict=True), strict=True)
        ]
        return max(
            sum(updates_s[start:stop]) * profile.max_degree / group.degree
            for choice in chosen
            for group, start, stop in _stages(choice)
        )

    def _plan(self) -> ParallelPlan:
        """The best choices on ranks."""
        assert self._best is not None
        shares, chosen = self._best
        key = tuple(sorted(tuple(sorted(choice.groups)) for choice in chosen))
        free = list(self.partitions[key])
        pipelines = []
        for choice, count in zip(chosen, shares, strict=True):
            stages = []
            for group, start, stop in _stages(choice):
                index = next(index for index, (other, _) in enumerate(free) if other == group)
                stages.append(Stage(free.pop(index)[1], (start, stop)))
            pipelines.append(Pipeline(tuple(stages), count))
        used = Counter(rank for pipeline in pipelines for rank in pipeline.ranks)
        standby = tuple(rank for rank in range(self.request.world_size) if rank not in used)
        return ParallelPlan(tuple(pipelines), self.micro_batch_size, standby)


def _stages(choice: Choice) -> Iterator[tuple[Group, int, int]]:
    return zip(choice.groups, choice.edges, choice.edges[1:], strict=False)


def fastest(choices: Sequence[Choice], num_micro_batches: int) -> Choice:
    return min(choices, key=lambda choice: choice.time_s(num_micro_batches))


def undominated(choices: Sequence[Choice]) -> list[Choice]:
    """Those that no other choice beats in all three times."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: choice[:3]):
        if not any(other.fill_s <= choice.fill_s and other.update_s <= choice.update_s for other in kept):
            kept.append(choice)
    return kept
