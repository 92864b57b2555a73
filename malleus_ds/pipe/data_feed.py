"""Where a rank's micro-batches come from: `training_data`, or an iterator of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from malleus_ds.config import MalleusConfig
from malleus_ds.data.loader import PlanInvariantLoader, check_map_style
from malleus_ds.data.order import DataError, SampleOrder
from malleus_ds.pipe.module import MalleusPipelineModule
from malleus_ds.plan import ParallelPlan


class DataFeed(PipelineEngine):  # type: ignore[misc]
    """The part of `MalleusPipelineEngine` that reads data: any rank may become a first or last stage."""

    malleus_config: MalleusConfig
    module: MalleusPipelineModule
    data_iterator: Iterator[Any] | None
    _owns_data: bool
    _stale_iterator: Iterator[Any] | None

    @property
    def plan(self) -> ParallelPlan:
        """The plan that the next step runs under."""
        return self.module.plan

    @property
    def is_standby(self) -> bool:
        return bool(self.grid.is_standby)

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """`training_data` in the plan-invariant order; other routes as in DeepSpeed."""
        if args or kwargs:
            return super().deepspeed_io(dataset, *args, **kwargs)
        check_map_style(dataset)
        order = SampleOrder(len(dataset), self.malleus_config.seed, self.malleus_config.shuffle)
        return PlanInvariantLoader(dataset, self.plan.micro_batch_size, order, self.collate_fn)

    def _build_data_iter(self, dataset: Any) -> None:
        self._owns_data = True

    def set_dataloader(self, loader: Any) -> None:
        """Take each pipeline's micro-batches from ``loader``, from its start."""
        self.set_dataiterator(iter(loader))
        self.training_dataloader = loader

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Each pipeline pulls its own micro-batches from its ``iterator``.

        All ranks keep it, because a switch may make any rank a first or last stage.
        """
        self._owns_data = False
        self.data_iterator = iterator

    def _check_iterator(self, data_iter: Iterator[Any] | None) -> None:
        """Raise `DataError` where this rank would read no data, or data meant for another place."""
        if data_iter is not None and data_iter is self._stale_iterator:
            raise DataError(
                "the data_iter was made for the plan before the switch: make a new one on every rank, for "
                "this rank's pipeline (engine.plan) and the samples that come next, or use training_data="
            )
        reads = not self.is_standby and (self.is_first_stage() or self.is_last_stage())
        if reads and data_iter is None and self.data_iterator is None and not self._owns_data:
            raise DataError("no data: pass training_data= to initialize, or a data_iter to train_batch")
