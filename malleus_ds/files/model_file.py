"""A model from a file: its profile, its batch and the cluster that it was profiled on."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from malleus_ds.files.reading import FileError, read_mapping
from malleus_ds.model_profile import LayerProfile, ModelProfile

if TYPE_CHECKING:
    from malleus_ds.files.schema import LayerSchema, ModelSchema

BUILT_IN_MODELS = ("32b", "70b", "110b")
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file.

    num_micro_batches: of one step, of ``micro_batch_size`` samples each; num_nodes, devices_per_node: the
    cluster that it was profiled on; memory_bytes: what layers may take of one of its devices, that is its
    capacity without ``reserve_bytes``.
    """

    name: str
    profile: ModelProfile
    num_micro_batches: int
    micro_batch_size: int
    num_nodes: int
    devices_per_node: int
    memory_bytes: int
    reserve_bytes: int = 0


def load_model(name_or_path: str | Path) -> ModelFile:
    """A built-in model by name (32b, 70b, 110b), or the YAML or JSON file of one (see docs/planning.md).

    Raises `FileError`.
    """
    name = str(name_or_path)
    if name in BUILT_IN_MODELS:
        return _read(Path(str(files("malleus_ds") / "profiles" / f"{name}.yaml")))
    if not os.path.exists(name):  # Path.exists raises for names that no file can have.
        names = ", ".join(BUILT_IN_MODELS)
        raise FileError(f"{name}: no such model; give {names} or the path of a model file")
    return _read(Path(name))


def _read(path: Path) -> ModelFile:
    from malleus_ds.files.schema import ModelSchema, validate

    content = validate(ModelSchema, read_mapping(path), path)
    memory = content.memory
    return ModelFile(
        name=path.stem if content.name is None else content.name,
        profile=ModelProfile(
            layers=_layers(content),
            message_bytes=_bytes(content.message_mib),
            rho=tuple(sorted(content.rho.items(), reverse=True)),
            device_bytes=_bytes(memory.device_mib),
            tau=tuple(sorted(content.micro_batch_sizes.items())),
        ),
        num_micro_batches=content.num_micro_batches,
        micro_batch_size=content.micro_batch_size,
        num_nodes=content.cluster.num_nodes,
        devices_per_node=content.cluster.devices_per_node,
        memory_bytes=_bytes(memory.capacity_mib) - _bytes(memory.reserve_mib),
        reserve_bytes=_bytes(memory.reserve_mib),
    )


def _bytes(mib: float) -> int:
    return round(mib * _MIB)


def _layers(content: ModelSchema) -> tuple[LayerProfile, ...]:
    layers = [_layer(layer) for layer in content.layers for _ in range(layer.count)]
    for index in (0, -1):
        state_bytes = layers[index].state_bytes + _bytes(content.embedding_mib)
        layers[index] = replace(layers[index], state_bytes=state_bytes)
    return tuple(layers)


def _layer(layer: LayerSchema) -> LayerProfile:
    return LayerProfile(
        name=layer.name,
        time_s=layer.time_ms / 1000,
        state_bytes=_bytes(layer.state_mib),
        optimizer_bytes=_bytes(layer.optimizer_mib),
        activation_table=tuple(_bytes(mib) for mib in layer.activation_mib),
        gradient_bytes=_bytes(layer.gradient_mib),
        optimizer_s=layer.optimizer_ms / 1000,
    )
