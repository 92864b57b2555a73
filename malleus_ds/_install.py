"""`malleus_ds.install`: for scripts that keep DeepSpeed's names."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import deepspeed
import deepspeed.pipe

from malleus_ds._initialize import initialize
from malleus_ds.pipe.module import MalleusPipelineModule


class Installation:
    """What `install` replaced; undone by `uninstall`, or at the end of a ``with`` block."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, module: Any, name: str, value: Any) -> None:
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def uninstall(self) -> None:
        """Put DeepSpeed's own names back; engines and modules that were made go on. Idempotent."""
        while self._replaced:
            setattr(*self._replaced.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.uninstall()


def install() -> Installation:
    """Let ``deepspeed.initialize`` and ``deepspeed.pipe.PipelineModule`` mean ours in this process.

    These two names are all that is replaced. Models that are no `MalleusPipelineModule` still get
    DeepSpeed's engines. Call it before the script imports the names from DeepSpeed: names that were
    bound earlier, and classes that derive from them, stay DeepSpeed's.
    """
    installation = Installation()
    installation.replace(deepspeed, "initialize", initialize)
    installation.replace(deepspeed.pipe, "PipelineModule", MalleusPipelineModule)
    return installation
