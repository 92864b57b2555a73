"""Ranks that disagree, or of which one fails, fail together with one named error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from malleus_ds.detector.control_plane import ControlPlaneError
from malleus_ds.errors import TRANSPORT_ERROR
from malleus_ds.migration.errors import StateLostError
from malleus_ds.migration.errors import SwitchFailedError as SwitchFailedError  # beside the other errors

Result = TypeVar("Result")


class AgreementError(ValueError):
    """The ranks do not agree on the plan, the model or the config."""


class RankFailedError(RuntimeError):
    """Another rank failed while this one did not."""


class PeerLostError(RuntimeError):
    """A peer stopped answering: it died, or it is stuck."""


@dataclass(frozen=True, slots=True)
class _Report:
    value: Any = None
    error: str | None = None
    is_user_error: bool = False


def run_together(
    action: Callable[[], Result], note: Callable[[Result], Any] = lambda result: None
) -> tuple[Result, list[Any]]:
    """Run ``action`` on every rank, then exchange a note of each result. Collective over the world.

    Returns this rank's result and the notes of all ranks (they must pickle). When the action raises
    on some rank, all raise: the own error where there is one, else `AgreementError` (for another
    rank's ``ValueError``) or `RankFailedError`, naming the rank.
    """
    own_error: Exception | None = None
    try:
        result = action()
        report = _Report(note(result))
    except Exception as error:
        own_error = error
        report = _Report(None, f"{type(error).__name__}: {error}", isinstance(error, ValueError))
    reports: list[_Report] = [_Report() for _ in range(dist.get_world_size())]
    with peer_errors("while comparing notes with the other ranks"):
        dist.all_gather_object(reports, report)
    if own_error is not None:
        raise own_error
    for rank, other in enumerate(reports):
        if other.error is not None:
            kind = AgreementError if other.is_user_error else RankFailedError
            raise kind(f"rank {rank} failed: {other.error}")
    return result, [other.value for other in reports]


def run_alike(
    kind: type[ValueError], action: Callable[[], Result], note: Callable[[Result], Any] = lambda result: None
) -> tuple[Result, list[Any]]:
    """`run_together`, but a `ValueError` or `OSError` on some rank is one and the same ``kind`` on all."""

    def guarded() -> tuple[Any, Any, str | None]:
        try:
            result = action()
            return result, note(result), None
        except (ValueError, OSError) as error:
            return None, None, str(error)

    (result, _, _), reports = run_together(guarded, note=lambda report: report[1:])
    for _, fault in reports:
        if fault is not None:
            raise kind(fault)
    return result, [value for value, _ in reports]


def require_equal(what: str, values: list[str], fix: str) -> None:
    """Raise `AgreementError` unless all ranks have the same value; names the ranks that differ."""
    different = [rank for rank, value in enumerate(values) if value != values[0]]
    if different:
        raise AgreementError(
            f"rank 0 and ranks {different} have different {what}: {values[0]} and "
            f"{values[different[0]]}; {fix}"
        )


@contextmanager
def peer_errors(what: str, on_loss: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Name the loss of a peer: torch reports it as a bare connection or timeout error."""
    try:
        yield
    except RuntimeError as error:
        is_named = isinstance(error, PeerLostError | RankFailedError | StateLostError)
        if is_named or not _is_connection_error(error):
            raise
        on_loss()
        rank = dist.get_rank() if dist.is_initialized() else -1
        raise PeerLostError(f"rank {rank} lost a peer {what}: {_first_line(error)}") from error


def _is_connection_error(error: RuntimeError) -> bool:
    is_named = isinstance(error, dist.DistError | ControlPlaneError)
    return is_named or TRANSPORT_ERROR.search(str(error)) is not None


def _first_line(error: RuntimeError) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
