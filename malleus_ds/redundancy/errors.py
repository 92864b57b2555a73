"""Errors of in-memory redundancy."""

from __future__ import annotations


class RedundancyError(ValueError):
    """The memory cannot be used, or does not hold what the job needs."""
