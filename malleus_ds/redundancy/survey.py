"""Which generations the present hosts hold together, and which of them is the newest whole one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from malleus_ds.redundancy.part import PartHeader, read_header

RUN_PREFIX = "run-"
"""Of the directories in a host's memory, one for each start of the job."""

Listing = Mapping[tuple[str, int], Mapping[int, tuple[tuple[str, ...], ...]]]
"""What a host holds: of each generation (run, step) the ranks whose shares are there, and its hosts."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole generation.

    readers: by each rank of that run that held something, the present ranks whose hosts have its share.
    """

    run: str
    step: int
    readers: Mapping[int, tuple[int, ...]]


def parts(directory: Path) -> Iterator[tuple[Path, PartHeader]]:
    """Path without suffix and header of every part that counts."""
    for path in sorted(directory.glob(f"{RUN_PREFIX}*/*.json")):
        header = read_header(path.with_suffix(""))
        if header is not None:
            yield path.with_suffix(""), header


def listing(directory: Path) -> Listing:
    """Of the parts in a host's memory."""
    result: dict[tuple[str, int], dict[int, tuple[tuple[str, ...], ...]]] = defaultdict(dict)
    for _, header in parts(directory):
        result[header.run, header.step][header.rank] = header.hosts
    return dict(result)


def newest(listings: Sequence[Listing]) -> tuple[Generation | None, str]:
    """The newest whole generation, from the listing of each present rank; None without one.

    Also says why nothing newer can be used, empty where nothing newer is there.
    """
    readers: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    hosts: dict[tuple[str, int], tuple[tuple[str, ...], ...]] = {}
    for reader, found in enumerate(listings):
        for key, shares in found.items():
            for rank, names in shares.items():
                readers[key][rank].append(reader)
                hosts[key] = names
    why = "" if readers else "the memory of the present hosts is empty"
    for run, step in sorted(readers, key=lambda key: (key[1], key[0]), reverse=True):
        held = readers[run, step]
        lost = [rank for rank, names in enumerate(hosts[run, step]) if names and rank not in held]
        if not lost:
            whole = {rank: tuple(ranks) for rank, ranks in sorted(held.items())}
            return Generation(run, step, whole), why
        why = why or _loss(step, lost, hosts[run, step])
    return None, why


def _loss(step: int, lost: Sequence[int], hosts: Sequence[Sequence[str]]) -> str:
    shares = ", ".join(f"rank {rank}'s (kept by {' and '.join(hosts[rank])})" for rank in lost)
    return f"of step {step} these shares of parameters and optimizer state are lost: {shares}"
