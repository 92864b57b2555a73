"""Saving and loading checkpoints, under any plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.utils import logger
from torch import Tensor

from malleus_ds.checkpoint.contents import logical_tensors
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import Manifest
from malleus_ds.checkpoint.opening import Checkpoint, open_checkpoint
from malleus_ds.checkpoint.restoring import Place, places, put_back
from malleus_ds.pipe.agreement import require_equal, run_alike, run_together
from malleus_ds.pipe.control_loop import ControlLoop
from malleus_ds.pipe.resume import Wanted, check, put_back_scalars
from malleus_ds.pipe.saving import Saving
from malleus_ds.zero.state import GroupState


class Checkpointing(Saving):
    """The part of `MalleusPipelineEngine` that saves and loads."""

    control_loop: ControlLoop | None

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of any plan, or one that DeepSpeed's own engine wrote. Collective over the world.

        Returns ``(path, client_state)``, or ``(None, None)`` without a tag and a file ``latest``. Raises
        `CheckpointError` on all ranks for one that is damaged or does not fit; the engine is unchanged then.
        """
        self.require_state()
        self.finish_saving()
        if custom_load_fn is not None:
            raise CheckpointError("custom_load_fn: a pipeline engine does not take one, in DeepSpeed neither")
        everything = not load_module_only
        wanted = Wanted(
            strict=load_module_strict,
            optimizer=load_optimizer_states and everything,
            lr_scheduler=load_lr_scheduler_states and everything,
            position=everything,
        )
        found, notes = run_alike(
            CheckpointError,
            lambda: self._open(load_dir, tag, wanted),
            note=lambda found: "none" if found is None else f"{found.directory.name} ({found.digest})",
        )
        require_equal("checkpoints", notes, "give every rank the same tag, in a directory that all share")
        if found is None:
            logger.warning(f"{load_dir} has no file 'latest': nothing is loaded; give a tag for an older one")
            return None, None
        manifest = found.manifest
        if found.left_out and self.global_rank == 0:
            logger.warning(f"{found.directory}: client state that is not JSON is left out: {found.left_out}")
        run_alike(CheckpointError, lambda: check(self, manifest, wanted, str(found.path)))
        run_alike(CheckpointError, lambda: found.check_share(self.global_rank, len(notes)))
        groups = None
        if wanted.optimizer:
            groups = {i: GroupState(dict(e.states), dict(e.shared)) for i, e in enumerate(manifest.groups)}
        values, _ = run_alike(CheckpointError, lambda: self._read(found, groups))
        run_together(lambda: self._put_back(manifest, wanted, values, groups))
        self._loaded()
        return str(found.directory), dict(manifest.client_state)

    def _open(self, load_dir: str, tag: str | None, wanted: Wanted) -> Checkpoint | None:
        return open_checkpoint(
            Path(load_dir),
            None if tag is None else str(tag),
            model=logical_tensors(self.optimizer),
            with_optimizer=wanted.optimizer,
        )

    def _loaded(self) -> None:
        """The state is that of a checkpoint, on all ranks."""

    def _put_back(
        self,
        manifest: Manifest,
        wanted: Wanted,
        values: Sequence[tuple[Place, Tensor]],
        groups: Mapping[int, GroupState] | None,
    ) -> None:
        slots = self.module.slots()
        self.optimizer.collect(slots)  # layers may have replaced buffers, some of which may stay
        put_back_scalars(self, manifest, wanted)
        put_back(self.optimizer, values, groups)
        for storage in self.optimizer.storages.values():
            self.optimizer.bind(storage, slots)
        if self.control_loop is not None:
            self.control_loop.jump()

    def _read(
        self, checkpoint: Checkpoint, groups: Mapping[int, GroupState] | None
    ) -> list[tuple[Place, Tensor]]:
        """All that this rank holds and the checkpoint has, on the host."""
        saved = {tensor.name for tensor in checkpoint.manifest.tensors}
        with checkpoint.reader() as reader:
            return [
                (place, reader.read(place.span.of(place.state)))
                for place in places(self.optimizer, groups)
                if place.span.tensor in saved
            ]
