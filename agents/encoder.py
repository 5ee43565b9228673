"""The network: message passing over the graph, then a score for every (group, device) pair.

Nothing in it knows how many groups or devices there are, so that a policy trained on some
problems acts on any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import GATv2Conv, SAGEConv
from torch_geometric.utils import scatter

from agents.features import DEVICE_FEATURES, GROUP_FEATURES, PAIR_FEATURES
from agents.store import GraphStore
from envs.refine import PAIR_FEATURES as REFINE_PAIRS
from envs.refine import SEARCH_FEATURES as REFINE_SEARCH
from envs.sequential_kernels import NUM_DEVICE_FEATURES
from placement.tools.files import short

ILLEGAL = -1e9
Formulation = Literal[
    "one_shot",
    "sequential",
    "select_place",
    "group_place",
    "refine",
    "sweep",
    "guided_search",
    "order_search",
]


class PolicyError(ValueError):
    """A policy cannot be read, or made as configured; the message says what to do."""


EncoderKind = Literal["sage", "gat", "dag"]


@dataclass(frozen=True)
class NetworkConfig:
    """Kind and size of the network, and how far an untrained policy strays from its warm start.

    Attributes:
        encoder: ``sage``, ``gat`` or ``dag`` (see ``LAYERS``).
        hidden: ``H``, width of every layer.
        layers: rounds of message passing, each in both directions; 0: no message passing.
        changes: groups that an untrained policy moves away from the warm start per placement,
            on average, above 0; at most ``max_change`` of them.
        max_change: a share, above 0 and below 1.
        finish_weight: without a warm start, a policy that places one group at a time starts
            close to list scheduling: logits fall with this times the log cost of a device
            (``envs.sequential_kernels``: of a latency the finish time).
        scorer: width of the network that scores the moves of a guided search.
        embed: it sees the encoder's view of groups and devices too, not their features alone.
        attention: layers of attention of all groups to each other, behind the message passing;
            of ``group_place``: of the clusters. Time and memory grow with their square.
        clusters: of ``group_place``: groups are assigned to so many; 0: they join a neighbour.
    """

    encoder: EncoderKind = "sage"
    hidden: int = 64
    layers: int = 3
    changes: float = 4.0
    max_change: float = 0.3
    finish_weight: float = 4.0
    scorer: int = 32
    embed: bool = False
    attention: int = 0
    clusters: int = 0

    def __post_init__(self) -> None:
        if self.encoder not in LAYERS:
            raise PolicyError(f"encoder {self.encoder!r} is unknown; use one of {list(LAYERS)}")
        if not 0 <= self.layers <= 64:  # a file of a few bytes must not ask for millions
            raise PolicyError(f"layers = {self.layers} must be 0..64")
        if self.hidden < 4 or self.hidden % 4:
            raise PolicyError(f"hidden = {self.hidden} must be a positive multiple of 4")
        for what, limit in (("attention", 64), ("clusters", 4096)):
            if not 0 <= getattr(self, what) <= limit:
                raise PolicyError(f"{what} = {getattr(self, what)} must be 0..{limit}")
        # Shares of a float32 that are 0 or 1 have no logarithm.
        for what, least, most, meaning in (
            ("finish_weight", -1e6, 1e6, "a weight"),
            ("changes", 1e-6, 1e9, "a number of groups"),
            ("max_change", 1e-6, 1 - 1e-6, "a share"),
        ):
            value = getattr(self, what)
            if not (isinstance(value, int | float) and least <= value <= most):
                raise PolicyError(
                    f"{what} = {short(value)} must be {meaning} from {least:g} to {most:g}"
                )


MOVING = ("refine", "sweep")  # formulations that move groups of a placement, one at a time
Observations = dict[str, Tensor]


class Encoded(NamedTuple):
    """What the encoder makes of ``U`` graphs."""

    groups: Tensor  # float32 [U, G, H]
    graph: Tensor  # float32 [U, H]
    devices: Tensor  # float32 [U, D, H]


class Sage(nn.Module):
    """GraphSAGE (Hamilton et al. 2017) along and against the edges, residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.along = SAGEConv(hidden, hidden)
        self.against = SAGEConv(hidden, hidden, root_weight=False)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, batch: Batch, waves: Waves) -> Tensor:
        y = self.norm(x)
        edges = batch.edge_index
        return x + torch.relu(self.along(y, edges) + self.against(y, edges.flip(0)))


