"""The network: message passing over the graph, then a score for every (group, device) pair.

Nothing in it knows how many groups or devices there are, so that a policy trained on some
problems acts on any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents.store import Graphs, Waves
from envs.features import DEVICE_FEATURES, GROUP_FEATURES, PAIR_FEATURES
from envs.rules import check_range
from envs.sequential.kernels import NUM_DEVICE_FEATURES
from placement.tools.clock import loads
from placement.tools.named import convert_fields, imported

if TYPE_CHECKING:  # where no graph is encoded PyG is not imported
    from torch_geometric.data import Batch

ILLEGAL = -1e9


class PolicyError(ValueError):
    """A policy cannot be read, or made as configured; the message says what to do."""


@dataclass(frozen=True)
class NetworkConfig:
    """Kind and size of the network, and how far an untrained policy strays from its warm start.

    Attributes:
        encoder: the kind of layer: ``sage``, ``gin``, ``gat`` or ``dag``, or ``perceptron``, which
            passes no messages (see ``LAYERS``), or yours as ``package.module:Class``: a
            ``torch.nn.Module`` made as ``Class(hidden)`` and called as ``layer(x, batch, waves)``,
            from and to the groups float32 ``[sum of groups, H]`` of a
            ``torch_geometric.data.Batch`` (``waves``: if the class has ``needs_waves = True``).
        hidden: ``H``, width of every layer.
        layers: rounds of message passing, each in both directions; 0: no message passing.
        changes: groups that an untrained policy moves away from the warm start per placement,
            on average, above 0; at most ``max_change`` of them.
        max_change: a share, above 0 and below 1.
        finish_weight: without a warm start, a policy that places one group at a time starts
            close to list scheduling: logits fall with this times the log cost of a device
            (``envs.sequential.kernels``: of a latency the finish time).
        attention: layers of attention of all groups to each other, behind the message passing.
            Time and memory grow with their square.
    """

    encoder: str = "sage"
    hidden: int = 64
    layers: int = 3
    changes: float = 4.0
    max_change: float = 0.3
    finish_weight: float = 4.0
    attention: int = 0

    def __post_init__(self) -> None:
        convert_fields(self, PolicyError)
        if self.encoder not in LAYERS and ":" not in self.encoder:
            raise PolicyError(
                f"encoder {self.encoder!r} is unknown; use one of {list(LAYERS)}, or your own as "
                f"package.module:Class"
            )
        if self.hidden < 4 or self.hidden % 4:
            raise PolicyError(f"hidden = {self.hidden} must be a positive multiple of 4")
        for what, least, most in (
            ("layers", 0, 64),  # a file of a few bytes must not ask for millions
            ("attention", 0, 64),
            ("finish_weight", -1e6, 1e6),
            ("changes", 1e-6, 1e9),  # shares of a float32 that are 0 or 1 have no logarithm
            ("max_change", 1e-6, 1 - 1e-6),
        ):
            check_range(what, getattr(self, what), least, most, PolicyError)


Observations = dict[str, Tensor]


class Encoded(NamedTuple):
    """What the encoder makes of ``U`` graphs."""

    groups: Tensor  # float32 [U, G, H]
    graph: Tensor  # float32 [U, H]
    devices: Tensor  # float32 [U, D, H]


class Sage(nn.Module):
    """GraphSAGE (Hamilton et al. 2017) along and against the edges, residual."""

    def __init__(self, hidden: int) -> None:
        from torch_geometric.nn import SAGEConv

        super().__init__()
        self.along = SAGEConv(hidden, hidden)
        self.against = SAGEConv(hidden, hidden, root_weight=False)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, batch: Batch, waves: Waves) -> Tensor:
        y = self.norm(x)
        edges = batch.edge_index
        return x + torch.relu(self.along(y, edges) + self.against(y, edges.flip(0)))


class Gin(nn.Module):
    """GIN (Xu et al. 2019) along and against the edges, residual: messages are added up."""

    def __init__(self, hidden: int) -> None:
        from torch_geometric.nn import GINConv

        super().__init__()
        self.along = GINConv(nn.Linear(hidden, hidden), train_eps=True)
        self.against = GINConv(nn.Linear(hidden, hidden), train_eps=True)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, batch: Batch, waves: Waves) -> Tensor:
        y = self.norm(x)
        edges = batch.edge_index
        return x + torch.relu(self.along(y, edges) + self.against(y, edges.flip(0)))


class Perceptron(nn.Module):
    """No message passing: each group hears itself alone, residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.own = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, batch: Batch, waves: Waves) -> Tensor:
        return x + torch.relu(self.own(self.norm(x)))


