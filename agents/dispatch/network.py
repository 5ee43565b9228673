"""The network that chooses pairs of a ready operator and a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents.encoder import (
    ILLEGAL,
    Encoded,
    Encoder,
    NetworkConfig,
    Observations,
    PolicyError,
    arrays,
)
from agents.store import Graphs, GraphStore
from envs.dispatch import Dispatcher, Weights
from envs.dispatch.kernels import NUM_PAIR_FEATURES
from envs.problem_set import choice_of
from envs.rules import check_range
from placement.problem import Problem
from placement.tools.named import convert_fields


@dataclass(frozen=True)
class DispatchConfig:
    """Size of the network.

    Attributes:
        scorer: width of both hidden layers; 0: the score is linear.
        finish_weight: the rule's score counts so many times; at first it alone decides.
        encoder: what encodes the graph, as of ``NetworkConfig``, with layers of width ``scorer``;
            None: nothing does.
        layers: of the encoder.
    """

    scorer: int = 32
    finish_weight: float = 4.0
    encoder: str | None = None
    layers: int = 3

    def __post_init__(self) -> None:
        convert_fields(self, PolicyError)
        check_range("scorer", self.scorer, 0, 4096, PolicyError)
        check_range("finish_weight", self.finish_weight, -1e6, 1e6, PolicyError)
        if self.encoder is not None:
            self.encoding()

    def encoding(self) -> NetworkConfig:
        """That of the encoder."""
        assert self.encoder is not None
        return NetworkConfig(self.encoder, self.scorer, self.layers)


class DispatchNet(nn.Module):
    """Of ``dispatch``: ``finish_weight`` times the rule's score, and what is learned, at first 0.

    That is a linear score of the features and two hidden layers of ``config.scorer``; the second
    also sees the mean over all pairs that are offered. With an encoder the first one also sees what
    that makes of the operator's group and of the device: once for a graph, not at every step.
    """

    Config = DispatchConfig

    def __init__(self, config: DispatchConfig | None = None, formulation: str = "dispatch") -> None:
        super().__init__()
        self.config = config or DispatchConfig()
        self.formulation = formulation
        h = self.config.scorer
        self.linear = nn.Linear(NUM_PAIR_FEATURES, 1, bias=False)
        self.pair = nn.Linear(NUM_PAIR_FEATURES, h)
        self.hidden = nn.Linear(h, h)
        self.around = nn.Linear(h, h, bias=False)
        self.out = nn.Linear(h, 1, bias=False)
        self.value = nn.Sequential(nn.Linear(NUM_PAIR_FEATURES, h), nn.ReLU(), nn.Linear(h, 1))
        if self.config.encoder is not None:
            self.encoder = Encoder(self.config.encoding())
            self.from_group = nn.Linear(h, h, bias=False)
            self.from_graph = nn.Linear(h, h, bias=False)
            self.from_device = nn.Linear(h, h, bias=False)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.out.weight)

    def encode(self, store: Graphs, ids: Tensor) -> Encoded | None:
        """The distinct graphs int64 ``ids [U]`` of ``store``: what the first layer is given.

        None where nothing encodes them: it then sees a graph through the features alone.
        """
        if self.config.encoder is None:
            return None
        encoded: Encoded = self.encoder(store, ids)
        groups = self.from_group(encoded.groups) + self.from_graph(encoded.graph)[:, None]
        return Encoded(groups, encoded.graph, self.from_device(encoded.devices))

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: Encoded | None, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, None]:
        """Logits ``[B, K]`` and values ``[B]``; as ``PlacementNet.evaluate``."""
        pairs, legal = obs["pairs"].float(), obs["mask"].bool()
        which, _ = torch.nonzero(legal, as_tuple=True)
        count = legal.sum(dim=1)
        graph, whose = row[which], obs["whose"].long()[legal]
        of_pairs = self.logits(
            pairs[legal], obs["score"].float()[legal], which, count, seen(encoded, graph, whose)
        )
        logits = torch.full(legal.shape, ILLEGAL, device=pairs.device).masked_scatter(
            legal, of_pairs
        )
        mean = (pairs * legal[:, :, None]).sum(dim=1) / count[:, None]
        return logits, self.value(mean).squeeze(1), None

    def logits(
        self,
        pairs: Tensor,
        score: Tensor,
        which: Tensor,
        count: Tensor,
        more: Tensor | float = 0.0,
    ) -> Tensor:
        """float32 ``[M]`` of pairs float32 ``[M, F]`` of the decisions int64 ``which [M]``.

        ``count`` int64 ``[S]`` is how many pairs each decision has; ``more`` float32 ``[M, H]`` is
        what ``seen`` of an encoded graph. The kernel computes the same.
        """
        first = torch.relu(self.pair(pairs) + more)
        mean = first.new_zeros(len(count), first.shape[1]).index_add(0, which, first)
        around = self.around(mean / count[:, None])
        learned = self.out(torch.relu(self.hidden(first) + around[which])) + self.linear(pairs)
        return self.config.finish_weight * score + learned.squeeze(-1)

    def weights(self, problem: Problem) -> Weights:
        """``net`` of ``envs.dispatch.kernels.judge``; of a turned one ``problem`` is that."""
        groups = devices = torch.zeros(0, 0)
        if self.config.encoder is not None:
            with torch.no_grad():
                device = self.linear.weight.device
                store = GraphStore([problem]).to(device)
                encoded = self.encode(store, torch.zeros(1, dtype=torch.long, device=device))
            assert encoded is not None
            groups, devices = encoded.groups[0], encoded.devices[0]
        return arrays(
            self.linear.weight[0],
            self.pair.weight.T,
            self.pair.bias,
            self.hidden.weight.T,
            self.hidden.bias,
            self.around.weight.T,
            groups,
            devices,
            self.out.weight[0],
        )


def seen(encoded: Encoded | None, graph: Tensor, whose: Tensor) -> Tensor | float:
    """float32 ``[M, H]`` of pairs of the graphs int64 ``[M]``; ``whose`` int64 ``[M, 2]``."""
    if encoded is None:
        return 0.0
    return encoded.groups[graph, whose[:, 0]] + encoded.devices[graph, whose[:, 1]]


def answer(
    net: DispatchNet, problem: Problem, backward: bool = False
) -> tuple[NDArray[np.int32], float]:
    """One greedy decode: the device of each group int32 ``[G]``, and its seconds.

    ``backward``: from the last operator to the first (see ``Dispatcher``).
    """
    episode = Dispatcher(problem, backward=backward)
    episode.construct(net.weights(episode.played), net.config.finish_weight)
    return choice_of(problem, episode.placement), episode.value_s()
