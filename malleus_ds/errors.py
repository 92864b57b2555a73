"""Which errors are mistakes of the user, and the exit code that they give. No torch."""

from __future__ import annotations

import re

USER_MISTAKE = 2
"""Exit code for a wrong argument, config, plan, data path, environment, ..."""


def is_user_mistake(error: BaseException) -> bool:
    """Whether it is one of the package's own ``ValueError`` subclasses, whose text says what to mend."""
    return isinstance(error, ValueError) and type(error).__module__.startswith("malleus_ds.")


TRANSPORT_ERROR = re.compile(
    r"\bgloo/|\[c10d\]|NCCL|Connection (closed|reset) by peer|Timed out waiting \d+ms|Broken pipe"
    r"|caused pair closure"
)
"""How torch's backends speak of a lost peer in a bare RuntimeError."""

_PEER_ERROR = re.compile(
    r"\b(PeerLostError|RankFailedError|StateLostError|ControlPlaneError|Dist(Backend|Network|Store)?Error)\b"
    r"|\bnccl\w+Error\b|^Exception raised from \w+ at \S*/c10d/"
)


def tells_of_lost_peer(text: str) -> bool:
    """Whether an error message, as a rank prints it, says that it ended because of another rank."""
    return _PEER_ERROR.search(text) is not None or TRANSPORT_ERROR.search(text) is not None
