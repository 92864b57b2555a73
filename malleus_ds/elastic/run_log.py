"""What `malleus-run` tells: readable lines on stderr, and the same as JSON lines in the run directory."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any


class RunLog:
    """path: of the JSON lines, each with ``time`` (Unix, in s), ``event``, ``text`` and further keys."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tell(self, event: str, text: str, **details: Any) -> None:
        """What cannot be written, for a full disk or a closed pipe, is left out: the job goes on."""
        entry = {"time": time.time(), "event": event, "text": text, **details}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            text = f"{text}\nnot in the log: {error}"
        with contextlib.suppress(OSError):
            sys.stderr.write("".join(f"malleus-run: {line}\n" for line in text.splitlines()))
            sys.stderr.flush()
