"""Which devices there are: from a cluster file, a hostfile, or the cluster that a model was profiled on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from malleus_ds.cluster import ClusterError, Links, Node, node_ranks, parse_hostfile
from malleus_ds.files.model_file import ModelFile
from malleus_ds.files.rates import parse_rates
from malleus_ds.files.reading import FileError, read_mapping, read_text

_GB = 10**9
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A cluster.

    hosts: name of each node; nodes: its ranks; rates: straggling rate of each rank; memory_bytes: capacity
    of each device, one for all or one per node (None: that of the model's devices); links: None: not given.
    """

    hosts: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...]
    rates: tuple[float, ...]
    memory_bytes: int | tuple[int, ...] | None = None
    links: Links | None = None

    @property
    def world_size(self) -> int:
        return len(self.rates)


def load_cluster(path: str | Path) -> ClusterFile:
    """Read a cluster file, YAML or JSON (see docs/planning.md). Raises `FileError`."""
    from malleus_ds.files.schema import ClusterSchema, validate

    content = validate(ClusterSchema, read_mapping(path), path)
    memory = [node.memory_gib for node in content.nodes]
    known = [round(gib * _GIB) for gib in memory if gib is not None]
    if known and len(known) < len(memory):
        raise FileError(
            f"{path}: nodes[{memory.index(None)}].memory_gib is missing; give it for all nodes or for none"
        )
    cluster = _cluster(
        [
            Node(f"node-{index}" if node.host is None else node.host, node.devices)
            for index, node in enumerate(content.nodes)
        ]
    )
    links = content.links
    return ClusterFile(
        hosts=cluster.hosts,
        nodes=cluster.nodes,
        rates=parse_rates(content.rates, cluster.world_size, where=f"{path}: rates"),
        memory_bytes=None if not known else known[0] if len(set(known)) == 1 else tuple(known),
        links=None if links is None else Links(links.intra_gb_per_s * _GB, links.inter_gb_per_s * _GB),
    )


def cluster_from_hostfile(path: str | Path) -> ClusterFile:
    """The healthy cluster of a DeepSpeed hostfile. Raises `FileError`."""
    try:
        return _cluster(parse_hostfile(read_text(path)))
    except ClusterError as error:
        raise FileError(f"{path}: {error}") from error


def published_cluster(model: ModelFile) -> ClusterFile:
    """The healthy cluster that the model was profiled on."""
    return _cluster([Node(f"node-{index}", model.devices_per_node) for index in range(model.num_nodes)])


def _cluster(nodes: list[Node] | tuple[Node, ...]) -> ClusterFile:
    ranks = node_ranks(nodes)
    return ClusterFile(tuple(node.host for node in nodes), ranks, (1.0,) * sum(map(len, ranks)))
