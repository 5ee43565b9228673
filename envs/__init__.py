"""Gymnasium environments: ``gym.make("envs:DevicePlacement-v0", problems=[...])``.

Importing this package registers the ids and nothing else.
"""

from __future__ import annotations

from gymnasium.envs.registration import register

register("DevicePlacement-v0", entry_point="envs.placement:DevicePlacementEnv")
register("SequentialDevicePlacement-v0", entry_point="envs.sequential:SequentialDevicePlacementEnv")
