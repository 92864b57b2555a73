"""Clusters of any size: good pipelines by column generation, plans by integer programs.

Plans are looked for by number of pipelines, since memory depends on it. First the step is bisected: pipelines
that waste little of it by whole micro-batches are generated (`whole`), and an integer program chooses among
them (`selection`). Then, round by round, another over the stages of good pipelines (`arcs`) builds plans,
with other bottlenecks and another step to aim at each time, and what was found is combined.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from malleus_ds.planner.arcs import choose_paths, find_arcs
from malleus_ds.planner.candidates import Candidates
from malleus_ds.planner.drafts import Realiser, draft_of_selection
from malleus_ds.planner.generation import Generated, Generator, reduced_s
from malleus_ds.planner.groups import Cluster
from malleus_ds.planner.micro_batches import RELATIVE_SLACK, FloatArray, Options, share_micro_batches
from malleus_ds.planner.pipelines import Column, PipelineTable
from malleus_ds.planner.selection import Selection, Selector
from malleus_ds.planner.whole import WholePipelines
from malleus_ds.planner.workload import Workload

# Numbers of pipelines up to this are tried one by one.
_FEW = 8
_MAX_STAGES = 32
_MAX_POOL = 400
_MANY_BOTTLENECKS = 48
_FIRST_STEP = 1.08  # Times the ideal, without a plan.
_NUM_BOTTLENECKS = (12, 16, 24, 32)
_NUM_ARCS = (1500, 2500, 4000, 6000)
# Step to aim at, as share of the way from the ideal to the best, or to 12 % above the ideal.
_AIMS = (0.2, 0.5, 0.7, 0.3, 0.9, 0.1)
_ROOMS = (0.0, 0.01, 0.02, 0.005)
_MAX_ROUNDS = 12
_MAX_IDLE = 3
_LEAST_LIMIT_S = 0.3
_FIRST_LIMIT_S = 1.0
# Relative step time that is not worth more search.
_CLOSE = 0.001


@dataclass(slots=True)
class Span:
    """Plans with ``numbers`` pipelines: pipelines generated for them (at first those of all numbers), the
    table of those that fit, and pipelines that plans were built of."""

    numbers: tuple[int, int]
    generated: Generated
    table: PipelineTable
    pool: dict[Column, None] = field(default_factory=dict)
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class LargeSearch:
    """Searches one micro-batch size.

    most: pipelines possible; relaxed: pipelines and prices for plans with up to so many; deadline_s: on the
    monotonic clock.
    """

    workload: Workload
    cluster: Cluster
    candidates: Candidates
    most: int
    relaxed: Generated
    deadline_s: float

    def run(self) -> None:
        """Offer good plans, and one of those about as fast that keeps most of the current plan."""
        spans = list(self._spans())
        self._improve(spans)
        if self.workload.request.current is not None and self.candidates.found:
            self._stay(min(spans, key=self._best_of))

    def _improve(self, spans: list[Span]) -> None:
        """Round by round, until no round helps or the time is over."""
        for span in spans:
            if not self._is_late():
                self._fill(span)
        spans, num_idle = self._better_half(spans), 0
        for number in range(_MAX_ROUNDS):
            before_s = self.candidates.best_s
            for span in spans:
                if number and not self.candidates.found:
                    self._build_any(span)
                if self._is_late(_LEAST_LIMIT_S):
                    return
                self._build(span, number)
                self._combine(span)
            if math.isinf(before_s):
                spans = self._better_half(spans)
            is_better = self.candidates.best_s < before_s * (1 - _CLOSE)
            num_idle = 0 if is_better else num_idle + 1
            if num_idle >= _MAX_IDLE or self.candidates.best_s <= self.relaxed.prices.step_s * (1 + _CLOSE):
                return

    def _better_half(self, spans: list[Span]) -> list[Span]:
        """Those worth the rest of the time, once there is a plan."""
        if not self.candidates.found:
            return spans
        return sorted(spans, key=self._best_of)[: max(1, (len(spans) + 1) // 2)]

    def _is_late(self, needed_s: float = 0.0) -> bool:
        """Whether there is no time for what needs so long; the first plan may take longer."""
        return bool(self.candidates.found) and time.monotonic() + needed_s > self.deadline_s

    def _best_of(self, span: Span) -> float:
        first, last = span.numbers
        steps = (s for plan, s in self.candidates.found.items() if first <= len(plan.pipelines) <= last)
        return min(steps, default=math.inf)

    def _spans(self) -> Iterator[Span]:
        """Numbers of pipelines that are tried together, the ideal first."""
        ideal = max(self.relaxed.num_pipelines, 1.0)
        numbers = [(number, number) for number in range(1, self.most + 1)]
        if self.most > _FEW:
            edges = [max(1, round(share * ideal)) for share in (0.6, 0.8, 0.95)]
            numbers = [(low, high - 1) for low, high in pairwise([1, *edges, self.most + 1]) if high > low]
        for first, last in sorted(
            numbers, key=lambda pair: abs(math.log(max(pair[0], min(pair[1], ideal)) / ideal))
        ):
            table = self._generator(last).table(self.cluster.rates, first, _MAX_STAGES)
            yield Span((first, last), self.relaxed, table)

    def _generator(self, most: int) -> Generator:
        return Generator(self.workload, self.cluster, most, self.deadline_s)

    def _build(self, span: Span, number: int) -> None:
        """A plan by the stages of good pipelines."""
        if number and not span.is_own:
            span.generated = self._generator(span.numbers[1]).run(span.numbers[0]) or span.generated
            span.is_own = True
        prices = span.generated.prices
        size = min(number, len(_NUM_ARCS) - 1)
        bottlenecks_s = self._bottlenecks_s(span, number, _NUM_BOTTLENECKS[size])
        arcs = find_arcs(span.table, prices, bottlenecks_s, 1.3 * prices.step_s, _NUM_ARCS[size])
        if not len(arcs.row):
            return
        above_s = min(self.candidates.best_s, 1.12 * prices.step_s) - prices.step_s
        step_s = prices.step_s + above_s * _AIMS[number % len(_AIMS)]
        least_s = _LEAST_LIMIT_S if self.candidates.found else _FIRST_LIMIT_S
        limit_s = max((self.deadline_s - time.monotonic()) / 2, least_s)
        selection = choose_paths(arcs, span.table, self.cluster, span.numbers, step_s, limit_s)
        if selection is not None:
            span.pool.update(dict.fromkeys(selection.columns))
            self._offer(selection, [*span.pool])

    def _fill(self, span: Span) -> None:
        """Plans of pipelines that waste little by whole micro-batches, of a shorter and shorter step."""
        low_s = self.relaxed.prices.step_s
        high_s = min(self.candidates.best_s, _FIRST_STEP * low_s / (1 - _CLOSE))
        bottlenecks_s = self._bottlenecks_s(span, 0, _MANY_BOTTLENECKS)
        prices = span.generated.prices
        whole = WholePipelines(self.cluster, span.numbers, span.table, prices, bottlenecks_s, self.deadline_s)
        whole.add([*span.pool, *span.generated.columns[:_MAX_POOL]])
        selector = Selector(self.cluster, span.numbers, self.workload.num_micro_batches)
        step_s = high_s * (1 - _CLOSE)
        while high_s > low_s * (1 + _CLOSE) and not self._is_late():
            selection = None
            if whole.generate(step_s) >= self.workload.num_micro_batches:
                limit_s = max((self.deadline_s - time.monotonic()) / 4, _LEAST_LIMIT_S)
                selection = selector.select(list(whole.pool), step_s, limit_s)
            if selection is None:
                low_s = step_s
            else:
                span.pool.update(dict.fromkeys(selection.columns))
                self._offer(selection, [*whole.pool])
                high_s = min(step_s, self.candidates.best_s)
            step_s = (low_s + high_s) / 2

    def _build_any(self, span: Span) -> None:
        """A plan with one bottleneck for all pipelines, the shortest of a few that admits one."""
        even_s = self._even_s(span)
        for factor in (1.15, 1.35, 1.5, 1.75, 2.5, 4.0):
            arcs = find_arcs(
                span.table, span.generated.prices, np.array([factor * even_s]), np.inf, _NUM_ARCS[0]
            )
            if not len(arcs.row):
                continue
            step_s = factor * span.generated.prices.step_s
            selection = choose_paths(arcs, span.table, self.cluster, span.numbers, step_s, _FIRST_LIMIT_S)
            if selection is not None:
                span.pool.update(dict.fromkeys(selection.columns))
                self._offer(selection, [*span.pool])
                if self.candidates.found:
                    return

    def _even_s(self, span: Span) -> float:
        """Bottleneck of so many equal pipelines if layers could be split."""
        speed = self.cluster.worth(1 / self.cluster.rates)
        number = min(max(self.relaxed.num_pipelines, span.numbers[0]), span.numbers[1])
        return float(self.workload.prefix_s[-1]) * number / speed

    def _bottlenecks_s(self, span: Span, number: int, most: int) -> FloatArray:
        """Bottlenecks about as long as so many equal pipelines need, others in each round.

        Times of whole layers on the fastest groups, since most groups are of these; those of good pipelines.
        """
        even_s = self._even_s(span)
        prices, columns = span.generated.prices, span.generated.columns
        fast_s = self.workload.stage_times_s([float(self.cluster.rates.min())], 1.5 * even_s)
        near_s = np.unique(np.round([column.max_s for column in columns], 12))
        used = [c.max_s for c, weight in zip(columns, prices.weights, strict=True) if weight > 0.01]
        parts = [
            _spread(fast_s[fast_s >= 0.85 * even_s], most, number),
            _spread(near_s[(near_s >= 0.8 * even_s) & (near_s <= 1.8 * even_s)], most // 2, number),
            np.array(used),
        ]
        # A little more lets a group in that just misses the time.
        room = _ROOMS[number % len(_ROOMS)]
        return np.unique(np.round(np.concatenate(parts), 12)) * (1 + room + RELATIVE_SLACK)

    def _combine(self, span: Span) -> None:
        """A better plan of whole pipelines that were found, as long as there is one."""
        prices = span.generated.prices
        best_s, ideal_s = self.candidates.best_s, prices.step_s
        good = [c for c in span.generated.columns[:_MAX_POOL] if reduced_s(c, prices) < 1.1 * ideal_s]
        pool = list(dict.fromkeys([*span.pool, *filter(span.table.holds, good)]))
        if not pool:
            return
        selector = Selector(self.cluster, span.numbers, self.workload.num_micro_batches)
        while not self._is_late(_LEAST_LIMIT_S):
            target_s = 10 * ideal_s  # Any plan.
            if math.isfinite(best_s):
                target_s = best_s - max(0.1 * (best_s - ideal_s), _CLOSE * best_s)
            limit_s = max((self.deadline_s - time.monotonic()) / 4, _LEAST_LIMIT_S)
            selection = selector.select(pool, target_s, limit_s)
            if selection is None:
                return
            self._offer(selection, pool)
            if self.candidates.best_s >= best_s:
                return  # The pipelines do not fit as they are.
            best_s = self.candidates.best_s

    def _stay(self, span: Span) -> None:
        """A plan with as many pipelines of the current one as possible."""
        present: dict[Column, int] = {}
        for column in self._present():
            present[column] = present.get(column, 0) + 1
        pool = [*span.pool, *filter(span.table.holds, span.generated.columns[:_MAX_POOL]), *present]
        selector = Selector(self.cluster, span.numbers, self.workload.num_micro_batches)
        selection = selector.select(
            list(dict.fromkeys(pool)), self.candidates.equal_s, _FIRST_LIMIT_S, present
        )
        if selection is not None:
            self._offer(selection, selection.columns)

    def _present(self) -> Iterator[Column]:
        """The current pipelines whose groups can still be formed."""
        request, prefix_s = self.workload.request, self.workload.prefix_s
        assert request.current is not None
        node_of = {rank: index for index, ranks in enumerate(request.node_ranks) for rank in ranks}
        for pipeline in request.current.pipelines:
            stages, times = [], []
            for stage in pipeline.stages:
                rate = dict(request.profile.rho)[stage.degree] * max(request.rates[r] for r in stage.ranks)
                memory_bytes = request.node_memory_bytes(node_of[stage.ranks[0]])
                type_id = next(
                    (
                        index
                        for index, kind in enumerate(self.cluster.types)
                        if (kind.degree, kind.memory_bytes) == (stage.degree, memory_bytes)
                        and kind.least_rate <= rate <= kind.rate
                    ),
                    None,
                )
                if type_id is not None:
                    start, stop = stage.layers
                    stages.append((type_id, start, stop))
                    times.append(self.cluster.types[type_id].rate * float(prefix_s[stop] - prefix_s[start]))
            if len(stages) == len(pipeline.stages):
                message_s = self.workload.message_s * (len(stages) - 1)
                yield Column(tuple(stages), max(times), sum(times) + message_s)

    def _offer(self, selection: Selection, pool: Sequence[Column]) -> None:
        """Share out the micro-batches among the pipelines, in the best of their divisions."""
        variants: dict[frozenset[tuple[int, int]], list[Column]] = {}
        for column in pool:
            variants.setdefault(frozenset(column.counts().items()), []).append(column)
        chosen = [variants[frozenset(column.counts().items())] for column in selection.columns]
        total = self.workload.num_micro_batches
        shares = share_micro_batches([_options(columns, total) for columns in chosen], total)
        if shares is not None:
            columns = tuple(columns[choice] for columns, choice in zip(chosen, shares.choices, strict=True))
            selection = Selection(columns, selection.flows)
            draft = draft_of_selection(self.cluster, selection, shares.counts, self.candidates.movement)
            Realiser(self.workload, self.candidates).offer(draft)


def _spread(times_s: FloatArray, most: int, number: int) -> FloatArray:
    """At most so many of them, evenly; different ones for different numbers."""
    if len(times_s) <= most:
        return times_s
    places = (np.arange(most) + (number % 3) / 3) * (len(times_s) - 1) / (most - 1)
    return times_s[np.unique(np.minimum(np.round(places), len(times_s) - 1).astype(np.int64))]


def _options(columns: Sequence[Column], num_micro_batches: int) -> Options:
    return Options(
        np.array([column.max_s for column in columns]),
        np.array([column.sum_s for column in columns]),
        np.full(len(columns), num_micro_batches, dtype=np.int64),
    )
