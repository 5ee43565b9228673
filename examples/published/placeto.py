"""Placeto (Addanki et al., NeurIPS 2019): sweeps that re-place one group after another.

From the best single device; every change of the value is rewarded. How it differs from the paper:
docs/published_methods.md

    python examples/published/run.py placeto
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import giph
import numpy as np
from numpy.typing import NDArray

from agents.encoder import NetworkConfig
from agents.training import TrainConfig
from envs.problem_set import ProblemSet, group_order
from placement.problem import Placement, Problem


class SweepRules(giph.MoveRules):
    """Groups take turns, by priority, and may stay where they are."""

    def __init__(
        self, problems: ProblemSet, num_envs: int, starts: Sequence[Placement] | None = None
    ) -> None:
        super().__init__(problems, num_envs, starts)
        self._turns = [group_order(p) for p in problems.problems]

    def length(self, problem: Problem) -> int:
        """One sweep."""
        return problem.graph.num_groups

    def movable(self, b: int, p: int) -> NDArray[np.bool_]:
        """bool ``[G, D]``: every device of the group whose turn it is."""
        legal = np.zeros_like(self.problems.legal[p])
        turn = self._turns[p][self._step[b] % len(self._turns[p])]
        legal[turn] = self.problems.legal[p, turn]
        return legal


class SweepEnv(giph.MoveEnv):
    """As ``giph.MoveEnv``, but the mask is of one group, and an episode has a step for each."""

    rules_of: Any = SweepRules


formulation = replace(
    giph.formulation, name="placeto:formulation", env="placeto:SweepEnv", options={}
)
CONFIG = TrainConfig(
    formulation=formulation.name,
    cold=True,
    gamma=1.0,
    gae_lambda=1.0,
    entropy=0.002,
    last_entropy=0.0,
    epochs=1,  # one step per rollout: REINFORCE with a learned baseline
    minibatches=1,
    learning_rate=1e-3,
    last_learning_rate=1e-4,
    network=NetworkConfig(encoder="sage", layers=8, hidden=32),
)
