"""The graphs that a policy acts on: kept beside it, or read from its observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from envs.features import PAIR_FEATURES, features
from envs.graphs import KEYS, stacked
from placement.graph import levels
from placement.problem import Placement, Problem

if TYPE_CHECKING:  # where no graph is encoded PyG is not imported
    from torch_geometric.data import Batch

MAX_WAVES = 48
_KEPT = 64  # batches; batching costs as much as encoding
_WARM = PAIR_FEATURES.index("1 if the warm start puts it here")
# Nodes int64 [W], sources int64 [K], targets int64 [K] of each wave, along and against the edges.
Waves = list[list[tuple[Tensor, Tensor, Tensor]]]


class Graphs:
    """Static tensors of ``P`` graphs, padded to ``G`` groups and ``D`` devices.

    Attributes:
        num_groups: int64 ``[P]``.
        device: float32 ``[P, D, Fd]``.
        pair: float32 ``[P, G, D, Fp]``.
        legal: bool ``[P, G, D]``; a group that is only padding: device 0.
        real: bool ``[P, G]`` False for padding.
        warm: bool ``[P, G, D]`` True where the warm start puts the group.
    """

    def __init__(self, seen: dict[str, Tensor]) -> None:
        """From the arrays of ``envs.graphs``, ``[P, ...]``."""
        self._seen = seen
        self.num_groups = seen["sizes"][:, 0].long()
        self.device, self.pair = seen["device_features"].float(), seen["pair_features"].float()
        self.legal = seen["supported"].bool()
        groups = torch.arange(self.legal.shape[1], device=self.legal.device)
        self.real = groups < self.num_groups[:, None]
        self.warm = self.pair[..., _WARM] > 0
        self._batches: dict[tuple[int, ...], Batch] = {}
        self._all_waves: dict[tuple[int, ...], Waves] = {}

    def __len__(self) -> int:
        """``P``."""
        return len(self.num_groups)

    def same(self, other: Graphs) -> bool:
        """Whether ``other`` has the same graphs in the same order."""
        return self is other

    def batch(self, ids: tuple[int, ...]) -> Batch:
        """The graphs ``ids`` side by side, as PyG has it: ``x``, ``edge_index``, ``edge_attr``.

        The last combinations of graphs are kept.
        """
        return _cached(self._batches, ids, lambda: self._batch(ids))

    def waves(self, ids: tuple[int, ...]) -> Waves:
        """``_waves`` of ``batch(ids)``, kept as the batches are."""
        return _cached(self._all_waves, ids, lambda: _waves(self.batch(ids)))

    def _batch(self, numbers: tuple[int, ...]) -> Batch:
        from torch_geometric.data import Batch

        ids = torch.tensor(numbers).to(self.num_groups.device)
        seen, count = self._seen, self.num_groups[ids]
        room = torch.arange(seen["edges"].shape[2], device=count.device)
        some = room < seen["sizes"][ids, 1, None]
        begin = count.cumsum(0) - count
        edges = seen["edges"][ids].long() + begin[:, None, None]
        return Batch(
            batch=torch.repeat_interleave(count),
            x=seen["nodes"][ids].float()[self.real[ids]],
            edge_index=edges.transpose(0, 1)[:, some],
            edge_attr=seen["edge_features"][ids].float()[some],
        )

    def dense(self, nodes: Tensor, ids: Tensor) -> Tensor:
        """``[sum of groups, H]`` of the graphs int64 ``ids [U]`` -> ``[U, G, H]``, zero-padded."""
        out = nodes.new_zeros(len(ids), self.real.shape[1], nodes.shape[1])
        out[self.real[ids]] = nodes
        return out


class GraphStore(Graphs):
    """The graphs of problems, which observations then only number."""

    def __init__(
        self, problems: Sequence[Problem], warm: Sequence[Placement | None] | None = None
    ) -> None:
        """``warm[i]`` int32 ``[N]`` is the placement that the policy starts from, or None."""
        starts = warm if warm is not None else [None] * len(problems)
        facts = [features(p, w) for p, w in zip(problems, starts, strict=True)]
        super().__init__({k: torch.from_numpy(x) for k, x in stacked(facts)[1].items()})

    def to(self, device: torch.device) -> GraphStore:
        """These graphs on another device."""
        if self.pair.device == device:
            return self
        moved = copy(self)
        Graphs.__init__(moved, {k: x.to(device) for k, x in self._seen.items()})
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """Without what is only kept to save time."""
        return self.__dict__ | {"_batches": {}, "_all_waves": {}}


class ObservedGraphs(Graphs):
    """The ``U`` distinct graphs of ``B`` observations with ``observe="graph"`` (``envs.graphs``).

    Attributes:
        row: int64 ``[B]`` the graph of each observation.
        key: ``[U, ...]`` what distinguishes them.
    """

    def __init__(self, obs: dict[str, Tensor]) -> None:
        self.key, self.row, first = _distinct(obs)
        super().__init__({name: obs[name][first] for name in KEYS})

    def same(self, other: Graphs) -> bool:
        """See ``Graphs``."""
        return isinstance(other, ObservedGraphs) and torch.equal(self.key, other.key)


def _distinct(obs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """What tells graphs apart ``[U, K]``, int64 ``[B]`` the graph of each row, int64 ``[U]`` a row
    of each.

    Numbers of problems are those of one environment, and several may be played: sums of features
    differ where graphs do.
    """
    parts = [obs["problem"].double(), obs["sizes"].double()]
    for name in ("nodes", "edge_features", "device_features", "pair_features"):
        flat = obs[name].flatten(1).double()
        weight = torch.arange(1, flat.shape[1] + 1, device=flat.device, dtype=flat.dtype).sqrt()
        parts.append((flat * weight).sum(dim=1, keepdim=True))
    key, row = torch.unique(torch.cat(parts, dim=1), dim=0, return_inverse=True)
    first = torch.full((len(key),), len(row), device=row.device)
    first = first.scatter_reduce(0, row, torch.arange(len(row), device=row.device), "amin")
    return key, row, first


def _cached(known: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """``make()``, or what it made for ``key``; the last ``_KEPT`` are kept."""
    value = known.pop(key, None)
    if value is None:
        value = make()
        if len(known) >= _KEPT:
            known.pop(next(iter(known)))
    known[key] = value
    return value


def _waves(batch: Batch) -> Waves:
    """Nodes in the order of their levels, along and against the edges.

    A wave is (nodes int64 ``[W]``, sources int64 ``[K]``, targets int64 ``[K]`` among the nodes):
    what reaches the wave from earlier ones. Deep graphs have ``MAX_WAVES``; neighbouring levels
    then share one, and edges within it are left to the next layer.
    """
    src, dst = batch.edge_index
    wave = _wave(batch, src, dst)
    waves = []
    for order, a, b in ((wave, src, dst), (wave.max() - wave, dst, src)):
        place = torch.zeros(len(order), dtype=torch.long, device=order.device)
        rows = []
        for w in range(int(order.max()) + 1):
            nodes = torch.nonzero(order == w).squeeze(1)
            place[nodes] = torch.arange(len(nodes), device=order.device)
            into = (order[b] == w) & (order[a] < w)
            rows.append((nodes, a[into], place[b[into]]))
        waves.append(rows)
    return waves


def _wave(batch: Batch, src: Tensor, dst: Tensor) -> Tensor:
    """int64 ``[V]`` the wave of each node: its level, the longest path to it in edges."""
    # Colocation can close circles: edges to later groups close none.
    forward = batch.edge_index[:, src < dst].T.cpu().numpy()
    level = torch.from_numpy(levels(forward, len(batch.x))).long().to(src.device)
    # Of the graph's own depth: what stands beside it in a batch must not change it.
    depth = torch.zeros_like(level).scatter_reduce(0, batch.batch, level + 1, "amax")[batch.batch]
    return level * depth.clamp(max=MAX_WAVES) // depth
