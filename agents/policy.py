"""The network as policies for stock stable-baselines3 PPO.

``log_prob`` and ``entropy`` of a whole placement are the *mean* over its groups, not the sum.
PPO's ratio then is the geometric mean of the groups' ratios: with the sum, one update moves
the ratio of a 300-group placement by ``exp(300 x)``, every sample is clipped and nothing is
learned. It only scales the gradient by 1 / groups, so stock PPO needs no change.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor

from agents.encoder import Observations, PlacementNet, greedy, sample
from agents.guided import GuidedNet
from agents.store import GraphStore


class PlacementPolicy(BasePolicy):
    """The policy of every formulation: the network, the graphs, the optimizer, sampling.

    What is observed and decided is the network's business: ``net.evaluate``.

    Args:
        observation_space, action_space, lr_schedule: as stable-baselines3 gives them.
        net: the network; it is trained in place.
        store: the graphs that ``problem`` in the observations counts.
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        lr_schedule: Schedule,
        net: PlacementNet | GuidedNet,
        store: GraphStore,
        use_sde: bool = False,
    ) -> None:
        assert not use_sde, "state-dependent exploration is for continuous actions"
        super().__init__(observation_space, action_space)
        self.net = net
        self.store = store
        self.optimizer = torch.optim.Adam(net.parameters(), lr=lr_schedule(1), eps=1e-5)
        self._weights = tuple(net.parameters())  # walking the modules takes longer than a step
        self._kept: tuple[int, Any] | None = None

    def forward(self, obs: Observations, deterministic: bool = False) -> Any:
        """Actions, values float32 ``[B]`` and log-probabilities float32 ``[B]``."""
        logits, values, real = self._evaluate(obs)
        actions = greedy(logits) if deterministic else sample(logits)
        return actions, values, _mean_log_prob(logits, actions, real)

    def evaluate_actions(self, obs: Observations, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values, log-probabilities and entropies, each float32 ``[B]``."""
        logits, values, real = self._evaluate(obs)
        log = torch.log_softmax(logits, dim=-1)
        entropy = -(log.exp() * log).sum(dim=-1)
        return values, _mean_log_prob(logits, actions.long(), real), _mean(entropy, real)

    def predict_values(self, obs: Observations) -> Tensor:
        """float32 ``[B]``."""
        return self._evaluate(obs)[1]

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        logits = self._evaluate(observation)[0]
        return greedy(logits) if deterministic else sample(logits)

    def _evaluate(self, obs: Observations) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[B, ..., A]``, values ``[B]``, and which groups are real (None: all)."""
        ids, encoded, row = self._encode(obs)
        found: Any = self.net.evaluate(self.store, ids, encoded, row, obs)
        return found

    def _encode(self, obs: Observations) -> tuple[Tensor, Any, Tensor]:
        """Each distinct graph encoded once: their numbers ``[U]``, and ``[B]`` rows among them.

        While collecting (no gradients) all graphs are encoded once per state of the network.
        """
        problem = obs["problem"].long().squeeze(1)
        if torch.is_grad_enabled():
            ids, row = torch.unique(problem, return_inverse=True)
            return ids, self.net.encode(self.store, ids), row
        ids = torch.arange(len(self.store))
        version = sum(p._version for p in self._weights)  # grows with every update
        if self._kept is None or self._kept[0] != version:
            self._kept = version, self.net.encode(self.store, ids)
        return ids, self._kept[1], problem


def _mean_log_prob(logits: Tensor, actions: Tensor, real: Tensor | None) -> Tensor:
    log = torch.log_softmax(logits, dim=-1)
    return _mean(log.gather(-1, actions.unsqueeze(-1)).squeeze(-1), real)


def _mean(x: Tensor, real: Tensor | None) -> Tensor:
    return x if real is None else (x * real).sum(dim=-1) / real.sum(dim=-1)
