"""A plan as text: one row of boxes per pipeline, as wide as its layers are many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from malleus_ds.plan.types import ParallelPlan

MAX_COLUMNS = 100
_MAX_LABEL_COLUMNS = 40
_COLUMNS_PER_LAYER = tuple(quarter / 4 for quarter in range(16, -1, -1))  # Tried from wide to narrow.
_VISIBLE_RATE = 1.05


@dataclass(frozen=True, slots=True)
class Mark:
    """Where an arrow points: a stage, a pipeline (no stage_id), or the standby ranks (neither)."""

    pipeline_id: int | None = None
    stage_id: int | None = None


@dataclass(frozen=True, slots=True)
class _Box:
    """One stage. `num_layers` only stretches it: a faulty stage may have none, or fewer."""

    ranks: str
    layers: str
    num_layers: int

    def columns(self, per_layer: float) -> int:
        """Columns between the bars."""
        return max(len(self.ranks) + 2, len(self.layers) + 2, math.floor(self.num_layers * per_layer))


def draw_plan(plan: ParallelPlan, rates: Mapping[int, float] | None = None, mark: Mark | None = None) -> str:
    """The plan as plain text of at most 100 columns; layer ranges include both ends.

    rates: straggling rates by rank, shown beside the ranks that are slow or failed; mark: draws an
    arrow. Also draws plans that are not legal.
    """
    rows = [
        [_box(stage.ranks, stage.layers, rates or {}) for stage in pipeline.stages]
        for pipeline in plan.pipelines
    ]
    title_columns = len(f"pipeline {max(len(rows) - 1, 0)}  layers ")
    tails = [
        f"  {_count(pipeline.num_micro_batches, 'micro-batch', 'micro-batches')}"
        for pipeline in plan.pipelines
    ]
    columns = MAX_COLUMNS - title_columns - max(map(len, tails), default=0)
    per_layer = next(
        (scale for scale in _COLUMNS_PER_LAYER if all(_row_columns(row, scale) <= columns for row in rows)),
        0.0,
    )
    lines: list[str] = []
    for pipeline_id, row in enumerate(rows):
        marked = mark.stage_id if mark is not None and mark.pipeline_id == pipeline_id else None
        title = f"pipeline {pipeline_id}"
        lines += _draw_row(
            row, title.ljust(title_columns - 7), tails[pipeline_id], columns, per_layer, marked
        )
        if mark == Mark(pipeline_id):
            lines.append("^" * len(title))
    if plan.standby or mark == Mark():
        lines.append(_shorten(f"standby: {ranks_text(plan.standby, rates) or 'none'}", MAX_COLUMNS))
    if mark == Mark():
        lines.append("^" * len("standby"))
    samples = _count(plan.global_batch_size, "sample", "samples")
    lines.append(f"micro-batch size {plan.micro_batch_size}, {samples} per step")
    return "\n".join(lines)


def layers_text(layers: tuple[int, int]) -> str:
    """A layer range with both ends: ``(0, 4)`` is "0-3", ``(3, 4)`` is "3"."""
    start, stop = layers
    if stop <= start:
        return "none"
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def ranks_text(ranks: Iterable[int], rates: Mapping[int, float] | None = None) -> str:
    """Ranks with runs joined, slow ones with their rate: "0-3,5 (x2.57)"."""
    runs: list[tuple[int, int, str]] = []
    for rank in ranks:
        note = _rate_text((rates or {}).get(rank, 1.0))
        if runs and not note and not runs[-1][2] and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank, "")
        else:
            runs.append((rank, rank, note))
    # Two neighbours are a list, not a range: "0,1", but "0-2".
    return ",".join(
        f"{first}{note}" if first == last else f"{first},{last}" if last == first + 1 else f"{first}-{last}"
        for first, last, note in runs
    )


def _rate_text(rate: float) -> str:
    if math.isinf(rate):
        return " (failed)"
    return f" (x{rate:.2f})" if rate > _VISIBLE_RATE else ""


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _shorten(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 3] + "..."


def _box(ranks: Sequence[int], layers: tuple[int, int], rates: Mapping[int, float]) -> _Box:
    return _Box(
        _shorten(ranks_text(ranks, rates), _MAX_LABEL_COLUMNS),
        _shorten(layers_text(layers), _MAX_LABEL_COLUMNS),
        layers[1] - layers[0],
    )


def _row_columns(row: Sequence[_Box], per_layer: float) -> int:
    return 1 + sum(box.columns(per_layer) + 1 for box in row)


def _draw_row(
    row: Sequence[_Box], title: str, tail: str, columns: int, per_layer: float, marked: int | None
) -> list[str]:
    """The lines of one pipeline: ranks above layers, on as many pairs of lines as its boxes need."""
    lines: list[str] = []
    start = 0
    while start < len(row) or not lines:
        stop = start + 1
        while stop < len(row) and _row_columns(row[start : stop + 1], per_layer) <= columns:
            stop += 1
        part = row[start:stop]
        widths = [box.columns(per_layer) for box in part]
        ranks = "".join(f" {box.ranks:<{width - 1}}|" for box, width in zip(part, widths, strict=True))
        layers = "".join(f" {box.layers:<{width - 1}}|" for box, width in zip(part, widths, strict=True))
        first = title if start == 0 else " " * len(title)
        lines.append(f"{first}ranks  |{ranks}" + (tail if stop >= len(row) else ""))
        lines.append(f"{' ' * len(title)}layers |{layers}")
        if marked is not None and start <= marked < stop:
            before = len(title) + len("layers |") + sum(width + 1 for width in widths[: marked - start])
            lines.append(" " * before + "^" * widths[marked - start])
        start = stop
    return lines
