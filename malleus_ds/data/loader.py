"""Micro-batches of a map-style data set at any position of a `SampleOrder`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import IterableDataset, default_collate

from malleus_ds.data.order import DataError, SampleOrder


class MapStyleDataset(Protocol):
    """A data set with a length and random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_map_style(dataset: Any) -> None:
    """Raise `DataError` for a data set without length or random access."""
    # Torch's iterable data sets inherit a `__getitem__` that only raises.
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_map_style or isinstance(dataset, IterableDataset):
        raise DataError(
            f"training_data is a {type(dataset).__name__}, which lacks a length or random access; "
            f"pass a map-style data set, or leave training_data out and pass a data_iter to train_batch"
        )


class PlanInvariantLoader:
    """Gives any pipeline the micro-batches it takes in a step, by their position in the order.

    It keeps no position of its own, so a rank may start, stop or change its share at any step.
    collate_fn: list of samples -> micro-batch, torch's `default_collate` unless given. Raises
    `DataError` for iterable-style data sets, an order of another length and
    ``micro_batch_size < 1``.
    """

    def __init__(
        self,
        dataset: MapStyleDataset,
        micro_batch_size: int,
        order: SampleOrder,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        check_map_style(dataset)
        if len(dataset) != order.num_samples:
            raise DataError(
                f"the order has {order.num_samples} samples but the data set {len(dataset)}; "
                f"make the order with num_samples=len(dataset)"
            )
        if micro_batch_size < 1:
            raise DataError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.order = order
        self._collate = collate_fn if collate_fn is not None else default_collate

    def micro_batch(self, first_position: int) -> Any:
        """The collated samples at positions ``[first_position, first_position + micro_batch_size)``."""
        indices = self.order.indices(first_position, first_position + self.micro_batch_size)
        return self._collate([self.dataset[index] for index in indices.tolist()])

    def micro_batches(self, first_position: int, start: int, stop: int) -> Iterator[Any]:
        """Micro-batches with global indices ``[start, stop)`` of one step.

        first_position: position of the step's first sample, ``step * global_batch_size``.
        """
        for index in range(start, stop):
            yield self.micro_batch(first_position + index * self.micro_batch_size)

    def __iter__(self) -> Iterator[Any]:
        """All micro-batches from position 0, epoch after epoch, without end."""
        position = 0
        while True:
            yield self.micro_batch(position)
            position += self.micro_batch_size

    def __len__(self) -> int:
        """Micro-batches that cover one epoch (the last may reach into the next)."""
        return -(-self.order.num_samples // self.micro_batch_size)
