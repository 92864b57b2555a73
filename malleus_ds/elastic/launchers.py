"""The commands that start the ranks of an attempt: DeepSpeed's launcher on each host."""

from __future__ import annotations

import base64
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SUPERVISOR = "malleus_ds.elastic.supervise"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that starts ranks. ranks: those that cannot live on when its process has ended."""

    command: tuple[str, ...]
    ranks: tuple[int, ...] = ()


def launches(
    slots: Mapping[str, Sequence[int]],
    folder: Path,
    port: int,
    all_local: bool,
    runner_args: Sequence[str],
    visible_devices: Sequence[str] = (),
) -> tuple[Launch, ...]:
    """One for each host of this machine, or one that reaches all hosts.

    slots: devices by host; folder: of the attempt; all_local: every host is this machine, whatever its name;
    runner_args: further options of DeepSpeed's runner; visible_devices: see `RunOptions`.
    """
    if all_local or all(is_this_machine(host) for host in slots):
        # DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES to these, whatever it was.
        ids = {
            host: [visible_devices[slot] if visible_devices else slot for slot in used]
            for host, used in slots.items()
        }
        return tuple(_on_this_machine(ids, node_rank, folder, port) for node_rank in range(len(slots)))
    hostfile = folder / "hostfile"
    lines = [f"{host} slots={max(used) + 1}\n" for host, used in slots.items()]
    hostfile.write_text("".join(lines), encoding="utf-8")
    included = "@".join(f"{host}:{','.join(map(str, used))}" for host, used in slots.items())
    command = (
        *(sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={hostfile}"),
        *(f"--include={included}", f"--master_addr={next(iter(slots))}", f"--master_port={port}"),
        # With one host left, which may be another one, the runner would start its ranks here.
        *("--force_multi", *runner_args, "--module", _SUPERVISOR, str(folder)),
    )
    return (Launch(command),)


def is_this_machine(host: str) -> bool:
    return host in ("localhost", _LOOPBACK, socket.gethostname())


def _on_this_machine(
    ids: Mapping[str, Sequence[int | str]], node_rank: int, folder: Path, port: int
) -> Launch:
    world = json.dumps({host: list(used) for host, used in ids.items()})
    command = (
        *(sys.executable, "-m", "deepspeed.launcher.launch", f"--node_rank={node_rank}"),
        f"--world_info={base64.urlsafe_b64encode(world.encode()).decode()}",
        *(f"--master_addr={_LOOPBACK}", f"--master_port={port}"),
        *("--log_level=critical", "--module", _SUPERVISOR, str(folder)),
    )
    counts = [len(used) for used in ids.values()]
    first = sum(counts[:node_rank])
    return Launch(command, tuple(range(first, first + counts[node_rank])))
