"""Whether the model fits at all: numbers of pipelines that memory leaves possible, or why there are none."""

from __future__ import annotations

import numpy as np

from malleus_ds.planner.groups import Cluster
from malleus_ds.planner.pipelines import PipelineTable
from malleus_ds.planner.types import PlanRequest
from malleus_ds.planner.workload import Workload


def most_pipelines(workload: Workload, cluster: Cluster) -> int:
    """No plan has more pipelines, for the sake of devices, micro-batches and memory; 0 if none fits.

    With D pipelines each needs at least the devices that the cheapest one needs when the optimizer is
    shared by D; fewer pipelines need no fewer devices each, so the limit that follows holds for all.
    """
    request = workload.request
    number = min(request.largest_num_pipelines, workload.num_micro_batches)
    while number:
        degrees = np.array([float(kind.degree) for kind in cluster.types])
        max_stages = min(workload.num_layers, cluster.num_devices)
        table = PipelineTable(workload, cluster.types, np.zeros(len(degrees)), number, max_stages)
        # So heavy that messages do not count.
        weight_s = np.array([1e9 * (1 + workload.message_s)])
        devices = float(table.solve(degrees, np.ones(1), weight_s, 1).best_costs()[0]) / weight_s[0]
        possible = int(cluster.num_devices / devices + 1e-6)
        if possible >= number:
            return number
        number = possible
    return 0


def explain_infeasible(request: PlanRequest, workload: Workload, cluster: Cluster) -> str:
    """What is missing, for the user."""
    most = request.largest_num_pipelines
    memory = (
        request.memory_bytes if isinstance(request.memory_bytes, int) else list(request.memory_bytes or ())
    )
    alone = workload.kind_of[np.arange(workload.num_layers), np.arange(1, workload.num_layers + 1)]
    fits = np.any(workload.fits(cluster.types, most, 1)[:, alone], axis=0) if cluster.types else alone < 0
    if not cluster.types or np.all(fits):
        degrees = [degree for degree, _ in request.profile.rho]
        return (
            f"no plan fits {workload.num_layers} layers into memory_bytes ({memory}) on "
            f"{len(request.usable_ranks)} usable ranks with TP degrees {sorted(degrees)}: give more "
            f"ranks, more memory per rank, or a model with a smaller state or smaller micro-batches"
        )
    index = int(np.flatnonzero(~fits)[0])
    layer, profile = request.profile.layers[index], request.profile
    return (
        f"layer {index} ({layer.name}) does not fit into memory_bytes ({memory}): it needs "
        f"{layer.state_bytes} bytes for parameters and gradients, {layer.optimizer_bytes} for the "
        f"optimizer, shared by at most {most} pipelines, and {layer.activations(1)} for activations, each at "
        f"TP degree {profile.max_degree}, beside {profile.device_bytes} of the device's own"
    )
