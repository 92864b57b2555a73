"""Who was lost when an attempt ended, and whether the job can go on. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from malleus_ds.elastic.run_files import ExitNote
from malleus_ds.errors import USER_MISTAKE


class Ending(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    MISTAKE = "mistake"  # of the user: no restart mends it
    BROKEN = "broken"  # all ranks failed before the first step: no restart mends it
    LOSS = "loss"  # go on without the lost ranks; with all when none is known to be lost


@dataclass(frozen=True, slots=True)
class Lost:
    """A lost rank. how: in words."""

    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """reason: what a rank said, for people."""

    ending: Ending
    lost: tuple[Lost, ...] = ()
    reason: str = ""


def judge(notes: Mapping[int, ExitNote | None], has_progress: bool) -> Judgement:
    """notes: by rank, None for a rank that said nothing; has_progress: whether the job trained a step.

    A rank is lost when a signal ended it, when it says nothing (its host is gone), and when it failed by
    itself, with an error that does not speak of a peer. Where there is no such rank, those hang that still
    ran long after the first one ended; else they may have waited for it, as in NCCL, which notices late.
    """
    known = [note for note in notes.values() if note is not None]
    if len(known) == len(notes) and all(note.code == 0 and not note.was_stopped for note in known):
        return Judgement(Ending.DONE)
    if not known and not has_progress:
        return Judgement(Ending.BROKEN, reason="no rank gave a sign; see above what the launcher said")
    broken = [Lost(rank, how) for rank, note in notes.items() if (how := _hard_loss(note)) is not None]
    mistakes = [note for note in known if note.code == USER_MISTAKE and not note.was_stopped]
    if mistakes and not broken:
        return Judgement(Ending.MISTAKE, reason=mistakes[0].reason)
    failed = [
        Lost(note.rank, f"failed with code {note.code}: {note.reason}")
        for note in known
        if note.code > 0 and note.code != USER_MISTAKE and not note.lost_peer and not note.was_stopped
    ]
    hanging = [
        Lost(note.rank, "did not end after a peer was lost: it hangs")
        for note in known
        if note.was_stopped and not note.lost_peer
    ]
    lost = tuple(sorted(broken + failed or hanging, key=lambda each: each.rank))
    reason = next((note.reason for note in known if note.reason), "")
    if len(lost) < len(notes):
        return Judgement(Ending.LOSS, lost, reason)
    if has_progress:
        return Judgement(Ending.LOSS, (), f"all ranks were lost at once, the first one {lost[0].how}")
    return Judgement(Ending.BROKEN, lost, lost[0].how)


def _hard_loss(note: ExitNote | None) -> str | None:
    """How the rank was lost, when its process or host did not end by itself."""
    if note is None:
        return "gave no sign: its host is gone"
    if note.code < 0 and not note.was_stopped and not note.lost_peer:
        return f"was ended by {signal_name(-note.code)}"
    return None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
