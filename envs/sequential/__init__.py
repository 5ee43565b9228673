"""``SequentialDevicePlacement-v0``: one colocation group per step, by priority."""

from envs.sequential.env import SequentialDevicePlacementEnv, SequentialRules

__all__ = ["SequentialDevicePlacementEnv", "SequentialRules"]
