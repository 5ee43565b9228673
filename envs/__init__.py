"""Gymnasium environments: ``gym.make("envs:DevicePlacement-v0", problems=[...])``.

Importing this package registers the ids and nothing else.
"""

from __future__ import annotations

from gymnasium.envs.registration import register

register("DevicePlacement-v0", entry_point="envs.placement:DevicePlacementEnv")
register("SequentialDevicePlacement-v0", entry_point="envs.sequential:SequentialDevicePlacementEnv")
register("GuidedSearch-v0", entry_point="envs.guided:GuidedSearchEnv")
register("OrderSearch-v0", entry_point="envs.order_search:OrderSearchEnv")
register("RefineDevicePlacement-v0", entry_point="envs.refine:RefineDevicePlacementEnv")
register(
    "GroupPlaceDevicePlacement-v0", entry_point="envs.group_place:GroupPlaceDevicePlacementEnv"
)
register(
    "SelectPlaceDevicePlacement-v0",
    entry_point="envs.select_place:SelectPlaceDevicePlacementEnv",
)
