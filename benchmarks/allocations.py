"""The memory of tensors over time, on one thread of one process."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, notes when the storage of a tensor comes into being and when it is freed.

    ``events`` are ``(storage, bytes)`` in order, bytes negative when it is freed; a storage is known by
    a number. Storages made before must be given, or they are not seen. Not seen are buffers that
    libraries keep beside tensors, such as the sockets' of gloo.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []
        self._numbers: dict[int, int] = {}  # by address of the storage object, while it lives
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in existing:
            self.number(tensor)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.number(leaf)
        return result

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage, which is noted when it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            number = len(self._references)
            num_bytes = storage.nbytes()
            self._numbers[key] = number
            self._references[number] = weakref.ref(storage, partial(self._freed, key, number, num_bytes))
            self.events.append((number, num_bytes))
        return self._numbers[key]

    def _freed(self, key: int, number: int, num_bytes: int, _: Any) -> None:
        del self._numbers[key]
        self.events.append((number, -num_bytes))

    def peak_bytes(self, left_out: Iterable[int] = ()) -> int:
        """Most bytes at once, without the storages of the numbers ``left_out``."""
        ignored = set(left_out)
        held = peak = 0
        for number, num_bytes in self.events:
            held += 0 if number in ignored else num_bytes
            peak = max(peak, held)
        return peak
