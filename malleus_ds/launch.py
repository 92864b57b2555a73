"""The outermost frame of a rank's main program: an error on one rank ends the job on all ranks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import torch.distributed as dist

from malleus_ds.detector.control_plane import ControlPlaneError
from malleus_ds.detector.mpi import abort_on_error
from malleus_ds.environment import named_rank
from malleus_ds.errors import USER_MISTAKE, is_user_mistake
from malleus_ds.migration.errors import StateLostError
from malleus_ds.pipe.agreement import PeerLostError, RankFailedError


def run_job(main: Callable[[], None]) -> None:
    """Run ``main`` and end the whole job when it raises.

    User mistakes (`malleus_ds.errors.is_user_mistake`) and the loss of a peer are told in one line
    that names the rank and the error, with exit code 2 and 1; anything else shows its traceback,
    with exit code 1. Under MPI the job is aborted, because a rank that left would wait in
    ``MPI_Finalize`` for ranks that wait for it; other launchers end the job when a rank fails.
    At a good end, and after a user's mistake, the process groups are destroyed.
    """
    with abort_on_error():
        code = _run(main)
        if code in (0, USER_MISTAKE):
            _end_groups()
        if code:
            raise SystemExit(code)


def _run(main: Callable[[], None]) -> int:
    """The exit code. Returns before groups are ended, so that no traceback keeps the engine alive."""
    try:
        main()
    except Exception as error:
        if not is_user_mistake(error) and not isinstance(
            error, PeerLostError | RankFailedError | StateLostError | ControlPlaneError
        ):
            raise
        _tell(error)
        return USER_MISTAKE if is_user_mistake(error) else 1
    return 0


def _end_groups() -> None:
    """Destroy the process groups, which joins gloo's threads.

    Now and then one of these would drop the last tensor of a finished operation while Python shuts down,
    and take the process down with it ("terminate called without an active exception").
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # Groups live on in the engine's reference cycles.


def _tell(error: Exception) -> None:
    """In one write, so that the lines of several ranks do not mix."""
    line = f"rank {named_rank()}: {type(error).__name__}: {error}\n"
    sys.stderr.write(line)
    sys.stderr.flush()
