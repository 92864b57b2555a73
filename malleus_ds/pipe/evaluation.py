"""Forward passes only, under plans that may be uneven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from malleus_ds.detector.clock import ComputeClock
from malleus_ds.pipe.agreement import peer_errors
from malleus_ds.pipe.messages import Messages


class Evaluation(Messages):
    """The part of `MalleusPipelineEngine` that evaluates."""

    clock: ComputeClock
    registration_order: tuple[str, ...]
    """Names of all tensors; those of a layer are in the order of its module."""
    outputs: Any
    total_loss: Any
    _micro_batch_totals: Tensor | None

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Forward passes only, as in DeepSpeed: each pipeline pulls ``num_micro_batches`` (its own
        share by default) from ``data_iter``.

        Returns the mean loss on every rank. With ``reduce_output=None`` the list of the pipeline's
        losses, and with ``compute_loss=False`` its outputs, reduced as asked, on last stages and None
        elsewhere. With ``return_logits`` a pair with the outputs of the last micro-batch.
        Outputs are what the rank's last layer returns: where the head is cut for tensor parallelism, this
        rank's part of the logits, ``[..., vocabulary / degree]``.
        """
        iterator, owns_data = self.data_iterator, self._owns_data
        self.module.eval()
        self._compute_loss, self.eval_return_logits = compute_loss, return_logits
        self.total_loss = None
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._micro_batch_totals = totals if compute_loss else None
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        try:
            self.set_dataiterator(data_iter)
            with peer_errors("in eval_batch", self.abandon), torch.no_grad():
                if not self.is_standby:
                    self._expect(count)
                    self._forget_shapes()
                    self._exec_schedule(self._inference_schedule(count))
                    self.finish_sends()
                dist.all_reduce(totals)  # also keeps the ranks of two evaluations in step
        finally:
            self.data_iterator, self._owns_data = iterator, owns_data
            self.eval_return_logits = False
        self.clock.take_s()  # evaluation is not part of the next step's record
        output: Any = None
        if compute_loss:
            output = (totals[1] / totals[0]).float()
            if self.global_rank == 0 and self.monitor.enabled:
                self.monitor.write_events([("Train/Samples/eval_loss", output.item(), self.global_samples)])
        if not compute_loss or reduce_output is None:
            output = None
            if self.is_last_stage() and not self.is_standby:
                output = self._reduce_outputs(
                    self.fwd_outputs, reduce=reduce_output, reduce_dp=False, micro_batches=count
                )
        if not return_logits:
            return output
        logits, self.outputs = self.outputs, None
        return output, logits
