"""Keeping the training state twice in the memory of the hosts, and going on from there."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import socket
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from deepspeed.utils import logger
from torch import Tensor

from malleus_ds.checkpoint.contents import contents_to_write, group_states, logical_tensors
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import GroupEntry, Manifest
from malleus_ds.checkpoint.opening import open_checkpoint
from malleus_ds.checkpoint.part_file import Content
from malleus_ds.checkpoint.restoring import Place, places
from malleus_ds.config import ConfigError
from malleus_ds.environment import HOST_VARIABLE, MEMORY_DIR_VARIABLE
from malleus_ds.pipe.agreement import peer_errors, run_alike, run_together
from malleus_ds.pipe.checkpointing import Checkpointing
from malleus_ds.pipe.resume import Wanted, check, describe
from malleus_ds.redundancy.errors import RedundancyError
from malleus_ds.redundancy.gathering import fetch, locate
from malleus_ds.redundancy.keeper import Arrangement, Keeper, RedundancyCost, check_room
from malleus_ds.redundancy.part import PartHeader
from malleus_ds.redundancy.survey import RUN_PREFIX, Generation, listing, newest, parts
from malleus_ds.zero.state import GroupState, describe_state, merge_group_states

_EVERYTHING = Wanted(strict=True, optimizer=True, lr_scheduler=True, position=True)
_EXIT_PATIENCE_S = 2.0
"""At exit the peers may be gone, or stuck."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where training goes on from.

    step: optimizer steps so far; path, client_state: of the checkpoint; reason: why the memory was not used,
    or not the newest generation in it, empty where it was.
    """

    source: Literal["memory", "checkpoint", "nothing"]
    step: int
    path: str | None = None
    client_state: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Note:
    """What a rank tells the others before the first generation of a plan."""

    run: str
    host: str
    num_bytes: int


class InMemory(Checkpointing):
    """The part of `MalleusPipelineEngine` that keeps its state in memory."""

    _keeper: Keeper | None = None
    node_of: dict[int, int]

    @property
    def redundancy_cost(self) -> RedundancyCost | None:
        """What in-memory redundancy takes of this rank; None where it is off."""
        return None if self._keeper is None else self._keeper.cost

    def resume(self, load_dir: str | None = None) -> Resumed:
        """Go on from the newest state that there is. Collective over the world.

        That is the memory of the present hosts, whatever their number and the plan, as long as it holds a
        whole generation that is not older than the newest checkpoint in ``load_dir``; else this checkpoint,
        if any. The log says which, and why. Raises as `load_checkpoint` does.
        """
        keeper, reason = self._keeper, ""
        if keeper is not None:
            self.finish_saving()
            self.end_keeping()
            (generation, reason), saved_step = self._look(keeper, load_dir)
            if generation is not None and saved_step > generation.step:
                steps = f"memory is whole as of step {generation.step}, the checkpoint of {saved_step}"
                reason = f"{steps}; {reason}" if reason else steps
            elif generation is not None:
                try:
                    self._restore(keeper, generation)
                except RedundancyError as error:
                    reason = str(error)
                else:
                    self._say(f"from memory after {generation.step} steps, without a checkpoint", reason)
                    return Resumed("memory", generation.step, reason=reason)
        path, client_state = (None, None) if load_dir is None else self.load_checkpoint(load_dir)
        source: Literal["checkpoint", "nothing"] = "nothing" if path is None else "checkpoint"
        if keeper is not None:
            self._say(f"from {'the start' if path is None else path}, and not from memory", reason)
        return Resumed(source, self.global_steps, path, client_state or {}, reason)

    # -- keeping -------------------------------------------------------------------------------

    def _start_keeper(self) -> None:
        """Collective."""
        config = self.malleus_config.redundancy
        if not config.enabled:
            return
        directory, _ = run_together(lambda: memory_directory(config.directory))
        host = os.environ.get(HOST_VARIABLE)
        if host is None:
            host = socket.gethostname()
            if self.malleus_config.nodes is not None:
                host = f"node {self.node_of[self.global_rank]} ({host})"
        self._keeper = Keeper(directory, host, self.malleus_config.timeout_s, self.device)
        tensors = [asdict(tensor) for tensor in logical_tensors(self.optimizer)]
        self._model_digest = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
        self._buffers: frozenset[str] = frozenset()
        atexit.register(_leave_at_exit, weakref.ref(self._keeper))

    def _keep(self) -> None:
        """Begin to copy the state as of this step boundary."""
        keeper = self._keeper
        if keeper is None or self.global_steps % self.malleus_config.redundancy.interval_steps:
            return
        if keeper.arrangement is None or keeper.arrangement.plan != self.plan.digest:
            self._arrange(keeper)
        began = time.perf_counter()
        draft = replace(describe(self, group_states(self.optimizer), {}, ()), tensors=())
        keeper.start(
            self.global_steps, self._contents(), self._model_digest, lambda: draft.to_json().decode()
        )
        keeper.cost = replace(keeper.cost, start_s=keeper.cost.start_s + time.perf_counter() - began)

    def _contents(self) -> list[Content]:
        """This rank's share. Forward passes may change buffers, so those are copied now."""
        if self._buffers:
            self.optimizer.collect(self.module.slots())
        return [
            Content(c.interval, c.values.clone()) if c.interval.tensor in self._buffers else c
            for c in contents_to_write(self.optimizer, ())
        ]

    def _arrange(self, keeper: Keeper) -> None:
        """Before the first generation under a plan. Collective over the world."""

        def look() -> _Note:
            describe_state(self.basic_optimizer, self.optimizer.storages.values())
            describe(self, group_states(self.optimizer), {}, ())
            slots = self.module.slots()
            self._buffers = frozenset(name for name, slot in slots.items() if not slot.is_parameter)
            run = f"{RUN_PREFIX}{uuid.uuid4().hex[:12]}"
            if keeper.arrangement is not None:
                run = keeper.arrangement.run
            return _Note(run, keeper.host, sum(content.values.nbytes for content in self._contents()))

        _, notes = run_alike(RedundancyError, look, note=lambda note: note)
        arrangement = Arrangement.make(
            self.plan.digest,
            notes[0].run,
            [note.num_bytes for note in notes],
            [note.host for note in notes],
            self.node_of,
        )
        node = self.node_of[self.global_rank]
        neighbours = [rank for rank, other in self.node_of.items() if other == node]
        run_alike(RedundancyError, lambda: check_room(keeper.directory, keeper.host, arrangement, neighbours))
        if keeper.arrangement is None and len(set(self.node_of.values())) == 1 and self.global_rank == 0:
            logger.warning(
                "malleus.redundancy: all ranks are on one node, so there is no second copy: the memory "
                "survives the loss of processes, not of the node"
            )
        keeper.arrange(arrangement)

    def end_keeping(self) -> None:
        """Wait for the copies under way, before the state changes."""
        if self._keeper is not None:
            with peer_errors("while the state was copied to another node", self.abandon):
                self._keeper.wait()

    def _put_back(self, *args: Any) -> None:
        self.end_keeping()
        super()._put_back(*args)

    def _loaded(self) -> None:
        if self._keeper is not None:
            self._keeper.forget()

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        self.end_keeping()
        super()._exec_optimizer_step(lr_kwargs)

    # -- going on ------------------------------------------------------------------------------

    def _look(self, keeper: Keeper, load_dir: str | None) -> tuple[tuple[Generation | None, str], int]:
        """The newest whole generation, and the step of the newest checkpoint, -1 without one."""

        def look() -> tuple[Any, int]:
            return listing(keeper.directory), _saved_step(load_dir) if self.global_rank == 0 else -1

        _, notes = run_together(look, note=lambda note: note)
        return newest([found for found, _ in notes]), notes[0][1]

    def _restore(self, keeper: Keeper, generation: Generation) -> None:
        """Raises `RedundancyError` on all ranks, with the engine unchanged, where it does not fit."""
        readable = {
            header.rank: (stem, header)
            for stem, header in parts(keeper.directory)
            if (header.run, header.step) == (generation.run, generation.step)
        }
        told = [
            header
            for rank, (_, header) in readable.items()
            if generation.readers[rank][0] == self.global_rank  # one of those that can
        ]
        _, notes = run_together(lambda: told, note=lambda note: note)
        headers = {header.rank: header for note in notes for header in note}
        (manifest, groups), _ = run_alike(RedundancyError, lambda: self._fit(headers))
        wanted = places(self.optimizer, groups)
        located, _ = run_alike(
            RedundancyError, lambda: locate([place.span.of(place.state) for place in wanted], headers)
        )
        timeout = timedelta(seconds=self.malleus_config.timeout_s)
        own = {rank: (stem, header.num_bytes) for rank, (stem, header) in readable.items()}
        tensors, _ = run_together(lambda: fetch(located, generation.readers, own, keeper.group, timeout))
        values: Sequence[tuple[Place, Tensor]] = list(zip(wanted, tensors, strict=True))
        run_together(lambda: self._put_back(manifest, _EVERYTHING, values, groups))
        keeper.keep_only(generation.run, generation.step)

    def _fit(self, headers: Mapping[int, PartHeader]) -> tuple[Manifest, dict[int, GroupState]]:
        """The manifest of a generation and its merged groups. Raises unless it is of this model."""
        where = f"the memory ({MEMORY_DIR_VARIABLE} or malleus.redundancy.directory)"
        if any(header.model != self._model_digest for header in headers.values()):
            raise RedundancyError(f"{where}: of another model: clear it, or build the same layers")
        manifests = [Manifest.parse(headers[rank].manifest.encode(), Path(where)) for rank in sorted(headers)]
        groups = merge_group_states(
            {
                index: GroupState(dict(entry.states), dict(entry.shared))
                for index, entry in enumerate(manifest.groups)
                if entry.states or entry.shared
            }
            for manifest in manifests
        )
        merged = [
            GroupEntry(entry.options, groups.setdefault(index, GroupState()).dtypes, groups[index].shared)
            for index, entry in enumerate(manifests[0].groups)
        ]
        manifest = replace(manifests[0], tensors=logical_tensors(self.optimizer), groups=tuple(merged))
        check(self, manifest, _EVERYTHING, where)
        return manifest, groups

    def _say(self, what: str, reason: str) -> None:
        if self.global_rank == 0:
            logger.warning(f"resume: going on {what}" + (f": {reason}" if reason else ""))


def memory_directory(configured: str | None) -> Path:
    """This host's directory. Raises `ConfigError` where none is given."""
    directory = configured or os.environ.get(MEMORY_DIR_VARIABLE)
    if not directory:
        raise ConfigError(
            f"malleus.redundancy.directory is null and {MEMORY_DIR_VARIABLE} is not set: give a directory in "
            f"memory, such as /dev/shm/my_job, that no other job uses"
        )
    return Path(directory)


def _saved_step(load_dir: str | None) -> int:
    """Of the newest checkpoint; -1 where there is none, or none that can be read."""
    if load_dir is None:
        return -1
    try:
        found = open_checkpoint(Path(load_dir))
    except CheckpointError as error:
        logger.warning(f"resume: {error}")
        return -1
    return -1 if found is None else found.manifest.position["global_steps"]


def _leave_at_exit(reference: weakref.ref[Keeper]) -> None:
    """For a program that ends without `MalleusPipelineEngine.destroy`."""
    keeper = reference()
    if keeper is not None:
        keeper.leave(_EXIT_PATIENCE_S)
