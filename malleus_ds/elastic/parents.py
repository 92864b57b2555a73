"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

_SET_PDEATHSIG = 1  # of prctl(2)


def end_with_parent(number: signal.Signals) -> Callable[[], None]:
    """For ``preexec_fn``: the child gets this signal when its parent is gone, however that ended."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_SET_PDEATHSIG, int(number))
