"""The optimizer and migration under TP groups, against torch's AdamW on whole tensors.

No engine and no layers: each rank's module has the tensors that its place in a plan gives it, and
gradients are drawn at random, one whole gradient per stage and tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn

from malleus_ds.migration.execute import migrate
from malleus_ds.migration.prepare import plan_migration
from malleus_ds.placement import LayoutError, LogicalTensor, make_buckets, place
from malleus_ds.placement.groups import GroupCache
from malleus_ds.plan import ParallelPlan, Pipeline, Stage
from malleus_ds.zero.binding import TensorSlot, tensor_slots
from malleus_ds.zero.optimizer import MalleusZeroOptimizer
from malleus_ds.zero.state import describe_state, merge_group_states, state_schema
from tests.harness import RankPool
from tests.strategies import legal_plans

WORLD_SIZE = 8
NUM_LAYERS = 5
NUM_SLICES = 4
CLIP_NORM = 1.5
LEARNING_RATE = 0.05
NUM_STEPS = 2


def tensor(
    name: str,
    shape: tuple[int, ...],
    layers: tuple[int, ...],
    *,
    is_cut: bool,
    group: int | None = 0,
    dtype: str = "float32",
) -> LogicalTensor:
    return LogicalTensor(name, shape, dtype, getattr(torch, dtype).itemsize, layers, group, is_cut)


LAYOUT = [
    *(tensor(f"weight{layer}", (8, 5), (layer,), is_cut=True) for layer in range(NUM_LAYERS)),
    *(tensor(f"cut_bias{layer}", (4,), (layer,), is_cut=True) for layer in range(1, NUM_LAYERS)),
    *(tensor(f"norm{layer}", (5,), (layer,), is_cut=False) for layer in range(NUM_LAYERS)),
    *(
        tensor(f"bias{layer}", (3, 2), (layer,), is_cut=False, group=1, dtype="bfloat16")
        for layer in range(NUM_LAYERS)
    ),
    tensor("tied", (12, 3), (0, NUM_LAYERS - 1), is_cut=True, group=1, dtype="bfloat16"),
    tensor("tied_norm", (7,), (0, NUM_LAYERS - 1), is_cut=False),
    tensor("frozen", (4, 3), (2,), is_cut=True, group=None),
    tensor("counter", (), (3,), is_cut=False, group=None, dtype="int64"),
]
BUCKETS = make_buckets(LAYOUT, bucket_bytes=64, num_slices=NUM_SLICES)
MOMENTS = ("exp_avg", "exp_avg_sq")

Held = dict[tuple[str, int], list[tuple[int, Tensor]]]
"""(state tensor, bucket) -> first element and values of each interval that a rank holds."""


class Groups:
    """Keeps the groups of a rank between calls."""

    def __init__(self) -> None:
        self.cache: GroupCache | None = None

    def get(self) -> GroupCache:
        if self.cache is None:
            self.cache = GroupCache(timedelta(seconds=60))
        return self.cache


GROUPS = Groups()


def whole_values(seed: int) -> dict[str, Tensor]:
    """Random values of all tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        each.name: torch.randn(each.shape, generator=generator).mul(10).to(getattr(torch, each.dtype))
        for each in LAYOUT
    }


def uses(stage: Stage, each: LogicalTensor) -> bool:
    return any(stage.layers[0] <= layer < stage.layers[1] for layer in each.layers)


def local(whole: Tensor, each: LogicalTensor, stage: Stage, rank: int) -> Tensor:
    """What a rank of a stage has of a whole tensor."""
    return whole.chunk(stage.degree)[stage.ranks.index(rank)] if each.is_cut else whole


def stage_of(plan: ParallelPlan, rank: int) -> Stage | None:
    return next((stage for _, _, stage in plan.stages() if rank in stage.ranks), None)


def module_of(plan: ParallelPlan, rank: int, values: dict[str, Tensor] | None) -> nn.Module:
    """The tensors that belong to a rank; without values they are wrong ones, to be replaced."""
    module, stage = nn.Module(), stage_of(plan, rank)
    for each in LAYOUT:
        if stage is None or not uses(stage, each):
            continue
        whole = whole_values(-1)[each.name] if values is None else values[each.name]
        own = local(whole, each, stage, rank).clone()
        if own.is_floating_point():
            module.register_parameter(each.name, nn.Parameter(own, requires_grad=each.group is not None))
        else:
            module.register_buffer(each.name, own)
    return module


def gradients(plan: ParallelPlan, step: int) -> dict[tuple[int, ...], dict[str, Tensor]]:
    """By the ranks of each stage: gradients of the whole tensors that it uses."""
    drawn = {}
    for index, (_, _, stage) in enumerate(plan.stages()):
        values = whole_values(1000 * step + index)
        drawn[stage.ranks] = {
            each.name: values[each.name] for each in LAYOUT if each.group is not None and uses(stage, each)
        }
    return drawn


