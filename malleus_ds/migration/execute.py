"""Moving the training state from one placement to another, in place, with two buckets of extra memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from malleus_ds.migration.prepare import MigrationPlan, Round, TensorKey, gradient_sizes
from malleus_ds.migration.transport import Flight, Transport
from malleus_ds.placement import PARAMETER
from malleus_ds.zero.binding import TensorSlot
from malleus_ds.zero.optimizer import MalleusZeroOptimizer
from malleus_ds.zero.state import GroupState, detach_state, state_dtypes
from malleus_ds.zero.storage import BucketStorage


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """What a migration cost on this rank.

    total_bytes, num_rounds: bytes over all ranks, and rounds of this one; copying_s: allocating, copying what
    stays, and pointing the module's tensors at it; packing_s: packing small intervals, and posting;
    wire_s: waiting for messages; finishing_s: gradients, and the torch optimizer.
    """

    total_bytes: int
    sent_bytes: int
    num_transfers: int
    num_rounds: int
    duration_s: float
    copying_s: float
    packing_s: float
    wire_s: float
    unpacking_s: float
    finishing_s: float


def migrate(
    optimizer: MalleusZeroOptimizer,
    plan: MigrationPlan,
    slots: Mapping[str, TensorSlot],
    states: Mapping[int, GroupState],
) -> MigrationReport:
    """Collective over the world: afterwards every rank holds exactly what ``plan.new`` gives it.

    slots: the tensors of this rank's module under the new plan; states: of the optimizer, over all ranks.
    While messages of some rounds are under way, the next ones are copied, packed and posted, as far as
    ``plan.window`` allows (design 4.3). A round frees what it moved when its messages have left.
    Gradients are zero at a step boundary: those that fit no bucket of the new plan are freed first, and what
    is missing is allocated last.
    """
    began = time.perf_counter()
    zeros = _kept_gradients(plan, optimizer.rank, _detach(optimizer, slots))
    mover = _Mover(optimizer, plan, slots, states)
    flights: deque[Flight] = deque()
    num_finished = 0
    for each, must_finish in zip(plan.rounds, plan.window.num_finished, strict=True):
        while num_finished < must_finish:
            mover.transport.finish(flights.popleft())
            num_finished += 1
        flights.append(mover.start(each))
    while flights:
        mover.transport.finish(flights.popleft())
    moved = time.perf_counter()
    optimizer.finish_placement(plan.new, slots, states, zeros)
    ended = time.perf_counter()
    transport = mover.transport
    return MigrationReport(
        total_bytes=plan.total_bytes,
        sent_bytes=transport.sent_bytes,
        num_transfers=sum(len(each.moves) for each in plan.rounds),
        num_rounds=len(plan.rounds),
        duration_s=ended - began,
        copying_s=mover.copying_s,
        packing_s=transport.packing_s,
        wire_s=transport.wire_s,
        unpacking_s=transport.unpacking_s,
        finishing_s=ended - moved,
    )


def _detach(optimizer: MalleusZeroOptimizer, slots: Mapping[str, TensorSlot]) -> list[Tensor]:
    """Put this rank's optimizer state into its storages, and drop what would keep old memory alive.

    Returns the flat gradients.
    """
    optimizer.sinks.disconnect_all()
    for slot in slots.values():
        slot.tensor.grad = None
    detach_state(optimizer.optimizer, optimizer.storages.values())
    gradients = [storage.stop_training() for storage in optimizer.storages.values()]
    for group in optimizer.param_groups:
        group["params"] = []  # the shards are views of the old buffers
    return [gradient for gradient in gradients if gradient is not None]


def _kept_gradients(plan: MigrationPlan, rank: int, gradients: list[Tensor]) -> list[Tensor]:
    """Those of a size that the new plan has, too."""
    wanted = gradient_sizes(plan.new, rank)
    kept = []
    for gradient in gradients:
        size = gradient.dtype, gradient.numel()
        if wanted[size] > 0:
            wanted[size] -= 1
            kept.append(gradient)
    return kept


class _Mover:
    """Starts rounds on one rank. copying_s: time taken so far, without packing."""

    def __init__(
        self,
        optimizer: MalleusZeroOptimizer,
        plan: MigrationPlan,
        slots: Mapping[str, TensorSlot],
        states: Mapping[int, GroupState],
    ) -> None:
        self.transport = Transport(plan.direct_bytes)
        self.copying_s = 0.0
        self._optimizer = optimizer
        self._plan = plan
        self._slots = slots
        self._states = states

    def start(self, each: Round) -> Flight:
        """Make the new parts of a round's buckets, copy what stays, and post what comes and goes."""
        began = time.perf_counter()
        before: dict[int, BucketStorage] = {}
        after: dict[int, BucketStorage] = {}
        for index in each.buckets:
            source = self._optimizer.storages.pop(index, None)
            target = self._allocate(index, source)
            if source is not None:
                before[index] = source
            if target is not None:
                after[index] = self._optimizer.storages[index] = target
                self._optimizer.bind(target, self._slots)
            if source is not None and target is not None:
                self._copy_kept(source, target)
        messages = self.transport.messages(
            each.moves,
            lambda move: before[move.bucket].interval(move.state, move.start, move.stop),
            lambda move: after[move.bucket].interval(move.state, move.start, move.stop),
        )
        self.copying_s += time.perf_counter() - began
        return self.transport.post(messages)

    def _allocate(self, index: int, before: BucketStorage | None) -> BucketStorage | None:
        """The new storage, with the tensors that are the same under both plans."""
        optimizer, placement = self._optimizer, self._plan.new
        rank, device = optimizer.rank, optimizer.device
        if not placement.parts_of(index, rank):
            return None
        old = {} if before is None else _tensors(before)
        parts = placement.parts_of(index, rank)
        flat = old.get((PARAMETER, parts[0].start, placement.flat_size(index, rank)))
        storage = BucketStorage.allocate(placement, index, rank, device, flat)
        dtypes = state_dtypes(storage.bucket, self._states)
        for shard in storage.shards:
            for name, dtype in dtypes.items():
                tensor = old.get((name, shard.start, shard.num_elements))
                if tensor is None:
                    tensor = torch.empty(shard.num_elements, dtype=dtype, device=device)
                shard.state[name] = tensor
        return storage

    def _copy_kept(self, before: BucketStorage, after: BucketStorage) -> None:
        """Copy the intervals that this rank has under both plans."""
        old, new = _tensors(before), _tensors(after)
        for (state, start, _), source in old.items():
            for (other, first, _), target in new.items():
                if state != other or source is target:
                    continue
                # Flat parameters have padding behind their last element.
                high = min(start + len(source), first + len(target), before.stop, after.stop)
                low = max(start, first)
                if low < high:
                    target[low - first : high - first].copy_(source[low - start : high - start])


def _tensors(storage: BucketStorage) -> dict[TensorKey, Tensor]:
    """The state tensors of a storage, as `prepare.tensors_of` names them."""
    flat = {(PARAMETER, storage.start, storage.flat.numel()): storage.flat}
    return flat | {
        (name, shard.start, shard.num_elements): tensor
        for shard in storage.shards
        for name, tensor in shard.state.items()
    }
