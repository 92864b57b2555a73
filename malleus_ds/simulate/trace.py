"""A simulated step in the Trace Event Format, for https://ui.perfetto.dev and chrome://tracing.

Format: "Trace Event Format" of the Chromium project; complete events (``ph: X``), times in microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from malleus_ds.plan import PlanError
from malleus_ds.planner.types import PlanRequest
from malleus_ds.simulate.engine import Kind, Simulation

# Reserved colour names of the format; Perfetto takes its colours from the names of the events.
_COLOURS: dict[Kind, str] = {
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "reduce": "thread_state_iowait",
    "optimizer": "rail_animation",
}


def trace_events(simulation: Simulation, request: PlanRequest) -> list[dict[str, Any]]:
    """One process per node, one thread per rank. Raises `PlanError` for a step that never ends."""
    if not math.isfinite(simulation.makespan_s):
        raise PlanError("the plan uses a failed rank (straggling rate inf): its step never ends; no trace")
    spans = simulation.spans()
    places = {
        rank: f"pipeline {pipeline_id}, stage {stage_id}"
        for pipeline_id, stage_id, stage in simulation.plan.stages()
        for rank in stage.ranks
    }
    events = []
    for node_id, ranks in enumerate(request.node_ranks):
        events.append(_name("process_name", node_id, None, f"node {node_id}"))
        for rank in ranks:
            events.append(_name("thread_name", node_id, rank, _title(rank, places, request)))
            for span in spans[rank]:
                event = {
                    "ph": "X",
                    "name": span.kind if span.micro_batch is None else f"{span.kind} {span.micro_batch}",
                    "cat": span.kind,
                    "cname": _COLOURS[span.kind],
                    "pid": node_id,
                    "tid": rank,
                    "ts": span.start_s * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": {"stage": span.stage_id},
                }
                events.append(event)
    return events


def write_trace(path: str | Path, simulation: Simulation, request: PlanRequest) -> None:
    """Write the trace of a step as JSON, one event per line."""
    lines = ",\n".join(_lines(simulation, request))
    Path(path).write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n', encoding="utf-8")


def _lines(simulation: Simulation, request: PlanRequest) -> Iterator[str]:
    return map(json.dumps, trace_events(simulation, request))


def _name(what: str, node_id: int, rank: int | None, name: str) -> dict[str, Any]:
    thread = {} if rank is None else {"tid": rank}
    return {"ph": "M", "name": what, "pid": node_id, **thread, "args": {"name": name}}


def _title(rank: int, places: Mapping[int, str], request: PlanRequest) -> str:
    rate = request.rates[rank]
    slow = "" if rate == 1.0 else f", x = {rate:g}"
    return f"rank {rank} ({places.get(rank, 'standby')}{slow})"
