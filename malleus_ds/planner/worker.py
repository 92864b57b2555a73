"""The process that plans: ``python -m malleus_ds.planner.worker``.

One JSON request per line on stdin; on stdout first ``{"ready": true}``, then per request one line,
``{"result": ...}`` or ``{"error": "..."}``. Ends when stdin closes.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from malleus_ds.planner.search import make_plan
from malleus_ds.planner.types import PlanRequest


def answer(line: str) -> dict[str, Any]:
    """The answer to one request."""
    try:
        return {"result": make_plan(PlanRequest.from_dict(json.loads(line))).to_dict()}
    except (ValueError, KeyError, TypeError) as error:
        # Faults of the request; any other exception ends the process, and stderr tells why.
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    # Solvers write banners to file descriptor 1; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.nice(10)  # Training comes first.
    import cvxpy  # noqa: F401  (takes a second: before the first request, not within it)
    import scipy.optimize  # noqa: F401

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
