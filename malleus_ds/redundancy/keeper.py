"""A rank's part in the redundancy of a job: generation after generation, in two slots by turns."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from malleus_ds.checkpoint.part_file import Content
from malleus_ds.redundancy.copying import Copying, Share
from malleus_ds.redundancy.errors import RedundancyError
from malleus_ds.redundancy.part import Part, PartHeader, lay_out
from malleus_ds.redundancy.partners import copy_ranks
from malleus_ds.redundancy.survey import RUN_PREFIX, parts

NUM_GENERATIONS = 2
"""The one that is being written, and the one before, which all ranks have."""


@dataclass(frozen=True, slots=True)
class RedundancyCost:
    """What redundancy takes of this rank.

    own_bytes, copy_bytes: of one generation, of this rank's share and of the copies that it keeps;
    held_bytes: of all generations, in this host's memory; start_s, wait_s: for which training waited, at the
    end of a step and before the optimizer's, in all steps so far (but not for what ranks agree on under a new
    plan); background_s: for which copying went on beside training.
    """

    num_generations: int = 0
    own_bytes: int = 0
    copy_bytes: int = 0
    held_bytes: int = 0
    start_s: float = 0.0
    wait_s: float = 0.0
    background_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What the ranks agree on for one plan.

    plan: its digest; run: of this start of the job; num_bytes: of each rank's share; partners: by rank, who
    keeps its copy; hosts: by rank, which hosts keep its share.
    """

    plan: str
    run: str
    num_bytes: tuple[int, ...]
    partners: tuple[int | None, ...]
    hosts: tuple[tuple[str, ...], ...]

    @classmethod
    def make(
        cls, plan: str, run: str, num_bytes: Sequence[int], hosts: Sequence[str], node_of: Mapping[int, int]
    ) -> Arrangement:
        """hosts: name of each rank's."""
        partners = copy_ranks(num_bytes, node_of)
        keeping = (
            () if not size else (hosts[rank],) if partner is None else (hosts[rank], hosts[partner])
            for rank, (size, partner) in enumerate(zip(num_bytes, partners, strict=True))
        )
        return cls(plan, run, tuple(num_bytes), partners, tuple(keeping))

    def sources(self, rank: int) -> tuple[int, ...]:
        """Whose copies ``rank`` keeps."""
        return tuple(source for source, partner in enumerate(self.partners) if partner == rank)

    def generation_bytes(self, rank: int) -> int:
        """What ``rank`` keeps of one generation: its share, and copies."""
        return self.num_bytes[rank] + sum(self.num_bytes[source] for source in self.sources(rank))


@dataclass
class _Slot:
    """The parts of one generation on this rank; copies: by the rank whose share it is."""

    own: Part | None = None
    copies: dict[int, Part] = field(default_factory=dict)


