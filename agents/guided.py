"""The policy that chooses among macro moves, and the search that it guides at full speed."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents.encoder import ILLEGAL, NetworkConfig, Observations, arrays, near_zero
from agents.store import Graphs
from envs import guided_kernels
from envs.guided import begin, state_of, tables_of
from placement.objective import Objective
from placement.problem import Problem
from placement.search import order_moves
from placement.search.descent import descend
from placement.search.evaluation import Search, can_move
from placement.search.pipeline import can_foresee

Chooser = Literal["policy", "hand", "uniform"]
CHOOSERS: dict[str, int] = {
    "policy": guided_kernels.POLICY,
    "hand": guided_kernels.HAND,
    "uniform": guided_kernels.UNIFORM,
}
_SLICE_S = 0.01  # between two looks at the clock
_FIRST_RATE = 400.0  # steps per second, before any was made


class GuidedNet(nn.Module):
    """Scores the moves that ``GuidedSearch-v0`` offers: hand-written score plus a network.

    Or, of the formulation ``order_search``, those of ``OrderSearch-v0``.

    The last layer begins near zero: untrained, it chooses as the hand-written score does.
    """

    def __init__(
        self, config: NetworkConfig | None = None, formulation: str = "guided_search"
    ) -> None:
        super().__init__()
        self.config = config or NetworkConfig()
        self.formulation = formulation
        num_search, num_move = guided_kernels.NUM_SEARCH_FEATURES, guided_kernels.NUM_MOVE_FEATURES
        if formulation == "order_search":
            num_search, num_move = order_moves.NUM_SEARCH_FEATURES, order_moves.NUM_MOVE_FEATURES
        h = self.config.scorer
        self.by_search = nn.Linear(num_search, h)
        self.by_move = nn.Linear(num_move, h, bias=False)
        self.hidden = nn.Linear(h, h)
        self.out = nn.Linear(h, 1, bias=False)
        self.value = nn.Sequential(
            nn.Linear(num_search + 2 * num_move, 2 * h),
            nn.ReLU(),
            nn.Linear(2 * h, 1),
        )
        last = self.value[-1]
        assert isinstance(last, nn.Linear)
        for weight in (self.out.weight, last.weight):
            near_zero(weight)
        nn.init.zeros_(last.bias)

    def encode(self, store: Graphs, ids: Tensor) -> None:
        """It sees a graph through the features alone."""

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: None, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, None]:
        """Logits ``[B, C + 1]`` and values ``[B]``; ``chooser.network`` computes the same logits.

        As ``PlacementNet.evaluate``.
        """
        moves, search, legal = obs["moves"].float(), obs["search"].float(), obs["mask"].bool()
        x = self.by_search(search)[:, None] + self.by_move(moves)
        score = self.out(torch.relu(self.hidden(torch.relu(x)))).squeeze(-1)
        logits = (score + moves[:, :, 0]).masked_fill(~legal, ILLEGAL)
        return logits, self.values(moves, search, legal), None

    def values(self, moves: Tensor, search: Tensor, legal: Tensor) -> Tensor:
        """Expected improvement of log(best) still to come, float32 ``[B]``."""
        some = legal[:, :, None]
        mean = (moves * some).sum(dim=1) / some.sum(dim=1)
        largest = moves.masked_fill(~some, -30.0).amax(dim=1)
        # The hand score of max_load spans 60 units; the others are within 10.
        scale = moves.new_ones(moves.shape[2])
        scale[0] = 0.1
        return self.value(torch.cat([search, mean * scale, largest * scale], dim=1)).squeeze(1)

    def weights(self) -> tuple[NDArray[np.float32], ...]:
        """``net`` of ``chooser.network``."""
        return arrays(
            self.by_search.weight.T,
            self.by_move.weight.T,
            self.by_search.bias,
            self.hidden.weight.T,
            self.hidden.bias,
            self.out.weight[0],
        )


WIDTH = 16, 4  # moves offered at each step where nobody says: simulated objectives, max_load


def default_budget(problem: Problem) -> int:
    """Evaluations of a search without a budget: some seconds for 1,500 operators."""
    return 1_000_000 if problem.objective is Objective.MAX_LOAD else 20_000


def anneal(
    search: Search,
    net: GuidedNet | None,
    chooser: Chooser,
    rounds: int = 6,
    width: int | None = None,
    seed: int = 0,
) -> int:
    """Spend what is left of a ``Search``'s budget in the kernel; the steps that were made.

    Each of the ``rounds`` starts from the best so far, that of a period improved by its estimate,
    and cools down, as the episodes do that the policy was trained on. For ``max_load`` an offered
    move counts as an evaluation.
    """
    problem = search.problem
    assert search.best is not None
    if not can_move(problem):
        return 0
    weights = (net or GuidedNet()).weights()
    tables = tables_of(problem)
    width = width or WIDTH[tables.kind == guided_kernels.LOAD]
    state, rng = state_of(tables, width), np.random.default_rng(seed)
    exact = tables.kind == guided_kernels.LOAD and chooser != "uniform"
    per_step = width if exact else 1
    # Temperatures change a hundred times in a round, wherever the budget is counted. The clock
    # is looked at only where seconds are limited: otherwise the seed decides everything.
    most = max(1.0, search.num_left / (100 * rounds * per_step))
    slice_s = _SLICE_S if np.isfinite(search.seconds_left) else np.inf
    begun, current, rate, num_steps = search.used, -1, _FIRST_RATE, 0
    while search.left and search.num_left > per_step:
        progress = (search.used - begun) / max(1.0 - begun, 1e-12) * rounds
        this = min(int(progress), rounds - 1)
        if this != current:
            if current >= 0 and can_foresee(problem):
                descend(search, seed + this)  # of another best, and with other walks
                if search.num_left <= per_step:
                    break
            current = this
            begin(tables, state, search.best, this, rng)
            search.num_evaluations += 1
        part, before = min(progress - this, 1.0), search.seconds
        steps = int(max(1, min(most, slice_s * rate, search.num_left // per_step)))
        best_s = float(state.best_cost)
        job = guided_kernels.SEARCH + CHOOSERS[chooser]
        guided_kernels.play(tables, state, job, steps, weights, part, part)
        rate = steps / max(search.seconds - before, 1e-9)
        num_steps += steps
        search.consider(state.best if state.best_cost < best_s else None, steps * per_step)
    return num_steps
