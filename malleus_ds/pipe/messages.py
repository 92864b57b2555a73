"""The engine's instructions that speak with neighbouring stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import engine as stock

from malleus_ds.pipe.data_feed import DataFeed
from malleus_ds.pipe.outputs import tensors_with_gradient
from malleus_ds.pipe.stage_link import Metas, StageLink, StageLinkError, TensorMeta


class Messages(DataFeed):
    """The part of `MalleusPipelineEngine` that sends and receives activations and gradients.

    Shapes are sent with the first activation, and with each where the module has ``dynamic_shape``; those of
    evaluation, where nothing has a gradient, apart from those of training, and anew in each `eval_batch`.
    """

    pipe_buffers: dict[str, list[Any]]
    grad_layer: Any

    def _connect(self) -> None:
        """Link this rank's stage with its neighbours under the current plan."""
        forth, back = self.module.activation_group, self.module.gradient_group
        self._previous = self._link(self.stage_id - 1, back, forth)
        self._next = self._link(self.stage_id + 1, forth, back)
        self.reset_activation_shape()

    def _link(
        self, neighbour: int, towards: dist.ProcessGroup | None, back: dist.ProcessGroup | None
    ) -> StageLink | None:
        if not 0 <= neighbour < len(self.grid.stages):
            return None
        handle = self.grid.get_slice_parallel_group()
        ranks = self.grid.stages[neighbour].ranks
        # Under 1F1B, a neighbour has received what was sent before that, as what it sent in return is here.
        max_sends = self.num_stages - self.stage_id + 1 if self.malleus_config.overlap else 0
        # Elsewhere a wait with a timeout blocks the host, and a watchdog knows that of the group.
        timeout = self.module.groups.timeout if dist.get_backend() == dist.Backend.GLOO else None
        return StageLink(self.grid.slice_group, ranks, handle, self.device, towards, back, max_sends, timeout)

    def _expect(self, num_micro_batches: int) -> None:
        """Before a schedule runs: how many activations, and gradients, come in it."""
        self._num_activations = self._num_gradients = num_micro_batches

    def reset_activation_shape(self) -> None:
        """Shapes are described anew with the next activations, on all ranks."""
        super().reset_activation_shape()
        self._sent_metas: dict[bool, Metas] = {}
        self._received_metas: dict[bool, Metas] = {}

    def _forget_shapes(self) -> None:
        """Of evaluation: one may have other shapes than the last."""
        self._sent_metas.pop(False, None)
        self._received_metas.pop(False, None)

    def finish_sends(self) -> None:
        """Wait until neighbours have all that was sent."""
        for link in (self._previous, self._next):
            if link is not None:
                link.finish()

    def _exec_send_activations(self, buffer_id: int) -> None:
        assert self._next is not None
        with self._timing(stock.PIPE_SEND_OUTPUT_TIMER):
            outputs = self.pipe_buffers["outputs"][buffer_id]
            metas = Metas.of(outputs)
            known = self._sent_metas.get(torch.is_grad_enabled())
            if self.dynamic_shape or known is None:
                self._next.send_metas(metas)
                self._sent_metas[torch.is_grad_enabled()] = metas
            elif known != metas:
                raise StageLinkError(
                    f"stage {self.stage_id} puts out {metas.tensors}, but did {known.tensors} before: where "
                    f"shapes change, build the module with dynamic_shape=True"
                )
            self._next.send(outputs if metas.is_tuple else [outputs])
            self.first_output_send = False

    def _exec_recv_activations(self, buffer_id: int) -> None:
        assert self._previous is not None
        with self._timing(stock.PIPE_RECV_INPUT_TIMER):
            metas = self._received_metas.get(torch.is_grad_enabled())
            if self.dynamic_shape or metas is None:
                metas = self._previous.receive_metas()
                self._received_metas[torch.is_grad_enabled()] = metas
            self._num_activations -= 1
            tensors = self._previous.receive(
                metas.tensors, more=self._num_activations > 0 and not self.dynamic_shape
            )
            for tensor, meta in zip(tensors, metas.tensors, strict=True):
                tensor.requires_grad_(meta.has_gradient)
            self.pipe_buffers["inputs"][buffer_id] = tuple(tensors) if metas.is_tuple else tensors[0]

    def _exec_send_grads(self, buffer_id: int) -> None:
        assert self._previous is not None
        with self._timing(stock.PIPE_SEND_GRAD_TIMER):
            inputs = tensors_with_gradient(self.pipe_buffers["inputs"][buffer_id])
            # What the stage did not use has no gradient; the neighbour waits for one all the same.
            self._previous.send([torch.zeros_like(t) if t.grad is None else t.grad for t in inputs])
            self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int) -> None:
        assert self._next is not None
        with self._timing(stock.PIPE_RECV_GRAD_TIMER):
            outputs = tensors_with_gradient(self.pipe_buffers["outputs"][buffer_id])
            self._num_gradients -= 1
            self.grad_layer = self._next.receive(
                list(map(TensorMeta.of, outputs)), more=self._num_gradients > 0 and not self.dynamic_shape
            )

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        if self.wall_clock_breakdown():
            self.timers(name).start()
        yield
        if self.wall_clock_breakdown():
            self.timers(name).stop()
