"""Clusters of a few nodes: exchanges between pipelines, for each number of pipelines (`exchange`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from malleus_ds.planner.candidates import Candidates
from malleus_ds.planner.drafts import Realiser
from malleus_ds.planner.estimate import Estimator
from malleus_ds.planner.exchange import Exchange
from malleus_ds.planner.generation import Generated
from malleus_ds.planner.groups import Cluster
from malleus_ds.planner.micro_batches import FloatArray
from malleus_ds.planner.node_groups import NodeGroups, State
from malleus_ds.planner.workload import Workload

# Numbers of pipelines tried, as shares of the ideal.
_SHARES = (0.35, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3)
# Of these kept in each round of a few changes; and looked at closer at once.
_NUM_KEPT = (8, 3)
_NUM_CHANGES = 8
_NUM_CLOSER = 3
# Steps judged by, as multiples of the ideal: closer where the best plans are.
_STEPS = np.concatenate([np.linspace(1.0, 1.12, 40), np.geomspace(1.13, 1.6, 12)])
_NEAR = 8.0  # Steps that shaking may make up for.
_FAR = 1.15  # Times the ideal.
_NUM_IDLE = 6  # Shakes without a better plan.


@dataclass(slots=True)
class _Start:
    """A way to begin: with so many pipelines; value: of the state."""

    value: float
    number: int
    exchange: Exchange
    state: State


@dataclass(frozen=True, slots=True)
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

    def run(self) -> None:
        """Offer good plans."""
        starts = list(self._starts())
        for number in _NUM_KEPT:
            # All a few changes further; the most promising go on.
            starts.sort(key=lambda start: (start.value, start.number))
            for start in starts[:number]:
                start.state, start.value = start.exchange.climb(start.state, _NUM_CHANGES)
        starts.sort(key=lambda start: (start.value, start.number))
        for first in range(0, len(starts), _NUM_CLOSER):
            batch = starts[first : first + _NUM_CLOSER]
            for start in batch:
                if self.candidates.found and self._is_late():
                    return
                start.state = self._climb(start.exchange, start.state)
            if self.candidates.found:
                self._look_closer([(start.exchange, start.state) for start in batch])
            if self.candidates.best_s > _FAR * self.relaxed.prices.step_s:
                return  # Where many short pipelines compete, integer programs do better.

    def refine(self) -> None:
        """Offer better plans near the best."""
        best = min(self.candidates.found, key=self.candidates.found.__getitem__)
        if best.micro_batch_size == self.workload.micro_batch_size:
            steps_s = self.candidates.best_s * _STEPS
            exchange = self._exchange(len(best.pipelines), steps_s)
            self._look_closer([(exchange, self._climb(exchange, self.groups.state_of(best)))])

    def _starts(self) -> Iterator[_Start]:
        """Beginnings by prices, for several numbers of pipelines, and the current plan."""
        steps_s = self.relaxed.prices.step_s * _STEPS
        worths = list(self._worths())
        for number in self._numbers():
            exchange = self._exchange(number, steps_s)
            state = exchange.start(worths)
            yield _Start(exchange.value(state), number, exchange, state)
        current = self.workload.request.current
        if current is not None and len(current.pipelines) <= self.most:
            exchange, state = self._exchange(len(current.pipelines), steps_s), self.groups.state_of(current)
            yield _Start(exchange.value(state), len(current.pipelines), exchange, state)

    def _climb(self, exchange: Exchange, state: State) -> State:
        """The state of a plan, the first that shaking finds where there is none near."""
        for _ in range(_NUM_IDLE):
            state, _ = exchange.climb(state)
            if math.isfinite(self._offer(exchange, state)) or self._is_late():
                break
            state = exchange.shaken(state)
        return state

    def _numbers(self) -> list[int]:
        """Around the ideal, and fewer: whole micro-batches leave less choice than the ideal knows."""
        ideal = max(self.relaxed.num_pipelines, 1.0)
        return sorted({min(max(round(share * ideal), 1), self.most) for share in _SHARES})

    def _exchange(self, number: int, steps_s: FloatArray) -> Exchange:
        estimator = Estimator(self.workload, self.groups.types, number, steps_s)
        return Exchange(self.groups, estimator, self.deadline_s)

    def _look_closer(self, starts: Sequence[tuple[Exchange, State]]) -> None:
        """Shake and improve in turn, until several shakes in a row gave nothing or the time is over."""
        best = [exchange.climb(state) for exchange, state in starts]
        num_idle = 0
        while num_idle < _NUM_IDLE:
            num_idle += 1
            for index, (exchange, _) in enumerate(starts):
                if self._is_late():
                    return
                state, value = best[index]
                if value > min(value for _, value in best) + _NEAR:
                    continue
                shaken, shaken_value = exchange.climb(exchange.shaken(state))
                if shaken_value < value:
                    num_idle = 0
                    self._offer(exchange, shaken)
                if shaken_value <= value:
                    best[index] = shaken, shaken_value

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
