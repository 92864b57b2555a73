"""Another global batch in a running job."""

from __future__ import annotations

from dataclasses import replace

from malleus_ds.pipe.agreement import require_equal, run_together
from malleus_ds.pipe.evaluation import Evaluation
from malleus_ds.plan import PlanError
from malleus_ds.plan.batch_size import with_batch_size
from malleus_ds.zero.optimizer import MalleusZeroOptimizer


class BatchSize(Evaluation):
    """The part of `MalleusPipelineEngine` that changes the global batch."""

    optimizer: MalleusZeroOptimizer
    _shares: tuple[int, ...]

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch between two steps; micro-batches keep their size. Collective.

        The pipelines share the micro-batches in the proportions of the last plan that was given or
        made; the data goes on where it is. Raises `PlanError` when the size is not a multiple of the
        micro-batch size, or below one micro-batch per pipeline, and `AgreementError` when ranks differ.
        """
        plan, sizes = run_together(
            lambda: with_batch_size(self.plan, train_batch_size, self._shares),
            note=lambda plan: str(plan.global_batch_size),
        )
        require_equal("batch sizes", sizes, "call set_train_batch_size with the same size on every rank")
        self.module.take_batch_of(plan)
        if self.optimizer.placement is not None:
            self.optimizer.placement = replace(self.optimizer.placement, plan=plan)
        self._take_position()
        self.dp_world_size = self.seq_dp_world_size = self.grid.data_parallel_size
        self._config.train_batch_size = train_batch_size
        self._config.gradient_accumulation_steps = plan.num_micro_batches // self.dp_world_size
        self.tput_timer.batch_size = self.batch_timer.batch_size = train_batch_size

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Refused: layer times and plans are made for one size."""
        raise PlanError(
            f"train_micro_batch_size_per_gpu cannot become {micro_batch_size} in a running job: plans are "
            f"made for micro-batches of {self.plan.micro_batch_size} samples; change the number of "
            f"micro-batches with set_train_batch_size"
        )
