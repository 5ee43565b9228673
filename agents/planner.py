"""The learned policy as one planner among others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from agents.encoder import PlacementNet
from agents.trained import PolicyError, TrainedPolicy
from placement.planners._search import INFEASIBLE, Search
from placement.problem import Placement, Planner, Problem, Solution

Mode = Literal["zero_shot", "best_of_k", "finetune"]
SAMPLES_AT_ONCE = 32


@dataclass(frozen=True)
class PolicyPlanner:
    """Starts from the answer of ``baseline`` and returns the best placement ever evaluated.

    So it is never worse than its baseline. ``stats`` keeps apart what is easily mixed up, each
    with its number of evaluations: ``baseline_value_s``, ``greedy_value_s`` (one decode),
    ``best_of_k_value_s`` (the best of the greedy and the sampled placements) and
    ``best_value_s`` (the best of everything, training included).

    Attributes:
        policy: a policy, or the file of one; None is an untrained network, which samples
            placements a few groups away from the baseline's.
        mode: ``zero_shot`` decodes greedily; ``best_of_k`` samples ``k`` placements too;
            ``finetune`` first trains on this very problem for ``steps``, then does the same.
        k: sampled placements.
        steps: environment steps of ``finetune``.
        seconds, evaluations: budget in all, the baseline's included; None is no limit.
        seed: of sampling and training.
        baseline: where to start: the name of a planner, or a planner.
    """

    policy: str | Path | TrainedPolicy | None = None
    mode: Mode = "best_of_k"
    k: int = 32
    steps: int = 4000
    seconds: float | None = None
    evaluations: int | None = None
    seed: int = 0
    baseline: str | Planner = "best_of"

    def __post_init__(self) -> None:
        if self.mode not in ("zero_shot", "best_of_k", "finetune"):
            raise PolicyError(
                f"mode {self.mode!r} is unknown; use zero_shot, best_of_k or finetune"
            )
        if self.k < 1 or self.steps < 1:
            raise PolicyError(f"k = {self.k} and steps = {self.steps} must be at least 1")

    def __call__(self, problem: Problem) -> Solution:
        """Plan ``problem``.

        Raises:
            PolicyError: the policy's file cannot be read.
            PlannerError: no such baseline, or a budget that is not positive.
        """
        policy = self._policy()
        search = Search(problem, self.seconds, self.evaluations)
        start = search.run(self.baseline)
        stats: dict[str, Any] = {
            "mode": self.mode,
            "baseline_value_s": start.value_s,
            "baseline_evaluations": search.num_evaluations,
        }
        if self.mode == "finetune" and search.left:
            before = search.num_evaluations
            policy = self._finetune(policy, problem, start.placement, search)
            stats["training_evaluations"] = search.num_evaluations - before
        before = search.num_evaluations
        wanted = 0 if self.mode == "zero_shot" else self.k
        seconds: list[float] = []
        for sampled in range(0, max(wanted, 1), SAMPLES_AT_ONCE):
            if not search.left:
                break
            rows = policy.place(
                problem,
                start.placement,
                min(SAMPLES_AT_ONCE, wanted - sampled),
                self.seed + sampled,
            )
            # The greedy placement comes first in every batch; it counts once.
            costs = search.costs(_choices(problem, rows if sampled == 0 else rows[1:]))
            seconds += np.where(costs < INFEASIBLE, costs, np.inf).tolist()
        if seconds:
            stats |= {"greedy_value_s": seconds[0], "greedy_evaluations": 1}
        if wanted and seconds:
            stats["best_of_k_value_s"] = min(seconds)
            stats["best_of_k_evaluations"] = search.num_evaluations - before
        stats["best_value_s"] = search.best_cost if search.best_cost < INFEASIBLE else np.inf
        return search.solution(start.lower_bound_s, **stats)

    def _policy(self) -> TrainedPolicy:
        if isinstance(self.policy, TrainedPolicy):
            return self.policy
        if self.policy is not None:
            return TrainedPolicy.load(self.policy)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return TrainedPolicy(PlacementNet())

    def _finetune(
        self, policy: TrainedPolicy, problem: Problem, warm: Placement, search: Search
    ) -> TrainedPolicy:
        """Train a copy of ``policy`` on this problem, within what is left of the budget."""
        from agents.training import TrainConfig, train

        def evaluate(_: Problem, placements: Placement) -> NDArray[np.float64]:
            costs = search.costs(_choices(problem, placements))
            costs = np.where(costs < INFEASIBLE, costs, np.inf)
            return np.pad(costs, (0, len(placements) - len(costs)), constant_values=np.inf)

        limits: dict[str, Any] = {}
        if self.seconds is not None:
            limits["max_seconds"] = max(1e-3, 0.85 * (self.seconds - search.seconds))
        if self.evaluations is not None:
            left = self.evaluations - search.num_evaluations - self.k - 1
            limits["max_evaluations"] = max(1, left)
        config = TrainConfig(total_steps=self.steps, seed=self.seed, **limits)
        return train([problem], config=config, warm=[warm], policy=policy, evaluator=evaluate)


def _choices(problem: Problem, placements: Placement) -> NDArray[np.int32]:
    """int32 ``[B, G]`` the device of each group of placements ``[B, N]``."""
    choices = np.zeros((len(placements), problem.graph.num_groups), np.int32)
    choices[:, problem.graph.group] = placements
    return choices
