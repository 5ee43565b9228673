"""Post (Gao et al., NeurIPS 2018): a distribution per group of operators.

PPO moves it, and the cross-entropy to the best placements drawn. How it differs from the paper:
docs/published_methods.md

    python examples/published/run.py post
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO

from agents.encoder import NetworkConfig
from agents.planner import PolicyPlanner
from agents.training import TrainConfig
from placement.problem import Problem, Solution
from placement.search.coarsen import grouped

GROUPS = 100  # into which operators are merged before they are placed


def prepared(problem: Problem) -> Problem:
    """The problem with at most ``GROUPS`` colocation groups."""
    return grouped(problem, GROUPS)


class GroupPlanner(PolicyPlanner):
    """The planner ``policy``, on problems whose operators are merged first."""

    def __call__(self, problem: Problem) -> Solution:
        return super().__call__(prepared(problem))


def elites(ids: NDArray[np.integer[Any]], returns: NDArray[Any], share: float) -> NDArray[np.intp]:
    """Rows int64 of the ``share`` with the highest ``returns`` ``[B]``, of each graph of ``ids``.

    Graphs with fewer than ``1 / share`` rows have one share together: the best of two may be bad.
    """
    parts = np.where(np.bincount(ids)[ids] * share >= 1, ids, -1)
    best = []
    for part in np.unique(parts):
        mine = np.flatnonzero(parts == part)
        ranked = mine[np.argsort(-returns[mine], kind="stable")]
        best.append(ranked[: max(1, round(share * len(mine)))])
    return np.concatenate(best)


class CrossEntropyPPO(PPO):
    """PPO on placements made in one step, then one step per epoch towards the best of them.

    PPO learns from every placement, minimising the cross-entropy to the ``elite`` share with the
    highest reward, of each graph, from these.
    """

    def __init__(self, *args: Any, elite: float = 0.1, **others: Any) -> None:
        self.elite = elite
        super().__init__(*args, **others)

    def train(self) -> None:
        super().train()
        seen: Any = self.rollout_buffer
        ids = seen.observations["problem"].astype(int).ravel()
        rows = elites(ids, seen.returns.ravel(), self.elite)
        obs = {k: seen.to_torch(v[rows]) for k, v in seen.observations.items()}
        actions = seen.to_torch(seen.actions[rows])
        self.policy.set_training_mode(True)
        for _ in range(self.n_epochs):
            loss = -self.policy.evaluate_actions(obs, actions)[1].mean()
            self.policy.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()


CONFIG = TrainConfig(
    formulation="one_shot",
    cold=True,
    algorithm="post:CrossEntropyPPO",
    algorithm_options={"elite": 0.1},
    gae_lambda=1.0,
    learning_rate=1e-2,
    last_learning_rate=1e-3,
    network=NetworkConfig(layers=0, hidden=64),  # each group by itself: no message passing
)
