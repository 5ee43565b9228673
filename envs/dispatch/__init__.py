"""``Dispatch-v0``: pick a ready operator and its device, both at once, as a list scheduler does."""

from envs.dispatch.env import (
    HEFT,
    MIXED,
    DispatchEnv,
    Dispatcher,
    DispatchRules,
    Past,
    Weights,
    no_network,
    notes_of,
)

__all__ = [
    "HEFT",
    "MIXED",
    "DispatchEnv",
    "DispatchRules",
    "Dispatcher",
    "Past",
    "Weights",
    "no_network",
    "notes_of",
]
