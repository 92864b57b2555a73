"""Time in the collectives of a TP group, which is not the rank's own compute.

Inside them a rank waits for the slowest of its group: counted as compute, one slow device would make its
peers look slow, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from malleus_ds.detector.clock import ComputeClock


class CollectiveWaits:
    """Adds up a rank's time in the collectives of its TP groups, over all plans of a job.

    total_s: of the host, so far; clock: stands still meanwhile (None: there is none yet).
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.clock: ComputeClock | None = None

    def now_s(self) -> float:
        """The host's time without that in collectives."""
        return time.perf_counter() - self.total_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a collective."""
        clock = self.clock
        if clock is not None:
            clock.pause()
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.total_s += time.perf_counter() - started_s
            if clock is not None:
                clock.resume()
