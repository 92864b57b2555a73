"""The groups near a state, by kinds so few that all numbers of each can be listed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from malleus_ds.planner.node_groups import STANDBY, NodeGroups, State, Way

# More of a kind than the state has.
_MORE, _MORE_LARGEST = 2, 1
# What a group that the state does not have is worth, as a share of its speed.
_SPARE = 0.25
# How many groups of each kind.
Vector = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """Types that count as one, as slow as the slowest of them.

    types: the slowest last; have: groups of the state; capacity: that the nodes can form; is_largest: of the
    largest degree.
    """

    types: tuple[int, ...]
    have: int
    capacity: int
    is_largest: bool

    @property
    def most(self) -> int:
        """Groups looked at."""
        return min(self.capacity, self.have + (_MORE_LARGEST if self.is_largest else _MORE))

    @property
    def used(self) -> float:
        """Groups of the state, and a share of the others."""
        return self.have + _SPARE * (self.most - self.have)

    def with_slower(self, other: Kind) -> Kind:
        """Both as one."""
        types, have = self.types + other.types, self.have + other.have
        return Kind(types, have, self.capacity + other.capacity, self.is_largest)


def kinds_near(groups: NodeGroups, state: State, most_rows: int) -> list[Kind]:
    """Kinds whose numbers have at most ``most_rows`` combinations.

    Types are merged with slower ones or dropped, those first that cost the least speed for what they save.
    """
    have = Counter(group.type_id for node in state for group in node if group.owner != STANDBY)
    largest = max(kind.degree for kind in groups.types)
    good = _good_types(groups)
    kinds = [
        Kind((type_id,), have[type_id], capacity, groups.types[type_id].degree == largest)
        for type_id, capacity in _capacity(groups).items()
        if have[type_id] or type_id in good
    ]
    kinds.sort(key=lambda kind: _order(groups, kind))
    while len(kinds) > 1 and math.prod(kind.most + 1 for kind in kinds) > most_rows:
        _shorten(groups, kinds)
    return kinds


def _order(groups: NodeGroups, kind: Kind) -> tuple[int, int, float]:
    """Those that can be merged side by side."""
    group = groups.types[kind.types[-1]]
    return group.degree, group.memory_bytes or 0, group.rate


def _capacity(groups: NodeGroups) -> Counter[int]:
    """How many groups of each type the nodes can form."""
    capacity: Counter[int] = Counter()
    for ways in groups.ways:
        most: Counter[int] = Counter()
        for way in ways:
            most |= Counter(type_id for type_id, _ in way)
        capacity += most
    return capacity


def _good_types(groups: NodeGroups) -> set[int]:
    """Types that cost their node less speed than half of what they have."""
    speeds = [1 / kind.rate for kind in groups.types]
    good: set[int] = set()
    for ways in groups.ways:
        totals = [sum(speeds[type_id] for type_id, _ in way) for way in ways]
        fastest = max(totals, default=0.0)
        for way, total in zip(ways, totals, strict=True):
            good.update(type_id for type_id, _ in way if fastest - total <= speeds[type_id] / 2)
    return good


def _shorten(groups: NodeGroups, kinds: list[Kind]) -> None:
    """Merge two kinds or drop one, whatever costs least."""
    speeds = [1 / groups.types[kind.types[-1]].rate for kind in kinds]
    choices = [
        (kind.used * speed / math.log(kind.most + 1), place, False)
        for place, (kind, speed) in enumerate(zip(kinds, speeds, strict=True))
    ]
    for place, (fast, slow) in enumerate(pairwise(kinds)):
        if _order(groups, fast)[:2] == _order(groups, slow)[:2]:
            saved = math.log((fast.most + 1) * (slow.most + 1) / (fast.with_slower(slow).most + 1))
            choices.append((fast.used * (speeds[place] - speeds[place + 1]) / saved, place, True))
    _, place, is_merge = min(choices)
    other = kinds.pop(place + is_merge)
    if is_merge:
        kinds[place] = kinds[place].with_slower(other)


def vectors_of(ways: Sequence[Way], kinds: Sequence[Kind]) -> dict[Vector, Way]:
    """Numbers of groups of each kind that a node can form, without those that others exceed."""
    places = {type_id: place for place, kind in enumerate(kinds) for type_id in kind.types}
    found: dict[Vector, Way] = {}
    for way in ways:
        counts = Counter(places[type_id] for type_id, _ in way if type_id in places)
        found.setdefault(tuple(min(counts[place], kind.most) for place, kind in enumerate(kinds)), way)
    return {
        counts: way
        for counts, way in found.items()
        if not any(other != counts and all(map(int.__ge__, other, counts)) for other in found)
    }
