"""Which parameter is which in DeepSpeed's optimizer state without ZeRO: it has no names, only an order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.stock.flat_state import FlatState, WholeOptimizer
from malleus_ds.checkpoint.stock.module import StockModule

Named = Sequence[tuple[str, int]]
"""Parameters in the order of their module, with their numbers of elements."""


def name_states(
    optimizers: Sequence[WholeOptimizer], module: StockModule, groups: Mapping[str, int] | None
) -> list[list[FlatState]]:
    """The states of each stage.

    groups: the parameter group of each trained parameter, where the model is known. The stages' layers
    follow from the numbers and sizes of the parameters. Raises `CheckpointError` where they do not fit.
    """
    stages = []
    start = 0
    for optimizer in optimizers:
        states = None
        for stop in range(start + 1, module.num_layers + 1):
            states = _match(optimizer, module.parameters(start, stop), groups)
            if states is not None:
                break
        if states is None:
            raise CheckpointError(
                f"{optimizer.path}: its optimizer has other parameters than the layers from {start} on, in "
                f"their order: name layers that share a module (--tied KEY=LAYER,LAYER), or load it in a job "
                f"(engine.load_checkpoint), which knows ties, frozen parameters and parameter groups"
            )
        stages.append(states)
        start = stop
    return stages


def _match(
    optimizer: WholeOptimizer, named: Named, groups: Mapping[str, int] | None
) -> list[FlatState] | None:
    """None unless these are the optimizer's parameters."""
    for division in _divisions(named, groups):
        if len(division) != len(optimizer.groups):
            continue
        if all(_fits(optimizer, group, names) for group, names in enumerate(division)):
            return [
                state for group, names in enumerate(division) for state in optimizer.flat_states(group, names)
            ]
    return None


def _divisions(named: Named, groups: Mapping[str, int] | None) -> list[list[Named]]:
    """Ways to divide parameters into groups: DeepSpeed's users leave frozen ones out, or do not."""
    if groups is None:
        return [[named]]
    trained = [(groups[name], (name, size)) for name, size in named if name in groups]
    present = sorted({group for group, _ in trained})  # DeepSpeed drops a group that a stage lacks
    divided: list[Named] = [[entry for of, entry in trained if of == group] for group in present]
    return [divided, [named]] if len(present) == 1 else [divided]


def _fits(optimizer: WholeOptimizer, group: int, names: Named) -> bool:
    sizes = optimizer.num_elements(group)
    if optimizer.is_flat:
        return sizes == [sum(size for _, size in names)]
    return len(sizes) == len(names) and all(
        size in (None, expected) for size, (_, expected) in zip(sizes, names, strict=True)
    )
