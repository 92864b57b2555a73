"""A plan as a picture in the terminal: a line of blocks per pipeline. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from malleus_ds.plan.drawing import ranks_text
from malleus_ds.report.plan_colours import colour_of, text_colour
from malleus_ds.report.plan_view import PipelineView, PlanView, StageView

_LEAST_COLUMNS = 11  # Of a block.
_MAX_LINES = 24  # Beyond, pipelines that are alike share a line.
_VISIBLE_RATE = 1.005


@dataclass(frozen=True, slots=True)
class _Line:
    """Pipelines that are alike. title: their numbers."""

    title: str
    pipeline: PipelineView


def print_plan(console: Console, view: PlanView) -> None:
    """The plan, as wide as the console: blocks as wide as their layers are many, coloured by group rate."""
    lines = list(_lines(view))
    title_columns = max(len(line.title) for line in lines) + 1
    tails = [f" m={line.pipeline.num_micro_batches:<3} {line.pipeline.time_s:.3f} s" for line in lines]
    columns = max(console.width - title_columns - max(map(len, tails)) - 1, _LEAST_COLUMNS + 1)
    for line, tail in zip(lines, tails, strict=True):
        first = 0
        stages = line.pipeline.stages
        while first < len(stages):
            part = stages[first : first + max(columns // (_LEAST_COLUMNS + 1), 1)]
            row = Text((line.title if first == 0 else "").ljust(title_columns))
            row.append_text(_blocks(part, columns, view))
            first += len(part)
            if first >= len(stages):
                row.append(" " * (title_columns + columns - len(row)) + tail)
            console.print(row, no_wrap=True, overflow="crop", soft_wrap=True)
    standby = ranks_text(view.standby, dict(enumerate(view.rates))) or "none"
    console.print(Text(f"standby: {standby}"))
    console.print(_legend(view))


def _lines(view: PlanView) -> Iterator[_Line]:
    """One per pipeline; in a large plan one per shape, in the order in which they come."""
    if len(view.pipelines) <= _MAX_LINES:
        for pipeline_id, pipeline in enumerate(view.pipelines):
            yield _Line(f"pipeline {pipeline_id}", pipeline)
        return
    alike: dict[tuple[object, ...], list[int]] = {}
    for pipeline_id, pipeline in enumerate(view.pipelines):
        alike.setdefault(pipeline.shape, []).append(pipeline_id)
    for numbers in alike.values():
        more = f" +{len(numbers) - 1} alike" if len(numbers) > 1 else ""
        yield _Line(f"pipeline {numbers[0]}{more}", view.pipelines[numbers[0]])


def _blocks(stages: Sequence[StageView], columns: int, view: PlanView) -> Text:
    row = Text()
    for stage, width in zip(stages, _widths(stages, columns, view), strict=True):
        row.append(_label(stage, width, view).ljust(width), style=_style(stage))
        row.append("|")
    return row


def _widths(stages: Sequence[StageView], columns: int, view: PlanView) -> list[int]:
    """Columns of each block without its bar: in proportion to the layers, but never too few for its label."""
    for labels in zip(*(_labels(stage, view) for stage in stages), strict=True):
        least = [max(_LEAST_COLUMNS, len(label) + 1) for label in labels]
        if sum(least) + len(least) <= columns:
            break
    else:
        least = [_LEAST_COLUMNS] * len(stages)
    num_layers, per_layer = sum(stage.num_layers for stage in stages), float(columns)
    while per_layer > 1e-3:
        widths = [
            max(fewest, int(stage.num_layers * per_layer))
            for fewest, stage in zip(least, stages, strict=True)
        ]
        if sum(widths) + len(widths) <= columns:
            break
        per_layer = min(per_layer * 0.98, columns / num_layers)
    return widths


def _label(stage: StageView, width: int, view: PlanView) -> str:
    """As much as fits."""
    for label in _labels(stage, view):
        if len(label) <= width:
            return label
    return label[: width - 1] + "~"


def _labels(stage: StageView, view: PlanView) -> Iterator[str]:
    """Ranks, TP degree, layers, group rate; then less and less of it."""
    ranks, layers = ranks_text(sorted(stage.ranks)), f"{stage.num_layers}L"
    mark = "*" if stage.is_limiting else ""
    degree = f"TP{len(stage.ranks)}" if view.max_degree > 1 else ""
    rate = f"x{stage.group_rate:.2f}" if stage.group_rate > _VISIBLE_RATE else ""
    for parts in ((ranks, degree, layers, rate), (ranks, layers, rate), (ranks, layers), (ranks,)):
        yield " " + mark + " ".join(filter(None, parts))


def _style(stage: StageView) -> str:
    fill = colour_of(stage.group_rate)
    return f"{'bold ' if stage.is_limiting else ''}{text_colour(fill)} on {fill}"


def _legend(view: PlanView) -> Text:
    has_degrees = view.max_degree > 1
    group = f"TP{view.max_degree} group" if has_degrees else "device"
    return Text(
        f"ranks, {'TP degree, ' if has_degrees else ''}layers (L); x and colour: layer time against a "
        f"healthy {group}; *: limits the step; m: micro-batches",
        style="dim",
    )
