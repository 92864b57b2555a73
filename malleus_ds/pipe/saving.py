"""Saving checkpoints: what each rank writes, and when the files of all become a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from malleus_ds.checkpoint.background import BackgroundSave
from malleus_ds.checkpoint.contents import contents_to_write, group_states
from malleus_ds.checkpoint.directory import begin, check_tag, commit, discard
from malleus_ds.checkpoint.disk import Disk
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import FILE_NAME, Manifest
from malleus_ds.checkpoint.part_file import Content, FileEntry, write_part
from malleus_ds.checkpoint.values import check_json
from malleus_ds.migration.errors import StateLostError
from malleus_ds.pipe.agreement import PeerLostError, require_equal, run_alike, run_together
from malleus_ds.pipe.batch_size import BatchSize
from malleus_ds.pipe.resume import describe
from malleus_ds.zero.state import GroupState, describe_state, merge_group_states


@dataclass(frozen=True, slots=True)
class _Order:
    """What the user asked for; equal on all ranks."""

    save_dir: str
    tag: str
    client_state: dict[str, Any]
    save_latest: bool
    exclude_frozen: bool
    is_async: bool

    def digest(self) -> str:
        """Readable, and short."""
        state = hashlib.sha256(json.dumps(self.client_state, sort_keys=True).encode()).hexdigest()[:8]
        return str(replace(self, client_state={"digest": state}))


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank holds. frozen: names of parameters that are not trained."""

    groups: dict[int, GroupState]
    frozen: set[str]


class Saving(BatchSize):
    """The part of `MalleusPipelineEngine` that saves."""

    is_state_lost = False
    """A switch failed when state had begun to move; for good."""
    _disk = Disk()
    _saving: BackgroundSave | None = None

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        async_save: bool | None = None,
    ) -> bool:
        """Save the training state at a step boundary, as in DeepSpeed. Collective over the world.

        client_state: of the user's, JSON only; async_save: copy the state, and write it beside the next
        steps (None: as the config says). Returns True. Raises `CheckpointError` on all ranks, also when
        the save before failed in the background; what was saved earlier is still there.
        """
        self.require_state()
        self.finish_saving()
        order = _Order(
            save_dir=str(save_dir or ""),
            tag=f"global_step{self.global_steps}" if tag is None else str(tag),
            client_state=dict(client_state or {}),
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            is_async=self.malleus_config.checkpoint.async_save if async_save is None else async_save,
        )
        _, notes = run_alike(CheckpointError, lambda: self._check(order), note=lambda note: note)
        fix = "call save_checkpoint with the same arguments on every rank"
        require_equal("arguments of save_checkpoint", [digest for digest, _ in notes], fix)
        (contents, draft), _ = run_together(lambda: self._take(order, [held for _, held in notes]))
        _, directories = run_alike(CheckpointError, lambda: self._begin(order), note=lambda path: path)
        directory = directories[0]

        def write() -> FileEntry | None:
            path = directory / f"rank_{self.global_rank:05d}.safetensors"
            return write_part(self._disk, path, contents) if contents else None

        def finish(entries: Sequence[FileEntry | None]) -> None:
            if self.global_rank == 0:
                files = tuple(entry for entry in entries if entry is not None)
                manifest = replace(draft, files=files).to_json()
                commit(self._disk, directory, order.tag, manifest, save_latest)

        if order.is_async:
            limit_s = self.malleus_config.checkpoint.timeout_s
            self._saving = BackgroundSave(
                self._disk, directory, self.global_rank, len(notes), write, finish, limit_s
            )
            return True
        try:
            _, entries = run_alike(CheckpointError, write, note=lambda entry: entry)
            run_alike(CheckpointError, lambda: finish(entries))
        except Exception:
            self._discard(directory)
            raise
        return True

    def require_state(self) -> None:
        """Raise `StateLostError` where what is left of the state must be neither saved nor trained."""
        if self.is_state_lost:
            raise StateLostError(
                f"rank {self.global_rank}: the training state was lost in a switch: start again from a "
                "checkpoint"
            )

    def finish_saving(self) -> None:
        """Wait for the save in the background. Collective; raises `CheckpointError` on all ranks when it
        failed."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            self._patiently(saving.part_ends_within)
            _, errors = run_together(saving.wait_for_part, note=lambda error: error)
        except PeerLostError:
            saving.give_up()
            raise
        if any(errors):
            saving.give_up()
        self._patiently(saving.ends_within)
        _, more_errors = run_together(saving.wait, note=lambda error: error)
        for error in (*errors, *more_errors):
            if error is not None:
                if saving.is_over:  # else the disk may never answer; the next save of the tag tidies up
                    self._discard(saving.directory)
                raise CheckpointError(f"the save in the background failed: {error}")

    def _patiently(self, ends_within: Callable[[float], bool]) -> None:
        """Until it has ended on all ranks. A save may take longer than a peer may stay silent, and some ranks
        have nothing to write."""
        patience_s = self.malleus_config.timeout_s / 4
        while not all(run_together(lambda: ends_within(patience_s), note=bool)[1]):
            pass  # each round takes as long as the patience of the rank that waits

    def _begin(self, order: _Order) -> Path | None:
        return begin(self._disk, Path(order.save_dir), order.tag) if self.global_rank == 0 else None

    def _discard(self, directory: Path) -> None:
        if self.global_rank == 0:
            discard(self._disk, directory)

    def _check(self, order: _Order) -> tuple[str, _Held]:
        """Find what is wrong before anything is written."""
        if not order.save_dir:
            raise CheckpointError("save_dir is empty: give a directory that all ranks share")
        check_tag(order.tag)
        check_json(order.client_state, "client_state")
        describe_state(self.basic_optimizer, self.optimizer.storages.values())
        slots = self.module.slots()
        self.optimizer.collect(slots)
        frozen = {
            piece.tensor
            for storage in self.optimizer.storages.values()
            for piece in storage.bucket.pieces
            if storage.bucket.group is None and slots[piece.tensor].is_parameter
        }
        groups = group_states(self.optimizer)
        describe(self, groups, order.client_state, ())
        return order.digest(), _Held(groups, frozen)

    def _take(self, order: _Order, held: Sequence[_Held]) -> tuple[list[Content], Manifest]:
        """The state as of now. For a save in the background: copied to the host."""
        left_out: Collection[str] = ()
        if order.exclude_frozen:
            left_out = {name for part in held for name in part.frozen}
        contents = contents_to_write(self.optimizer, left_out)
        if order.is_async:
            contents = [Content(c.interval, c.values.detach().to("cpu", copy=True)) for c in contents]
        groups = merge_group_states(part.groups for part in held)
        draft = describe(self, groups, order.client_state, left_out)
        # Through JSON, so that it shares nothing with the user or the LR scheduler.
        return contents, Manifest.parse(draft.to_json(), Path(FILE_NAME))
