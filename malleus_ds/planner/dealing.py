"""The best way to deal the groups of all nodes out to the pipelines, exact for a few kinds of groups.

What a pipeline takes within a step depends on how many groups of each kind it has: a vector. All vectors up
to some numbers are listed, with the micro-batches that such a pipeline takes (`division`), and which of them
all nodes can form together (`deck`). So each step is tried for all groupings and all ways to deal at once
(`dealt`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from malleus_ds.planner.dealt import Dealt, KindPrices
from malleus_ds.planner.deck import Deck
from malleus_ds.planner.division import NUM_BOTTLENECKS
from malleus_ds.planner.estimate import Estimator
from malleus_ds.planner.micro_batches import (
    RELATIVE_SLACK,
    FloatArray,
    IntArray,
    Options,
    share_micro_batches,
)
from malleus_ds.planner.node_groups import NodeGroups, State

_BATCH = 512  # Vectors between two looks at the clock.
# Of equal shares, micro-batches that a likely pipeline would take if its layers could be split.
_LEAST_SHARE, _MOST_SHARE = 0.7, 1.6
_CLOSE = 0.001  # Relative step that is not worth another try.


@dataclass(frozen=True, slots=True)
class Dealer:
    """For plans with ``estimator.num_pipelines`` pipelines; deadline_s: on the monotonic clock."""

    groups: NodeGroups
    estimator: Estimator
    deadline_s: float
    _known: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def deal(self, deck: Deck, low_s: float, high_s: float) -> State | None:
        """The state of the shortest step from ``low_s`` to ``high_s``, None if there is none or no time."""
        table = self._table(deck, (low_s, high_s))
        if table is None:
            return None
        number, wanted = self.estimator.num_pipelines, self.estimator.workload.num_micro_batches
        best = None
        prices = KindPrices.of(deck, np.zeros(len(deck.kinds)))
        tried_s = high_s
        while best is None or (high_s > low_s * (1 + _CLOSE) and time.monotonic() < self.deadline_s):
            amounts = table.amounts(tried_s, wanted)
            dealt = Dealt(deck, number, wanted, *amounts, prices, self.deadline_s)
            prices, parts = dealt.prices, dealt.parts()
            if parts is not None:
                best, high_s = parts, min(tried_s, table.step_s(parts, wanted))
            elif best is None:
                return None
            else:
                low_s = tried_s
            tried_s = (low_s + high_s) / 2
        return deck.state(deck.vectors[list(best)].tolist())

    def _table(self, deck: Deck, steps_s: tuple[float, float]) -> _Table | None:
        """None if there is no time for it."""
        slowest = [kind.types[-1] for kind in deck.kinds]
        max_s = np.ones((len(deck.vectors), NUM_BOTTLENECKS))
        sum_s = np.full_like(max_s, np.inf)
        wanted = self._likely(deck, slowest, steps_s)
        numbers = deck.vectors[wanted]
        keys = (numbers.astype(np.uint64) * self.estimator.keys[slowest]).sum(axis=1, dtype=np.uint64)
        known = keys.tolist()
        new = np.array([place for place, key in enumerate(known) if key not in self._known], dtype=np.int64)
        for start in range(0, len(new), _BATCH):
            if time.monotonic() > self.deadline_s:
                return None
            batch = new[start : start + _BATCH]
            found = zip(*self.estimator.divider.choices(_listed(numbers[batch], slowest)), strict=True)
            self._known.update(zip([known[place] for place in batch.tolist()], found, strict=True))
        for row, key in zip(wanted.tolist(), known, strict=True):
            max_s[row], sum_s[row] = self._known[key]
        return _Table(deck, max_s, sum_s)

    def _likely(self, deck: Deck, types: Sequence[int], steps_s: tuple[float, float]) -> IntArray:
        """Rows of pipelines that take neither far less nor far more micro-batches than others.

        steps_s: least and most.
        """
        workload, number = self.estimator.workload, self.estimator.num_pipelines
        if number == 1:
            return np.flatnonzero(deck.is_enough)
        speeds = np.array([1 / self.groups.types[type_id].rate for type_id in types])
        passes = deck.vectors @ speeds / workload.prefix_s[-1]  # Of all layers per second, without fill.
        fill = deck.vectors.sum(axis=1) - 1
        shares = (np.outer(steps_s, passes) - fill) * number / workload.num_micro_batches
        most = min(_MOST_SHARE, number - (number - 1) * _LEAST_SHARE)
        return np.flatnonzero((shares[1] >= _LEAST_SHARE) & (shares[0] <= most) & deck.is_enough)


def _listed(numbers: IntArray, types: Sequence[int]) -> list[list[int]]:
    """Types of the groups of pipelines that have these numbers of them, ascending."""
    order = np.argsort(types)
    flat = np.repeat(np.tile(np.array(types)[order], len(numbers)), numbers[:, order].ravel())
    return [part.tolist() for part in np.split(flat, np.cumsum(numbers.sum(axis=1))[:-1])]


@dataclass(frozen=True, slots=True)
class _Table:
    """max_s, sum_s: ``[vector, bottleneck]``."""

    deck: Deck
    max_s: FloatArray
    sum_s: FloatArray

    def amounts(self, step_s: float, most: int) -> tuple[IntArray, IntArray]:
        """Vectors that take micro-batches within a step, and how many; without those that one group less
        takes as well."""
        steps = (step_s * (1 + RELATIVE_SLACK) - self.sum_s) / self.max_s
        amounts = np.floor(np.clip(steps.max(axis=1), -1, most - 1)).astype(np.int64) + 1
        rows = np.flatnonzero(self.deck.without_copies(amounts))
        return rows, amounts[rows]

    def step_s(self, rows: Sequence[int], num_micro_batches: int) -> float:
        """Step of these pipelines."""
        limit = np.full(NUM_BOTTLENECKS, num_micro_batches)
        options = [Options(self.max_s[row], self.sum_s[row], limit) for row in rows]
        shares = share_micro_batches(options, num_micro_batches)
        return math.inf if shares is None else shares.step_s
