"""The history of one rank's rate, cut where it changed."""

from __future__ import annotations

import math
import statistics
from collections import deque

from malleus_ds.config import DetectorConfig

# A change must exceed this many standard deviations of the mean that shows it. Six, because the
# test is repeated for every rank in every step of a job.
_NUM_SIGMAS = 6.0
# Until a rank has a history of its own, its noise counts as this (relative, per step).
_PRIOR_NOISE = 0.05
_NUM_PRIOR = 5
_NUM_NOISE_STEPS = 40
# The estimate forgets after this many windows, so that it can follow a slow drift.
_NUM_WINDOWS = 4
# Standard deviation of a normal distribution per mean absolute difference of two draws.
_SIGMA_PER_DIFFERENCE = math.sqrt(math.pi) / 2


def is_clear(change: float, noise: float, num_values: int) -> bool:
    """Whether a mean of ``num_values`` that moved by ``change`` stands out of the noise."""
    return change >= _NUM_SIGMAS * noise / math.sqrt(num_values)


class RankTrack:
    """Log rate of one rank: the mean of what came after the last change point.

    A value further than ``large_shift`` from the level is set aside. If the next one is, too, and
    on the same side, both begin a new level; otherwise it was a hiccup and is forgotten. Values
    that stay below that bound move the level by themselves, and the median of the last
    ``window_steps`` begins a new one when it leaves the older values clearly.
    """

    def __init__(self, config: DetectorConfig) -> None:
        self._small = math.log1p(config.small_shift)
        self._large = math.log1p(config.large_shift)
        self._window = config.window_steps
        self._values: deque[float] = deque(maxlen=_NUM_WINDOWS * config.window_steps)
        self._suspect: float | None = None
        self._last: float | None = None
        # Absolute differences of neighbours, bounded: a new level disturbs one of them a little.
        self._differences: deque[float] = deque(maxlen=_NUM_NOISE_STEPS)
        self.level = 0.0

    @property
    def num_values(self) -> int:
        """Records that the level rests on."""
        return len(self._values)

    def noise(self) -> float:
        """Standard deviation of one value, hardly moved by changes of the level."""
        prior = [_PRIOR_NOISE / _SIGMA_PER_DIFFERENCE] * _NUM_PRIOR
        return _SIGMA_PER_DIFFERENCE * statistics.fmean([*prior, *self._differences])

    def fail(self) -> None:
        """The rank can compute no more; two later values would bring it back."""
        self._restart([])
        self._suspect = self._last = None
        self.level = math.inf

    def add(self, value: float) -> None:
        """Take the log rate that one record shows."""
        if self._last is not None:
            self._differences.append(min(abs(value - self._last), self._large))
        self._last = value
        deviation = value - self.level
        if self._is_large(deviation):
            if self._suspect is not None and (self._suspect > self.level) == (value > self.level):
                self._restart([self._suspect, value])
            else:
                self._suspect = value
            return
        self._suspect = None
        self._values.append(value)
        self._find_small_change()
        self.level = statistics.fmean(self._values)

    def _is_large(self, deviation: float) -> bool:
        if abs(deviation) <= self._large:
            return False
        return abs(deviation) > _NUM_SIGMAS / 2 * self.noise()

    def _find_small_change(self) -> None:
        """Drop what came before a small change, once the window's median shows one."""
        values = list(self._values)
        recent, older = values[-self._window :], values[: -self._window]
        if not older:
            return
        median, before = statistics.median(recent), statistics.fmean(older)
        change = abs(median - before)
        if change < self._small or not is_clear(change, self.noise(), len(recent)):
            return
        # The change lies where the values begin to stay nearer to the new level than to the old.
        start = len(recent)
        while start > 0 and abs(recent[start - 1] - median) < abs(recent[start - 1] - before):
            start -= 1
        if start < len(recent):
            self._restart(recent[start:])

    def _restart(self, values: list[float]) -> None:
        self._suspect = None
        self._values.clear()
        self._values.extend(values)
        if values:
            self.level = statistics.fmean(values)
