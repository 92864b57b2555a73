"""Throughput over time as a picture (matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from malleus_ds.simulate.report import Comparison


def write_plot(path: str | Path, comparison: Comparison, batch_size: int) -> None:
    """Write an SVG or PNG, by the suffix of ``path``. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    healthy_rate = batch_size / comparison.healthy_s
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, segments in zip(comparison.rows, comparison.segments, strict=True):
        is_ours = row is comparison.rows[-1]
        edges_s = [segments[0].start_s, *(segment.end_s for segment in segments)]
        rates = [segment.samples_per_s / healthy_rate for segment in segments]
        axes.stairs(
            rates, edges_s, baseline=None, label=row.system.name, linewidth=2.5 if is_ours else 1.2, alpha=0.9
        )
    _mark_situations(axes, comparison)
    axes.set(
        xlabel="time (s)", ylabel="throughput / healthy throughput", ylim=(0, 1.12), title=comparison.model
    )
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path)


def _mark_situations(axes: Any, comparison: Comparison) -> None:
    outcomes, end_s = comparison.rows[0].outcomes, comparison.segments[0][-1].end_s
    for index, outcome in enumerate(outcomes):
        start_s = end_s * index / len(outcomes)
        axes.axvline(start_s, color="0.8", linewidth=0.8)
        middle_s = start_s + end_s / len(outcomes) / 2
        optimum = 1 / outcome.situation.optimum_ratio
        axes.text(middle_s, 1.06, outcome.situation.name, ha="center")
        label = None if index else "optimum"
        axes.hlines(
            optimum, start_s, start_s + end_s / len(outcomes), color="0.5", linestyle=":", label=label
        )
