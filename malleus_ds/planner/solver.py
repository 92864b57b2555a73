"""HiGHS through cvxpy: the one place that knows their options and their noise."""

from __future__ import annotations

import math
import warnings
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray


def cvxpy() -> Any:
    """The package; it takes a second to import, so only where it is used. Partly typed, hence Any."""
    return import_module("cvxpy")


def solved(
    problem: Any, time_limit_s: float, *variables: Any, enough: float = math.inf
) -> list[NDArray[np.int64]] | None:
    """Whole values of the variables; None without a solution, also when none was found in time.

    enough: of the objective, which is maximised. What is there when the time is over need not be the best.
    """
    # Only HiGHS's own option silences its log; its banner (once per process) nothing does.
    options = {"output_flag": False, "time_limit": max(time_limit_s, 0.01), "threads": 1}
    options["objective_target"] = -enough  # cvxpy minimises.
    with warnings.catch_warnings():
        # That a solution at the time limit may be inaccurate is known here.
        warnings.simplefilter("ignore", UserWarning)
        try:
            problem.solve(solver=cvxpy().HIGHS, highs_options=options)
        except cvxpy().SolverError:
            return None
    if any(variable.value is None for variable in variables):
        return None
    for variable in problem.variables():
        if variable.attributes["integer"]:
            variable.value = np.rint(variable.value)
    if any(np.max(constraint.violation(), initial=0.0) > 1e-5 for constraint in problem.constraints):
        return None
    return [np.asarray(variable.value).astype(np.int64) for variable in variables]
