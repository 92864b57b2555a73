"""Start-up of `torch.distributed` through DeepSpeed, under any launcher or none."""

from __future__ import annotations

import importlib.metadata
import os
from datetime import timedelta

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from packaging.specifiers import SpecifierSet

from malleus_ds.config import DEFAULT_TIMEOUT_S
from malleus_ds.environment import LaunchError, free_port, num_started

SUPPORTED_DEEPSPEED = ">=0.19.8,<0.20"

_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class UnsupportedDeepSpeedError(ValueError):
    """The installed DeepSpeed lacks the hooks that the engine needs, or is not tested with it."""


def check_deepspeed_version(version: str | None = None) -> None:
    """Raise `UnsupportedDeepSpeedError` unless ``version`` (default: the installed one) is supported."""
    version = version or importlib.metadata.version("deepspeed")
    # Local builds (0.19.8+abc) and pre-releases are judged by their number alone.
    if not SpecifierSet(SUPPORTED_DEEPSPEED).contains(version, prereleases=True):
        raise UnsupportedDeepSpeedError(
            f"malleus_ds needs deepspeed{SUPPORTED_DEEPSPEED}, but {version} is installed: "
            f"pip install 'deepspeed{SUPPORTED_DEEPSPEED}'"
        )


def init_distributed(
    backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S, port: int | None = None
) -> None:
    """Initialise `torch.distributed` and `deepspeed.comm`; does nothing when both are up.

    The processes come from `torchrun` or `deepspeed` (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT are set), from `mpirun` or `srun` with MPI (found through mpi4py), or else this is one
    process by itself: world size 1.

    backend: None takes the accelerator's (nccl, gloo, ...); timeout_s: how long a collective may wait
    for a peer, in seconds, until there is an engine, whose config has its own; port: of the rendezvous
    when the launcher names none, default a free one.
    Raises `LaunchError` for an incomplete environment.
    """
    if deepspeed.comm.is_initialized():
        return
    if get_accelerator().device_name() == "cpu":
        skip_shared_memory_op()
    if not dist.is_initialized():
        _complete_environment(port)
    deepspeed.init_distributed(
        dist_backend=backend,
        timeout=timedelta(seconds=timeout_s),
        # Used only when MASTER_ADDR is still unknown: DeepSpeed then asks MPI for the first host's address.
        distributed_port=int(os.environ.get("MASTER_PORT", "0")),
        verbose=False,
    )


def skip_shared_memory_op() -> None:
    """Tell DeepSpeed not to build its shared-memory op for CPUs.

    The op needs ninja and a C++ compiler, takes half a minute, and serves inference only. DeepSpeed keeps
    edits to this table (`deepspeed/ops/__init__.py`).
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _complete_environment(port: int | None) -> None:
    """Set what the launcher left out of the five variables that torch's rendezvous reads."""
    if all(name in os.environ for name in _LAUNCHER_VARIABLES):
        return
    if num_started() > 1:
        _read_mpi(port)
        return
    given = [name for name in ("RANK", "WORLD_SIZE") if int(os.environ.get(name, "0"))]
    if given:
        missing = ", ".join(name for name in _LAUNCHER_VARIABLES if name not in os.environ)
        raise LaunchError(
            f"{given[0]} is {os.environ[given[0]]}, but {missing} is not set: start with torchrun, deepspeed "
            f"or mpirun, or set all of {', '.join(_LAUNCHER_VARIABLES)}"
        )
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port or free_port()))


def _read_mpi(port: int | None) -> None:
    """Ranks from MPI, and one rendezvous for all of them. MASTER_ADDR stays unset over several hosts."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter when it finds no MPI library
        raise LaunchError(
            f"the launcher started {num_started()} processes, but mpi4py cannot be imported ({error}): "
            f"install it for the launcher's MPI (pip install mpi4py), or start with torchrun or deepspeed"
        ) from error
    world = MPI.COMM_WORLD
    if world.size != num_started():
        raise LaunchError(
            f"the launcher started {num_started()} processes, but mpi4py sees {world.size}: mpi4py must "
            f"be built for the launcher's MPI (mpirun of the same MPI, or srun --mpi=pmi2 or pmix)"
        )
    chosen = os.environ.get("MASTER_PORT") or str(port or free_port()) if world.rank == 0 else None
    hosts: list[str] = world.allgather(MPI.Get_processor_name())
    os.environ.update(
        RANK=str(world.rank),
        LOCAL_RANK=str(hosts[: world.rank].count(hosts[world.rank])),
        WORLD_SIZE=str(world.size),
        MASTER_PORT=world.bcast(chosen, root=0),
    )
    if len(set(hosts)) == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
