"""Making plans: cost model, exact search, lower bound, and the process that plans beside training."""

from malleus_ds.planner.process import PlannerFailure, PlannerProcess
from malleus_ds.planner.search import make_plan
from malleus_ds.planner.types import PlanRequest, PlanResult

__all__ = ["PlanRequest", "PlanResult", "PlannerFailure", "PlannerProcess", "make_plan"]
