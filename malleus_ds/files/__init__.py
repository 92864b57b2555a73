"""Files that describe models and clusters, as YAML or JSON. Loads no torch, and pydantic on use only."""

from malleus_ds.files.cluster_file import ClusterFile, cluster_from_hostfile, load_cluster, published_cluster
from malleus_ds.files.model_file import BUILT_IN_MODELS, ModelFile, load_model
from malleus_ds.files.rates import parse_rates
from malleus_ds.files.reading import FileError
from malleus_ds.files.request import make_request

__all__ = [
    "BUILT_IN_MODELS",
    "ClusterFile",
    "FileError",
    "ModelFile",
    "cluster_from_hostfile",
    "load_cluster",
    "load_model",
    "make_request",
    "parse_rates",
    "published_cluster",
]
