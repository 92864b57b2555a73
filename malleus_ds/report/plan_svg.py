"""A plan as an SVG: a row of blocks per pipeline, and how long each pipeline takes. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from malleus_ds.plan.drawing import layers_text, ranks_text
from malleus_ds.report.plan_colours import LEGEND_RATES, colour_of, text_colour
from malleus_ds.report.plan_view import PipelineView, PlanView, StageView

_WIDTH = 1280
_MARGIN = 24
_TITLE_WIDTH = 96  # Of "pipeline 12".
_TIME_WIDTH = 230  # Of the bar of a pipeline's time with its figures.
_BLOCKS_WIDTH = _WIDTH - 2 * _MARGIN - _TITLE_WIDTH - _TIME_WIDTH
_HEADER_HEIGHT = 96
_FONT = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"'
_LETTER = 0.56  # Mean width of a letter in font sizes, on the safe side.
_CELL = 26  # Side of a standby device.


@dataclass(frozen=True, slots=True)
class _Rows:
    """Heights that suit the number of pipelines, in pixels. pitch: from one row to the next."""

    pitch: int
    height: int
    has_two_lines: bool

    @classmethod
    def of(cls, num_pipelines: int) -> _Rows:
        if num_pipelines <= 16:
            return cls(54, 46, True)
        return cls(40, 36, True) if num_pipelines <= 64 else cls(22, 20, False)


def draw_svg(view: PlanView, title: str, subtitle: str = "") -> str:
    """The plan as the text of an SVG file.

    Blocks are as wide as their layers are many, coloured by group rate; each has a tooltip with its ranks,
    layers, time and memory. The bars on the right are the pipelines' times: the longest is the step.
    """
    rows = _Rows.of(len(view.pipelines))
    body = list(_header(view, title, subtitle))
    top = _HEADER_HEIGHT
    longest_s = max(pipeline.time_s for pipeline in view.pipelines)
    for pipeline_id, pipeline in enumerate(view.pipelines):
        body += _pipeline(pipeline_id, pipeline, view, top, rows)
        body += _time_bar(pipeline, longest_s, top, rows)
        top += rows.pitch
    body += _standby(view, top + 12)
    height = top + 12 + _standby_height(view) + _MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" {_FONT}>'
    )
    return "\n".join(
        [head, f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>', *body, "</svg>", ""]
    )


def _text(x: float, y: float, text: str, size: int = 12, fill: str = "#1b1b1b", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"{more}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {box} rx="3" fill="{fill}"{more}/>'


def _header(view: PlanView, title: str, subtitle: str) -> Iterator[str]:
    yield _text(_MARGIN, 34, title, 17, more=' font-weight="600"')
    yield _text(_MARGIN, 58, subtitle, 13, "#555555")
    yield _text(
        _MARGIN + _TITLE_WIDTH, 86, "stages: ranks, layers (dark frame: limits the step)", 12, "#555555"
    )
    yield _text(_WIDTH - _MARGIN - _TIME_WIDTH + 12, 86, "time of a step (micro-batches)", 12, "#555555")
    label = "layer time against a healthy group" + (f" at TP{view.max_degree}" if view.max_degree > 1 else "")
    width, height = 30, 14
    left = _WIDTH - _MARGIN - width * len(LEGEND_RATES)
    yield _text(left - 8, 25, label, 12, "#555555", ' text-anchor="end"')
    for index, rate in enumerate(LEGEND_RATES):
        x = left + index * width
        yield _rect(x, 14, width - 2, height, colour_of(rate))
        yield _text(x + width / 2 - 1, 41, f"{rate:g}", 11, "#555555", ' text-anchor="middle"')


def _pipeline(
    pipeline_id: int, pipeline: PipelineView, view: PlanView, top: float, rows: _Rows
) -> Iterator[str]:
    middle = top + rows.height / 2 + 4
    yield _text(_MARGIN, middle, f"pipeline {pipeline_id}", 13 if rows.has_two_lines else 11)
    per_layer = _BLOCKS_WIDTH / view.num_layers
    for stage in pipeline.stages:
        x = _MARGIN + _TITLE_WIDTH + stage.layers[0] * per_layer
        yield from _block(stage, x, top, stage.num_layers * per_layer - 2, view, rows)


def _block(
    stage: StageView, x: float, top: float, width: float, view: PlanView, rows: _Rows
) -> Iterator[str]:
    fill = colour_of(stage.group_rate)
    outline = ' stroke="#111111" stroke-width="3"' if stage.is_limiting else ""
    yield f"<g><title>{escape(_tooltip(stage, view))}</title>"
    yield _rect(x, top, max(width, 1), rows.height, fill, outline)
    centre, colour = x + width / 2, text_colour(fill)
    degree = f"TP{len(stage.ranks)} · " if view.max_degree > 1 else ""
    ranks, count = ranks_text(sorted(stage.ranks)), f"{stage.num_layers}"
    layers = f"{count} layer" if stage.num_layers == 1 else f"{count} layers"
    below = (f"{degree}{layers}", layers, f"{count} L", count)
    if rows.has_two_lines:
        yield _fitting(centre, top + rows.height * 0.42, width, (ranks,), 13, colour, True)
        yield _fitting(centre, top + rows.height * 0.82, width, below, 12, colour, False)
    else:
        one_line = (f"{ranks} · {degree}{layers}", f"{ranks} · {count}", ranks)
        yield _fitting(centre, top + rows.height * 0.72, width, one_line, 11, colour, False)
    yield "</g>"


def _fitting(
    x: float, y: float, width: float, texts: tuple[str, ...], size: int, fill: str, is_bold: bool
) -> str:
    """The first text that fits into the width, at a smaller size if need be; nothing if none does."""
    more = ' text-anchor="middle"' + (' font-weight="600"' if is_bold else "")
    for font_size in (size, size - 1, size - 2, size - 3):
        for text in texts:
            if len(text) * font_size * _LETTER <= width - 4:
                return _text(x, y, text, font_size, fill, more)
    return ""


def _tooltip(stage: StageView, view: PlanView) -> str:
    slow = {rank: view.rates[rank] for rank in stage.ranks}
    return (
        f"ranks {ranks_text(sorted(stage.ranks), slow)}, TP{len(stage.ranks)}\n"
        f"layers {layers_text(stage.layers)} ({stage.num_layers}), group rate {stage.group_rate:.3f}\n"
        f"{stage.time_s * 1000:.1f} ms per micro-batch\n"
        f"{stage.needed_bytes / 2**30:.1f} GiB per device"
    )


def _time_bar(pipeline: PipelineView, longest_s: float, top: float, rows: _Rows) -> Iterator[str]:
    left, full = _WIDTH - _MARGIN - _TIME_WIDTH + 12, _TIME_WIDTH - 12
    width = full * pipeline.time_s / longest_s
    is_slowest = pipeline.time_s >= longest_s
    yield _rect(left, top, full, rows.height, "#f2f2f2")
    yield _rect(left, top, width, rows.height, "#e3a7b0" if is_slowest else "#c5ccd6")
    text = f"{pipeline.time_s:.3f} s  ({pipeline.num_micro_batches})"
    yield _text(left + 8, top + rows.height / 2 + 4, text, 12 if rows.has_two_lines else 11)


def _standby_columns() -> int:
    return (_WIDTH - 2 * _MARGIN - _TITLE_WIDTH) // (_CELL + 4)


def _standby_height(view: PlanView) -> int:
    return (_CELL + 4) * max(math.ceil(len(view.standby) / _standby_columns()), 1)


def _standby(view: PlanView, top: float) -> Iterator[str]:
    yield _text(_MARGIN, top + _CELL / 2 + 4, "standby", 13)
    if not view.standby:
        yield _text(_MARGIN + _TITLE_WIDTH, top + _CELL / 2 + 4, "none", 12, "#555555")
    for index, rank in enumerate(view.standby):
        row, column = divmod(index, _standby_columns())
        x, y = _MARGIN + _TITLE_WIDTH + column * (_CELL + 4), top + row * (_CELL + 4)
        rate = view.rates[rank]
        fill = colour_of(rate)
        note = "failed" if math.isinf(rate) else f"rate {rate:.2f}"
        yield f"<g><title>{escape(f'rank {rank}: {note}')}</title>"
        yield _rect(x, y, _CELL, _CELL, fill)
        colour = text_colour(fill)
        yield _fitting(x + _CELL / 2, y + _CELL / 2 + 4, _CELL + 3, (str(rank),), 11, colour, False)
        yield "</g>"
