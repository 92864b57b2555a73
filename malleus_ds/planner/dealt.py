"""Pipelines that take enough micro-batches together, of groups that the nodes can form: exact for one step.

What k pipelines take together follows from what their halves take (a max-plus convolution). Prices keep it
small: give each kind of group a price ``pi >= 0`` and each pipeline ``mu >= 0``, so that no pipeline takes
more than ``pi * vector + mu``, and call what it takes less its loss. All pipelines take at most ``k * mu``
and what the nodes' groups are worth, so the losses of pipelines that take enough are at most what this bound
exceeds the wanted number by. The best prices solve a linear program, whose bound alone often decides.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from malleus_ds.planner.deck import Deck
from malleus_ds.planner.micro_batches import FloatArray, IntArray

_ROUNDING = 1e-6  # Micro-batches.
_MANY = 200  # Vectors left, times pipelines, that are worth other prices.
_LEAST_PAIRS, _MOST_PAIRS = 2**13, 2**20  # Looked at at once, more each time.


@dataclass(frozen=True, slots=True)
class Sums:
    """What some pipelines take together. rows: of the deck's vectors; amounts: the most micro-batches;
    losses: see above, ascending; pairs: of places in the sums of both halves."""

    rows: IntArray
    amounts: IntArray
    losses: FloatArray
    pairs: IntArray


@dataclass(frozen=True, slots=True)
class KindPrices:
    """kinds: ``pi``; nodes: what the groups of all nodes are worth at most."""

    kinds: FloatArray
    nodes: float

    @staticmethod
    def of(deck: Deck, kinds: FloatArray) -> KindPrices:
        return KindPrices(kinds, float(sum((vectors @ kinds).max() for vectors in deck.node_vectors)))

    @staticmethod
    def best(deck: Deck, rows: IntArray, amounts: IntArray, number: int) -> KindPrices:
        """Those with the least bound for so many pipelines that take these amounts."""
        from scipy.optimize import linprog

        num_kinds, num_nodes = deck.vectors.shape[1], len(deck.node_vectors)
        pipelines = np.zeros((len(rows), num_kinds + 1 + num_nodes))
        pipelines[:, :num_kinds], pipelines[:, num_kinds] = -deck.vectors[rows], -1.0
        parts = [pipelines]
        for node, vectors in enumerate(deck.node_vectors):
            worths = np.zeros((len(vectors), num_kinds + 1 + num_nodes))
            worths[:, :num_kinds], worths[:, num_kinds + 1 + node] = vectors, -1.0
            parts.append(worths)
        matrix = np.concatenate(parts)
        limits = np.concatenate([-amounts, np.zeros(len(matrix) - len(rows))])
        costs = np.concatenate([np.zeros(num_kinds), [float(number)], np.ones(num_nodes)])
        # Presolving takes longer than it saves.
        options = {"presolve": False}
        answer = linprog(costs, matrix, limits, bounds=(0, None), method="highs", options=options)
        if answer.x is None:
            raise ArithmeticError(f"the prices of groups: {answer.message}")
        return KindPrices.of(deck, np.maximum(answer.x[:num_kinds], 0.0))


@dataclass(slots=True)
class Dealt:
    """``number`` pipelines that take ``wanted`` micro-batches. rows, amounts: of those that one pipeline may
    have, and what it takes; prices: the last ones, kept while they leave few; deadline_s: on the monotonic
    clock, after which no more pairs are looked at."""

    deck: Deck
    number: int
    wanted: int
    rows: IntArray
    amounts: IntArray
    prices: KindPrices
    deadline_s: float
    _slack: float = field(init=False)
    _most: float = field(init=False)  # mu
    _sums: dict[int, Sums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        left = self._price()
        if self._slack >= 0 and self.number * len(left) > _MANY:
            self.prices = KindPrices.best(self.deck, self.rows, self.amounts, self.number)
            left = self._price()
        self._sums[1] = self._sorted(1, self.rows[left], self.amounts[left], np.zeros_like(left))

    def _price(self) -> IntArray:
        """Places of the pipelines that may be part of a solution under these prices."""
        losses = self.deck.vectors[self.rows] @ self.prices.kinds - self.amounts
        self._most = -float(losses.min(initial=0.0))
        self._slack = self.number * self._most + self.prices.nodes - self.wanted + _ROUNDING
        return np.flatnonzero(losses + self._most <= self._slack)

    def parts(self) -> tuple[int, ...] | None:
        """Rows of the pipelines, None if they cannot take enough or none were found in time."""
        if self._slack < 0:
            return None
        number, is_enough = self.number, self.deck.is_enough
        if number == 1:
            sums = self.sums(1)
            places = np.flatnonzero((sums.amounts >= self.wanted) & is_enough[sums.rows])
            return (int(sums.rows[places[0]]),) if places.size else None
        half, rest = self.sums(number // 2), self.sums(number - number // 2)
        for first, second in self._pairs(half, rest):
            takes_enough = half.amounts[first] + rest.amounts[second] >= self.wanted
            found = np.flatnonzero(takes_enough & is_enough[half.rows[first] + rest.rows[second]])
            if found.size:
                return (
                    *self._rows_of(number // 2, int(first[found[0]])),
                    *self._rows_of(number - number // 2, int(second[found[0]])),
                )
        return None

    def sums(self, number: int) -> Sums:
        """The most that so many pipelines take, by vector."""
        if number not in self._sums:
            half, rest = self.sums(number // 2), self.sums(number - number // 2)
            num_pairs = max(1, len(half.rows) * len(rest.rows))
            best = np.zeros(len(self.deck.vectors), dtype=np.int64)  # The amount, and the pair that takes it.
            for first, second in self._pairs(half, rest):
                amounts = half.amounts[first] + rest.amounts[second]
                pairs = first * len(rest.rows) + second
                np.maximum.at(best, half.rows[first] + rest.rows[second], amounts * num_pairs + pairs)
            amounts, pairs = np.divmod(best, num_pairs)
            rows = np.flatnonzero(self.deck.without_copies(amounts))
            self._sums[number] = self._sorted(number, rows, amounts[rows], pairs[rows])
        return self._sums[number]

    def _sorted(self, number: int, rows: IntArray, amounts: IntArray, pairs: IntArray) -> Sums:
        losses = number * self._most + self.deck.vectors[rows] @ self.prices.kinds - amounts
        order = np.argsort(losses, kind="stable")
        return Sums(rows[order], amounts[order], losses[order], pairs[order])

    def _rows_of(self, number: int, place: int) -> Iterator[int]:
        """Rows of the pipelines of a sum."""
        sums = self.sums(number)
        if number == 1:
            yield int(sums.rows[place])
        else:
            first, second = divmod(int(sums.pairs[place]), len(self.sums(number - number // 2).rows))
            yield from self._rows_of(number // 2, first)
            yield from self._rows_of(number - number // 2, second)

    def _pairs(self, half: Sums, rest: Sums) -> Iterator[tuple[IntArray, IntArray]]:
        """Places of pairs that lose little and have no more groups than there are, some at a time."""
        counts = np.searchsorted(rest.losses, self._slack - half.losses, side="right")
        ends = np.cumsum(counts)
        codes, start, done, size = self.deck.codes, 0, 0, _LEAST_PAIRS
        while start < len(counts) and counts[start] and time.monotonic() < self.deadline_s:
            stop = max(start + 1, int(np.searchsorted(ends, done + size, side="right")))
            part = slice(start, stop)
            first = np.repeat(np.arange(start, stop), counts[part])
            second = np.arange(done, ends[stop - 1]) - np.repeat(ends[part] - counts[part], counts[part])
            legal = np.flatnonzero(self.deck.fits(codes[half.rows[first]] + codes[rest.rows[second]]))
            yield first[legal], second[legal]
            start, done, size = stop, int(ends[stop - 1]), min(2 * size, _MOST_PAIRS)