class Reference:
    """AdamW on the whole tensors, with the sum of all stages' gradients."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.parameters = {
            each.name: nn.Parameter(values[each.name].float()) for each in LAYOUT if each.group is not None
        }
        groups = [
            {"params": [self.parameters[each.name] for each in LAYOUT if each.group == group]}
            for group in (0, 1)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)

    def step(self, plan: ParallelPlan, step: int) -> float:
        drawn = gradients(plan, step)
        for name, parameter in self.parameters.items():
            total = torch.stack([each[name].float() for each in drawn.values() if name in each]).sum(0)
            parameter.grad = total / plan.num_micro_batches
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), CLIP_NORM)
        self.optimizer.step()
        return float(norm)

    def values(self, state: str, name: str) -> Tensor:
        parameter = self.parameters[name]
        is_moment = state in MOMENTS
        return self.optimizer.state[parameter][state] if is_moment else parameter.detach()


class Job:
    """One rank of a job that follows plans."""

    def __init__(self, plan: ParallelPlan, values: dict[str, Tensor]) -> None:
        self.rank, self.plan = dist.get_rank(), plan
        stage = stage_of(plan, self.rank)
        # Only the first pipeline knows the values: the others must get them.
        is_source = stage is not None and stage in plan.pipelines[0].stages
        self.slots = tensor_slots(module_of(plan, self.rank, values if is_source else None))
        groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
        self.optimizer = MalleusZeroOptimizer(
            torch.optim.AdamW(groups, lr=LEARNING_RATE), LAYOUT, GROUPS.get(), torch.device("cpu"), CLIP_NORM
        )
        placement = place(plan, BUCKETS)
        GROUPS.get().ensure(placement.groups)
        self.optimizer.adopt(placement, self.slots)

    def step(self, step: int) -> float:
        self.optimizer.zero_grad()
        for ranks, by_name in gradients(self.plan, step).items():
            stage = stage_of(self.plan, self.rank)
            if stage is None or stage.ranks != ranks:
                continue
            for each in (each for each in LAYOUT if each.name in by_name):
                (
                    self.slots[each.name].tensor * local(by_name[each.name], each, stage, self.rank)
                ).sum().backward()
        for pipeline in self.plan.pipelines:
            if self.rank == pipeline.stages[-1].ranks[0]:
                self.optimizer.local_totals[0] += pipeline.num_micro_batches
        self.optimizer.reduce_gradients()
        self.optimizer.step()
        return float(self.optimizer._global_grad_norm or 0)

    def move(self, plan: ParallelPlan) -> tuple[int, int]:
        """Bytes that this rank sent, and the sum over all ranks, by the report."""
        placement = place(plan, BUCKETS)
        GROUPS.get().ensure(placement.groups)
        slots: dict[str, TensorSlot] = tensor_slots(module_of(plan, self.rank, None))
        self.optimizer.check_slots(placement, slots)
        gathered: list[Any] = [None] * dist.get_world_size()
        own = describe_state(self.optimizer.optimizer, self.optimizer.storages.values())
        dist.all_gather_object(gathered, own)
        states = merge_group_states(gathered)
        assert self.optimizer.placement is not None
        schema = state_schema(placement, states)
        way = plan_migration(self.optimizer.placement, placement, schema, self.rank)
        report = migrate(self.optimizer, way, slots, states)
        GROUPS.get().trim(placement.groups)
        self.plan, self.slots = plan, slots
        return report.sent_bytes, report.total_bytes

    def held(self) -> Held:
        held: Held = {}
        for index, storage in self.optimizer.storages.items():
            count = storage.stop - storage.start
            held["parameter", index] = [(storage.start, storage.flat[:count].clone())]
            for shard in storage.shards:
                if shard.parameter is None:
                    continue
                state = {name: self.optimizer.state[shard.parameter][name] for name in MOMENTS}
                if BUCKETS[index].dtype == "bfloat16":
                    state["master"] = shard.parameter.detach()
                for name, values in state.items():
                    held.setdefault((name, index), []).append((shard.start, values.clone()))
        return held

    def check_module(self) -> None:
        """The module's tensors are those of the storages, in their local shapes."""
        stage = stage_of(self.plan, self.rank)
        for name, slot in self.slots.items():
            (each,) = (each for each in LAYOUT if each.name == name)
            assert stage is not None
            assert slot.tensor.shape == local(torch.empty(each.shape), each, stage, self.rank).shape


def gathered(job: Job) -> list[Held]:
    held: list[Held] = [{} for _ in range(WORLD_SIZE)]
    dist.all_gather_object(held, job.held())
    return held