class Gat(nn.Module):
    """GATv2 (Brody et al. 2022) with edge features along and against the edges, residual."""

    def __init__(self, hidden: int) -> None:
        from torch_geometric.nn import GATv2Conv

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

    needs_waves = True

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.heard = nn.ModuleList(nn.Linear(2 * hidden, hidden, bias=False) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))

    def forward(self, x: Tensor, batch: Batch, waves: Waves) -> Tensor:
        from torch_geometric.utils import scatter

        for k, order in enumerate(waves):
            own = self.own[k](self.norm[k](x))
            done = x
            for nodes, sources, targets in order:
                y = own[nodes]
                if len(sources):
                    messages, size = done[sources], len(nodes)
                    mean = scatter(messages, targets, dim_size=size, reduce="mean")
                    largest = scatter(messages, targets, dim_size=size, reduce="max")
                    y = y + self.heard[k](torch.cat([mean, largest], dim=1))
                done = done.index_copy(0, nodes, x[nodes] + torch.relu(y))
            x = done
        return x


LAYERS: dict[str, type[nn.Module]] = {
    "sage": Sage,
    "gin": Gin,
    "gat": Gat,
    "dag": Dag,
    "perceptron": Perceptron,
}


def layer_of(encoder: str) -> type[nn.Module]:
    """The class of layer of that name; one of the user's is imported.

    Raises:
        PolicyError: it cannot be imported, or is no ``torch.nn.Module`` of the form that is called.
    """
    if encoder in LAYERS:
        return LAYERS[encoder]
    kind = imported(encoder, "encoder", PolicyError)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise PolicyError(f"encoder {encoder!r} must be a class of torch.nn.Module")
    for method, arguments in (
        (kind.__init__, ("hidden",)),
        (kind.forward, ("x", "batch", "waves")),
    ):
        try:
            signature(method).bind("self", *arguments)
        except TypeError as error:
            raise PolicyError(
                f"encoder {encoder!r}: {method.__name__} must take ({', '.join(arguments)}), "
                f"it has {signature(method)}: {error} (docs/extend.md, A policy)"
            ) from error
    return kind


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


@loads
def load_pyg() -> None:
    """Import it: that takes seconds, and is no budget's."""
    import torch_geometric.nn  # noqa: F401


class Encoder(nn.Module):
    """Message passing over the groups, then what a graph and its devices are in it."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        load_pyg()
        h = config.hidden
        layer = layer_of(config.encoder)
        self.needs_waves = bool(getattr(layer, "needs_waves", False))
        self.group_in = nn.Linear(len(GROUP_FEATURES), h)
        self.layers = nn.ModuleList(layer(h) for _ in range(config.layers))
        self.group_out = nn.LayerNorm(h)
        self.attention = nn.ModuleList(Attention(h) for _ in range(config.attention))
        self.graph = nn.Sequential(nn.Linear(2 * h, h), nn.ReLU())
        self.device = nn.Sequential(nn.Linear(len(DEVICE_FEATURES) + h, h), nn.ReLU())

    def forward(self, store: Graphs, ids: Tensor) -> Encoded:
        """Encode the distinct graphs int64 ``ids [U]`` of ``store``."""
        key = tuple(ids.tolist())
        batch = store.batch(key)
        waves = store.waves(key) if self.needs_waves else []
        x = self.group_in(batch.x)
        for layer in self.layers:
            x = _heard(layer, x, batch, waves)
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


def _heard(layer: nn.Module, x: Tensor, batch: Batch, waves: Waves) -> Tensor:
    """What a layer makes of the groups ``x``.

    Raises:
        PolicyError: it is of another form than ``x``. What the layer raises says what it was given.
    """
    name, form = type(layer).__name__, _form(x)
    try:
        y = layer(x, batch, waves)
    except Exception as error:
        edges = f"edge_index {_form(batch.edge_index)}, edge_attr {_form(batch.edge_attr)}"
        error.add_note(f"encoder {name} was given x {form}, {edges}, and must give {form}")
        raise
    if _form(y) != form:
        raise PolicyError(
            f"encoder {name}: forward gives {_form(y)} for x {form}: a layer gives groups as it "
            f"gets them, float32 [V, H]"
        )
    groups: Tensor = y
    return groups


def _form(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def near_zero(weight: Tensor) -> None:
    """Set new weights; on ``meta`` there are none, and torch would import its compiler (1 s)."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=0.01)


