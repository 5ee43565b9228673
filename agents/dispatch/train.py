"""Train a dispatching network: a group-relative policy gradient over whole episodes in a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from torch import nn

from agents.dispatch.network import seen
from agents.encoder import ILLEGAL, PolicyError
from agents.store import GraphStore
from envs.dispatch import Dispatcher, notes_of
from envs.dispatch.kernels import NUM_PAIR_FEATURES, PAIRS
from envs.problem_set import Evaluator
from placement.problem import Problem
from placement.simulator import score
from placement.tools.files import short


class _Noted(NamedTuple):
    """Decisions of an episode: what they were between, and what became of it."""

    graph: int  # which of the problems that were played
    pairs: NDArray[np.float32]  # [M, F]
    score: NDArray[np.float32]  # [M]
    whose: NDArray[np.int32]  # [M, 2] group and device
    counts: NDArray[np.int32]  # [S]
    taken: NDArray[np.int32]  # [S]
    log: NDArray[np.float32]  # [S] of the probability with which
    advantage: NDArray[np.float32]  # [S]


class GroupRelative(OnPolicyAlgorithm):
    """Each problem is played ``episodes`` times, and each episode compared with the others.

    How much better an episode is, in deviations of the logarithm of the values of its problem, is
    the advantage of all its decisions (as in POMO, Kwon et al. 2020, and GRPO, Shao et al. 2024):
    no value is learned, nothing is discounted, and rewards other than the value do not count. The
    gradient is clipped as PPO's. Episodes run in one kernel, which notes a share of the decisions.
    Of stable-baselines3 it has the loop, the callbacks and the schedule of the learning rate.

    Args:
        policy, env: as of PPO.
        n_steps: decisions between two updates, for each environment.
        batch_size, n_epochs: decisions of a mini-batch, and passes over what was played.
        episodes: of each problem; 2 or more.
        keep: share of the decisions that are learned from; a fifth to a half suffices.
        imitate: instead, the best episode of each problem is imitated (self-labelling: Corsini et
            al., NeurIPS 2024).
        without: numbers of the ``PAIR_FEATURES`` of ``envs.dispatch.kernels`` that the network does
            not see.
        others: ``learning_rate``, ``ent_coef``, ``policy_kwargs``, ``seed``, ``device``: as of PPO.

    Raises:
        PolicyError: ``episodes``, ``keep`` or ``without`` are out of range.
    """

    unused: ClassVar = ("reward", "gamma", "gae_lambda", "repeats")
    clip = 0.2  # of the ratio of probabilities

    def __init__(
        self,
        policy: Any,
        env: Any,
        n_steps: int = 2048,
        batch_size: int = 256,
        n_epochs: int = 1,
        episodes: int = 16,
        keep: float = 0.3,
        imitate: bool = False,
        without: Sequence[int] = (),
        **others: Any,
    ) -> None:
        last = NUM_PAIR_FEATURES - 1
        if episodes < 2 or not 0 < keep <= 1 or any(not 0 <= x <= last for x in without):
            raise PolicyError(
                f"episodes = {episodes} must be at least 2, keep = {keep:g} above 0 and at most 1, "
                f"without = {short([*without])} of numbers from 0 to {last}"
            )
        self.episodes, self.keep, self.imitate, self.without = episodes, keep, imitate, without
        self.batch_size, self.n_epochs, self._wanted = batch_size, n_epochs, n_steps
        self._played: list[_Noted] = []
        self._problems: list[Problem] = []  # of them
        super().__init__(
            policy,
            env,
            n_steps=1,  # of a buffer that is not used
            gamma=1.0,
            gae_lambda=1.0,
            vf_coef=0.0,
            max_grad_norm=0.5,
            use_sde=False,
            sde_sample_freq=-1,
            **others,
        )

    def _setup_model(self) -> None:
        super()._setup_model()
        net: Any = self.policy.net
        if net.formulation != "dispatch":  # one of the user's has rules of its own
            raise PolicyError(
                f"{type(self).__name__} trains the formulation dispatch, not {net.formulation}: "
                f"use stable_baselines3:PPO"
            )
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
        self._played, self._problems = [], []
        until = self.num_timesteps + self._wanted * env.num_envs
        while self.num_timesteps < until:
            problem = env.episodes.draw()
            logs, batches = self._play(problem, env.rules.problems.evaluator)
            self._problems.append(problem)
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
        self, problem: Problem, evaluator: Evaluator
    ) -> tuple[NDArray[np.float64], list[_Noted]]:
        """Episodes of a problem: logarithms of their values, and what is learned from."""
        net: Any = self.policy.net
        weights, scale = net.weights(problem), net.config.finish_weight
        episode, graph = Dispatcher(problem), len(self._problems)
        noted: list[list[NDArray[Any]]] = []
        room = notes_of(PAIRS * problem.num_ops, problem.num_ops)
        values = np.empty(self.episodes)
        placements = np.empty((self.episodes, problem.num_ops), np.int32)
        for i in range(self.episodes):
            seed = int(np.random.randint(2**62, dtype=np.int64))
            n = episode.construct(weights, scale, seed, room, self.keep)
            m = int(room.count[:n].sum())
            if evaluator is score:
                values[i] = episode.value_s()
            placements[i] = episode.placement
            pairs = room.features[:m], room.score[:m], room.whose[:m]
            noted.append([x.copy() for x in (*pairs, room.count[:n], room.taken[:n], room.log[:n])])
        if evaluator is not score:  # at once: one round, if they run
            values = np.asarray(evaluator(problem, placements))
        able = np.isfinite(values)
        logs = np.log(np.where(able, np.maximum(values, 1e-300), 1.0))
        logs[~able] = logs[able].max(initial=logs.min()) + 1.0  # worse than all that can run
        advantage = (logs.mean() - logs) / (logs.std() + 0.01)
        chosen: Any = [int(logs.argmin())] if self.imitate else range(self.episodes)
        if np.ptp(logs) < 1e-9:
            chosen = []
        return logs, [
            _Noted._make([graph, *x, np.full(len(x[3]), gain, np.float32)])
            for x, gain in ((noted[i], advantage[i]) for i in chosen)
        ]

    def train(self) -> None:
        """Update on what was played, whole episodes of about ``batch_size`` steps at a time."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        parts = max(1, self._wanted * self.n_envs // self.batch_size)
        net: Any = self.policy.net
        store = None if net.config.encoder is None else GraphStore(self._problems)
        figures = []
        for _ in range(self.n_epochs if self._played else 0):
            for rows in np.array_split(np.random.permutation(len(self._played)), parts):
                part = [self._played[i] for i in rows]
                if any(len(x.counts) for x in part):
                    figures.append(self._update(part, store))
        self._n_updates += self.n_epochs
        names = ("policy_gradient_loss", "entropy_loss", "approx_kl", "clip_fraction")
        for name, value in zip(names, np.mean(figures, axis=0) if figures else [], strict=False):
            self.logger.record(f"train/{name}", float(value))

    def _update(self, part: list[_Noted], store: GraphStore | None) -> tuple[float, ...]:
        """One step of the optimizer; ``store`` has the graphs, where they are encoded."""
        graphs, *noted = zip(*part, strict=True)
        pairs, score, whose, counts, taken, before, advantage = (
            torch.from_numpy(np.concatenate(x)).to(self.device) for x in noted
        )
        count = counts.long()
        which = torch.repeat_interleave(count)
        net: Any = self.policy.net
        more: Any = 0.0
        if store is not None:
            ids, graph = np.unique(graphs, return_inverse=True)
            encoded = net.encode(store.to(self.device), torch.from_numpy(ids).to(self.device))
            graph = np.repeat(graph, [len(x.score) for x in part])
            more = seen(encoded, torch.from_numpy(graph).to(self.device), whose.long())
        logits = net.logits(pairs, score, which, count, more)
        most = logits.detach().new_full((len(count),), ILLEGAL)
        most = most.scatter_reduce(0, which, logits.detach(), "amax")
        shifted = logits - most[which]
        share = torch.exp(shifted)
        total = share.new_zeros(len(count)).index_add(0, which, share)
        log = shifted[torch.cumsum(count, 0) - count + taken] - torch.log(total)
        weighted = share.new_zeros(len(count)).index_add(0, which, share * shifted)
        entropy = (torch.log(total) - weighted / total).mean()
        ratio = torch.exp(log - before)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        loss = -(log if self.imitate else gain).mean()
        self.policy.optimizer.zero_grad()
        (loss - self.ent_coef * entropy).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), self.max_grad_norm)
        self.policy.optimizer.step()
        off = (torch.abs(ratio - 1) > self.clip).float().mean().item()
        return loss.item(), -entropy.item(), (before - log).mean().item(), off
