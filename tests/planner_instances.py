"""Random small planning problems, and every legal plan of a tiny one, written out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np

from malleus_ds.cluster import Links
from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage
from malleus_ds.planner.checker import check_answer
from malleus_ds.planner.types import PlanRequest
from tests.brute_force import compositions, device_groups

RATES = (1.0, 1.0, 1.0, 1.0, 1.1, 1.5, 2.57, 3.75, 5.42, 12.0, math.inf)


def instance(seed: int) -> PlanRequest:
    """A problem to compare the planner with brute force on: at most 6 devices, 8 layers, 8 micro-batches
    and TP 2 (4 in a tenth). A fifth has updates, a tenth has micro-batch sizes to choose from."""
    request = random_request(seed)
    if seed % 10 in (0, 1):
        return with_updates(request, seed)
    return with_micro_batch_sizes(request) if seed % 10 == 2 else request


def random_request(
    seed: int, max_devices: int = 6, max_layers: int = 8, max_micro_batches: int = 8
) -> PlanRequest:
    """A problem on at most two nodes. Half of them have unequal layers, two thirds a memory limit, from too
    little for any plan to more than any needs."""
    rng = np.random.default_rng(seed)
    num_devices = int(rng.integers(2, max_devices, endpoint=True)) if rng.random() < 0.5 else max_devices
    first = num_devices if rng.random() < 0.1 else int(rng.integers(1, num_devices))
    nodes = (tuple(range(first)), tuple(range(first, num_devices)))
    if rng.random() < 0.5:
        rates = tuple(float(rate) for rate in rng.choice(RATES, num_devices))
    else:
        slow = rng.uniform(1.0, 6.0, num_devices).round(2)
        rates = tuple(float(rate) for rate in np.where(rng.random(num_devices) < 0.5, 1.0, slow))
    profile = _random_profile(rng, _mostly(rng, max_layers))
    request = PlanRequest(
        profile,
        rates,
        num_micro_batches=_mostly(rng, max_micro_batches),
        nodes=tuple(node for node in nodes if node),
        message_s=float(rng.choice([0.0, 0.0, 0.3])),
        max_pipelines=(None, None, None, 1, 2)[rng.integers(5)],
        time_limit_s=20.0,
    )
    return _with_memory(rng, request) if rng.random() < 2 / 3 else request


def with_updates(request: PlanRequest, seed: int) -> PlanRequest:
    """The same problem with a time for the optimizer's step and for gradient reduction over links."""
    rng = np.random.default_rng(seed)
    layers = tuple(
        replace(layer, gradient_bytes=int(rng.integers(0, 100)), optimizer_s=float(rng.uniform(0, 0.5)))
        for layer in request.profile.layers
    )
    links = Links(float(rng.uniform(50, 1000)), float(rng.uniform(20, 200)))
    return replace(request, profile=replace(request.profile, layers=layers), links=links)


def with_micro_batch_sizes(request: PlanRequest) -> PlanRequest:
    """The same problem with micro-batches of 1 to 4 samples, those of 2 being the profiled ones."""
    return replace(
        request,
        profile=replace(request.profile, tau=((1, 0.62), (2, 1.0), (4, 1.85))),
        micro_batch_size=2,
        micro_batch_sizes=(1, 2, 4),
    )


def _mostly(rng: np.random.Generator, largest: int) -> int:
    return largest if rng.random() < 2 / 3 else int(rng.integers(1, largest, endpoint=True))