class Gat(nn.Module):
    """GATv2 (Brody et al. 2022) with edge features along and against the edges, residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        options = {"heads": 4, "edge_dim": 2, "add_self_loops": False}
        self.along = GATv2Conv(hidden, hidden // 4, **options)
        self.against = GATv2Conv(hidden, hidden // 4, **options)
        self.own = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, batch: Batch, waves: Waves) -> Tensor:
        y = self.norm(x)
        edges, edge = batch.edge_index, batch.edge_attr
        heard = self.along(y, edges, edge) + self.against(y, edges.flip(0), edge)
        return x + torch.relu(self.own(y) + heard)


class Dag(nn.Module):
    """Along the order of the graph, then against it: one layer sees every ancestor and descendant.

    As DAGNN (Thost and Chen 2021) does: a group hears of its producers after they heard of
    theirs. Messages are means and maxima; the topological levels are ``GraphStore.waves``.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.heard = nn.ModuleList(nn.Linear(2 * hidden, hidden, bias=False) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))

    def forward(self, x: Tensor, batch: Batch, waves: Waves) -> Tensor:
        for k, order in enumerate(waves):
            own = self.own[k](self.norm[k](x))
            done = x
            for nodes, sources, targets in order:
                y = own[nodes]
                if len(sources):
                    told, size = done[sources], len(nodes)
                    mean = scatter(told, targets, dim_size=size, reduce="mean")
                    largest = scatter(told, targets, dim_size=size, reduce="max")
                    y = y + self.heard[k](torch.cat([mean, largest], dim=1))
                done = done.index_copy(0, nodes, x[nodes] + torch.relu(y))
            x = done
        return x


Waves = list[list[tuple[Tensor, Tensor, Tensor]]]
LAYERS: dict[str, Callable[[int], nn.Module]] = {"sage": Sage, "gat": Gat, "dag": Dag}


class Attention(nn.Module):
    """Self-attention (Vaswani et al. 2017) of rows ``[B, G, H]``, residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.attend = nn.MultiheadAttention(hidden, 4, batch_first=True)
        self.own = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.ReLU())

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Rows that are not ``real`` bool ``[B, G]`` are not heard, and become 0."""
        y = self.norm(x)
        x = x + self.attend(y, y, y, key_padding_mask=~real, need_weights=False)[0]
        return (x + self.own(x)) * real[:, :, None]


class Encoder(nn.Module):
    """Message passing over the groups, then what a graph and its devices are in it."""

    def __init__(self, config: NetworkConfig, attention: int = 0) -> None:
        super().__init__()
        h = config.hidden
        self.needs_waves = config.encoder == "dag"
        self.group_in = nn.Linear(len(GROUP_FEATURES), h)
        self.layers = nn.ModuleList(LAYERS[config.encoder](h) for _ in range(config.layers))
        self.group_out = nn.LayerNorm(h)
        self.attention = nn.ModuleList(Attention(h) for _ in range(attention))
        self.graph = nn.Sequential(nn.Linear(2 * h, h), nn.ReLU())
        self.device = nn.Sequential(nn.Linear(len(DEVICE_FEATURES) + h, h), nn.ReLU())

    def forward(self, store: GraphStore, ids: Tensor) -> Encoded:
        """Encode the distinct graphs int64 ``ids [U]`` of ``store``."""
        key = tuple(ids.tolist())
        batch = store.batch(key)
        waves = store.waves(key) if self.needs_waves else []
        x = self.group_in(batch.x)
        for layer in self.layers:
            x = layer(x, batch, waves)
        groups = store.dense(self.group_out(x), ids)
        for layer in self.attention:
            groups = layer(groups, store.real[ids])
        real = store.real[ids][:, :, None]
        mean = groups.sum(dim=1) / real.sum(dim=1)
        largest = groups.masked_fill(~real, ILLEGAL).amax(dim=1)
        graph = self.graph(torch.cat([mean, largest], dim=1))
        everywhere = graph[:, None].expand(-1, store.device.shape[1], -1)
        devices = self.device(torch.cat([store.device[ids], everywhere], dim=2))
        return Encoded(groups, graph, devices)


