"""How a command fails, and with which exit code beside `malleus_ds.errors.USER_MISTAKE`."""

from __future__ import annotations

JOB_FAILED = 3
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class UsageError(ValueError):
    """A wrong argument of a command: names it, its value and the fix."""


class JobFailedError(RuntimeError):
    """A job that a command started ended with an error or stopped answering."""
