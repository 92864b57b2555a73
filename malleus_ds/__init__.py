"""Malleable hybrid-parallel training on DeepSpeed: plans that change while a job runs.

Importing this package loads neither torch nor DeepSpeed; the names that need them load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from malleus_ds._initialize import initialize
    from malleus_ds._install import install
    from malleus_ds.comm import init_distributed
    from malleus_ds.config import ConfigError, MalleusConfig
    from malleus_ds.pipe.engine import MalleusPipelineEngine
    from malleus_ds.pipe.module import MalleusPipelineModule
    from malleus_ds.plan import ParallelPlan, Pipeline, PlanError, Stage

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "MalleusConfig",
    "MalleusPipelineEngine",
    "MalleusPipelineModule",
    "ParallelPlan",
    "Pipeline",
    "PlanError",
    "Stage",
    "init_distributed",
    "initialize",
    "install",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    match name:
        case "ParallelPlan" | "Pipeline" | "PlanError" | "Stage":
            module = "malleus_ds.plan"
        case "ConfigError" | "MalleusConfig":
            module = "malleus_ds.config"
        case "init_distributed":
            module = "malleus_ds.comm"
        case "initialize":
            module = "malleus_ds._initialize"
        case "install":
            module = "malleus_ds._install"
        case "MalleusPipelineModule":
            module = "malleus_ds.pipe.module"
        case "MalleusPipelineEngine":
            module = "malleus_ds.pipe.engine"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
