"""What can go wrong in a switch of plans."""

from __future__ import annotations


class SwitchFailedError(RuntimeError):
    """A switch of plans failed on some rank; all ranks still run the old plan."""


class MigrationError(SwitchFailedError):
    """The state cannot move to the new plan: no rank has a part of it, or a rank has too little memory."""


class StateLostError(RuntimeError):
    """A migration failed on some rank after it had begun: the training state is lost on all ranks."""
