"""Straggling rates from the step records, and the decision that they moved.

All arithmetic is on logarithms, where rates and noise are additive. Per step and rank the ratio
``measured / expected`` is ``scale * rate * noise``. `ScaleTracker` finds the common scale from
ranks that have not moved; `RankTrack` finds the points where the rest of one rank's history
changes and averages what came after the last of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from malleus_ds.config import DetectorConfig
from malleus_ds.detector.rank_track import RankTrack, is_clear
from malleus_ds.detector.record import StepRecord

_NUM_CENTRE_STEPS = 3


@dataclass(frozen=True, slots=True)
class Shift:
    """Ranks whose rate moved away from the rate that the current plan was made for."""

    ranks: tuple[int, ...]
    old_rates: tuple[float, ...]
    new_rates: tuple[float, ...]


class RateEstimator:
    """Current straggling rate of every rank; 1.0 for the healthy ones, inf for failed ones.

    `update` takes the records of all ranks once per step. `shift` compares the estimates with
    `planned_rates`, which `accept` sets once a plan was made. A change by more than
    ``large_shift`` (relative) needs two records in a row, so one slow step is never a shift, and
    the estimate then rests on these two alone. A smaller one, of at least ``small_shift``, needs
    the window's median and must stand out of the rank's own noise.
    """

    def __init__(self, world_size: int, config: DetectorConfig) -> None:
        self._small = math.log1p(config.small_shift)
        self._large = math.log1p(config.large_shift)
        self._window = config.window_steps
        self._tracks = [RankTrack(config) for _ in range(world_size)]
        self._planned = [0.0] * world_size
        self._scale = ScaleTracker(self._small)

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(math.exp(track.level) for track in self._tracks)

    @property
    def planned_rates(self) -> tuple[float, ...]:
        return tuple(math.exp(level) for level in self._planned)

    def update(self, records: Sequence[StepRecord]) -> None:
        """One record per rank, in rank order. A record without a measurement changes nothing."""
        if len(records) != len(self._tracks):
            raise ValueError(f"{len(records)} records for {len(self._tracks)} ranks: give one per rank")
        ratios: dict[int, float] = {}
        for rank, record in enumerate(records):
            if record.failed:
                self._tracks[rank].fail()
            elif record.expected_s > 0 and record.compute_s > 0:
                ratios[rank] = math.log(record.compute_s / record.expected_s)
        if not ratios:
            return
        scale = self._scale.update(ratios, [track.level for track in self._tracks])
        for rank, ratio in ratios.items():
            self._tracks[rank].add(ratio - scale)

    def shift(self) -> Shift | None:
        """The ranks that moved since the rates of the current plan; None when none did."""
        moved = tuple(rank for rank in range(len(self._tracks)) if self._has_moved(rank))
        if not moved:
            return None
        rates, planned = self.rates, self.planned_rates
        return Shift(
            ranks=moved,
            old_rates=tuple(planned[rank] for rank in moved),
            new_rates=tuple(rates[rank] for rank in moved),
        )

    def accept(self, rates: Sequence[float]) -> None:
        """A plan was made for ``rates``: measure shifts from these. One positive rate per rank."""
        if len(rates) != len(self._tracks):
            raise ValueError(f"{len(rates)} rates for {len(self._tracks)} ranks: give one per rank")
        self._planned = [math.log(rate) for rate in rates]

    def _has_moved(self, rank: int) -> bool:
        track, planned = self._tracks[rank], self._planned[rank]
        if track.level == planned:  # Also where both are infinite.
            return False
        change = abs(track.level - planned)
        if change < self._small:
            return False
        if change > self._large:
            return True
        # Of many ranks, one always underestimates its own noise: not below the typical one.
        noise = max(track.noise(), statistics.median(other.noise() for other in self._tracks))
        return track.num_values >= self._window and is_clear(change, noise, track.num_values)


class ScaleTracker:
    """The common factor of all ratios: the machine's drift and the error of the model profile.

    A plan depends on the ratio of rates only, so which ranks are called healthy is a convention:
    those that stay near the last scale, if at least a quarter of the ranks does; so more than half
    may slow down. If fewer do, the machine moved as a whole, and the largest group of ranks that
    agree (the faster of two) gives the new scale.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._scale: float | None = None

    def update(self, ratios: dict[int, float], levels: Sequence[float]) -> float:
        """The logarithm of this step's scale.

        ratios: rank -> log ratio; levels: log rate of each rank as known before. Healthy ranks
        count as exactly 1.0, which keeps the rates from drifting all together.
        """
        healthy, slow = [], []
        for rank, ratio in ratios.items():
            if abs(levels[rank]) < self._tolerance:
                healthy.append(ratio)
            elif math.isfinite(levels[rank]):
                slow.append(ratio - levels[rank])
        candidates = healthy + slow or list(ratios.values())
        if self._scale is not None:
            for group in (healthy, candidates):
                near = self._near(group, self._scale)
                if len(near) >= math.ceil(len(ratios) / 4):
                    self._scale = self._centre(group, statistics.fmean(near))
                    return self._scale
        self._scale = self._centre(candidates, statistics.fmean(_densest(candidates, 2 * self._tolerance)))
        return self._scale

    def _near(self, values: list[float], centre: float) -> list[float]:
        return [value for value in values if abs(value - centre) <= self._tolerance]

    def _centre(self, values: list[float], start: float) -> float:
        """The mean of the group around ``start``; without the steps, it would lag behind drift."""
        centre = start
        for _ in range(_NUM_CENTRE_STEPS):
            centre = statistics.fmean(self._near(values, centre) or [centre])
        return centre


def _densest(values: list[float], width: float) -> list[float]:
    """The most values that fit into an interval of ``width``; the lowest such interval."""
    ordered = sorted(values)
    groups = [[value for value in ordered if low <= value <= low + width] for low in ordered]
    return max(groups, key=len)  # The first of equals is the lowest.
