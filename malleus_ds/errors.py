"""Which errors are mistakes of the user, and the exit code that they give. No torch."""

from __future__ import annotations

USER_MISTAKE = 2
"""Exit code for a wrong argument, config, plan, data path, environment, ..."""


def is_user_mistake(error: BaseException) -> bool:
    """Whether it is one of the package's own ``ValueError`` subclasses, whose text says what to mend."""
    return isinstance(error, ValueError) and type(error).__module__.startswith("malleus_ds.")
