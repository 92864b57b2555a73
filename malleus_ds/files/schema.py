"""The keys of model and cluster files, strict; loaded on use only, as pydantic costs start-up time."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from malleus_ds.files.reading import FileError, shown

_MAX_FAULTS = 5
_FIXES = {
    "dict_type": "write 'key: value' entries",
    "finite_number": "it must be finite",
    "float_type": "write a number",
    "greater_than": "it must be more than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "int_type": "write a whole number",
    "list_type": "write a list",
    "model_type": "write 'key: value' entries",
    "string_type": "write a text, in quotes",
    "too_short": "give at least one",
}


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _integer_keys(value: Any) -> Any:
    """JSON has no integer keys."""
    if not isinstance(value, dict):
        return value
    is_text = {key: isinstance(key, str) and re.fullmatch(r"\d+", key) is not None for key in value}
    return {int(key) if is_text[key] else key: item for key, item in value.items()}


def _list_of_one(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Factors = Annotated[dict[Count, Positive], BeforeValidator(_integer_keys), Field(min_length=1)]


class LayerSchema(_Section):
    """`count` equal layers; all values are those of one device at the largest TP degree."""

    name: str = Field("block", description="type of the layer")
    count: Count = Field(1, description="how many of them follow each other")
    time_ms: NonNegative = Field(description="forward and backward of one micro-batch on a healthy device")
    state_mib: NonNegative = Field(0.0, description="parameters and gradients, and all else that is fixed")
    optimizer_mib: NonNegative = Field(
        0.0, description="master weights and optimizer moments before ZeRO-1 shards them over the pipelines"
    )
    activation_mib: Annotated[list[NonNegative], BeforeValidator(_list_of_one), Field(min_length=1)] = Field(
        [0.0],
        description="activations of one micro-batch in flight; or a list: measured totals for 1, 2, ...",
    )
    gradient_mib: NonNegative = Field(0.0, description="gradients that the pipelines reduce")
    optimizer_ms: NonNegative = Field(0.0, description="the optimizer's step before sharding")


class MemorySchema(_Section):
    """Memory of one device."""

    capacity_mib: Positive = Field(description="what the device has")
    reserve_mib: NonNegative = Field(0.0, description="what stays free: communication buffers, fragmentation")
    device_mib: NonNegative = Field(0.0, description="what a device needs apart from its layers")

    @model_validator(mode="after")
    def _leaves_room(self) -> Self:
        if self.reserve_mib + self.device_mib >= self.capacity_mib:
            raise ValueError(
                f"capacity_mib ({self.capacity_mib:g}) leaves nothing for layers beside reserve_mib "
                f"({self.reserve_mib:g}) and device_mib ({self.device_mib:g}); give a larger capacity"
            )
        return self


class ProfiledClusterSchema(_Section):
    """The cluster that the model was profiled on; `malleus plan` plans for it unless another one is given."""

    num_nodes: Count = Field(description="number of nodes")
    devices_per_node: Count = Field(description="devices of each node")


class ModelSchema(_Section):
    """A model file."""

    name: str | None = Field(None, description="for reports; `null`: the file's name")
    num_micro_batches: Count = Field(description="micro-batches of all pipelines in one step")
    micro_batch_size: Count = Field(1, description="samples of the micro-batch that was profiled")
    micro_batch_sizes: Annotated[dict[Count, Positive], BeforeValidator(_integer_keys)] = Field(
        {}, description="micro-batch sizes to choose from, with their layer time relative to the profiled one"
    )
    rho: Factors = Field(description="layer time at each TP degree, relative to the largest one")
    cluster: ProfiledClusterSchema = Field(description="the cluster that the model was profiled on")
    memory: MemorySchema = Field(description="of one device")
    message_mib: NonNegative = Field(0.0, description="one activation between two stages")
    embedding_mib: NonNegative = Field(
        0.0, description="embedding and head: added to state_mib of the first and of the last layer"
    )
    layers: Annotated[list[LayerSchema], BeforeValidator(_list_of_one), Field(min_length=1)] = Field(
        description="all layers in order; one mapping where they are equal"
    )

    @model_validator(mode="after")
    def _factors_start_at_one(self) -> Self:
        wrong = [degree for degree in self.rho if degree & (degree - 1)]
        if wrong:
            raise ValueError(f"rho has TP degree {wrong[0]}; use powers of two: 1, 2, 4, 8, ...")
        degree = max(self.rho)
        if self.rho[degree] != 1:
            raise ValueError(
                f"rho of the largest TP degree, {degree}, is {self.rho[degree]:g}; it must be 1.0, as all "
                f"layer times are those at this degree"
            )
        size, factors = self.micro_batch_size, self.micro_batch_sizes
        if factors and factors.get(size) != 1:
            raise ValueError(
                f"micro_batch_sizes has {factors.get(size, 'nothing')} for the profiled size {size}; "
                f"write {size}: 1.0, as all layer times are those of this size"
            )
        if not any(layer.time_ms for layer in self.layers):
            raise ValueError("layers: time_ms is 0 for all layers; give the time of at least one")
        return self


class NodeSchema(_Section):
    """One node; ranks are numbered node by node."""

    host: str | None = Field(None, description="its name; `null`: node-0, node-1, ...")
    devices: Count = Field(description="number of its devices")
    memory_gib: Positive | None = Field(
        None, description="capacity of each device, for all nodes or none; `null`: the model's"
    )


class LinksSchema(_Section):
    """Bandwidth of one device's link, in 10^9 bytes/s."""

    intra_gb_per_s: Positive = Field(description="to a device of its own node")
    inter_gb_per_s: Positive = Field(description="to a device of another node")