def assembled(all_held: list[Held]) -> dict[tuple[str, int], dict[int, Any]]:
    """The state of the whole model by element; all holders agree, and sharded state has one holder."""
    whole: dict[tuple[str, int], dict[int, Any]] = {}
    for held in all_held:
        for key, intervals in held.items():
            known = whole.setdefault(key, {})
            for start, values in intervals:
                for offset, value in enumerate(values.tolist()):
                    assert key[0] == "parameter" or start + offset not in known, key
                    assert known.setdefault(start + offset, value) == value, key
    return whole


def missing_bytes(old: Held, new: Held) -> int:
    """What a rank must receive: elements that it holds in ``new`` but not in ``old``."""
    total = 0
    for key, intervals in new.items():
        had = {start + i for start, values in old.get(key, []) for i in range(len(values))}
        for start, values in intervals:
            total += values.itemsize * sum(start + i not in had for i in range(len(values)))
    return total


def assert_same_as_reference(whole: dict[tuple[str, int], dict[int, Any]], reference: Reference) -> None:
    for bucket in BUCKETS:
        if bucket.group is None:
            continue
        is_low = bucket.dtype == "bfloat16"
        for state in ("parameter", *MOMENTS, *(["master"] if is_low else [])):
            expected = [reference.values(state, piece.tensor).flatten() for piece in bucket.pieces]
            actual = torch.tensor([whole[state, bucket.index][i] for i in range(bucket.num_elements)])
            rtol = 2**-7 if is_low and state == "parameter" else 1e-4
            torch.testing.assert_close(actual, torch.cat(expected), rtol=rtol, atol=1e-5)


def follow(plans: Sequence[ParallelPlan]) -> None:
    """On each rank: train under each of the plans, and compare all along."""
    values = whole_values(0)
    job, reference = Job(plans[0], values), Reference(whole_values(0))
    step = 0
    for index, plan in enumerate(plans):
        if index > 0:
            before = gathered(job)
            sent_bytes, total_bytes = job.move(plan)
            after = gathered(job)
            assert assembled(before) == assembled(after), "bit by bit: the values have no NaN"
            all_sent: list[int] = [0] * WORLD_SIZE
            dist.all_gather_object(all_sent, sent_bytes)
            needed = sum(map(missing_bytes, before, after))
            assert (sum(all_sent), total_bytes) == (needed, needed)
        job.check_module()
        for _ in range(NUM_STEPS):
            step += 1
            norm = reference.step(plan, step)
            assert job.step(step) == pytest.approx(norm, rel=1e-5)
        whole = assembled(gathered(job))
        assert_same_as_reference(whole, reference)
        for bucket in BUCKETS:
            if bucket.group is None:  # it is as at the start
                expected = values[bucket.pieces[0].tensor].flatten().tolist()
                assert whole["parameter", bucket.index] == dict(enumerate(expected))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD_SIZE) as ranks:
        yield ranks


some_plans = legal_plans(NUM_LAYERS, WORLD_SIZE, degrees=(1, 2, 4))


@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a failure replaces the ranks: too slow to shrink
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(first=some_plans, second=some_plans)
def test_any_plans_train_as_torch_does(pool: RankPool, first: ParallelPlan, second: ParallelPlan) -> None:
    pool.run(follow, [first, second, first])


def test_degrees_meet_in_one_job(pool: RankPool) -> None:
    """Pipelines of degree 4, 2 and 1 side by side, whose shards do not divide; then other ones."""
    mixed = ParallelPlan(
        (
            Pipeline((Stage((2, 5, 0, 7), (0, NUM_LAYERS)),), 3),
            Pipeline((Stage((1, 4), (0, 3)), Stage((3,), (3, NUM_LAYERS))), 1),
        ),
        standby=(6,),
    )
    one_by_one = ParallelPlan(
        tuple(Pipeline((Stage((rank,), (0, NUM_LAYERS)),), rank + 1) for rank in range(7)), standby=(7,)
    )
    halves = ParallelPlan(
        (
            Pipeline((Stage((0, 7), (0, NUM_LAYERS)),), 1),
            Pipeline((Stage((6, 1), (0, 1)), Stage((2, 3, 4, 5), (1, NUM_LAYERS))), 1),
        )
    )
    pool.run(follow, [mixed, one_by_one, halves, mixed])


def refuse_wrong_shape() -> None:
    plan = ParallelPlan((Pipeline((Stage(tuple(range(4)), (0, NUM_LAYERS)),), 1),), standby=(4, 5, 6, 7))
    whole = ParallelPlan((Pipeline((Stage((0,), (0, NUM_LAYERS)),), 1),), standby=tuple(range(1, 8)))
    job = Job(plan, whole_values(0))
    if job.rank == 0:
        slots = tensor_slots(module_of(whole, 0, None))
        with pytest.raises(LayoutError, match=r"has shape \(8, 5\), but \(2, 5\) belongs here"):
            job.optimizer.check_slots(place(plan, BUCKETS), slots)


def test_whole_tensors_are_refused_where_a_part_belongs(pool: RankPool) -> None:
    pool.run(refuse_wrong_shape)