class PlacementNet(nn.Module):
    """Scores and values of (group, device) pairs: of ``sequential`` one group at a time.

    ``OneShotNet`` scores all groups at once; a network of yours may score something else.
    """

    Config = NetworkConfig
    num_state = NUM_DEVICE_FEATURES  # features of what changes, of each pair
    num_search = 0  # and of the episode

    def __init__(
        self, config: NetworkConfig | None = None, formulation: str = "sequential"
    ) -> None:
        super().__init__()
        self.config = config or NetworkConfig()
        self.formulation = formulation
        h, state, search = self.config.hidden, self.num_state, self.num_search
        self.encoder = Encoder(self.config)
        self.from_group = nn.Linear(h, h)
        self.from_graph = nn.Linear(h, h, bias=False)
        self.from_device = nn.Linear(h, h, bias=False)
        self.from_pair = nn.Linear(len(PAIR_FEATURES), h, bias=False)
        self.from_state = nn.Linear(state, h, bias=False)
        self.score = nn.Sequential(nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1))
        self.value = nn.Sequential(nn.Linear(h + 2 * state + search, h), nn.ReLU(), nn.Linear(h, 1))
        for head in (self.score, self.value, *self.more_heads()):
            last = head[-1]
            assert isinstance(last, nn.Linear)
            # Start at the warm start: the learned part of every score begins near zero.
            near_zero(last.weight)
            nn.init.zeros_(last.bias)

    def more_heads(self) -> Sequence[nn.Sequential]:
        """What a formulation has besides ``score`` and ``value``, made here."""
        return ()

    def encode(self, store: Graphs, ids: Tensor) -> Encoded:
        """The distinct graphs int64 ``ids [U]`` of ``store``, encoded."""
        encoded: Encoded = self.encoder(store, ids)
        return encoded

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: Encoded, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[B, ..., A]``, values ``[B]``, and which groups are real (None: all).

        ``obs`` is of the formulation's environment; ``row`` int64 ``[B]`` is each episode's place
        among the encoded graphs ``ids``.
        """
        state, legal = obs["devices"].float(), obs["mask"].bool()
        group = obs["group"].long().squeeze(1)
        logits = self.step_logits(store, ids, encoded, row, group, state, legal)
        return logits, self.values(encoded, row, state, legal), None

    def step_logits(
        self,
        store: Graphs,
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

    def weights(self, store: Graphs) -> tuple[NDArray[np.float32], ...]:
        """``net`` of ``sequential_kernels.construct``, which scores as ``step_logits`` does."""
        with torch.no_grad():
            encoded = self.encode(store, torch.arange(len(store)))
            _, hidden, _, out = self.score
            assert isinstance(hidden, nn.Linear) and isinstance(out, nn.Linear)
            return arrays(
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
        None: before anything is placed. ``search`` float32 ``[B, S]`` is of the episode.
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


class OneShotNet(PlacementNet):
    """Of ``one_shot``: all groups at once."""

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: Encoded, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See ``PlacementNet.evaluate``."""
        logits = self.all_logits(store, ids, encoded)[row]
        return logits, self.values(encoded, row, None, store.legal), store.real[ids][row]

    def all_logits(self, store: Graphs, ids: Tensor, encoded: Encoded) -> Tensor:
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


def arrays(*parts: Tensor) -> tuple[NDArray[np.float32], ...]:
    """Weights as kernels take them."""
    return tuple(np.ascontiguousarray(x.detach().cpu().numpy(), dtype=np.float32) for x in parts)


def greedy(logits: Tensor) -> Tensor:
    """int64 ``[...]`` the most likely device of logits ``[..., D]``."""
    return logits.argmax(dim=-1)


def sample(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """int64 ``[...]`` a device drawn from the softmax (the Gumbel trick); never an illegal one."""
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device).clamp(
        1e-10, 1 - 1e-7
    )
    return (logits - torch.log(-torch.log(uniform))).argmax(dim=-1)
