"""From JSON's data to a plan: strict, and every error says where in the data it is."""

from __future__ import annotations

from typing import Any

from malleus_ds.plan.types import ParallelPlan, Pipeline, PlanError, Stage


def plan_from_dict(data: Any) -> ParallelPlan:
    """The inverse of `ParallelPlan.to_dict`.

    Raises `PlanError` for unknown and missing keys and for wrong types; the message names the place
    (``pipelines[0].stages[1].layers``), the value and the fix. Whether the plan fits a model and a
    world is `malleus_ds.plan.checks`' business.
    """
    fields = _object(data, "plan", ("pipelines", "micro_batch_size", "standby"))
    return ParallelPlan(
        pipelines=tuple(
            _pipeline(item, f"pipelines[{index}]")
            for index, item in enumerate(_filled_list(fields["pipelines"], "pipelines"))
        ),
        micro_batch_size=_integer(fields["micro_batch_size"], "micro_batch_size"),
        standby=_integers(fields["standby"], "standby"),
    )


def _pipeline(data: Any, path: str) -> Pipeline:
    fields = _object(data, path, ("stages", "num_micro_batches"))
    return Pipeline(
        stages=tuple(
            _stage(item, f"{path}.stages[{index}]")
            for index, item in enumerate(_filled_list(fields["stages"], f"{path}.stages"))
        ),
        num_micro_batches=_integer(fields["num_micro_batches"], f"{path}.num_micro_batches"),
    )


def _stage(data: Any, path: str) -> Stage:
    fields = _object(data, path, ("ranks", "layers"))
    _filled_list(fields["ranks"], f"{path}.ranks")
    layers = _integers(fields["layers"], f"{path}.layers")
    if len(layers) != 2:
        raise PlanError(f"{path}.layers is {fields['layers']!r}: write [start, stop], stop excluded")
    return Stage(ranks=_integers(fields["ranks"], f"{path}.ranks"), layers=(layers[0], layers[1]))


def _object(data: Any, path: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise PlanError(f"{path} is {data!r}: write an object with the keys {', '.join(keys)}")
    prefix = "" if path == "plan" else f"{path}."
    for key in data:
        if key not in keys:
            raise PlanError(
                f"{prefix}{key} is an unknown key (value {data[key]!r}): allowed are {', '.join(keys)}"
            )
    for key in keys:
        if key not in data:
            raise PlanError(f"{prefix}{key} is missing: add it beside {', '.join(data) or 'nothing'}")
    return data


def _list(data: Any, path: str) -> list[Any]:
    if not isinstance(data, list):
        raise PlanError(f"{path} is {data!r}: write a list")
    return data


def _filled_list(data: Any, path: str) -> list[Any]:
    if not _list(data, path):
        raise PlanError(f"{path} is []: it needs at least one entry")
    return data  # type: ignore[no-any-return]


def _integers(data: Any, path: str) -> tuple[int, ...]:
    return tuple(_integer(item, f"{path}[{index}]") for index, item in enumerate(_list(data, path)))


def _integer(data: Any, path: str) -> int:
    if not isinstance(data, int) or isinstance(data, bool):
        raise PlanError(f"{path} is {data!r}: write an integer")
    return data
