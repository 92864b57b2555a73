"""Progress bars for work that may take longer than a user waits without a sign. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar

_DELAY_S = 2.0


class _TimeBar(ProgressColumn):
    """How much of the time limit is over."""

    def render(self, task: Task) -> ProgressBar:
        total = task.total or 1.0
        return ProgressBar(total=total, completed=min(task.elapsed or 0.0, total), width=30)


@contextmanager
def waiting(
    what: str, time_limit_s: float, console: Console | None = None, delay_s: float = _DELAY_S
) -> Iterator[None]:
    """After a while, show on a terminal's stderr how much of the time limit is over."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        _TimeBar(),
        TimeElapsedColumn(),
        TextColumn(f"of at most {time_limit_s:g} s"),
    )
    with _shown_later(
        Progress(*columns, console=console or Console(stderr=True), transient=True), delay_s
    ) as bar:
        bar.add_task(what, total=time_limit_s)
        yield


@contextmanager
def counting(
    what: str, num_steps: int, console: Console | None = None, delay_s: float = _DELAY_S
) -> Iterator[Callable[[], None]]:
    """After a while, show on a terminal's stderr how many steps are done; the function counts one."""
    with _shown_later(Progress(console=console or Console(stderr=True), transient=True), delay_s) as bar:
        task = bar.add_task(what, total=num_steps)
        yield lambda: bar.advance(task)


@contextmanager
def _shown_later(bar: Progress, delay_s: float) -> Iterator[Progress]:
    timer = Timer(delay_s, bar.start)
    timer.daemon = True
    if bar.console.is_terminal:
        timer.start()
    try:
        yield bar
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()  # It may be starting the display just now.
        if bar.live.is_started:  # To stop what never started prints an empty line.
            bar.stop()
