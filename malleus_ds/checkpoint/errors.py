"""The one error of checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read: names the file or the key, and the fix.

    Raised on all ranks alike. After a failed save the checkpoint before it is still there; a failed load
    leaves the engine as it was.
    """
