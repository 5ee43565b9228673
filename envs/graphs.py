"""The graph in the observation: padded arrays, or PyG's ``Data``.

``observe="graph"`` adds these keys to the observation of every environment, of ``G`` groups,
``E`` edges between groups and ``D`` devices, padded to the largest problem:

* ``nodes`` float32 ``[G, 23]``: ``envs.features.GROUP_FEATURES``.
* ``edges`` int64 ``[2, E]``: producer and consumer; -1 for padding.
* ``edge_features`` float32 ``[E, 2]``: log transfer seconds over the mean group, share of bytes.
* ``device_features`` float32 ``[D, 10]``: ``envs.features.DEVICE_FEATURES``.
* ``pair_features`` float32 ``[G, D, 7]``: ``envs.features.PAIR_FEATURES`` of a group on a device.
* ``supported`` int8 ``[G, D]``: 1 = the group can run there; a group of padding: device 0.
* ``sizes`` int64 ``[3]``: how many groups, edges and devices are no padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.features import DEVICE_FEATURES, GROUP_FEATURES, PAIR_FEATURES, Features, features
from envs.problem_set import MAX_ID, Sizes
from placement.problem import Problem

if TYPE_CHECKING:
    from torch_geometric.data import Data

_BOUND = 1e6  # features are logarithms and shares; spaces have bounds
_EDGE_FEATURES = 2


class GraphArrays:
    """The arrays above of ``P`` problems, stacked.

    Attributes:
        spaces: of one observation, by key.
    """

    def __init__(self, problems: Sequence[Problem], room: Sizes | None = None) -> None:
        self.spaces, self._arrays = stacked([features(p) for p in problems], room)

    def __call__(self, ids: NDArray[np.integer[Any]]) -> dict[str, NDArray[Any]]:
        """Arrays ``[B, ...]`` of problems ``ids [B]``, new ones."""
        return {key: rows[ids] for key, rows in self._arrays.items()}


def stacked(
    facts: Sequence[Features], room: Sizes | None = None
) -> tuple[dict[str, spaces.Box], dict[str, NDArray[Any]]]:
    """The spaces and the arrays above of ``P`` graphs, with room for ``room`` at least."""
    least = room or Sizes(1, 1, 1)
    groups = max(least.groups, *(len(f.group) for f in facts))
    devices = max(least.devices, *(len(f.device) for f in facts))
    edges = max(least.edges, *(f.edges.shape[1] for f in facts))
    seen = _spaces(groups, devices, edges)
    arrays: dict[str, NDArray[Any]] = {
        key: np.zeros((len(facts), *(space.shape or ())), space.dtype)
        for key, space in seen.items()
    }
    arrays["edges"][:] = -1
    for i, f in enumerate(facts):
        g, d = f.legal.shape
        e = f.edges.shape[1]
        arrays["nodes"][i, :g] = f.group
        arrays["edges"][i, :, :e] = f.edges
        arrays["edge_features"][i, :e] = f.edge
        arrays["device_features"][i, :d] = f.device
        arrays["pair_features"][i, :g, :d] = f.pair
        arrays["supported"][i, :g, :d] = f.legal
        arrays["supported"][i, g:, 0] = 1
        arrays["sizes"][i] = g, e, d
    return seen, arrays


def _spaces(groups: int, devices: int, edges: int) -> dict[str, spaces.Box]:
    def numbers(*shape: int) -> spaces.Box:
        return spaces.Box(-_BOUND, _BOUND, shape, np.float32)

    return {
        "nodes": numbers(groups, len(GROUP_FEATURES)),
        "edges": spaces.Box(-1, MAX_ID, (2, edges), np.int64),
        "edge_features": numbers(edges, _EDGE_FEATURES),
        "device_features": numbers(devices, len(DEVICE_FEATURES)),
        "pair_features": numbers(groups, devices, len(PAIR_FEATURES)),
        "supported": spaces.Box(0, 1, (groups, devices), np.int8),
        "sizes": spaces.Box(0, MAX_ID, (3,), np.int64),
    }


KEYS = tuple(_spaces(1, 1, 1))


def to_data(observation: Mapping[str, Any]) -> Data:
    """The graph of one observation, without padding, as ``torch_geometric.data.Data``.

    ``x`` float32 ``[G, 23]``, ``edge_index`` int64 ``[2, E]``, ``edge_attr`` float32 ``[E, 2]``,
    and, with the padding of devices so that graphs can be batched, ``device`` float32
    ``[1, D, 10]``, ``pair`` float32 ``[G, D, 7]`` and ``supported`` bool ``[G, D]``.
    """
    import torch
    from torch_geometric.data import Data

    seen = {key: torch.as_tensor(np.asarray(observation[key])) for key in KEYS}
    groups, edges, _ = seen["sizes"].long().tolist()
    return Data(
        x=seen["nodes"][:groups],
        edge_index=seen["edges"][:, :edges].long(),
        edge_attr=seen["edge_features"][:edges],
        device=seen["device_features"][None],
        pair=seen["pair_features"][:groups],
        supported=seen["supported"][:groups].bool(),
    )
