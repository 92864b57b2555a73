"""The control plane over MPI."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malleus_ds.detector.control_plane import ControlPlane, ControlPlaneError, Request

# An abort ends mpirun at once, and with it the output of the ranks that it has not passed on yet.
_FORWARDING_S = 3.0


class MpiControlPlane(ControlPlane):
    """Over a duplicate of mpi4py's ``COMM_WORLD``, so no message of others interferes.

    Only non-blocking calls that are polled: MPICH's blocking ones keep a core busy. MPI makes
    progress inside its calls, so an exchange completes when all ranks have come to finish it.
    """

    def __init__(self, timeout_s: float) -> None:
        from mpi4py import MPI

        self._comm: Any = MPI.COMM_WORLD.Dup()
        self._mpi_error: type[Exception] = MPI.Exception
        super().__init__(self._comm.Get_rank(), self._comm.Get_size(), "MPI", timeout_s)

    def close(self) -> None:
        self._comm.Free()

    def _start_all_gather(self, send: NDArray[Any], receive: NDArray[Any]) -> Request:
        return self._polled(lambda: self._comm.Iallgather(send, receive))

    def _start_broadcast(self, buffer: NDArray[np.uint8], root: int) -> Request:
        return self._polled(lambda: self._comm.Ibcast(buffer, root=root))

    def _polled(self, start: Any) -> Request:
        request = start()

        def is_done() -> bool:
            try:
                return bool(request.Test())
            except self._mpi_error as error:
                raise ControlPlaneError(f"MPI failed: {error}") from error

        return is_done


@contextmanager
def abort_on_error() -> Iterator[None]:
    """Run a rank's main program in it: an error on one rank ends the job on all ranks.

    Without it, a rank that leaves by an exception waits in ``MPI_Finalize`` for peers that wait
    for it. Prints the traceback and calls ``MPI_Abort`` with exit code 1, or with that of a
    failing SystemExit. Where MPI is not in use, the exception passes through.
    """
    try:
        yield
    except BaseException as error:
        if _mpi_is_running() and _exit_code(error) != 0:
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            elif not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            from mpi4py import MPI

            time.sleep(_FORWARDING_S)
            MPI.COMM_WORLD.Abort(_exit_code(error))
        raise


def _exit_code(error: BaseException) -> int:
    """The exit code that Python would give."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _mpi_is_running() -> bool:
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.Get_size() > 1
