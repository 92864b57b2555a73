"""Parallel plans: immutable data, checks, JSON, drawing and diff. Imports no torch."""

from malleus_ds.plan.diff import PlanDiff, diff_plans
from malleus_ds.plan.drawing import draw_plan
from malleus_ds.plan.types import ParallelPlan, Pipeline, PlanError, Position, Stage

__all__ = [
    "ParallelPlan",
    "Pipeline",
    "PlanDiff",
    "PlanError",
    "Position",
    "Stage",
    "diff_plans",
    "draw_plan",
]
