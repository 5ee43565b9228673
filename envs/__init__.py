"""Gymnasium environments: ``gym.make("envs:envs/DevicePlacement-v0")``.

Importing this package registers the ids, ``envs/DevicePlacement-v0`` and, as they were once called,
``DevicePlacement-v0``, and nothing else. (Gymnasium 1.0 gave up plugins: an id alone imports
nothing, the module before the colon does.)
"""

from __future__ import annotations

from gymnasium.envs.registration import register

IDS = {
    "DevicePlacement-v0": "envs.one_shot:DevicePlacementEnv",
    "SequentialDevicePlacement-v0": "envs.sequential.env:SequentialDevicePlacementEnv",
    "Dispatch-v0": "envs.dispatch.env:DispatchEnv",
}


for _name, _env in IDS.items():
    for _id in (_name, f"envs/{_name}"):
        register(_id, entry_point=_env, vector_entry_point=f"envs.vector:{_env.split(':')[1]}")
