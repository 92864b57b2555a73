"""Clusters of a few nodes: groups dealt out to pipelines (`dealing`), and exchanged (`exchange`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from malleus_ds.plan import ParallelPlan
from malleus_ds.planner.candidates import Candidates
from malleus_ds.planner.deck import Deck
from malleus_ds.planner.drafts import Realiser
from malleus_ds.planner.estimate import Estimator
from malleus_ds.planner.exchange import Exchange
from malleus_ds.planner.generation import Generated
from malleus_ds.planner.groups import Cluster
from malleus_ds.planner.node_groups import NodeGroups, State
from malleus_ds.planner.workload import Workload

# Numbers of pipelines tried, as shares of the ideal.
_SHARES = (0.35, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
_NUM_CLOSER = 3
# Vectors listed when the groups of 64 devices are dealt out, see `dealing`.
_FEW_VECTORS, _MORE_VECTORS, _MANY_VECTORS = 8_000, 24_000, 72_000
_NUM_DEVICES = 64
# Steps judged by, as multiples of the ideal: closer where the best plans are.
_STEPS = np.concatenate([np.linspace(1.0, 1.12, 40), np.geomspace(1.13, 1.6, 12)])
_LIMITS = (1.12, 1.6)  # First plans are looked for within these.
_NEAR = 8.0  # Steps that shaking may make up for.
_FAR = 1.15  # Times the ideal.
_CLOSE = 0.001  # Relative step that is not worth dealing again.
_NUM_IDLE = 6  # Shakes without a better plan.
_NUM_DEALT = 2  # Times that groups are dealt out for a first plan.


@dataclass(slots=True)
class _Start:
    """A way to begin: with so many pipelines. step_s: of the plan of the state, inf where there is none."""

    value: float
    number: int
    exchange: Exchange
    state: State
    step_s: float = math.inf


@dataclass(slots=True)
class LocalSearch:
    """Searches one micro-batch size. most: pipelines possible; relaxed: for prices; deadline_s: on the
    monotonic clock."""

    workload: Workload
    cluster: Cluster
    groups: NodeGroups
    candidates: Candidates
    most: int
    relaxed: Generated
    deadline_s: float
    _starts: list[_Start] = field(init=False)

    def __post_init__(self) -> None:
        ideal = max(self.relaxed.num_pipelines, 1.0)
        hopeless = len(_STEPS) - 1.0
        self._starts = sorted(
            self._beginnings(),
            key=lambda start: (min(start.value, hopeless), abs(math.log(start.number / ideal))),
        )

    def run(self) -> None:
        """Offer a first plan."""
        for start in self._starts:
            if not self.candidates.found:
                self._find(start)

    def improve(self) -> None:
        """Offer better plans, dealing few kinds of groups out."""
        if self.candidates.found:
            self._adopt()
            self._deal_all(_FEW_VECTORS, self._likely())

    def refine(self) -> None:
        """Offer better plans, closer and closer until the time is over."""
        for num_vectors in (0, _MORE_VECTORS, self._scaled(_MANY_VECTORS)):
            if not self.candidates.found or self._is_late():
                return
            self._adopt()
            if num_vectors:
                self._deal_all(num_vectors, self._starts)
            if num_vectors or self._is_far():
                for start in self._starts:
                    self._find(start)
            self._look_closer(sorted(self._starts, key=lambda start: start.step_s)[:_NUM_CLOSER])
            if self._is_far():
                return  # Where many short pipelines compete, integer programs do better.

    def _scaled(self, num_vectors: int) -> int:
        """With twice the devices there are twice as many groups of each kind."""
        return round(num_vectors * max(1.0, self.cluster.num_devices / _NUM_DEVICES) ** 2)

    def _is_far(self) -> bool:
        """Whether the ideal is far."""
        return self.candidates.best_s > _FAR * self.relaxed.prices.step_s

    def _find(self, start: _Start) -> None:
        """A first plan with so many pipelines, whatever it takes."""
        for number in range(_NUM_IDLE):
            if math.isfinite(start.step_s) or (self._is_late() and (number or self.candidates.found)):
                return
            if number < _NUM_DEALT:
                num_vectors = self._scaled(_FEW_VECTORS) if number else _FEW_VECTORS
                deck = Deck.near(self.groups, start.state, num_vectors)
                for limit in _LIMITS:
                    if math.isinf(start.step_s):
                        self._deal(start, deck, limit * self.relaxed.prices.step_s)
            if math.isinf(start.step_s):
                self._climb(start, start.exchange.shaken(start.state) if number else start.state)

    def _best(self) -> ParallelPlan:
        return min(self.candidates.found, key=self.candidates.found.__getitem__)

    def _adopt(self) -> None:
        """Go on from the best plan, whatever found it."""
        best = self._best()
        if best.micro_batch_size != self.workload.micro_batch_size:
            return
        number = len(best.pipelines)
        if all(start.number != number for start in self._starts):
            self._starts.append(self._start(number, self.groups.state_of(best)))
        for start in self._starts:
            if start.number == number and self.candidates.best_s < start.step_s and not self._is_late():
                self._climb(start, self.groups.state_of(best))

    def _likely(self) -> list[_Start]:
        """Starts with at least a third of the ideal number of pipelines."""
        return [start for start in self._starts if 3 * start.number >= self.relaxed.num_pipelines]

    def _deal_all(self, num_vectors: int, starts: Sequence[_Start]) -> None:
        """For each number of pipelines deal the groups out that the best plan has, while that helps."""
        near = deck = None
        for start in starts:
            while not self._is_late():
                limit_s = self.candidates.best_s * (1 - _CLOSE)
                if deck is None or near is not self._best():
                    near = self._best()
                    deck = Deck.near(self.groups, self.groups.state_of(near), num_vectors)
                self._deal(start, deck, limit_s)
                if self.candidates.best_s > limit_s:
                    break

    def _deal(self, start: _Start, deck: Deck, limit_s: float) -> None:
        state = start.exchange.dealer.deal(deck, self.relaxed.prices.step_s, limit_s)
        if state is not None:
            self._take(start, state)
            self._climb(start, state)

    def _climb(self, start: _Start, state: State) -> None:
        self._take(start, start.exchange.climb(state)[0])

    def _take(self, start: _Start, state: State) -> None:
        """Offer a state, and go on from there if it is as good."""
        step_s = self._offer(start.exchange, state)
        if step_s <= start.step_s:
            start.state, start.step_s = state, step_s

    def _beginnings(self) -> Iterator[_Start]:
        """By prices, for several numbers of pipelines, and the current plan."""
        worths = list(self._worths())
        for number in self._numbers():
            yield self._start(number, worths)
        current = self.workload.request.current
        if current is not None and len(current.pipelines) <= self.most:
            yield self._start(len(current.pipelines), self.groups.state_of(current))

    def _start(self, number: int, near: State | list[float]) -> _Start:
        """near: a state, or what types of groups are worth."""
        steps_s = self.relaxed.prices.step_s * _STEPS
        estimator = Estimator(self.workload, self.groups.types, number, steps_s)
        exchange = Exchange(self.groups, estimator, self.deadline_s)
        state = exchange.start(near) if isinstance(near, list) else near
        return _Start(exchange.value(state), number, exchange, state)

    def _numbers(self) -> list[int]:
        """Around the ideal, and fewer: whole micro-batches leave less choice than the ideal knows."""
        ideal = max(self.relaxed.num_pipelines, 1.0)
        return sorted({min(max(round(share * ideal), 1), self.most) for share in _SHARES})

    def _look_closer(self, starts: Sequence[_Start]) -> None:
        """Shake and improve in turn, until several shakes in a row gave nothing or the time is over."""
        for start in starts:
            self._climb(start, start.state)
            start.value = start.exchange.value(start.state)
        num_idle = 0
        while num_idle < _NUM_IDLE:
            num_idle += 1
            for start in starts:
                if self._is_late():
                    return
                if start.value > min(other.value for other in starts) + _NEAR:
                    continue
                shaken, value = start.exchange.climb(start.exchange.shaken(start.state))
                if value < start.value:
                    num_idle = 0
                    start.step_s = self._offer(start.exchange, shaken)
                if value <= start.value:
                    start.state, start.value = shaken, value

    def _offer(self, exchange: Exchange, state: State) -> float:
        """Step time of the plan, inf if it is none."""
        draft = exchange.draft(state, self.candidates.movement)
        if draft is None:
            return math.inf
        realiser = Realiser(self.workload, self.candidates)
        step_s = self.candidates.found.get(realiser.offer(draft), math.inf)
        if math.isfinite(step_s):
            return step_s
        return realiser.offer_groups(
            [[group.ranks for group in groups] for groups in exchange.pipelines(state)]
        )

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline_s

    def _worths(self) -> Iterator[float]:
        """Prices of the nodes' types."""
        for kind in self.groups.types:
            yield next(
                float(price)
                for price, wide in zip(self.relaxed.prices.groups, self.cluster.types, strict=True)
                if (wide.degree, wide.memory_bytes) == (kind.degree, kind.memory_bytes)
                and wide.least_rate <= kind.rate <= wide.rate
            )
