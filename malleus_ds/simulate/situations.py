"""Situations: which devices are slow, and by how much."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEALTHY = "healthy"


class SituationError(ValueError):
    """A situation that is unknown, or that does not fit the cluster."""


@dataclass(frozen=True, slots=True)
class Situation:
    """rates: straggling rate of each rank."""

    name: str
    rates: tuple[float, ...]

    @property
    def optimum_ratio(self) -> float:
        """``N / sum(1 / x)``: step time over the healthy one, if work could be spread without loss."""
        return len(self.rates) / sum(1 / rate for rate in self.rates)


def published_situations() -> dict[str, dict[int, float]]:
    """Straggling rates by rank in the published evaluation; all other ranks are healthy."""
    return {
        HEALTHY: {},
        "S1": {0: 2.57},
        "S2": {0: 5.42},
        "S3": {0: 2.57, 8: 5.42},
        "S4": {0: 2.57, 8: 3.75, 16: 5.42},
        "S5": {0: 2.57, 1: 3.75, 2: 5.42},
        "S6": dict.fromkeys(range(8), 2.57),
    }


def find_situation(name: str, world_size: int) -> Situation:
    """A published situation on the first ranks of a cluster. Raises `SituationError`."""
    known = published_situations()
    if name not in known:
        raise SituationError(f"situation {name!r}: unknown; choose from {', '.join(known)}")
    return make_situation(name, known[name], world_size)


def make_situation(name: str, rates: Mapping[int, float], world_size: int) -> Situation:
    """rates: by rank, 1.0 for all others. Raises `SituationError` for a rank outside the cluster."""
    outside = [rank for rank in rates if not 0 <= rank < world_size]
    if outside:
        raise SituationError(
            f"situation {name!r} slows rank {outside[0]}, but the cluster has {world_size} devices (ranks 0 "
            f"to {world_size - 1}); give rates of your own"
        )
    return Situation(name, tuple(rates.get(rank, 1.0) for rank in range(world_size)))


def parse_names(text: str) -> list[str]:
    """``S1-S3,healthy,S6`` as names in that order. Raises `SituationError`."""
    names: list[str] = []
    for part in text.split(","):
        part = part.strip()
        match = re.fullmatch(r"S(\d+)-S(\d+)", part)
        if match is None:
            names.append(part)
            continue
        first, last = int(match[1]), int(match[2])
        if first > last:
            raise SituationError(f"situations {part!r}: the first is behind the last; write S{last}-S{first}")
        names += [f"S{number}" for number in range(first, last + 1)]
    return names


def tour(situations: Sequence[Situation]) -> list[Situation]:
    """The situations in order, from healthy and back to healthy."""
    healthy = Situation(HEALTHY, (1.0,) * len(situations[0].rates))
    inner = list(situations)
    while inner and inner[0].name == HEALTHY:
        inner.pop(0)
    while inner and inner[-1].name == HEALTHY:
        inner.pop()
    return [healthy, *inner, healthy] if inner else [healthy]