class Keeper:
    """One per engine. All ranks make it together: it has a process group of its own.

    `start` begins to copy a generation and `wait` ends it, before the state changes. After each `wait` all
    ranks meet in the reduction of the optimizer step, so when a slot is written again, the other one is
    complete on all ranks: at any moment one whole generation exists.
    """

    def __init__(self, directory: Path, host: str, timeout_s: float, device: torch.device) -> None:
        """directory: in this host's memory; host: its name."""
        self.directory = directory
        self.host = host
        self.cost = RedundancyCost()
        self.arrangement: Arrangement | None = None
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device
        self._rank = dist.get_rank()
        self._copying: Copying | None = None
        self._num_started = 0
        self._slots: list[_Slot] = []
        self._resumed_run: str | None = None

    def arrange(self, arrangement: Arrangement) -> None:
        """From now on generations are made for another plan."""
        if self.arrangement is None:
            self._num_started = 0
            self._slots = [_Slot() for _ in range(NUM_GENERATIONS)]
            # Until there is one of this run, the generation that it went on from is kept.
            self._remove_runs(but=(arrangement.run, self._resumed_run))
        self.arrangement = arrangement

    def start(self, step: int, contents: Sequence[Content], model: str, manifest: Callable[[], str]) -> None:
        """Begin to copy the state after ``step`` steps. The contents must stay as they are until `wait`.

        model: digest of the logical tensors; manifest: called in the background.
        """
        arrangement = self.arrangement
        assert arrangement is not None, "arrange() comes first"
        number, self._num_started = self._num_started, self._num_started + 1
        sections, ordered, num_bytes = lay_out(contents)

        def header() -> bytes:
            return PartHeader(
                run=arrangement.run,
                step=step,
                rank=self._rank,
                hosts=arrangement.hosts,
                num_bytes=num_bytes,
                model=model,
                sections=sections,
                manifest=manifest(),
            ).to_json()

        def renewed() -> tuple[Share | None, dict[int, Part]]:
            if number == 1:  # this run's first generation is complete everywhere
                self._remove_runs(but=(arrangement.run,))
            slot = self._renew(number % NUM_GENERATIONS, arrangement)
            if slot.own is None:
                return None, slot.copies
            partner = arrangement.partners[self._rank]
            return Share(ordered, num_bytes, header, slot.own, partner), slot.copies

        self._copying = Copying(renewed, self.group, self._timeout, self._device)
        has_own = arrangement.num_bytes[self._rank] > 0
        self.cost = replace(
            self.cost,
            num_generations=self.cost.num_generations + 1,
            own_bytes=num_bytes if has_own else 0,
        )

    def wait(self, patience_s: float | None = None) -> None:
        """End what `start` began, if anything: then the state may change. Raises what went wrong.

        patience_s: give up after so long.
        """
        copying, self._copying = self._copying, None
        if copying is None:
            return
        began = time.perf_counter()
        copying.wait(patience_s)
        self.cost = replace(
            self.cost,
            copy_bytes=copying.copy_bytes,
            held_bytes=self._held_bytes(),
            wait_s=self.cost.wait_s + time.perf_counter() - began,
            background_s=self.cost.background_s + copying.duration_s,
        )

    def forget(self) -> None:
        """Remove all generations of all runs: the state is no more the one that training leads to."""
        self.arrangement = self._resumed_run = None
        self._slots = []
        self._remove_runs()

    def keep_only(self, run: str, step: int) -> None:
        """Remove all generations but the one that training goes on from."""
        self.arrangement, self._slots, self._resumed_run = None, [], run
        self._remove_runs(but=(run,))
        for stem, header in parts(self.directory):
            if header.step != step:
                Part(stem).remove()

    def close(self) -> None:
        """Free the process group, on all ranks; the memory keeps what it has."""
        self.wait()
        dist.destroy_process_group(self.group)

    def leave(self, patience_s: float) -> None:
        """The job ends, or lost a peer: let the last copies arrive, if they still can."""
        with contextlib.suppress(Exception):
            self.wait(patience_s)

    def _renew(self, number: int, arrangement: Arrangement) -> _Slot:
        """The parts of a slot under the current arrangement; removes those that belong to it no more."""
        folder, slot = self.directory / arrangement.run, self._slots[number]
        sources = arrangement.sources(self._rank)
        for source in [*slot.copies]:
            if source not in sources:
                slot.copies.pop(source).remove()
        if slot.own is not None and not arrangement.num_bytes[self._rank]:
            slot.own.remove()
            slot.own = None
        if slot.own is None and arrangement.num_bytes[self._rank]:
            slot.own = Part(folder / f"rank_{self._rank:05d}.own.{number}")
        for source in sources:
            if source not in slot.copies:
                slot.copies[source] = Part(folder / f"rank_{source:05d}.copy.{number}")
        return slot

    def _held_bytes(self) -> int:
        owned = [part for slot in self._slots for part in (slot.own, *slot.copies.values())]
        return sum(part.num_bytes for part in owned if part is not None)

    def _remove_runs(self, but: Collection[str | None] = ()) -> None:
        """Ranks of one host do it together: what is gone already is as good."""
        for path in self.directory.glob(f"{RUN_PREFIX}*"):
            if path.name not in but:
                shutil.rmtree(path, ignore_errors=True)


def check_room(directory: Path, host: str, arrangement: Arrangement, neighbours: Sequence[int]) -> None:
    """Raise `RedundancyError` unless a host's memory can hold what its ranks will keep.

    neighbours: all ranks of this node.
    """
    where = f"malleus.redundancy.directory is {str(directory)!r} on {host}"
    needed = NUM_GENERATIONS * sum(arrangement.generation_bytes(rank) for rank in neighbours)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        used = sum(path.stat().st_size for path in directory.glob(f"{RUN_PREFIX}*/*.bin"))
        room = shutil.disk_usage(directory).free + used
    except OSError as error:
        raise RedundancyError(
            f"{where}: {error.strerror}; give a directory in memory that can be written"
        ) from error
    if needed > room:
        raise RedundancyError(
            f"{where}: has room for {room} bytes, but {NUM_GENERATIONS} generations of {len(neighbours)} "
            f"ranks take {needed}: give it more memory, or disable malleus.redundancy"
        )
