"""Decide where every operator of a PyTorch model runs, and in which order."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from placement.capturing import capture
    from placement.cluster import Cluster, Device, Link
    from placement.executor import Executor, Runner, Trainer
    from placement.generating import language_model
    from placement.graph import OpGraph
    from placement.optimizing import optimize
    from placement.plan import Plan, load_plan, make_plan
    from placement.problem import Problem, Solution
    from placement.profile import Profile
    from placement.schedule import Schedule
    from placement.simulator import simulate
    from placement.timeline import Timeline

# Imported when first asked for: `import placement` loads nothing else.
_HOME = {
    "Cluster": "cluster",
    "Device": "cluster",
    "Executor": "executor",
    "Link": "cluster",
    "OpGraph": "graph",
    "Plan": "plan",
    "Problem": "problem",
    "Profile": "profile",
    "Runner": "executor",
    "Schedule": "schedule",
    "Solution": "problem",
    "Timeline": "timeline",
    "Trainer": "executor",
    "capture": "capturing",
    "language_model": "generating",
    "load_plan": "plan",
    "make_plan": "plan",
    "optimize": "optimizing",
    "simulate": "simulator",
}
__all__ = [
    "Cluster",
    "Device",
    "Executor",
    "Link",
    "OpGraph",
    "Plan",
    "Problem",
    "Profile",
    "Runner",
    "Schedule",
    "Solution",
    "Timeline",
    "Trainer",
    "capture",
    "language_model",
    "load_plan",
    "make_plan",
    "optimize",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
