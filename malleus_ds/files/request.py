"""From a model and a cluster to the question that the planner answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from malleus_ds.files.cluster_file import ClusterFile, published_cluster
from malleus_ds.files.model_file import ModelFile
from malleus_ds.files.reading import FileError

if TYPE_CHECKING:
    from malleus_ds.plan import ParallelPlan
    from malleus_ds.planner.types import PlanRequest


def make_request(
    model: ModelFile,
    cluster: ClusterFile | None = None,
    *,
    rates: tuple[float, ...] | None = None,
    global_batch_size: int | None = None,
    current: ParallelPlan | None = None,
    max_pipelines: int | None = None,
    time_limit_s: float = 10.0,
    num_alternatives: int = 3,
) -> PlanRequest:
    """A planning problem.

    cluster: default: the one that the model was profiled on; rates: instead of the cluster's;
    global_batch_size: in samples, instead of the model's. Raises `FileError` for a batch that is not
    whole micro-batches, and for a cluster with less memory than the model reserves.
    """
    from malleus_ds.planner.types import PlanRequest  # Here: its package loads the solvers.

    cluster = published_cluster(model) if cluster is None else cluster
    links, size = cluster.links, model.micro_batch_size
    batch = model.num_micro_batches * size if global_batch_size is None else global_batch_size
    if batch < 1 or batch % size:
        raise FileError(
            f"global batch {batch}: it must be a positive multiple of the profiled micro-batch size {size}"
        )
    return PlanRequest(
        profile=model.profile,
        rates=cluster.rates if rates is None else rates,
        num_micro_batches=batch // size,
        micro_batch_size=size,
        nodes=cluster.nodes,
        current=current,
        memory_bytes=_memory_bytes(model, cluster),
        time_limit_s=time_limit_s,
        max_pipelines=max_pipelines,
        # An activation and its gradient; stages are on different nodes in general.
        message_s=0.0 if links is None else 2 * model.profile.message_bytes / links.inter_bytes_per_s,
        # The others cannot make up the batch.
        micro_batch_sizes=tuple(each for each, _ in model.profile.tau if batch % each == 0),
        links=links,
        num_alternatives=num_alternatives,
    )


def _memory_bytes(model: ModelFile, cluster: ClusterFile) -> int | tuple[int, ...]:
    """What layers may take: the model's reserve stays free on any cluster."""
    match cluster.memory_bytes:
        case None:
            return model.memory_bytes
        case int(capacity):
            return _usable_bytes(capacity, model)
        case capacities:
            return tuple(_usable_bytes(capacity, model) for capacity in capacities)


def _usable_bytes(capacity: int, model: ModelFile) -> int:
    if capacity <= model.reserve_bytes:
        raise FileError(
            f"memory_gib of the cluster is {capacity / 2**30:g}, but model {model.name} reserves "
            f"{model.reserve_bytes / 2**30:g} GiB; give devices with more memory"
        )
    return capacity - model.reserve_bytes
