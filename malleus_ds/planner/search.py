"""The search for a plan.

1. The current plan, and its pipelines with other layers and data: at once a bound on the step time.
2. Small clusters: all multisets of devices are solved as pipelines (`catalogue`) and the best disjoint ones
   are picked (`grouping`): exact where updates take no time. Others: good pipelines and a bound by column
   generation (`generation`); a few nodes: groups dealt out to pipelines and exchanged (`local_search`);
   many, or time left: integer programs (`large`, `whole`, `arcs`, `selection`).
3. Among plans within 1 % of the best step, the one that moves least is chosen (`movement`, `layout`,
   `drafts`).

Every plan is checked from its definition (`checker`) before it can be chosen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from malleus_ds.plan import PlanError
from malleus_ds.planner.candidates import Candidates
from malleus_ds.planner.cost_model import CostModel
from malleus_ds.planner.drafts import Realiser
from malleus_ds.planner.exact import MAX_MULTISETS, ExactSearch
from malleus_ds.planner.feasibility import explain_infeasible, most_pipelines
from malleus_ds.planner.generation import TARGETS, Generated, Generator
from malleus_ds.planner.groups import Cluster, build_cluster, rate_ratio
from malleus_ds.planner.large import LargeSearch
from malleus_ds.planner.lattice import DeviceClasses
from malleus_ds.planner.local_search import LocalSearch
from malleus_ds.planner.lower_bound import closed_form_bound_s
from malleus_ds.planner.movement import Movement
from malleus_ds.planner.node_groups import NodeGroups
from malleus_ds.planner.polish import polish, settle
from malleus_ds.planner.types import PlanRequest, PlanResult
from malleus_ds.planner.workload import Workload

_MAX_RATES = 32
_MAX_POLISHED = 16
# Devices up to which exchanges find better plans than integer programs.
_MAX_EXCHANGED = 128
_MAX_NODE = 8
# Of the time limit, when the prices end, the bound of many nodes, that of a few, and the search of these;
# left for the last plan's layout.
_PRICES_SHARE = 0.42
_BOUND_SHARE = 0.5
_LOCAL_BOUND_SHARE = 0.8
_LOCAL_SHARE = 0.96
_LAYOUT_SHARE = 0.15
_GRACE = 0.05


def make_plan(request: PlanRequest) -> PlanResult:
    """The best plan found within the time limit.

    Raises `PlanError` for a wrong request, when no rank is usable and when the model does not fit.
    """
    start_s = time.monotonic()
    request.check()
    candidates = Candidates(request, Movement(request), start_s + request.time_limit_s)
    usable = [request.rates[rank] for rank in request.usable_ranks]
    cluster = build_cluster(request, rate_ratio(usable, _MAX_RATES))
    sizes = [
        size
        for size in request.micro_batch_sizes or (request.micro_batch_size,)
        if request.global_batch_size % size == 0
    ]
    searches = [
        _SizeSearch(Workload(request, size), cluster, candidates, number / len(sizes))
        for number, size in enumerate(sizes, start=1)
    ]
    for number, search in enumerate(sorted(searches, key=lambda search: search.ideal_s), start=1):
        search.until = _PRICES_SHARE + (1 - _PRICES_SHARE) * number / len(sizes)
        search.run()
    if not candidates.found:
        raise PlanError(explain_infeasible(request, Workload(request, min(sizes)), cluster))
    if request.world_size <= _MAX_POLISHED:
        if searches[0].workload.has_updates:
            polish(candidates)
        if request.current is not None:
            settle(candidates)
    plan, step_s = candidates.choose()
    cost = CostModel(request)
    bound_s = min(search.proven_s for search in searches)
    return PlanResult(
        plan=plan,
        step_s=step_s,
        lower_bound_s=min(step_s, bound_s),
        current_step_s=None if request.current is None else cost.step_time_s(request.current),
        limiting_rank=cost.limiting_rank(plan),
        planning_s=time.monotonic() - start_s,
        alternatives=candidates.alternatives(plan),
        moved_bytes=candidates.movement.received_bytes(plan),
    )


@dataclass(slots=True)
class _SizeSearch:
    """The search with one micro-batch size.

    until: share of the time limit when it ends; most: pipelines possible; relaxed: see `LargeSearch`, None
    without a possible pipeline; proven_s: no plan is faster.
    """

    workload: Workload
    cluster: Cluster
    candidates: Candidates
    until: float
    most: int = 0
    relaxed: Generated | None = None
    proven_s: float = math.inf

    def __post_init__(self) -> None:
        self.most = most_pipelines(self.workload, self.cluster) if self.cluster.types else 0
        if self.most:
            self.relaxed = self._generator(_PRICES_SHARE).run(self.most)

    def _generator(self, share: float) -> Generator:
        return Generator(self.workload, self.cluster, self.most, self._deadline_s(share))

    def _deadline_s(self, share: float) -> float:
        """When this share of the search's time is over."""
        limit_s = self.workload.request.time_limit_s
        return self.candidates.deadline_s - (1 - share * self.until) * limit_s

    @property
    def ideal_s(self) -> float:
        """Step of the fractional plan; inf without any."""
        return math.inf if self.relaxed is None else self.relaxed.prices.step_s

    def run(self) -> None:
        """Prove a bound and offer plans."""
        request, candidates = self.workload.request, self.candidates
        if not self.most:
            return
        self.proven_s = closed_form_bound_s(self.workload, self.cluster, self.most)
        if self.proven_s >= candidates.best_s:
            return
        Realiser(self.workload, candidates).offer_current()
        classes = DeviceClasses.of(request, request.usable_ranks)
        if classes.num_multisets <= MAX_MULTISETS:
            self._prove(_BOUND_SHARE)
            ExactSearch(self.workload, classes, self.cluster, candidates, self.most).run()
        elif self.relaxed is not None:
            local = self._local(self.relaxed) if self._has_few_choices() else None
            if local is None:
                self._prove(_BOUND_SHARE)
            else:
                self._search_locally(local)
            if time.monotonic() < self._deadline_s(1 - _LAYOUT_SHARE) or not candidates.found:
                self._large(self.relaxed).run()
                if local is not None:
                    local.improve()
                    local.refine()

    def _search_locally(self, local: LocalSearch) -> None:
        """Plans take most of the time; the best bound comes when they get better slowly."""
        self._prove(_LOCAL_BOUND_SHARE, TARGETS[:1])
        local.run()
        local.improve()
        if time.monotonic() < self._deadline_s(_BOUND_SHARE):
            self._prove(_LOCAL_BOUND_SHARE, TARGETS[1:])
        local.refine()

    def _has_few_choices(self) -> bool:
        """Whether the groupings of every node can be listed, and changes of a plan tried one by one."""
        largest = max(node.num_devices for node in self.cluster.classes)
        return self.cluster.num_devices <= _MAX_EXCHANGED and largest <= _MAX_NODE

    def _local(self, relaxed: Generated) -> LocalSearch:
        groups, deadline_s = NodeGroups.of(self.workload.request), self._deadline_s(_LOCAL_SHARE)
        return LocalSearch(
            self.workload, self.cluster, groups, self.candidates, self.most, relaxed, deadline_s
        )

    def _large(self, relaxed: Generated) -> LargeSearch:
        deadline_s = self._deadline_s(1 - _LAYOUT_SHARE)
        return LargeSearch(self.workload, self.cluster, self.candidates, self.most, relaxed, deadline_s)

    def _prove(self, share: float, targets: Sequence[float] = TARGETS) -> None:
        """A sharper bound, in this share of the time."""
        if self.relaxed is not None:
            # A first bound is short, and worth a little more time.
            generator = self._generator(share + _GRACE)
            found_s = generator.bound_s(self.relaxed.proving, self.proven_s, targets)
            self.proven_s = max(self.proven_s, found_s)
