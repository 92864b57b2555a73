"""Checkpoints that do not depend on the plan: saved under one, they load under any other."""

from malleus_ds.checkpoint.errors import CheckpointError

__all__ = ["CheckpointError"]
