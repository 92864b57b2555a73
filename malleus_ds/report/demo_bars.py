"""The bars of the demo. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from malleus_ds.report.bars import Bar
from malleus_ds.report.measurements import Measurements
from malleus_ds.report.situations import Situation

MAX_RATE_ERROR = 0.05
MAX_STEPS_TO_SWITCH = 6
MAX_RATIO = 1.15
MAX_OVERRUN_SHARE = 0.05


def demo_bars(
    measurements: Measurements,
    situations: Sequence[Situation],
    duration_s: float,
    max_duration_s: float | None,
) -> list[Bar]:
    """What the demo must hold. max_duration_s: None where the user asked for a longer run."""
    healthy, *changed = situations
    bars = [Bar("rates that moved in healthy steps", healthy.num_shifts, 0, "lower")]
    for situation in changed:
        bars += _situation_bars(situation)
    losses = [step.loss for step in measurements.steps]
    bars.append(Bar("last loss, limit: the first", losses[-1], losses[0], "lower"))
    bars.append(
        Bar(
            "share of emulated layer calls that overran",
            _overrun_share(measurements),
            MAX_OVERRUN_SHARE,
            "lower",
        )
    )
    if max_duration_s is not None:
        bars.append(Bar("duration, s", duration_s, max_duration_s, "lower"))
    return bars


def _situation_bars(situation: Situation) -> list[Bar]:
    at = f"step {situation.start}"
    bars = [
        Bar(f"{at}: error of the rate of rank {rank}", situation.rate_error(rank), MAX_RATE_ERROR, "lower")
        for rank in situation.changed_ranks
    ]
    bars.append(Bar(f"{at}: steps to the switch", situation.steps_to_switch, MAX_STEPS_TO_SWITCH, "lower"))
    bars.append(
        Bar(f"{at}: new step / optimum", situation.ratio if situation.switches else None, MAX_RATIO, "lower")
    )
    excess = None
    if situation.switches and all(switch.sent_bytes is not None for switch in situation.switches):
        excess = sum(abs((switch.sent_bytes or 0) - switch.total_bytes) for switch in situation.switches)
    bars.append(Bar(f"{at}: bytes sent beyond the lower bound", excess, 0, "lower"))
    return bars


def _overrun_share(measurements: Measurements) -> float | None:
    end = measurements.end
    return end.num_overruns / end.num_emulated_calls if end and end.num_emulated_calls else None
