"""Cost of planning against the size of the cluster, as a picture."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Limit(Protocol):
    """A size with a bar on the planning time."""

    @property
    def num_devices(self) -> int: ...
    @property
    def bar_s(self) -> float: ...


def plot_scale(clusters: Sequence[Mapping[str, Any]], limits: Sequence[Limit], path: Path) -> None:
    """Planning time and gap to the lower bound of each cluster, and their means; SVG or PNG by the suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, gap_axes = figure.subplots(1, 2)
    _series(time_axes, clusters, "planning_s", 1.0)
    shown = [limit for limit in limits if any(limit.num_devices == row["num_devices"] for row in clusters)]
    time_axes.scatter(
        [limit.num_devices for limit in shown],
        [limit.bar_s for limit in shown],
        marker="_",
        s=300,
        color="tab:red",
        label="bar",
    )
    time_axes.set(yscale="log", ylabel="planning time (s)", title="Time of one plan")
    time_axes.legend()
    _series(gap_axes, clusters, "gap", 100.0)
    gap_axes.axhline(6.0, color="tab:red", linewidth=1, label="bar (mean)")
    gap_axes.set(ylabel="gap to the lower bound (%)", title="Distance to what no plan can beat")
    gap_axes.set_ylim(bottom=0)
    gap_axes.legend()
    for axes in (time_axes, gap_axes):
        sizes = sorted({row["num_devices"] for row in clusters})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set_xlabel("devices (3 to 12 % of them slow)")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _series(axes: Any, clusters: Sequence[Mapping[str, Any]], name: str, scale: float) -> None:
    by_size: dict[int, list[float]] = defaultdict(list)
    for row in clusters:
        by_size[row["num_devices"]].append(scale * row[name])
    points = [(size, value) for size, values in by_size.items() for value in values]
    axes.scatter(*zip(*points, strict=True), s=12, alpha=0.5, color="tab:blue", label="one cluster")
    sizes = sorted(by_size)
    axes.plot(sizes, [statistics.mean(by_size[size]) for size in sizes], color="tab:blue", label="mean")
