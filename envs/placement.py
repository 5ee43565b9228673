"""``DevicePlacement-v0``: all operators at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.base import Observation, PlacementEnv, id_space
from envs.problems import MAX_ID, Evaluator, ProblemSet, Runtime
from placement.problem import Planner, Problem
from placement.simulator import score


class OneShotRules:
    """``B`` one-step episodes: the action is the whole placement."""

    def __init__(self, problems: ProblemSet, num_envs: int) -> None:
        self.problems = problems
        self.ids = np.zeros(num_envs, np.int64)
        self.choices = np.full((num_envs, problems.max_groups), -1, np.int32)
        self.observation_space = spaces.Dict({"problem": id_space(MAX_ID)})
        self.action_space = spaces.MultiDiscrete([problems.max_devices] * problems.max_groups)

    def start(self, rows: NDArray[np.integer[Any]], ids: NDArray[np.integer[Any]]) -> None:
        self.ids[rows] = ids
        self.choices[rows] = -1

    def observe(self) -> Observation:
        return {"problem": self.ids[:, None].copy()}

    def masks(self) -> NDArray[np.bool_]:
        return self.problems.legal[self.ids].reshape(len(self.ids), -1)

    def act(self, actions: NDArray[Any]) -> NDArray[np.bool_]:
        self.choices[:] = actions
        return np.ones(len(self.ids), bool)


class DevicePlacementEnv(PlacementEnv):
    """Place every operator of a graph in one step.

    Operators of a colocation group share a device, so what is placed is the *group*. Problems
    of different sizes are padded to the largest: ``G`` groups, ``D`` devices.

    **Observation** ``Dict``: ``problem`` int64 ``[1]``, which of ``problems`` this is. The
    graph does not change and is not observed: a policy keeps it (``agents.store.GraphStore``).

    **Action** ``MultiDiscrete([D] * G)``: the device of each group. Actions of groups that the
    problem does not have are ignored. ``action_masks()`` is bool ``[G * D]``; a group that is
    only padding has the one legal device 0.

    **Reward** float: ``log(reference_s / value_s)``, at least -4; -5 where the placement cannot
    run (a device that does not exist or does not support an operator, memory exceeded).
    0 is as good as the reference, 0.69 twice as fast.

    **Termination**: after one step. Never truncated. Discount with gamma = 1.

    ``info`` has ``problem`` (int), ``value_s`` (float, inf if it cannot run) and ``placement``
    (int32 ``[N]``).

    Args:
        problems: the problems to choose from; ``reset(options={"problem": i})`` takes one.
        reference_s: ``[P]`` seconds of reward 0; by default what ``baseline`` reaches, and
            without a baseline the best single device.
        evaluator: ``placement.simulator.score``, or ``Measured(Executor)``, or any object whose
            ``run(placement)`` returns a ``Timeline``.
        render_mode: ``"ansi"``: ``render()`` returns the last placement's Gantt chart as text.

    Raises:
        EnvError: no problems, wrong references, an unknown render mode or problem number.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        reference_s: Sequence[float] | None = None,
        baseline: Planner | None = None,
        evaluator: Evaluator | Runtime = score,
        render_mode: str | None = None,
    ) -> None:
        chosen = ProblemSet.build(problems, reference_s, baseline, evaluator)
        super().__init__(OneShotRules(chosen, 1), render_mode)
