"""What stable-baselines3's algorithms lack: a buffer per graph, cross-entropy, whole episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer
from torch import nn

from agents.encoder import ILLEGAL, PolicyError
from envs.dispatch import Dispatcher, Weights, notes_of
from envs.dispatch_kernels import PAIRS
from placement.problem import Problem

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


class _Noted(NamedTuple):
    """Decisions of an episode: what they were between, and what became of it."""

    pairs: NDArray[np.float32]  # [M, F]
    score: NDArray[np.float32]  # [M]
    counts: NDArray[np.int32]  # [S]
    taken: NDArray[np.int32]  # [S]
    log: NDArray[np.float32]  # [S] of the probability with which
    advantage: NDArray[np.float32]  # [S]


class EpisodesPPO(PPO):
    """PPO of ``dispatch`` on whole episodes that run in one kernel, many of each problem.

    How much better an episode is than the others of its problem, in deviations of the logarithm
    of their values, is the advantage of all its decisions: no value is learned (as in POMO, Kwon
    et al. 2020, and GRPO, Shao et al. 2024). A fifth to a half of the decisions suffices. Rewards
    other than the value, and ``gamma``, do not count.

    Args:
        episodes: of each problem; 2 or more.
        keep: share of the decisions that are learned from.
        imitate: instead, the best episode of each problem is imitated (self-labelling: Corsini et
            al., NeurIPS 2024).
        without: numbers of the ``dispatch_kernels.PAIR_FEATURES`` that the network does not see.
        others: as of stable-baselines3.
    """

    def __init__(
        self,
        *args: Any,
        episodes: int = 16,
        keep: float = 0.3,
        imitate: bool = False,
        without: Sequence[int] = (),
        **others: Any,
    ) -> None:
        self.episodes, self.keep, self.imitate, self.without = episodes, keep, imitate, without
        self._played: list[_Noted] = []
        super().__init__(*args, **others)

    def _setup_model(self) -> None:
        steps, self.n_steps = self.n_steps, 1  # the buffer is not used
        super()._setup_model()
        net: Any = self.policy.net
        if net.formulation != "dispatch":  # one of the user's has rules of its own
            raise PolicyError(
                f"EpisodesPPO trains the formulation dispatch, not {net.formulation}: use "
                f"stable_baselines3:PPO"
            )
        self.n_steps = steps
        for group in self.policy.optimizer.param_groups:
            group["eps"] = 1e-8  # means over thousands of decisions have small gradients
        if self.without:
            seen = torch.ones_like(net.linear.weight[0])
            seen[list(self.without)] = 0.0
            for layer in (net.linear, net.pair):  # weights are 0 and stay so
                layer.weight.data.mul_(seen)
                layer.weight.register_hook(seen.mul)

    def collect_rollouts(
        self, env: Any, callback: Any, rollout_buffer: Any, n_rollout_steps: int
    ) -> bool:
        """Play problems until there are ``n_rollout_steps`` steps of every environment."""
        callback.on_rollout_start()
        self._played, wanted = [], n_rollout_steps * env.num_envs
        net: Any = self.policy.net
        weights, until = net.weights(), self.num_timesteps + wanted
        while self.num_timesteps < until:
            problem = env.episodes.draw()
            logs, batches = self._play(problem, weights, net.config.finish_weight)
            self._played += batches
            self.num_timesteps += self.episodes * problem.num_ops
            env.rules.num_evaluations += self.episodes
            infos = [{"episode": {"r": -float(x)}} for x in logs]
            callback.update_locals({"infos": infos})
            if not callback.on_step():
                return False
        callback.on_rollout_end()
        return True

    def _play(
        self, problem: Problem, weights: Weights, scale: float
    ) -> tuple[NDArray[np.float64], list[_Noted]]:
        """Episodes of a problem: logarithms of their values, and what is learned from."""
        episode = Dispatcher(problem)
        noted: list[list[NDArray[Any]]] = []
        room = notes_of(PAIRS * problem.num_ops, problem.num_ops)
        values = np.empty(self.episodes)
        for i in range(self.episodes):
            seed = int(np.random.randint(2**62, dtype=np.int64))
            n = episode.construct(weights, scale, seed, room, self.keep)
            m = int(room.count[:n].sum())
            values[i] = episode.value_s()
            parts = room.features[:m], room.score[:m], room.count[:n], room.taken[:n], room.log[:n]
            noted.append([x.copy() for x in parts])
        able = np.isfinite(values)
        logs = np.log(np.where(able, np.maximum(values, 1e-300), 1.0))
        logs[~able] = logs[able].max(initial=0.0) + 1.0  # worse than all that can run
        advantage = (logs.mean() - logs) / (logs.std() + 0.01)
        chosen: Any = [int(logs.argmin())] if self.imitate else range(self.episodes)
        if np.ptp(logs) < 1e-9:
            chosen = []
        return logs, [
            _Noted._make([*x, np.full(len(x[2]), gain, np.float32)])
            for x, gain in ((noted[i], advantage[i]) for i in chosen)
        ]

    def train(self) -> None:
        """Update on what was played, whole episodes of about ``batch_size`` steps at a time."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        clip = self.clip_range(self._current_progress_remaining)  # type: ignore[operator]
        parts = max(1, self.n_steps * self.n_envs // self.batch_size)
        figures = []
        for _ in range(self.n_epochs if self._played else 0):
            for rows in np.array_split(np.random.permutation(len(self._played)), parts):
                part = [self._played[i] for i in rows]
                if any(len(x.counts) for x in part):
                    figures.append(self._update(part, clip))
        self._n_updates += self.n_epochs
        names = ("policy_gradient_loss", "entropy_loss", "approx_kl", "clip_fraction")
        for name, value in zip(names, np.mean(figures, axis=0) if figures else [], strict=False):
            self.logger.record(f"train/{name}", float(value))

    def _update(self, part: list[_Noted], clip: float) -> tuple[float, ...]:
        """One step of the optimizer."""
        pairs, score, counts, taken, before, advantage = (
            torch.from_numpy(np.concatenate(x)).to(self.device) for x in zip(*part, strict=True)
        )
        count = counts.long()
        which = torch.repeat_interleave(count)
        net: Any = self.policy.net
        logits = net.logits(pairs, score, which, count)
        most = logits.detach().new_full((len(count),), ILLEGAL)
        most = most.scatter_reduce(0, which, logits.detach(), "amax")
        shifted = logits - most[which]
        share = torch.exp(shifted)
        total = share.new_zeros(len(count)).index_add(0, which, share)
        log = shifted[torch.cumsum(count, 0) - count + taken] - torch.log(total)
        weighted = share.new_zeros(len(count)).index_add(0, which, share * shifted)
        entropy = (torch.log(total) - weighted / total).mean()
        ratio = torch.exp(log - before)
        clipped = ratio.clamp(1 - clip, 1 + clip)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        loss = -(log if self.imitate else gain).mean()
        self.policy.optimizer.zero_grad()
        (loss - self.ent_coef * entropy).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), self.max_grad_norm)
        self.policy.optimizer.step()
        off = (torch.abs(ratio - 1) > clip).float().mean().item()
        return loss.item(), -entropy.item(), (before - log).mean().item(), off
