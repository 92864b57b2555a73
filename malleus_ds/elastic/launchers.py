"""The commands that start the ranks of an attempt: DeepSpeed's launcher on each host."""

from __future__ import annotations

import base64
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SUPERVISOR = "malleus_ds.elastic.supervise"
_LOOPBACK = "127.0.0.1"


def launch_commands(
    slots: Mapping[str, Sequence[int]], folder: Path, port: int, all_local: bool, runner_args: Sequence[str]
) -> list[list[str]]:
    """One command for each host of this machine, or one that reaches all hosts.

    slots: devices by host; folder: of the attempt; all_local: every host is this machine, whatever its name;
    runner_args: further options of DeepSpeed's runner.
    """
    if all_local or all(is_this_machine(host) for host in slots):
        return [_on_this_machine(slots, node_rank, folder, port) for node_rank in range(len(slots))]
    hostfile = folder / "hostfile"
    lines = [f"{host} slots={max(used) + 1}\n" for host, used in slots.items()]
    hostfile.write_text("".join(lines), encoding="utf-8")
    included = "@".join(f"{host}:{','.join(map(str, used))}" for host, used in slots.items())
    return [
        [
            *(sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={hostfile}"),
            *(f"--include={included}", f"--master_addr={next(iter(slots))}", f"--master_port={port}"),
            # With one host left, which may be another one, the runner would start its ranks here.
            *("--force_multi", *runner_args, "--module", _SUPERVISOR, str(folder)),
        ]
    ]


def is_this_machine(host: str) -> bool:
    return host in ("localhost", _LOOPBACK, socket.gethostname())


def _on_this_machine(
    slots: Mapping[str, Sequence[int]], node_rank: int, folder: Path, port: int
) -> list[str]:
    world = base64.urlsafe_b64encode(json.dumps({host: list(used) for host, used in slots.items()}).encode())
    return [
        *(sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world.decode()}"),
        *(f"--node_rank={node_rank}", f"--master_addr={_LOOPBACK}", f"--master_port={port}"),
        *("--log_level=critical", "--module", _SUPERVISOR, str(folder)),
    ]
