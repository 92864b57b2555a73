"""What a job measures of itself, as JSON lines: written by rank 0, read while the job runs. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Start:
    """The job is about to take its first step. plan: as `ParallelPlan.to_dict`."""

    world_size: int
    plan: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. duration_s: on rank 0; rates: estimated straggling rate of each rank."""

    step: int
    duration_s: float
    loss: float
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One `LoopEvent` of the control loop. step: the one that had just ended."""

    step: int
    kind: str
    details: dict[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """After the last step.

    sent_bytes: per switch, what the transports of all ranks sent; num_emulated_calls,
    num_overruns: waits of all emulated devices, and those whose computation alone took longer.
    """

    sent_bytes: tuple[int, ...]
    num_emulated_calls: int
    num_overruns: int


Record = Start | Step | Event | End
_KINDS: dict[str, Callable[..., Record]] = {kind.__name__.lower(): kind for kind in (Start, Step, Event, End)}


class MeasurementWriter:
    """Appends records to a file, each at once. Use as a context manager; without a path it does nothing."""

    def __init__(self, path: str | Path | None) -> None:
        self._file = None if path is None else Path(path).open("a", encoding="utf-8")  # noqa: SIM115

    def write(self, record: Record) -> None:
        if self._file is not None:
            line = json.dumps({"record": type(record).__name__.lower(), **asdict(record)})
            self._file.write(line + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


class MeasurementReader:
    """Gives the records that were added to a file since the last call; the file may not exist yet."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._offset = 0

    def new_records(self) -> Iterator[Record]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # Still being written.
                self._offset += len(line)
                yield _parse(json.loads(line))


@dataclass(slots=True)
class Measurements:
    """All records of a job so far."""

    start: Start | None = None
    steps: list[Step] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    end: End | None = None

    def add(self, record: Record) -> None:
        match record:
            case Start():
                self.start = record
            case Step():
                self.steps.append(record)
            case Event():
                self.events.append(record)
            case End():
                self.end = record

    def first_event(self, kind: str, steps: range) -> Event | None:
        return next(iter(self.events_of(kind, steps)), None)

    def events_of(self, kind: str, steps: range) -> Sequence[Event]:
        return [event for event in self.events if event.kind == kind and event.step in steps]


def _parse(data: Mapping[str, Any]) -> Record:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    kind = str(values.pop("record"))
    return _KINDS[kind](**values)
