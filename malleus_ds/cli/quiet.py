"""Output is for answers and messages alone, not for what libraries have to say."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_solvers() -> Iterator[None]:
    """Drop what libraries write to file descriptor 1, where HiGHS greets whatever its options say, and
    cvxpy's warning of a search that its time limit ended: each plan is checked anyway."""
    sys.stdout.flush()
    kept, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Solution may be inaccurate", category=UserWarning)
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(sink)
