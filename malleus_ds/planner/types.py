"""What the planner is asked and what it answers; both as JSON, so that a plan can be reproduced."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from malleus_ds.cluster import Links, check_rates
from malleus_ds.model_profile import ModelProfile
from malleus_ds.plan import ParallelPlan, PlanError


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(value) else value


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One planning problem.

    profile: cost and memory per layer; rates: straggling rate of each rank (inf: failed);
    num_micro_batches: of all pipelines in one step; micro_batch_size: the profiled one, in samples; nodes:
    ranks of each node (None: all on one); current: the plan in use, which the new one should resemble;
    memory_bytes: capacity of a device, one for all or one per node (None: not a limit); time_limit_s: of
    the search; max_pipelines: bound on the number of pipelines (None: none); message_s: time of one
    activation and its gradient across one stage boundary; micro_batch_sizes: those to choose from, with
    the global batch kept (empty: only ``micro_batch_size``); links: for the time of gradient reduction
    (None: it takes none); num_alternatives: other plans to report.
    """

    profile: ModelProfile
    rates: tuple[float, ...]
    num_micro_batches: int
    micro_batch_size: int = 1
    nodes: tuple[tuple[int, ...], ...] | None = None
    current: ParallelPlan | None = None
    memory_bytes: int | tuple[int, ...] | None = None
    time_limit_s: float = 10.0
    max_pipelines: int | None = None
    message_s: float = 0.0
    micro_batch_sizes: tuple[int, ...] = ()
    links: Links | None = None
    num_alternatives: int = 3

    @property
    def world_size(self) -> int:
        return len(self.rates)

    @property
    def usable_ranks(self) -> tuple[int, ...]:
        """Ranks that have not failed."""
        return tuple(rank for rank, rate in enumerate(self.rates) if math.isfinite(rate))

    @property
    def node_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each node."""
        return (tuple(range(self.world_size)),) if self.nodes is None else self.nodes

    @property
    def global_batch_size(self) -> int:
        """Samples of one step."""
        return self.num_micro_batches * self.micro_batch_size

    def node_memory_bytes(self, node_id: int) -> int | None:
        """Capacity of each device of a node."""
        return self.memory_bytes[node_id] if isinstance(self.memory_bytes, tuple) else self.memory_bytes

    @property
    def largest_num_pipelines(self) -> int:
        """No plan can have more: each pipeline takes a rank and a micro-batch."""
        smallest = min(self.micro_batch_sizes, default=self.micro_batch_size)
        limits = [len(self.usable_ranks), self.global_batch_size // smallest]
        return min(limits if self.max_pipelines is None else [*limits, self.max_pipelines])

    def check(self) -> None:
        """Raise `PlanError` (or `ClusterError` for the rates) naming the value that is wrong."""
        check_rates(self.rates, self.world_size)
        times = self.profile.layer_times_s
        if not times or sum(times) <= 0 or not all(0 <= time < math.inf for time in times):
            raise PlanError(f"profile: layer times must be finite, not negative and not all 0: {times}")
        for name in (
            "num_micro_batches",
            "micro_batch_size",
            "memory_bytes",
            "time_limit_s",
            "max_pipelines",
            "micro_batch_sizes",
        ):
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not number > 0:
                    raise PlanError(f"{name} is {value}: it must be positive")
        if not 0 <= self.message_s < math.inf:
            raise PlanError(f"message_s is {self.message_s}: it must be finite and not negative")
        if not self.usable_ranks:
            raise PlanError(
                f"no usable device: all {self.world_size} ranks have the straggling rate inf (failed); "
                f"at least one rank must be alive"
            )

        self._check_shape()
        if isinstance(self.memory_bytes, tuple) and len(self.memory_bytes) != len(self.node_ranks):
            raise PlanError(
                f"{len(self.memory_bytes)} memory_bytes for {len(self.node_ranks)} nodes: give one each"
            )
        if self.current is not None:
            shape = (self.current.num_layers, self.current.world_size)
            if shape != (len(times), self.world_size):
                raise PlanError(
                    f"current: the plan has {shape[0]} layers on {shape[1]} ranks; the profile has "
                    f"{len(times)} layers and there are {self.world_size} rates"
                )

    def _check_shape(self) -> None:
        """Nodes, degrees and micro-batch sizes; and whether the current plan is one of them."""
        degrees = [degree for degree, _ in self.profile.rho]
        if not degrees or any(degree < 1 or degree & (degree - 1) for degree in degrees):
            raise PlanError(f"profile: rho has the TP degrees {degrees}: give at least one, powers of two")
        listed = sorted(rank for ranks in self.node_ranks for rank in ranks)
        if listed != list(range(self.world_size)):
            raise PlanError(f"nodes: together they must have the ranks 0..{self.world_size - 1}, each once")
        sizes = self.micro_batch_sizes or (self.micro_batch_size,)
        known = {self.micro_batch_size, *dict(self.profile.tau)}
        if not any(self.global_batch_size % size == 0 for size in sizes) or not known.issuperset(sizes):
            raise PlanError(
                f"micro_batch_sizes are {list(sizes)}: they must be among the profiled {sorted(known)}, and "
                f"one must divide the global batch of {self.global_batch_size}"
            )
        if self.current is not None:
            unknown = {stage.degree for _, _, stage in self.current.stages()}.difference(degrees)
            if unknown:
                raise PlanError(
                    f"current: the plan has TP degree {min(unknown)}; rho has {sorted(degrees)} only"
                )
            if self.current.micro_batch_size not in known:
                raise PlanError(
                    f"current: the plan has micro-batches of {self.current.micro_batch_size}, the profile "
                    f"{sorted(known)} only"
                )

    def to_dict(self) -> dict[str, Any]:
        return {
            "profile": self.profile.to_dict(),
            "rates": [_number(rate) for rate in self.rates],
            "num_micro_batches": self.num_micro_batches,
            "micro_batch_size": self.micro_batch_size,
            "nodes": None if self.nodes is None else [list(node) for node in self.nodes],
            "current": None if self.current is None else self.current.to_dict(),
            "memory_bytes": (
                list(self.memory_bytes) if isinstance(self.memory_bytes, tuple) else self.memory_bytes
            ),
            "time_limit_s": self.time_limit_s,
            "max_pipelines": self.max_pipelines,
            "message_s": self.message_s,
            "micro_batch_sizes": list(self.micro_batch_sizes),
            "links": None if self.links is None else asdict(self.links),
            "num_alternatives": self.num_alternatives,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PlanRequest:
        """Inverse of `to_dict`."""
        nodes, current, links, memory = data["nodes"], data["current"], data["links"], data["memory_bytes"]
        return cls(
            **{
                **data,
                "profile": ModelProfile.from_dict(data["profile"]),
                "rates": tuple(float(rate) for rate in data["rates"]),
                "nodes": None if nodes is None else tuple(tuple(node) for node in nodes),
                "current": None if current is None else ParallelPlan.from_dict(current),
                "memory_bytes": tuple(memory) if isinstance(memory, list) else memory,
                "micro_batch_sizes": tuple(data["micro_batch_sizes"]),
                "links": None if links is None else Links(**links),
            }
        )


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan that was found, and its step time."""

    plan: ParallelPlan
    step_s: float


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The plan found.

    step_s: its step time in the cost model; lower_bound_s: no plan is faster (see `lower_bound`);
    current_step_s: step time of the current plan under the new rates (inf when it uses a failed rank;
    None without a current plan); limiting_rank: rank of the slowest stage of the slowest pipeline;
    planning_s: time the planner took; alternatives: other plans, fastest first; moved_bytes: what ranks
    receive to go from the current plan to this one (0 without one).
    """

    plan: ParallelPlan
    step_s: float
    lower_bound_s: float
    current_step_s: float | None
    limiting_rank: int
    planning_s: float
    alternatives: tuple[Alternative, ...] = ()
    moved_bytes: int = 0

    @property
    def gap(self) -> float:
        """Relative distance to the lower bound: at most this share of the step can be gained."""
        return 1 - self.lower_bound_s / self.step_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_dict(),
            "step_s": self.step_s,
            "lower_bound_s": self.lower_bound_s,
            "current_step_s": None if self.current_step_s is None else _number(self.current_step_s),
            "limiting_rank": self.limiting_rank,
            "planning_s": self.planning_s,
            "alternatives": [
                {"plan": other.plan.to_dict(), "step_s": other.step_s} for other in self.alternatives
            ],
            "moved_bytes": self.moved_bytes,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PlanResult:
        current_step_s = data["current_step_s"]
        return cls(
            **{
                **data,
                "plan": ParallelPlan.from_dict(data["plan"]),
                "current_step_s": None if current_step_s is None else float(current_step_s),
                "alternatives": tuple(
                    Alternative(ParallelPlan.from_dict(other["plan"]), other["step_s"])
                    for other in data["alternatives"]
                ),
            }
        )
