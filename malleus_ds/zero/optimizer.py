"""ZeRO-1 over sync groups: DeepSpeed's optimizer contract, for stages that need not be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from torch import Tensor

from malleus_ds.placement import LayoutError, LogicalTensor, Part, Placement, local_shape
from malleus_ds.placement.groups import GroupCache
from malleus_ds.zero.binding import TensorSlot
from malleus_ds.zero.collectives import Collective, all_gather, reduce_scatter
from malleus_ds.zero.precision import GradientSinks
from malleus_ds.zero.state import GroupState, attach_state
from malleus_ds.zero.storage import BucketStorage

_LEAST_WEIGHT = 1e-30
"""A step without any valid token has zero gradients, not a division by zero."""


class MalleusZeroOptimizer(ZeROOptimizer):  # type: ignore[misc]
    """Reduces, clips, steps and gathers bucket by bucket, each over the ranks that hold it.

    Gradients are plain sums over micro-batches; they are divided once, at the step, by the total
    weight of the global batch (design 4.2). The number and identity of the torch parameter groups
    never change, on any rank and over any plan, so LR schedulers keep working; only the tensors in
    them do.
    """

    # What DeepSpeed's engine reads of an optimizer.
    custom_loss_scaler = False
    external_loss_scale = None
    torch_autocast_gradscaler = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layout: Sequence[LogicalTensor],
        groups: GroupCache,
        device: torch.device,
        clip_norm: float = 0.0,
        loss_scaler: LossScalerBase | None = None,
        skips_overflow: bool = False,
    ) -> None:
        """optimizer: any element-wise torch optimizer; groups: must hold the groups of each placement
        before it is adopted; clip_norm: largest global gradient norm, 0 for none; loss_scaler: for fp16;
        skips_overflow: a step with a gradient that is not finite changes nothing, on any rank. That takes
        a look at the norm, for which the device must be waited for."""
        super().__init__()
        self.optimizer = optimizer
        self.dp_process_group = dist.group.WORLD
        self.groups = groups
        self.device = device
        self.clip_norm = clip_norm
        self.shapes = {tensor.name: tensor.shape for tensor in layout}
        self.rank = dist.get_rank()
        self.allocate_bytes: Callable[[int], Tensor] = partial(torch.empty, dtype=torch.uint8, device=device)
        """Tries whether memory is there, before a migration."""
        self.placement: Placement | None = None
        self.storages: dict[int, BucketStorage] = {}
        self.local_totals = torch.zeros(2, dtype=torch.float64, device=device)
        """This rank's share of the step: (weight of its micro-batches, sum of their losses)."""
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        """The same, summed over the world by the last step."""
        self.loss_scaler = loss_scaler
        self.dynamic_loss_scale = loss_scaler is not None and loss_scaler.dynamic
        self.skips_overflow = skips_overflow
        self.overflow = False
        """Whether the last step was skipped."""
        self.sinks = GradientSinks()
        self._global_grad_norm: Tensor | None = None
        self._running: list[Collective] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[Tensor, Any]:
        return self.optimizer.state

    @property
    def loss_scale(self) -> float:
        """Factor on the loss of the next step. It follows from all-reduced numbers, so it is the same on
        all ranks, standby ones too, and has nothing to migrate."""
        return 1.0 if self.loss_scaler is None else float(self.loss_scaler.loss_scale)

    cur_scale = loss_scale
    """DeepSpeed's other name of it."""

    def adopt(self, placement: Placement, slots: Mapping[str, TensorSlot]) -> None:
        """Take over the tensors that this rank's module has now, and agree with the other holders.

        The source of a part is its holder in the first pipeline, of the bucket's first layer.
        """
        for index in placement.held_by(self.rank):
            storage = BucketStorage.allocate(placement, index, self.rank, self.device)
            for name, view in storage.views(storage.flat, self.shapes):
                view.copy_(slots[name].tensor.detach())
            for shard in storage.shards:
                if len(shard.part.ranks) > 1:
                    source = placement.first_holder(index, shard.part)
                    group = self.groups.get(shard.part.ranks)
                    dist.broadcast(storage.part(storage.flat, shard.part), source, group=group)
            self.storages[index] = storage
        self.finish_placement(placement, slots)

    def check_slots(self, placement: Placement, slots: Mapping[str, TensorSlot]) -> None:
        """Raise `LayoutError` unless a module has exactly the tensors that ``placement`` gives this rank."""
        expected = {
            piece.tensor: local_shape(self.shapes[piece.tensor], placement.num_cuts(index, self.rank))
            for index in placement.held_by(self.rank)
            for piece in placement.buckets[index].pieces
        }
        strange = expected.keys() ^ slots.keys()
        if strange:
            raise LayoutError(
                f"the layers have other tensors than at the start: {sorted(strange)}; register all "
                f"parameters and buffers in the layers' constructors"
            )
        for name, expected_shape in expected.items():
            shape = tuple(slots[name].tensor.shape)
            if shape != expected_shape:
                raise LayoutError(
                    f"{name!r} has shape {shape}, but {expected_shape} belongs here: a layer's constructor "
                    f"must give the shapes of the start"
                )

    def collect(self, slots: Mapping[str, TensorSlot]) -> None:
        """Take in tensors that a layer replaced by new ones, such as a buffer assigned in forward."""
        for storage in self.storages.values():
            for name, view in storage.views(storage.flat, self.shapes):
                tensor = slots[name].tensor.detach()
                if tensor.data_ptr() != view.data_ptr():
                    view.copy_(tensor)

    def bind(self, storage: BucketStorage, slots: Mapping[str, TensorSlot]) -> None:
        """Point the module's tensors, and their gradients, at the storage."""
        for name, view in storage.views(storage.flat, self.shapes):
            slots[name].point_at(view)
            if slots[name].is_parameter and storage.bucket.group is None:
                slots[name].tensor.requires_grad_(False)  # a layer built anew has forgotten it
        if storage.gradient is not None:
            for name, view in storage.views(storage.gradient, self.shapes):
                self.sinks.connect(name, slots[name].tensor, view)

    def finish_placement(
        self,
        placement: Placement,
        slots: Mapping[str, TensorSlot],
        states: Mapping[int, GroupState] | None = None,
        zeros: list[Tensor] | None = None,
    ) -> None:
        """Allocate gradients and give the shards, with their state, to the torch optimizer.

        zeros: buffers to take for gradients, where they fit.
        """
        self.placement = placement
        self.storages = dict(sorted(self.storages.items()))
        for group in self.param_groups:
            group["params"] = []
        for storage in self.storages.values():
            storage.prepare_training(zeros)
            self.bind(storage, slots)
            for shard in storage.shards:
                if shard.parameter is not None:
                    self.param_groups[storage.bucket.group or 0]["params"].append(shard.parameter)
        attach_state(self.optimizer, self.storages.values(), states or {})

    def trained(self) -> list[tuple[BucketStorage, Tensor]]:
        """The storages that are optimized, in bucket order, with their flat gradient."""
        return [(s, s.gradient) for s in self.storages.values() if s.gradient is not None]

    def reduce_gradients(self, pipeline_parallel: bool = True) -> None:
        """Start summing each part's gradient over its holders; `step` waits for it."""
        for storage, gradient in self.trained():
            if storage.copies > 1:  # all of them are in the sum (design 4.2)
                gradient.mul_(1 / storage.copies)
            for part, group in self._shared_parts(storage):
                self._running.append(reduce_scatter(storage.padded_part(gradient, part), group))

    def _shared_parts(self, storage: BucketStorage) -> Iterator[tuple[Part, dist.ProcessGroup]]:
        """The parts that other ranks hold, too, with their groups."""
        for part in (shard.part for shard in storage.shards):
            if len(part.ranks) > 1 and part.stop > part.start:
                yield part, self.groups.get(part.ranks)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Divide by the total weight, clip by the true global norm, step the shards, gather.

        Each element of the model has exactly one owner, so the sum of the owners' squares is the
        squared norm; it travels with the weight and the loss in one reduction over the world. A
        gradient that is not finite anywhere makes the norm so, everywhere.
        """
        self._wait()
        gradients = [
            storage.own(gradient, shard)
            for storage, gradient in self.trained()
            for shard in storage.shards
            if shard.num_elements > 0
        ]
        reduced = torch.cat((_squared_norm(gradients, self.device), self.local_totals))
        dist.all_reduce(reduced)
        self.totals = reduced[1:]
        self.local_totals.zero_()
        scaled_weight = self.totals[0].clamp(min=_LEAST_WEIGHT) * self.loss_scale
        self._global_grad_norm = reduced[0].sqrt() / scaled_weight
        if self._is_skipped():
            return
        scale = 1.0 / scaled_weight
        if self.clip_norm > 0:
            scale = scale * (self.clip_norm / (self._global_grad_norm + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_(gradients, scale.to(torch.float32))
        self.optimizer.step()
        for storage, _ in self.trained():
            storage.take_masters()
            for part, group in self._shared_parts(storage):
                self._running.append(all_gather(storage.padded_part(storage.flat, part), group))
        self._wait()

    def _is_skipped(self) -> bool:
        """Whether the gradients of this step overflowed; adapts the loss scale."""
        assert self._global_grad_norm is not None, "called in a step"
        self.overflow = self.skips_overflow and not bool(self._global_grad_norm.isfinite())
        if self.overflow:
            self._global_grad_norm.fill_(torch.inf)
        if self.loss_scaler is not None:
            self.loss_scaler.update_scale(self.overflow)
        return self.overflow

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the flat gradients; in fp32 ``p.grad`` stays a view of them."""
        for _, gradient in self.trained():
            gradient.zero_()

    def _wait(self) -> None:
        for collective in self._running:
            collective.wait()
        self._running.clear()


def _squared_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over all tensors, shape [1], float64."""
    if not tensors:
        return torch.zeros(1, dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    return norms.double().square().sum().reshape(1)
