"""What the launcher of this process says in environment variables, and free ports. No torch."""

from __future__ import annotations

import os
import secrets
import socket

# Names of the rank and of the number of ranks, set for each process by MPICH's and Intel's hydra (and
# srun --mpi=pmi2), Open MPI, MVAPICH, and PMIx (srun --mpi=pmix), which has no number.
_MPI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMIX_RANK", None),
)
# Set by srun for programs without MPI, too.
_SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
# Below the range from which Linux hands out ports by itself (32768 and up), so that no other
# socket takes the port between the choice and its use.
_PORT_RANGE = (15000, 32000)
_PORT_TRIES = 100

# What `malleus-run` tells each rank.
RUN_DIR_VARIABLE = "MALLEUS_RUN_DIR"
ATTEMPT_VARIABLE = "MALLEUS_ATTEMPT"
HOST_VARIABLE = "MALLEUS_HOST"
MEMORY_DIR_VARIABLE = "MALLEUS_MEMORY_DIR"
PLAN_VARIABLE = "MALLEUS_PLAN"


class LaunchError(ValueError):
    """The launcher's environment is incomplete, contradicts MPI, or lacks what it needs."""


def is_mpi_process() -> bool:
    """Whether an MPI launcher started this process."""
    return any(rank in os.environ for rank, _ in _MPI_VARIABLES)


def num_started() -> int:
    """Processes that an MPI launcher or srun started, this one included; 1 without them."""
    sizes = [size for _, size in (*_MPI_VARIABLES, _SRUN_VARIABLES) if size is not None]
    return max(int(os.environ.get(size, "1")) for size in sizes)


def named_rank() -> int:
    """This process's rank as its launcher says, for messages before ``torch.distributed`` is up."""
    names = ("RANK", *(rank for rank, _ in (*_MPI_VARIABLES, _SRUN_VARIABLES)))
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


def free_port() -> int:
    """A TCP port on which nothing listens. Raises `LaunchError` when none is found."""
    low, high = _PORT_RANGE
    for _ in range(_PORT_TRIES):
        port = low + secrets.randbelow(high - low)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise LaunchError(f"found no free port between {low} and {high}: free some, or pass port=")