def _random_profile(rng: np.random.Generator, num_layers: int) -> ModelProfile:
    is_unequal, has_table = rng.random() < 0.5, rng.random() < 0.25
    layers = tuple(
        LayerProfile(
            "layer",
            time_s=round(rng.uniform(0.2, 3.0), 3) if is_unequal else 1.0,
            state_bytes=int(rng.integers(10, 100)) if is_unequal else 60,
            optimizer_bytes=int(rng.integers(0, 300)) if is_unequal else 180,
            activation_bytes=0 if has_table else int(rng.integers(0, 30)) if is_unequal else 20,
            activation_table=(30, 45, 58, 70) if has_table else (),
        )
        for _ in range(num_layers)
    )
    half, quarter = (round(float(factor), 3) for factor in rng.uniform(1.5, 2.1, 2))
    degrees = (
        ((1, 1.0),),
        ((1, half), (2, 1.0)),
        ((1, round(half * quarter, 3)), (2, half), (4, 1.0)),
    )
    rho = degrees[rng.choice(3, p=[0.2, 0.7, 0.1])]
    return ModelProfile(layers, rho=rho, device_bytes=int(rng.integers(0, 200)))


def _with_memory(rng: np.random.Generator, request: PlanRequest) -> PlanRequest:
    """A limit from 0.7 to 3 times an even share of the model on the usable devices; at times uneven."""
    profile = request.profile
    whole = sum(
        layer.state_bytes + layer.optimizer_bytes + 2 * layer.activations(1) for layer in profile.layers
    )
    even = whole * profile.max_degree / max(1, len(request.usable_ranks))
    limits = [profile.device_bytes + int(even * rng.uniform(0.7, 3.0)) + 1 for _ in request.node_ranks]
    return replace(request, memory_bytes=limits[0] if rng.random() < 2 / 3 else tuple(limits))


def least_step_s(request: PlanRequest) -> float:
    """The least step time of all plans that the checker accepts, one by one; inf without any."""
    best_s = math.inf
    for plan in every_plan(request):
        try:
            best_s = min(best_s, check_answer(plan, request))
        except PlanError:
            continue
    return best_s


def every_plan(request: PlanRequest) -> Iterator[ParallelPlan]:
    """All plans of the ranks that have not failed, but for the order of ranks in a group, which costs
    nothing, and of pipelines."""
    num_layers = len(request.profile.layers)
    degrees = [degree for degree, _ in request.profile.rho]
    usable = set(request.usable_ranks)
    nodes = tuple(tuple(rank for rank in node if rank in usable) for node in request.node_ranks)
    for groups in _groupings(nodes, degrees):
        standby = tuple(sorted(set(range(request.world_size)).difference(*groups)))
        for parts in _partitions(groups):
            for size in request.micro_batch_sizes or (request.micro_batch_size,):
                for shares in compositions(request.global_batch_size // size, len(parts)):
                    for stages in _stages(parts, num_layers):
                        pipelines = tuple(map(Pipeline, stages, shares))
                        yield ParallelPlan(pipelines, size, standby)


def _groupings(nodes: tuple[tuple[int, ...], ...], degrees: list[int]) -> Iterator[list[tuple[int, ...]]]:
    if not nodes:
        yield []
        return
    for groups in device_groups(nodes[0], degrees):
        for others in _groupings(nodes[1:], degrees):
            yield [*groups, *others]


def _partitions(groups: list[tuple[int, ...]]) -> Iterator[list[list[tuple[int, ...]]]]:
    """All partitions of the groups into at least one pipeline, by a label for each group."""
    labellings: list[list[int]] = [[]]
    for _ in groups:
        labellings = [[*labels, new] for labels in labellings for new in range(max(labels, default=-1) + 2)]
    for labels in labellings if groups else ():
        yield [
            [group for group, label in zip(groups, labels, strict=True) if label == part]
            for part in range(max(labels) + 1)
        ]


def _stages(parts: list[list[tuple[int, ...]]], num_layers: int) -> Iterator[tuple[tuple[Stage, ...], ...]]:
    """All orders and divisions of all pipelines."""
    if not parts:
        yield ()
        return
    for order in permutations(parts[0]):
        for sizes in compositions(num_layers, len(order)):
            edges = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
            stages = tuple(map(Stage, order, pairwise(edges)))
            for others in _stages(parts[1:], num_layers):
                yield (stages, *others)
