"""The network that chooses pairs of a ready operator and a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents.encoder import ILLEGAL, Observations, PolicyError, arrays
from agents.store import Graphs
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
    """

    scorer: int = 32
    finish_weight: float = 4.0

    def __post_init__(self) -> None:
        convert_fields(self, PolicyError)
        check_range("scorer", self.scorer, 0, 4096, PolicyError)
        check_range("finish_weight", self.finish_weight, -1e6, 1e6, PolicyError)


class DispatchNet(nn.Module):
    """Of ``dispatch``: ``finish_weight`` times the rule's score, and what is learned, at first 0.

    That is a linear score of the features and two hidden layers of ``config.scorer``; the second
    also sees the mean over all pairs that are offered.
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
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.out.weight)

    def encode(self, store: Graphs, ids: Tensor) -> None:
        """It sees a graph through the features alone."""

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: None, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, None]:
        """Logits ``[B, K]`` and values ``[B]``; as ``PlacementNet.evaluate``."""
        pairs, legal = obs["pairs"].float(), obs["mask"].bool()
        which, _ = torch.nonzero(legal, as_tuple=True)
        count = legal.sum(dim=1)
        of_pairs = self.logits(pairs[legal], obs["score"].float()[legal], which, count)
        logits = torch.full(legal.shape, ILLEGAL, device=pairs.device).masked_scatter(
            legal, of_pairs
        )
        mean = (pairs * legal[:, :, None]).sum(dim=1) / count[:, None]
        return logits, self.value(mean).squeeze(1), None

    def logits(self, pairs: Tensor, score: Tensor, which: Tensor, count: Tensor) -> Tensor:
        """float32 ``[M]`` of pairs float32 ``[M, F]`` of the decisions int64 ``which [M]``.

        ``count`` int64 ``[S]`` is how many pairs each decision has. The kernel computes the same.
        """
        first = torch.relu(self.pair(pairs))
        mean = first.new_zeros(len(count), first.shape[1]).index_add(0, which, first)
        around = self.around(mean / count[:, None])
        learned = self.out(torch.relu(self.hidden(first) + around[which])) + self.linear(pairs)
        return self.config.finish_weight * score + learned.squeeze(-1)

    def weights(self) -> Weights:
        """``net`` of ``envs.dispatch.kernels.judge``."""
        return arrays(
            self.linear.weight[0],
            self.pair.weight.T,
            self.pair.bias,
            self.hidden.weight.T,
            self.hidden.bias,
            self.around.weight.T,
            self.out.weight[0],
        )


def answer(
    net: DispatchNet, problem: Problem, backward: bool = False
) -> tuple[NDArray[np.int32], float]:
    """One greedy decode: the device of each group int32 ``[G]``, and its seconds.

    ``backward``: from the last operator to the first (see ``Dispatcher``).
    """
    episode = Dispatcher(problem, backward=backward)
    episode.construct(net.weights(), net.config.finish_weight)
    return choice_of(problem, episode.placement), episode.value_s()
