"""What stable-baselines3's algorithms lack for graphs: a buffer per graph, and cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer

_ENOUGH = 4  # independent samples for a mean of advantages


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

    Post (Gao et al., NeurIPS 2018) joins the two: PPO learns from every placement, minimising
    the cross-entropy to the ``elite`` share with the highest reward, of each graph, from these.
    """

    elite: float = 0.0

    def train(self) -> None:
        super().train()
        seen: Any = self.rollout_buffer
        ids = seen.observations["problem"].astype(int).ravel()
        rows = elites(ids, seen.returns.ravel(), self.elite)
        obs = {k: seen.to_torch(v[rows]) for k, v in seen.observations.items()}
        actions = seen.to_torch(seen.actions[rows])
        self.policy.set_training_mode(True)
        for _ in range(self.n_epochs):
            loss = -self.policy.evaluate_actions(obs, actions)[1].mean()  # type: ignore[arg-type]
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()


class PerGraphBuffer(DictRolloutBuffer):
    """A rollout whose advantages have mean 0 and deviation 1 over the steps of each graph.

    Steps of one episode say nearly the same of it: over those of a single one the mean *is* what
    it earned, and taking that off would leave nothing to learn. Graphs with fewer than ``_ENOUGH``
    independent samples therefore share one mean and one deviation: every episode counts as a
    sample, and so do ``1 / (1 - gamma * lambda)`` steps, as far as an advantage looks ahead.
    """

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: Any) -> None:
        super().compute_returns_and_advantage(last_values, dones)
        numbers = self.observations["problem"].reshape(self.advantages.shape)
        ids = np.unique(numbers, return_inverse=True)[1].reshape(numbers.shape)
        begins = self.episode_starts.astype(bool)
        begins[0] = True  # or it began in the rollout before
        steps = np.bincount(ids.ravel())
        episodes = np.bincount(ids[begins], minlength=len(steps))
        enough = episodes + (1 - self.gamma * self.gae_lambda) * steps >= _ENOUGH
        parts = np.where(enough[ids], ids, -1)
        whole = self.advantages.std() + 1e-8
        for part in np.unique(parts):
            these = self.advantages[parts == part]
            # A graph with few steps, or nothing to choose from, has no deviation of its own.
            scale = these.std() if len(these) >= 16 else whole
            self.advantages[parts == part] = (these - these.mean()) / max(scale, 1e-3 * whole)