class ClusterSchema(_Section):
    """A cluster file."""

    nodes: Annotated[list[NodeSchema], Field(min_length=1)] = Field(description="all nodes in rank order")
    rates: dict[Any, Any] = Field(
        {}, description="straggling rate by rank: 1.0 healthy (default), 2.57 slow, inf failed"
    )
    links: LinksSchema | None = Field(
        None, description="bandwidths; `null`: messages and reductions take no time"
    )


Schema = TypeVar("Schema", bound=_Section)


def validate(schema: type[Schema], data: dict[Any, Any], path: str | Path) -> Schema:
    """The checked content of a file. Raises `FileError` with one line per fault."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        faults = error.errors()
        lines = [f"{path}: {_explain(fault, schema)}" for fault in faults[:_MAX_FAULTS]]
        if len(faults) > _MAX_FAULTS:
            lines.append(f"{path}: and {len(faults) - _MAX_FAULTS} more")
        raise FileError("\n".join(lines)) from error


def _explain(fault: Any, schema: type[_Section]) -> str:
    key, value = _key(fault["loc"]), shown(fault["input"])
    match fault["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key (value {value}); {_instead(fault['loc'], schema)}"
        case "missing":
            return f"{key}: missing; give it a value"
        case "value_error":
            return f"{key}: {fault['ctx']['error']}" if key else str(fault["ctx"]["error"])
        case kind:
            fix = _FIXES.get(kind, fault["msg"]).format_map(fault.get("ctx", {}))
            return f"{key}: {value} is wrong; {fix}"


def _key(location: tuple[int | str, ...]) -> str:
    """``("layers", 0, "time_ms")`` is "layers[0].time_ms"."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if part != "[key]"]
    return "".join(parts).removeprefix(".")


def _instead(location: tuple[int | str, ...], schema: type[_Section]) -> str:
    """The key that was meant, or those there are."""
    keys = list(_section_at(location[:-1], schema).model_fields)
    close = difflib.get_close_matches(str(location[-1]), keys, n=1)
    return f"did you mean {close[0]!r}?" if close else f"remove it; allowed are {', '.join(keys)}"


def _section_at(location: tuple[int | str, ...], schema: type[_Section]) -> type[_Section]:
    for part in location:
        if isinstance(part, str):
            schema = next(_sections(schema.model_fields[part].annotation))
    return schema


def _sections(annotation: Any) -> Iterator[type[_Section]]:
    """The sections in an annotation: of ``list[NodeSchema]``, ``LinksSchema | None``."""
    if isinstance(annotation, type) and issubclass(annotation, _Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
