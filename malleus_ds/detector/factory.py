"""Chooses the carrier of the control plane, the same one on all ranks."""

from __future__ import annotations

from typing import Literal

from malleus_ds.detector.control_plane import ControlPlane
from malleus_ds.detector.gloo import GlooControlPlane
from malleus_ds.detector.mpi import MpiControlPlane
from malleus_ds.environment import is_mpi_process


class ControlPlaneUnavailableError(ValueError):
    """The carrier that the config asks for cannot be had."""


def make_control_plane(
    kind: Literal["auto", "mpi", "gloo"], timeout_s: float, world_size: int, rank: int
) -> ControlPlane:
    """The control plane that ``detector.control_plane`` asks for; all ranks call it together.

    world_size, rank: of the default group of ``torch.distributed``, which must be initialised.
    ``"auto"`` is MPI exactly where every rank was started by an MPI launcher and its place in
    ``COMM_WORLD`` is the same as in ``torch.distributed``. Where ``"mpi"`` cannot be had on some
    rank, `ControlPlaneUnavailableError` on all.
    """
    gloo = GlooControlPlane(timeout_s)
    if kind == "gloo":
        return gloo
    # A rank must not choose alone: one in gloo and another in MPI would wait for each other.
    obstacles = gloo.all_gather_bytes((_obstacle_to_mpi(world_size, rank) or "").encode())
    blocked = [other for other, text in enumerate(obstacles) if text]
    if blocked and kind == "auto":
        return gloo
    gloo.close()
    if blocked:
        raise ControlPlaneUnavailableError(
            f'malleus.detector.control_plane is "mpi", but rank {blocked[0]} cannot use MPI: '
            f"{obstacles[blocked[0]].decode()}; start the job with mpirun -n {world_size}, or set "
            f'detector.control_plane to "gloo" or "auto"'
        )
    return MpiControlPlane(timeout_s)


def _obstacle_to_mpi(world_size: int, rank: int) -> str | None:
    """Why this rank cannot use MPI; None when it can."""
    # First the environment: to import MPI starts it, which not every environment survives.
    if not is_mpi_process():
        return "it was not started by an MPI launcher"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"mpi4py cannot be imported ({error})"
    mpi_size, mpi_rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    if (mpi_size, mpi_rank) != (world_size, rank):
        return f"it is rank {mpi_rank} of {mpi_size} in COMM_WORLD, but rank {rank} of {world_size} in torch"
    return None
