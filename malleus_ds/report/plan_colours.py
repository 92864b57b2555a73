"""Colours of group rates in the pictures of a plan."""

from __future__ import annotations

import math
from itertools import pairwise

# (group rate, red, green, blue), interpolated between on a logarithmic scale.
_SCALE = (
    (1.0, 42, 133, 125),
    (1.5, 138, 177, 125),
    (2.5, 233, 196, 106),
    (5.0, 232, 132, 79),
    (12.0, 166, 38, 46),
)
LEGEND_RATES = tuple(rate for rate, *_ in _SCALE)
_FAILED = "#3d405b"


def colour_of(group_rate: float) -> str:
    """The colour of a group rate, as ``#rrggbb``: green healthy, red slow."""
    if math.isinf(group_rate):
        return _FAILED
    rate = min(max(group_rate, _SCALE[0][0]), _SCALE[-1][0])
    low, high = next((low, high) for low, high in pairwise(_SCALE) if rate <= high[0])
    share = math.log(rate / low[0]) / math.log(high[0] / low[0])
    return "#" + "".join(
        f"{round(start + (stop - start) * share):02x}" for start, stop in zip(low[1:], high[1:], strict=True)
    )


def text_colour(fill: str) -> str:
    """Black or white, whichever can be read on a colour ``#rrggbb``."""
    red, green, blue = (int(fill[index : index + 2], 16) for index in (1, 3, 5))
    return "#1b1b1b" if 0.299 * red + 0.587 * green + 0.114 * blue > 135 else "#ffffff"
