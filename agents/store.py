"""The graphs that a policy acts on, kept beside it: observations carry only their number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from agents.features import Features, features
from placement.problem import Placement, Problem

MAX_WAVES = 48


class GraphStore:
    """Static tensors of ``P`` problems, padded to ``G`` groups and ``D`` devices.

    Attributes:
        num_groups: float32 ``[P]``.
        device: float32 ``[P, D, Fd]``.
        pair: float32 ``[P, G, D, Fp]``.
        legal: bool ``[P, G, D]``; a group that is only padding: device 0.
        real: bool ``[P, G]`` False for padding.
        warm: bool ``[P, G, D]`` True where the warm start puts the group.
        node_at: int64 ``[P + 1]`` where each graph's groups begin among all of them.
    """

    def __init__(
        self, problems: Sequence[Problem], warm: Sequence[Placement | None] | None = None
    ) -> None:
        """``warm[i]`` int32 ``[N]`` is the placement that the policy starts from, or None."""
        starts = warm if warm is not None else [None] * len(problems)
        found = [features(p, w) for p, w in zip(problems, starts, strict=True)]
        count = len(found)
        groups = max(len(f.group) for f in found)
        devices = max(len(f.device) for f in found)
        self.num_groups = torch.tensor([len(f.group) for f in found])
        self.device = torch.zeros(count, devices, found[0].device.shape[1])
        self.pair = torch.zeros(count, groups, devices, found[0].pair.shape[2])
        self.legal = torch.zeros(count, groups, devices, dtype=torch.bool)
        self.real = torch.zeros(count, groups, dtype=torch.bool)
        self.warm = torch.zeros(count, groups, devices, dtype=torch.bool)
        for i, f in enumerate(found):
            g, d = f.legal.shape
            self.device[i, :d] = torch.from_numpy(f.device)
            self.pair[i, :g, :d] = torch.from_numpy(f.pair)
            self.legal[i, :g, :d] = torch.from_numpy(f.legal)
            self.legal[i, g:, 0] = True
            self.real[i, :g] = True
            if f.warm[0] >= 0:
                self.warm[i, torch.arange(g), torch.from_numpy(f.warm)] = True
        self._graphs = [_data(f) for f in found]
        # Batching costs as much as encoding: keep the last combinations of graphs.
        self.batch = lru_cache(maxsize=64)(self._batch)
        self.waves = lru_cache(maxsize=64)(self._batch_waves)

    def __len__(self) -> int:
        """``P``."""
        return len(self._graphs)

    def _batch(self, ids: tuple[int, ...]) -> Batch:
        """The graphs ``ids`` side by side, as PyG has it (cached as ``batch``)."""
        return Batch.from_data_list([self._graphs[i] for i in ids])

    def _batch_waves(self, ids: tuple[int, ...]) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
        """``_waves`` of ``batch(ids)`` (cached as ``waves``)."""
        return _waves(self.batch(ids))

    def dense(self, nodes: Tensor, ids: Tensor) -> Tensor:
        """``[sum of groups, H]`` of the graphs int64 ``ids [U]`` -> ``[U, G, H]``, zero-padded."""
        out = nodes.new_zeros(len(ids), self.real.shape[1], nodes.shape[1])
        out[self.real[ids]] = nodes
        return out


def _data(f: Features) -> Data:
    depth = int(f.level.max()) + 1
    return Data(
        x=torch.from_numpy(f.group),
        edge_index=torch.from_numpy(f.edges),
        edge_attr=torch.from_numpy(f.edge),
        # Of the graph's own depth: what stands beside it in a batch must not change it.
        wave=torch.from_numpy(f.level * min(depth, MAX_WAVES) // depth),
    )


def _waves(batch: Batch) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """Nodes in the order of their levels, along and against the edges.

    A wave is (nodes int64 ``[W]``, sources int64 ``[K]``, targets int64 ``[K]`` among the nodes):
    what reaches the wave from earlier ones. Deep graphs have ``MAX_WAVES``; neighbouring levels
    then share one, and edges within it are left to the next layer.
    """
    wave = batch.wave
    src, dst = batch.edge_index
    found = []
    for order, a, b in ((wave, src, dst), (wave.max() - wave, dst, src)):
        place = torch.zeros(len(order), dtype=torch.long)
        rows = []
        for w in range(int(order.max()) + 1):
            nodes = torch.nonzero(order == w).squeeze(1)
            place[nodes] = torch.arange(len(nodes))
            into = (order[b] == w) & (order[a] < w)
            rows.append((nodes, a[into], place[b[into]]))
        found.append(rows)
    return found
