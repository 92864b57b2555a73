"""Changing the plan of an engine between two steps: checks first, then the state moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from malleus_ds.migration.errors import MigrationError, StateLostError, SwitchFailedError
from malleus_ds.migration.execute import MigrationReport, migrate
from malleus_ds.migration.prepare import MigrationPlan, plan_migration, reserve
from malleus_ds.pipe.agreement import PeerLostError, require_equal, run_together
from malleus_ds.pipe.grid import plan_groups
from malleus_ds.pipe.interruption import Interruption
from malleus_ds.placement import Placement, place
from malleus_ds.plan import ParallelPlan, PlanError
from malleus_ds.zero.binding import TensorSlot
from malleus_ds.zero.state import GroupState, describe_state, merge_group_states, missing_state, state_schema

if TYPE_CHECKING:
    from malleus_ds.pipe.engine import MalleusPipelineEngine


@dataclass(frozen=True, slots=True)
class SwitchReport:
    """What `MalleusPipelineEngine.reconfigure` did, on this rank.

    parts_s: where its time went, in seconds by name; waiting for other ranks counts where it happens.
    """

    step: int
    migration: MigrationReport
    num_new_groups: int
    duration_s: float
    parts_s: dict[str, float]


def switch(engine: MalleusPipelineEngine, plan: ParallelPlan) -> SwitchReport:
    """See `MalleusPipelineEngine.reconfigure`. Collective over the world."""
    engine.require_state()
    interruption = Interruption()
    with interruption.part("copies"):
        engine.end_keeping()
    with interruption.part("agreement"):
        states = _agree(engine, plan)
    with interruption.part("groups"):
        placement = place(plan, engine.placement.buckets)
        in_use = groups_of(placement)
        num_new_groups = engine.module.groups.ensure(in_use)
    slots, migration_plan = _prepare(engine, placement, states, interruption)
    try:
        report = migrate(engine.optimizer, migration_plan, slots, states)
    except Exception as error:
        # Peers wait for what this rank will never send, until its process ends and closes its connections.
        engine.abandon()
        engine.is_state_lost = True
        raise StateLostError(
            f"rank {engine.global_rank}: the switch before step {engine.global_steps} failed when state had "
            f"begun to move, which cannot be undone: start again from a checkpoint "
            f"({type(error).__name__}: {error})"
        ) from error
    for name in ("copying", "packing", "wire", "unpacking", "finishing"):
        interruption.add(name, getattr(report, f"{name}_s"))
    with interruption.part("groups"):
        engine.module.groups.trim(in_use)
    with interruption.part("position"):
        engine.moved()
    return SwitchReport(
        engine.global_steps, report, num_new_groups, interruption.duration_s, interruption.parts_s
    )


def prepare(engine: MalleusPipelineEngine, plan: ParallelPlan, max_groups: int | None) -> int:
    """See `MalleusPipelineEngine.prepare`. Collective over the world."""
    groups = engine.module.groups
    missing = groups.missing(groups_of(place(plan, engine.placement.buckets)))
    return len(missing) - groups.ensure(missing[:max_groups])


def groups_of(placement: Placement) -> list[tuple[int, ...]]:
    """The process groups that a plan needs, in an order that all ranks agree on."""
    return [*plan_groups(placement.plan), *placement.groups]


def _agree(engine: MalleusPipelineEngine, plan: ParallelPlan) -> dict[int, GroupState]:
    """Check the plan on all ranks; returns what the optimizer holds, over all ranks."""

    def check() -> dict[int, GroupState]:
        engine.module.check(plan)
        engine.check_nodes(plan)
        shape, own = (
            f"{p.num_micro_batches} micro-batches of {p.micro_batch_size} samples"
            for p in (plan, engine.plan)
        )
        if shape != own:
            raise PlanError(f"the plan has {shape}, but the job has {own}; a switch must keep both")
        engine.optimizer.collect(engine.module.slots())
        return describe_state(engine.basic_optimizer, engine.optimizer.storages.values())

    _, notes = run_together(check, note=lambda states: (plan.digest, states))
    digests = [digest for digest, _ in notes]
    require_equal("plans", digests, "call reconfigure with the same plan on every rank")
    return merge_group_states(states for _, states in notes)


def _prepare(
    engine: MalleusPipelineEngine,
    placement: Placement,
    states: dict[int, GroupState],
    interruption: Interruption,
) -> tuple[dict[str, TensorSlot], MigrationPlan]:
    """The module's tensors under ``placement``, and how the state gets there.

    When a rank cannot build its layers, or cannot send or take its part of the state, all go back.
    """

    def build() -> tuple[dict[str, TensorSlot], MigrationPlan | None, str | None]:
        with interruption.part("layers"):
            slots = engine.module.rebuild(placement.plan)
            engine.cast_module()
            engine.optimizer.check_slots(placement, slots)
        with interruption.part("preparation"):
            try:
                return slots, _plan_migration(engine, placement, states), None
            except MigrationError as error:
                return slots, None, str(error)

    engine.param_names.clear()  # its keys would keep the parameters of dropped layers alive
    error: Exception
    try:
        with interruption.part("agreement"):
            (slots, migration_plan, _), faults = run_together(build, note=lambda built: built[2])
    except PeerLostError:
        raise
    except Exception as fault:  # whatever a layer's constructor raises
        error = SwitchFailedError(f"the old plan stays: {fault}")
        error.__cause__ = fault
    else:
        told = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault is not None]
        if migration_plan is not None and not told:
            engine.module.forget()
            return slots, migration_plan
        error = MigrationError(f"the old plan stays: {'; '.join(told)}")
    slots, _ = run_together(engine.module.go_back)
    for storage in engine.optimizer.storages.values():
        engine.optimizer.bind(storage, slots)
    engine.moved()
    raise error


def _plan_migration(
    engine: MalleusPipelineEngine, placement: Placement, states: dict[int, GroupState]
) -> MigrationPlan:
    """Raises `MigrationError` when this rank lacks state that it should have, or memory."""
    optimizer = engine.optimizer
    absent = missing_state(optimizer.optimizer, optimizer.storages.values(), states)
    if absent is not None:
        raise MigrationError(f"the optimizer has no {absent}, which other ranks have: load a checkpoint")
    schema = state_schema(placement, states)
    plan = plan_migration(engine.placement, placement, schema, optimizer.rank, engine.node_of)
    reserve(plan, optimizer.allocate_bytes)
    return plan
