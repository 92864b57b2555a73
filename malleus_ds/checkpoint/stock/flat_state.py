"""The optimizer's state in DeepSpeed's files: flat tensors in which parameters follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.part_file import Content, Interval
from malleus_ds.checkpoint.stock.pickles import FragmentAddress, read_pickle
from malleus_ds.zero.precision import MASTER


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``[first, first + size)`` of a parameter, at ``offset`` of the flat tensors."""

    name: str
    first: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class FlatState:
    """Element-wise state of one parameter group of a stage, or a part of it.

    group: position in the stage's optimizer; tensors: by state, flat, also `MASTER` (in fp32 the parameter
    itself); shared: the other state, such as a step count; options: of the group; loss_scaler: of the stage,
    an object of `pickles`.
    """

    group: int
    runs: tuple[Run, ...]
    tensors: Mapping[str, Tensor]
    shared: Mapping[str, Any]
    options: Mapping[str, Any]
    loss_scaler: Any = None

    def contents(self) -> Iterator[Content]:
        """All intervals of all states."""
        for run in self.runs:
            for state, flat in self.tensors.items():
                if run.offset + run.size > flat.numel():
                    raise CheckpointError(f"{state} of {run.name!r} ends before the parameter does")
                interval = Interval(state, run.name, run.first, run.first + run.size)
                yield Content(interval, flat[run.offset : run.offset + run.size])


def partitioned(
    paths: Sequence[Path], shapes: Sequence[Mapping[str, Sequence[int]]] | None
) -> list[FlatState]:
    """The state of one stage from the files of its data-parallel ranks, in their order.

    shapes: of the parameters of each group, in the order of the flat group, where the stage's file has them.
    Else the partitions' own mappings are taken, which are wrong for ``round_robin_gradients`` (in 0.19.8).
    """
    found: dict[str, int] = {}
    states = []
    sizes: dict[int, int] = {}
    for rank, path in enumerate(paths):
        content = _optimizer_state(path)
        masters, base = content["single_partition_of_fp32_groups"], content["base_optimizer_state"]
        for group, mapping in enumerate(content["param_slice_mappings"]):
            # Without this key it is BF16_Optimizer, which keeps the padding.
            padding = content["group_paddings"][group] if "zero_stage" in content else 0
            size = masters[group].numel() + padding
            if size != sizes.setdefault(group, size):
                raise CheckpointError(
                    f"{path}: group {group} has {size} elements, but {sizes[group]} in {paths[0].name}: "
                    f"damaged, or of another checkpoint"
                )
            if shapes is None:
                runs = tuple(_mapped_runs(mapping, found))
            else:
                gaps = content.get("param_alignment_paddings") or [[0] * len(names) for names in shapes]
                runs = tuple(_runs(shapes[group], gaps[group], rank * size, (rank + 1) * size))
            state = base["state"].get(base["param_groups"][group]["params"][0], {})
            flat = _flat(group, runs, state, base["param_groups"][group], masters[group])
            states.append(replace(flat, loss_scaler=content.get("loss_scaler")))
    return states


def _runs(shapes: Mapping[str, Sequence[int]], gaps: Sequence[int], start: int, stop: int) -> Iterator[Run]:
    """What is in the elements ``[start, stop)`` of a flat group. gaps: padding behind each parameter."""
    first = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        low, high = max(start, first), min(stop, first + prod(shape))
        if low < high:
            yield Run(name, low - first, low - start, high - low)
        first += prod(shape) + gap


def _optimizer_state(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_pickle(path).get("optimizer_state_dict") or {}
    if content.get("zero_stage", 1) > 1:
        raise CheckpointError(f"{path}: of ZeRO stage {content['zero_stage']}: a pipeline uses 0 or 1")
    if not isinstance(content.get("base_optimizer_state"), dict):
        raise CheckpointError(
            f"{path}: has no options of the optimizer: save with zero_optimization.elastic_checkpoint false"
        )
    missing = {"param_slice_mappings", "single_partition_of_fp32_groups"} - content.keys()
    if missing:
        raise CheckpointError(f"{path}: lacks {sorted(missing)}: save it with a newer DeepSpeed")
    return content


def _mapped_runs(mapping: Mapping[str, FragmentAddress], found: dict[str, int]) -> Iterator[Run]:
    """found: elements of each parameter that the partitions before have; grows."""
    for name, address in mapping.items():
        first = found.get(name, 0)
        found[name] = first + address.numel
        yield Run(name, first, address.start, address.numel)


def _flat(
    group: int,
    runs: tuple[Run, ...],
    state: Mapping[str, Any],
    options: Mapping[str, Any],
    master: Tensor | None,
) -> FlatState:
    tensors = {} if master is None else {MASTER: master.detach().view(-1)}
    shared = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            tensors[name] = value.view(-1)
        else:
            shared[name] = value
    return FlatState(
        group, runs, tensors, shared, {name: value for name, value in options.items() if name != "params"}
    )


@dataclass(frozen=True, slots=True)
class WholeOptimizer:
    """The optimizer of a stage without ZeRO, as its file has it: parameters by their place in a group.

    masters: per group, one tensor per parameter, or one flat tensor (DeepSpeed's fused optimizers); None
    where parameters are in fp32.
    """

    path: Path
    state: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    masters: Sequence[Any] | None

    @classmethod
    def of(cls, path: Path, content: Mapping[str, Any]) -> WholeOptimizer:
        """content: what the file has as ``optimizer``."""
        base = content.get("optimizer_state_dict", content)
        masters = content.get("fp32_groups", content.get("fp32_groups_flat"))
        return cls(path, base["state"], base["param_groups"], masters)

    @property
    def is_flat(self) -> bool:
        return self.masters is not None and any(isinstance(group, Tensor) for group in self.masters)

    def num_elements(self, group: int) -> list[int | None]:
        """Of each parameter of a group (of all together where they are fused); None: it has no state."""
        return [_num_elements(state, master) for state, master in self._entries(group)]

    def flat_states(self, group: int, names: Sequence[tuple[str, int]]) -> list[FlatState]:
        """names: of the parameters, in their order, with their numbers of elements."""
        options = self.groups[group]
        entries = list(self._entries(group))
        if self.is_flat:
            (state, master), runs, offset = entries[0], [], 0
            for name, size in names:
                runs.append(Run(name, 0, offset, size))
                offset += size
            return [_flat(group, tuple(runs), state, options, master)]
        return [
            _flat(group, (Run(name, 0, 0, size),), state, options, master)
            for (name, size), (state, master) in zip(names, entries, strict=True)
            if state or master is not None
        ]

    def _entries(self, group: int) -> Iterator[tuple[Mapping[str, Any], Tensor | None]]:
        """State and master of each parameter of a group, or of all together."""
        masters = None if self.masters is None else self.masters[group]
        if isinstance(masters, Tensor):
            masters = [masters]
        for position, index in enumerate(self.groups[group]["params"]):
            yield self.state.get(index, {}), None if masters is None else masters[position]


def _num_elements(state: Mapping[str, Any], master: Tensor | None) -> int | None:
    sizes = [master] if master is not None else []
    sizes += [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    return sizes[0].numel() if sizes else None
