"""The network: message passing over the graph, then a score for every (group, device) pair.

Nothing in it knows how many groups or devices there are, so that a policy trained on some
problems acts on any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from agents.features import DEVICE_FEATURES, GROUP_FEATURES, PAIR_FEATURES
from agents.store import GraphStore
from envs.sequential import NUM_DEVICE_FEATURES

ILLEGAL = -1e9


@dataclass(frozen=True)
class NetworkConfig:
    """Size of the network, and how far an untrained policy strays from its warm start.

    Attributes:
        hidden: ``H``, width of every layer.
        layers: rounds of message passing, each in both directions.
        changes: groups that an untrained policy moves away from the warm start per placement,
            on average; at most ``max_change`` of them.
        max_change: see there.
        finish_weight: without a warm start, a policy that places one group at a time starts
            close to list scheduling: logits fall with this times the log finish time.
    """

    hidden: int = 64
    layers: int = 3
    changes: float = 4.0
    max_change: float = 0.3
    finish_weight: float = 4.0


class Encoded(NamedTuple):
    """What the encoder makes of ``U`` graphs."""

    groups: Tensor  # float32 [U, G, H]
    graph: Tensor  # float32 [U, H]
    devices: Tensor  # float32 [U, D, H]


class Layer(nn.Module):
    """GraphSAGE (Hamilton et al. 2017) along and against the edges, residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.along = SAGEConv(hidden, hidden)
        self.against = SAGEConv(hidden, hidden, root_weight=False)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        y = self.norm(x)
        return x + torch.relu(self.along(y, edges) + self.against(y, edges.flip(0)))


class PlacementNet(nn.Module):
    """Scores and values for both decodings (all groups at once, one group at a time)."""

    def __init__(self, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.config = config or NetworkConfig()
        h = self.config.hidden
        self.group_in = nn.Linear(len(GROUP_FEATURES), h)
        self.layers = nn.ModuleList(Layer(h) for _ in range(self.config.layers))
        self.group_out = nn.LayerNorm(h)
        self.graph = nn.Sequential(nn.Linear(2 * h, h), nn.ReLU())
        self.device = nn.Sequential(nn.Linear(len(DEVICE_FEATURES) + h, h), nn.ReLU())
        self.from_group = nn.Linear(h, h)
        self.from_graph = nn.Linear(h, h, bias=False)
        self.from_device = nn.Linear(h, h, bias=False)
        self.from_pair = nn.Linear(len(PAIR_FEATURES), h, bias=False)
        self.from_state = nn.Linear(NUM_DEVICE_FEATURES, h, bias=False)
        self.score = nn.Sequential(nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1))
        self.value = nn.Sequential(
            nn.Linear(h + 2 * NUM_DEVICE_FEATURES, h), nn.ReLU(), nn.Linear(h, 1)
        )
        for last in (self.score[-1], self.value[-1]):
            assert isinstance(last, nn.Linear)
            # Start at the warm start: the learned part of every score begins near zero.
            nn.init.normal_(last.weight, std=0.01)
            nn.init.zeros_(last.bias)

    def encode(self, store: GraphStore, ids: Tensor) -> Encoded:
        """Encode the distinct graphs int64 ``ids [U]`` of ``store``."""
        batch = store.batch(tuple(ids.tolist()))
        x = self.group_in(batch.x)
        for layer in self.layers:
            x = layer(x, batch.edge_index)
        groups = store.dense(self.group_out(x), ids)
        real = store.real[ids][:, :, None]
        mean = groups.sum(dim=1) / real.sum(dim=1)
        largest = groups.masked_fill(~real, ILLEGAL).amax(dim=1)
        graph = self.graph(torch.cat([mean, largest], dim=1))
        everywhere = graph[:, None].expand(-1, store.device.shape[1], -1)
        devices = self.device(torch.cat([store.device[ids], everywhere], dim=2))
        return Encoded(groups, graph, devices)

    def all_logits(self, store: GraphStore, ids: Tensor, encoded: Encoded) -> Tensor:
        """Masked logits float32 ``[U, G, D]`` of every group at once."""
        x = (
            self.from_group(encoded.groups)[:, :, None]
            + self.from_graph(encoded.graph)[:, None, None]
            + self.from_device(encoded.devices)[:, None]
            + self.from_pair(store.pair[ids])
        )
        logits = self.score(x).squeeze(-1)
        logits = logits + self._bonus(store.legal[ids], store.warm[ids], store.num_groups[ids])
        return logits.masked_fill(~store.legal[ids], ILLEGAL)

    def step_logits(
        self,
        store: GraphStore,
        ids: Tensor,
        encoded: Encoded,
        row: Tensor,
        group: Tensor,
        state: Tensor,
        legal: Tensor,
    ) -> Tensor:
        """Masked logits float32 ``[B, D]`` of one group per episode.

        ``row`` int64 ``[B]`` is the episode's place in ``ids``, ``group`` int64 ``[B]`` what is
        placed, ``state`` float32 ``[B, D, F]`` and ``legal`` bool ``[B, D]`` the observation.
        """
        x = (
            self.from_group(encoded.groups[row, group])[:, None]
            + self.from_graph(encoded.graph)[row][:, None]
            + self.from_device(encoded.devices)[row]
            + self.from_pair(store.pair[ids[row], group])
            + self.from_state(state)
        )
        logits = self.score(x).squeeze(-1)
        warm = store.warm[ids[row], group]
        bonus = self._bonus(legal[:, None], warm[:, None], store.num_groups[ids[row]]).squeeze(1)
        cold = ~warm.any(dim=1, keepdim=True)
        residual = bonus - cold * self.config.finish_weight * state[:, :, 0]
        return (logits + residual).masked_fill(~legal, ILLEGAL)

    def values(self, encoded: Encoded, row: Tensor, state: Tensor | None, legal: Tensor) -> Tensor:
        """Expected reward float32 ``[B]``; ``state`` None: before anything is placed."""
        if state is None:
            seen = encoded.graph.new_zeros(len(row), 2 * NUM_DEVICE_FEATURES)
        else:
            some = legal[:, :, None]
            mean = (state * some).sum(dim=1) / some.sum(dim=1)
            least = state.masked_fill(~some, -ILLEGAL).amin(dim=1)
            seen = torch.cat([mean, least], dim=1)
        return self.value(torch.cat([encoded.graph[row], seen], dim=1)).squeeze(1)

    def _bonus(self, legal: Tensor, warm: Tensor, num_groups: Tensor) -> Tensor:
        """Logits ``[U, G, D]`` that put the warm start's device first.

        With the learned part at zero a group leaves it with probability ``changes / groups``:
        about ``changes`` groups move per placement, whatever the size of the graph.
        """
        move = (self.config.changes / num_groups).clamp(max=self.config.max_change)
        others = (legal.sum(dim=2) - 1).clamp(min=1)
        bonus = torch.log(others * ((1 - move) / move)[:, None])
        return warm * bonus[:, :, None]


def greedy(logits: Tensor) -> Tensor:
    """int64 ``[...]`` the most likely device of logits ``[..., D]``."""
    return logits.argmax(dim=-1)


def sample(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """int64 ``[...]`` a device drawn from the softmax (the Gumbel trick); never an illegal one."""
    uniform = torch.rand(logits.shape, generator=generator).clamp(1e-10, 1 - 1e-7)
    return (logits - torch.log(-torch.log(uniform))).argmax(dim=-1)
