"""The files through which `malleus-run`, the supervisors and the ranks of a job speak to each other.

In the run directory, which all hosts share:

- ``run.jsonl``: the log of `malleus-run`, one event per line;
- ``request.json``: what the planner needs after a loss; rank 0 writes it;
- ``attempt_000/``, one per start of the ranks: ``order.json`` (what to start), ``plan.json`` (the plan after
  a loss), ``progress.json`` (of rank 0), ``rank_00000.json`` (how the rank ended), ``stop`` (ranks must end
  now), ``verdict.json`` (what comes next).

Each file appears at once, whole.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from malleus_ds.elastic.devices import Device

LOG = "run.jsonl"
REQUEST = "request.json"
PLAN = "plan.json"
PROGRESS = "progress.json"
STOP = "stop"
_ORDER = "order.json"
_VERDICT = "verdict.json"
_READ_TRIES = 5


def attempt_path(run_dir: Path, attempt: int) -> Path:
    return run_dir / f"attempt_{attempt:03d}"


def write_json(path: Path, data: Any) -> None:
    """Whole, or not at all: a reader sees what was there before, or all of the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """None when there is no such file."""
    for _ in range(_READ_TRIES):
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            stale = error  # on NFS, when it was replaced between opening and reading
    raise stale


@dataclass(frozen=True, slots=True)
class Order:
    """What to start in an attempt.

    devices: by rank; script: a path, or ``-m`` and a module; arguments: of it; passes_local_rank: whether it
    gets ``--local_rank``; memory_dirs: by host; fresh_hosts: those that were not part of the attempt before;
    has_plan: whether the attempt has a plan of its own; verdict_s: how long supervisors wait for a verdict
    at most, before they take `malleus-run` for gone.
    """

    attempt: int
    devices: tuple[Device, ...]
    script: tuple[str, ...]
    arguments: tuple[str, ...]
    passes_local_rank: bool
    memory_dirs: dict[str, str]
    fresh_hosts: tuple[str, ...]
    has_plan: bool
    verdict_s: float

    def local_rank(self, rank: int) -> int:
        """Place of its device among those of its host.

        DeepSpeed's launcher takes the rank modulo their number, which is another order on unequal hosts.
        """
        host = self.devices[rank].host
        return sum(device.host == host for device in self.devices[:rank])

    def save(self, run_dir: Path) -> Path:
        """Returns the directory of the attempt, which it makes."""
        folder = attempt_path(run_dir, self.attempt)
        folder.mkdir(parents=True)
        write_json(folder / _ORDER, asdict(self))
        return folder

    @classmethod
    def load(cls, folder: Path) -> Order:
        data = read_json(folder / _ORDER)
        return cls(
            **{
                **data,
                "devices": tuple(Device(**device) for device in data["devices"]),
                "script": tuple(data["script"]),
                "arguments": tuple(data["arguments"]),
                "fresh_hosts": tuple(data["fresh_hosts"]),
            }
        )


@dataclass(frozen=True, slots=True)
class ExitNote:
    """How a rank ended.

    code: of its process, negative for a signal; was_stopped: it still ran when all had to end; lost_peer: it
    ended because another rank did; reason: the last line that it wrote to stderr.
    """

    rank: int
    code: int
    was_stopped: bool
    lost_peer: bool
    reason: str

    def save(self, folder: Path) -> None:
        write_json(_note_path(folder, self.rank), asdict(self))

    @classmethod
    def load(cls, folder: Path, rank: int) -> ExitNote | None:
        """None while the rank has not ended."""
        data = read_json(_note_path(folder, rank))
        return None if data is None else cls(**data)


def _note_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The attempt is over. stays: hosts whose memory the next attempt may use; none when there is no next."""

    stays: tuple[str, ...]

    def save(self, folder: Path) -> None:
        write_json(folder / _VERDICT, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Verdict | None:
        data = read_json(folder / _VERDICT)
        return None if data is None else cls(tuple(data["stays"]))


@dataclass(frozen=True, slots=True)
class Progress:
    """Of an attempt. first_step: its first whole step, step: its last so far."""

    first_step: int
    step: int

    @classmethod
    def load(cls, folder: Path) -> Progress | None:
        """None before the first step has ended."""
        data = read_json(folder / PROGRESS)
        return None if data is None else cls(**data)