class PlacementNet(nn.Module):
    """Scores and values of (group, device) pairs, for every formulation that has such pairs.

    ``formulation`` adds what only one of them needs: ``select_place`` a score of ready groups,
    ``group_place`` one of clusters, ``refine`` and ``sweep`` what is observed of the current
    placement.
    """

    def __init__(
        self, config: NetworkConfig | None = None, formulation: Formulation = "sequential"
    ) -> None:
        super().__init__()
        self.config = config or NetworkConfig()
        self.formulation = formulation
        h = self.config.hidden
        state, search = NUM_DEVICE_FEATURES, 0
        if formulation in MOVING:
            state, search = len(REFINE_PAIRS), len(REFINE_SEARCH)
        grouping, attention = formulation == "group_place", self.config.attention
        self.encoder = Encoder(self.config, 0 if grouping else attention)
        self.from_group = nn.Linear(h, h)
        self.from_graph = nn.Linear(h, h, bias=False)
        self.from_device = nn.Linear(h, h, bias=False)
        self.from_pair = nn.Linear(len(PAIR_FEATURES), h, bias=False)
        self.from_state = nn.Linear(state, h, bias=False)
        self.score = nn.Sequential(nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1))
        self.value = nn.Sequential(nn.Linear(h + 2 * state + search, h), nn.ReLU(), nn.Linear(h, 1))
        heads = [self.score, self.value]
        if formulation == "select_place":
            self.select = nn.Sequential(nn.Linear(2 * h + state, h), nn.ReLU(), nn.Linear(h, 1))
            heads.append(self.select)
        if grouping:
            choices = self.config.clusters or 1
            self.group = nn.Sequential(nn.Linear(2 * h, h), nn.ReLU(), nn.Linear(h, choices))
            self.from_size = nn.Linear(1, h, bias=False)
            self.attention = nn.ModuleList(Attention(h) for _ in range(attention))
            heads.append(self.group)
        for head in heads:
            last = head[-1]
            assert isinstance(last, nn.Linear)
            # Start at the warm start: the learned part of every score begins near zero.
            nn.init.normal_(last.weight, std=0.01)
            nn.init.zeros_(last.bias)

    def encode(self, store: GraphStore, ids: Tensor) -> Encoded:
        """The distinct graphs int64 ``ids [U]`` of ``store``, encoded."""
        found: Encoded = self.encoder(store, ids)
        return found

    def evaluate(
        self, store: GraphStore, ids: Tensor, encoded: Encoded, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[B, ..., A]``, values ``[B]``, and which groups are real (None: all).

        ``obs`` is of the formulation's environment; ``row`` int64 ``[B]`` is each episode's place
        among the encoded graphs ``ids``.
        """
        if self.formulation == "one_shot":
            logits = self.all_logits(store, ids, encoded)[row]
            return logits, self.values(encoded, row, None, store.legal), store.real[ids][row]
        legal = obs["mask"].bool()
        if self.formulation == "group_place":
            logits = self.group_logits(store, ids, encoded, row, obs)
            real = legal.sum(dim=2) > 1
            real |= ~real.any(dim=1, keepdim=True)
            return logits, self.values(encoded, row, None, store.legal), real
        if self.formulation in MOVING:
            pairs, search = obs["pairs"].float(), obs["search"].float()
            logits = self.move_logits(store, ids, encoded, row, pairs, legal)
            return logits, self.values(encoded, row, pairs, legal, search), None
        state, group = obs["devices"].float(), obs["group"].long()
        if self.formulation == "select_place":
            logits = self.select_logits(store, ids, encoded, row, group, state, legal)
        else:
            one = group.squeeze(1)
            logits = self.step_logits(store, ids, encoded, row, one, state, legal)
        return logits, self.values(encoded, row, state, legal), None

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

    def weights(self, store: GraphStore) -> tuple[NDArray[np.float32], ...]:
        """``net`` of ``sequential_kernels.construct``, which scores as ``step_logits`` does."""
        with torch.no_grad():
            encoded = self.encode(store, torch.arange(len(store)))
            _, hidden, _, out = self.score
            assert isinstance(hidden, nn.Linear) and isinstance(out, nn.Linear)
            parts = (
                self.from_group(encoded.groups) + self.from_graph(encoded.graph)[:, None],
                self.from_device(encoded.devices),
                self.from_pair.weight.T,
                self.from_state.weight.T,
                hidden.weight.T,
                hidden.bias,
                out.weight[0],
                torch.cat([out.bias, torch.tensor([self.config.finish_weight])]),
                self._moving(store.num_groups),
            )
            return tuple(np.ascontiguousarray(x.numpy(), dtype=np.float32) for x in parts)

    def select_logits(
        self,
        store: GraphStore,
        ids: Tensor,
        encoded: Encoded,
        row: Tensor,
        group: Tensor,
        state: Tensor,
        legal: Tensor,
    ) -> Tensor:
        """Log-probabilities float32 ``[B, K * D]`` of a ready group, times those of its device.

        ``group`` int64 ``[B, K]``, ``state`` float32 ``[B, K, D, F]``, ``legal`` bool
        ``[B, K, D]``; an untrained network selects the first, which has the highest priority.
        """
        count, ready, devices, features = state.shape
        many = row[:, None].expand(-1, ready).reshape(-1)
        some = legal.any(dim=2)
        flat = legal.reshape(-1, devices).clone()
        flat[:, 0] |= ~some.reshape(-1)  # a row that is only padding: some device, never selected
        device = self.step_logits(
            store, ids, encoded, many, group.reshape(-1), state.reshape(-1, devices, features), flat
        )
        device = torch.log_softmax(device, dim=-1).reshape(count, ready, devices)
        least = state.masked_fill(~legal[:, :, :, None], -ILLEGAL).amin(dim=2)
        least = least.masked_fill(~some[:, :, None], 0.0)
        seen = [
            encoded.groups[row[:, None], group],
            encoded.graph[row][:, None].expand(-1, ready, -1),
            least,
        ]
        wanted = self.select(torch.cat(seen, dim=2)).squeeze(-1)
        wanted = wanted - torch.arange(ready) * 1.0  # a list scheduler takes the first
        select = torch.log_softmax(wanted.masked_fill(~some, ILLEGAL), dim=-1)
        both = select[:, :, None] + device
        return both.masked_fill(~legal, ILLEGAL).reshape(count, -1)

    def group_logits(
        self, store: GraphStore, ids: Tensor, encoded: Encoded, row: Tensor, obs: Observations
    ) -> Tensor:
        """Masked logits float32 ``[B, G, A]``: of the cluster of each group, or, where there are
        clusters (``obs["cluster"]``), of the device of each.
        """
        legal, cluster = obs["mask"].bool(), obs["cluster"].long()
        groups, real = encoded.groups[row], store.real[ids][row]
        if self.config.clusters:
            other = encoded.graph[row][:, None].expand_as(groups)
        else:
            producer = obs["producer"].long().clamp(min=0)
            other = groups.gather(1, producer[:, :, None].expand_as(groups))
        first = self.group(torch.cat([groups, other], dim=2))
        if not self.config.clusters:
            first = torch.cat([torch.zeros_like(first), first], dim=2)  # begin one, or join

        label = cluster.clamp(min=0)
        count = torch.zeros_like(label, dtype=torch.float32).scatter_add(1, label, real.float())
        share = (real / count.gather(1, label).clamp(min=1))[:, :, None]  # of a cluster's mean
        mean = torch.zeros_like(groups)
        mean = mean.scatter_add(1, label[:, :, None].expand_as(groups), groups * share)
        for layer in self.attention:
            mean = layer(mean, count > 0)
        pair = store.pair[ids][row].flatten(2)
        pairs = torch.zeros_like(pair)
        pairs = pairs.scatter_add(1, label[:, :, None].expand_as(pair), pair * share)
        x = (
            self.from_group(mean)[:, :, None]
            + self.from_size(torch.log1p(count)[:, :, None])[:, :, None]
            + self.from_graph(encoded.graph)[row][:, None, None]
            + self.from_device(encoded.devices)[row][:, None]
            + self.from_pair(pairs.unflatten(2, store.pair.shape[2:]))
        )
        second = self.score(x).squeeze(-1)
        width = legal.shape[2]
        first, second = (
            nn.functional.pad(y[:, :, :width], (0, max(0, width - y.shape[2])))
            for y in (first, second)
        )
        logits = torch.where((cluster < 0)[:, :1, None], first, second)
        return logits.masked_fill(~legal, ILLEGAL)

    def move_logits(
        self,
        store: GraphStore,
        ids: Tensor,
        encoded: Encoded,
        row: Tensor,
        pairs: Tensor,
        legal: Tensor,
    ) -> Tensor:
        """Masked logits float32 ``[B, G * D]`` of moving each group to each device.

        ``pairs`` float32 ``[B, G, D, F]``, ``legal`` bool ``[B, G, D]``.
        """
        x = (
            self.from_group(encoded.groups)[row][:, :, None]
            + self.from_graph(encoded.graph)[row][:, None, None]
            + self.from_device(encoded.devices)[row][:, None]
            + self.from_pair(store.pair[ids[row]])
            + self.from_state(pairs)
        )
        logits = self.score(x).squeeze(-1)
        return logits.masked_fill(~legal, ILLEGAL).flatten(1)

    def values(
        self,
        encoded: Encoded,
        row: Tensor,
        state: Tensor | None,
        legal: Tensor,
        search: Tensor | None = None,
    ) -> Tensor:
        """Expected return float32 ``[B]``.

        ``state`` float32 ``[B, ..., F]`` of what may be chosen, where ``legal`` bool ``[B, ...]``;
        None: before anything is placed. ``search`` float32 ``[B, S]`` is what ``refine`` knows.
        """
        if state is None:
            seen = encoded.graph.new_zeros(len(row), 2 * NUM_DEVICE_FEATURES)
        else:
            state, some = state.flatten(1, -2), legal.flatten(1)[:, :, None]
            mean = (state * some).sum(dim=1) / some.sum(dim=1)
            least = state.masked_fill(~some, -ILLEGAL).amin(dim=1)
            seen = torch.cat([mean, least], dim=1)
        parts = [encoded.graph[row], seen] + ([] if search is None else [search])
        return self.value(torch.cat(parts, dim=1)).squeeze(1)

    def _bonus(self, legal: Tensor, warm: Tensor, num_groups: Tensor) -> Tensor:
        """Logits ``[U, G, D]`` that put the warm start's device first.

        With the learned part at zero a group leaves it with probability ``changes / groups``:
        about ``changes`` groups move per placement, whatever the size of the graph.
        """
        move = self._moving(num_groups)
        others = (legal.sum(dim=2) - 1).clamp(min=1)
        bonus = torch.log(others * ((1 - move) / move)[:, None])
        return warm * bonus[:, :, None]

    def _moving(self, num_groups: Tensor) -> Tensor:
        """Share of the groups that an untrained policy moves away from the warm start."""
        return (self.config.changes / num_groups).clamp(max=self.config.max_change)


def greedy(logits: Tensor) -> Tensor:
    """int64 ``[...]`` the most likely device of logits ``[..., D]``."""
    return logits.argmax(dim=-1)


def sample(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """int64 ``[...]`` a device drawn from the softmax (the Gumbel trick); never an illegal one."""
    uniform = torch.rand(logits.shape, generator=generator).clamp(1e-10, 1 - 1e-7)
    return (logits - torch.log(-torch.log(uniform))).argmax(dim=-1)
