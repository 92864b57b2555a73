"""Contiguous partitions of weighted layers with the smallest largest part."""

from __future__ import annotations

from collections.abc import Sequence

from malleus_ds.plan import PlanError


def balanced_boundaries(weights: Sequence[float], num_parts: int) -> list[int]:
    """``num_parts + 1`` boundaries of non-empty contiguous parts whose largest weight is minimal.

    Dynamic programme over (last part, stop), O(num_parts * n^2); ties lean towards parts of equal
    weight, then of equal length. Raises `PlanError` when there are fewer layers than parts.
    """
    num_layers = len(weights)
    if num_parts > num_layers:
        raise PlanError(
            f"{num_layers} layers cannot fill {num_parts} stages: use at most {num_layers} stages, "
            f"or give a plan that leaves ranks standby"
        )
    prefix = [0.0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    # best[stop] = (largest part, sum of squares, sum of squared lengths, start of the last part)
    best: list[tuple[float, float, int, int] | None]
    best = [None] + [(prefix[stop], prefix[stop] ** 2, stop * stop, 0) for stop in range(1, num_layers + 1)]
    choices = [best]
    for part in range(2, num_parts + 1):
        row: list[tuple[float, float, int, int] | None] = [None] * (num_layers + 1)
        for stop in range(part, num_layers + 1):
            candidates = []
            for start in range(part - 1, stop):
                before = best[start]
                if before is None:
                    continue
                weight = prefix[stop] - prefix[start]
                candidates.append(
                    (
                        max(before[0], weight),
                        before[1] + weight**2,
                        before[2] + (stop - start) ** 2,
                        start,
                    )
                )
            row[stop] = min(candidates)
        best = row
        choices.append(best)
    boundaries = [num_layers]
    for row in reversed(choices):
        entry = row[boundaries[-1]]
        assert entry is not None
        boundaries.append(entry[3])
    return boundaries[::-1]
