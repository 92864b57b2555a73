"""Which devices a job may use: hosts of a hostfile, some of them spare, without those that were lost."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from malleus_ds.cluster import ClusterError, parse_hostfile

_SPARE = re.compile(r"#.*\bspare\b")


@dataclass(frozen=True, slots=True)
class Device:
    """One slot of a host; its rank is its place in the list of all devices of an attempt."""

    host: str
    slot: int


@dataclass(frozen=True, slots=True)
class Host:
    """One line of the hostfile. is_spare: joins only when devices were lost; text: the whole line."""

    name: str
    num_slots: int
    is_spare: bool = False
    text: str = ""


def parse_hosts(text: str, spare_hosts: Collection[str] = ()) -> tuple[Host, ...]:
    """The hosts of a DeepSpeed hostfile; ``# spare`` behind one, or its name in spare_hosts, marks a spare.

    Raises `ClusterError` for a malformed file, an unknown spare host, and when all hosts are spare.
    """
    nodes = parse_hostfile(text)
    lines = {line.split()[0]: line for line in text.splitlines() if line.split("#", 1)[0].strip()}
    unknown = [name for name in spare_hosts if name not in lines]
    if unknown:
        raise ClusterError(
            f"--spare_hosts {unknown[0]}: not in the hostfile, which has {', '.join(lines)}; add it there, "
            f"or give one of these"
        )
    hosts = tuple(
        Host(
            node.host,
            node.num_slots,
            node.host in spare_hosts or _SPARE.search(lines[node.host]) is not None,
            lines[node.host],
        )
        for node in nodes
    )
    if all(host.is_spare for host in hosts):
        raise ClusterError("all hosts are spare: leave at least one to start on")
    return hosts


def first_devices(hosts: Iterable[Host]) -> tuple[Device, ...]:
    """All slots of the hosts that are not spare."""
    return tuple(device for host in hosts if not host.is_spare for device in _slots(host))


def next_devices(
    hosts: Sequence[Host],
    current: Sequence[Device],
    lost: Mapping[Device, str],
    num_wanted: int,
) -> tuple[Device, ...]:
    """The devices of the next attempt: hosts in use first, in their order, then those that join.

    hosts: as the hostfile is now. A host that is not there any more leaves; a new one joins; a spare one
    joins while there are fewer than num_wanted devices. lost: with the hostfile's line of its host as it
    was then; a line that has changed since says that the host was repaired.
    """
    in_use = list(dict.fromkeys(device.host for device in current))
    by_name = {host.name: host for host in hosts}
    order = [*(name for name in in_use if name in by_name), *(n for n in by_name if n not in in_use)]
    chosen: list[Device] = []
    waiting: list[list[Device]] = []
    for name in order:
        host = by_name[name]
        usable = [device for device in _slots(host) if lost.get(device) != host.text]
        if host.is_spare and name not in in_use:
            waiting.append(usable)
        else:
            chosen += usable
    for usable in waiting:
        if len(chosen) < num_wanted:
            chosen += usable
    return tuple(chosen)


def by_host(devices: Iterable[Device]) -> dict[str, list[int]]:
    """Slots of each host, as DeepSpeed's launchers have it."""
    slots: dict[str, list[int]] = {}
    for device in devices:
        slots.setdefault(device.host, []).append(device.slot)
    return slots


def _slots(host: Host) -> list[Device]:
    return [Device(host.name, slot) for slot in range(host.num_slots)]
