"""How many micro-batches each pipeline takes, exactly, given the divisions that each may choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
# Slack for rounding: a time that misses a bound by less than this share meets it.
RELATIVE_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Options:
    """Ways to divide the layers over one set of devices; arrays along the last axis.

    max_s: bound on the slowest stage; sum_s: all stages, inf where there is no such division;
    limit: most micro-batches that the division allows (fewer in flight take less memory).
    """

    max_s: FloatArray
    sum_s: FloatArray
    limit: IntArray

    def capacity(self, step_s: float) -> tuple[IntArray, IntArray]:
        """Most micro-batches within ``step_s``, at most 0 if none; and the option that takes them."""
        steps = (step_s * (1 + RELATIVE_SLACK) - self.sum_s) / self.max_s
        counts = np.minimum(np.floor(np.maximum(steps, -1.0)).astype(np.int64) + 1, self.limit)
        choice = counts.argmax(axis=-1)
        return np.take_along_axis(counts, choice[..., None], axis=-1)[..., 0], choice

    def fastest(self, num_micro_batches: int) -> tuple[float, int]:
        """Shortest time in which this many micro-batches pass, in seconds, and its option."""
        times = (num_micro_batches - 1) * self.max_s + self.sum_s
        times = np.where(self.limit >= num_micro_batches, times, np.inf)
        choice = int(times.argmin())
        return float(times[choice]), choice


@dataclass(frozen=True, slots=True)
class Shares:
    """num_micro_batches and option per pipeline, and the time of the slowest one."""

    counts: tuple[int, ...]
    choices: tuple[int, ...]
    step_s: float


def share_micro_batches(pipelines: Sequence[Options], num_micro_batches: int) -> Shares | None:
    """Split the micro-batches so that the slowest pipeline is fastest; each gets at least one.

    Exact: a bound on the step is met if and only if the capacities within it sum up to the number of
    micro-batches; the bound is bisected. None: impossible.
    """
    if len(pipelines) > num_micro_batches:
        return None
    options = _together(pipelines)
    low = high = max(options_of_one.fastest(1)[0] for options_of_one in pipelines)
    most = np.where(np.isfinite(options.sum_s), options.limit, 0).max(axis=1)
    if not np.isfinite(high) or np.minimum(most, num_micro_batches).sum() < num_micro_batches:
        return None
    while not _suffices(options, num_micro_batches, high):
        low, high = high, 2 * high
    while high - low > RELATIVE_SLACK * high:
        middle = (low + high) / 2
        if _suffices(options, num_micro_batches, middle):
            high = middle
        else:
            low = middle
    return _within(pipelines, num_micro_batches, high)


def _together(pipelines: Sequence[Options]) -> Options:
    """``[pipeline, option]``, with impossible options where a pipeline has fewer than others."""
    size = max(len(options.max_s) for options in pipelines)
    spare = [size - len(options.max_s) for options in pipelines]
    return Options(
        *(
            np.stack([np.pad(a, (0, n), constant_values=fill) for a, n in zip(arrays, spare, strict=True)])
            for arrays, fill in (
                ([options.max_s for options in pipelines], 1.0),
                ([options.sum_s for options in pipelines], np.inf),
                ([options.limit for options in pipelines], 0),
            )
        )
    )


def _suffices(options: Options, num_micro_batches: int, step_s: float) -> bool:
    counts, _ = options.capacity(step_s)
    return bool(counts.min() >= 1 and np.minimum(counts, num_micro_batches).sum() >= num_micro_batches)


def _within(pipelines: Sequence[Options], num_micro_batches: int, step_s: float) -> Shares | None:
    capacities = [min(num_micro_batches, int(options.capacity(step_s)[0])) for options in pipelines]
    surplus = sum(capacities) - num_micro_batches
    if surplus < 0 or min(capacities) < 1:
        return None
    while surplus > 0:  # Take from the pipeline that ends last.
        slowest = max(
            (index for index, count in enumerate(capacities) if count > 1),
            key=lambda index: pipelines[index].fastest(capacities[index])[0],
        )
        capacities[slowest] -= 1
        surplus -= 1
    best = [options.fastest(count) for options, count in zip(pipelines, capacities, strict=True)]
    return Shares(tuple(capacities), tuple(choice for _, choice in best), max(time for time, _ in best))
