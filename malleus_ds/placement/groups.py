"""Process groups, cached by their members, because each costs set-up time and memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

Members = tuple[int, ...]


class GroupCache:
    """Communicators by member tuple.

    timeout: of collectives in groups that are created from now on.

    `ensure` and `trim` are collective over the world: every rank must call them with the same groups
    in the same order, because ``new_group`` numbers the groups by a counter on each rank.
    """

    def __init__(self, timeout: timedelta, max_groups: int = 64) -> None:
        self.timeout = timeout
        self._max_groups = max_groups
        self._groups: OrderedDict[Members, dist.ProcessGroup | None] = OrderedDict()

    def missing(self, wanted: Iterable[Members]) -> list[Members]:
        """Those that are not there, each once, in their order."""
        return [members for members in dict.fromkeys(wanted) if members not in self._groups]

    def ensure(self, wanted: Iterable[Members]) -> int:
        """Create the missing groups; returns how many were created."""
        num_created = 0
        for members in wanted:
            if members in self._groups:
                self._groups.move_to_end(members)
                continue
            group = dist.new_group(list(members), timeout=self.timeout)
            self._groups[members] = group if dist.get_rank() in members else None
            num_created += 1
        return num_created

    def trim(self, in_use: Iterable[Members]) -> None:
        """Destroy the least recently used groups beyond ``max_groups``, but none that is in use."""
        kept = set(in_use)
        idle = [members for members in self._groups if members not in kept]
        for members in idle[: max(0, len(self._groups) - self._max_groups)]:
            self._destroy(members)

    def close(self) -> None:
        """Destroy all groups."""
        for members in list(self._groups):
            self._destroy(members)

    def _destroy(self, members: Members) -> None:
        group = self._groups.pop(members)
        if group is not None:
            dist.destroy_process_group(group)

    def get(self, members: Members) -> dist.ProcessGroup:
        """The group of exactly these members, which this rank belongs to."""
        group = self._groups[members]
        if group is None:
            raise KeyError(f"rank {dist.get_rank()} is not a member of the group {members}")
        return group
