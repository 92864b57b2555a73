"""Plan-invariant sample order, its loader, and text as bytes. The order itself needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from malleus_ds.data.order import DataError, SampleOrder

if TYPE_CHECKING:
    from malleus_ds.data.loader import PlanInvariantLoader
    from malleus_ds.data.text import VOCABULARY_SIZE, ByteTextDataset

__all__ = ["VOCABULARY_SIZE", "ByteTextDataset", "DataError", "PlanInvariantLoader", "SampleOrder"]


def __getattr__(name: str) -> Any:
    # The torch side loads on first use, so that the order can be used without it.
    if name == "PlanInvariantLoader":
        from malleus_ds.data import loader

        return loader.PlanInvariantLoader
    if name in ("ByteTextDataset", "VOCABULARY_SIZE"):
        from malleus_ds.data import text

        return getattr(text, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
