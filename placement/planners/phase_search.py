"""Search over the phases of a periodic placement, one operator of one phase at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.graph import OpGraph
from placement.planners import PlannerError, check_least
from placement.planners.data_parallel import DataParallel, check_turns
from placement.planners.macro_search import MacroSearch
from placement.planners.replicated import Replicated
from placement.problem import Planner, Problem, Solution
from placement.search.evaluation import Search, device_classes

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class PhaseSearch:
    """``macro_search`` where every phase has operators of its own.

    The largest load of a periodic placement is that of a placement with one phase of ``K`` copies
    of the graph, each a ``K``-th as heavy, that read the same parameters. So its moves change one
    phase, or (where a neighbourhood is of several) more. It begins with the best of ``start``,
    ``data_parallel``, ``replicated`` and the best of one phase with devices alike changing places
    from phase to phase. The objectives ``period`` and ``energy`` are searched as ``max_load``; what
    is found counts if the simulator finds it better.

    Attributes:
        start: planner of one phase (a name or a planner).
        phases: ``K``; None: the number of devices (of fewer than 100 groups twice as many), or
            ``max_phases`` if that is less.
        seconds, evaluations: budget; with neither, 300,000 evaluations, most of them of loads.
        seed: of the draws.
    """

    start: str | Planner = "best_of"
    phases: int | None = None
    seconds: float | None = None
    evaluations: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, 1, "phases")
        check_least(self, 0, "seed")

    def __call__(self, problem: Problem) -> Solution:
        """Plan ``problem``.

        Raises:
            PlannerError: it allows one phase only, fewer than ``phases``, or is of a latency.
        """
        check_turns("phase_search", problem)
        if self.phases is not None and self.phases > problem.max_phases:
            raise PlannerError(
                f"phase_search: phases = {self.phases}, the problem allows {problem.max_phases}: "
                f"--max-phases {self.phases}"
            )
        search = Search(problem, self.seconds, self.evaluations, 300_000)
        search.run_start(self.start)
        assert search.best is not None, "a start is always scored"
        for planner in (DataParallel(), Replicated()):
            if search.left:
                search.run(planner)
        known = np.atleast_2d(search.best)
        each = 2 if problem.graph.num_groups < 100 else 1
        count = self.phases or min(problem.max_phases, each * problem.num_devices)
        count = max(count // len(known), 1) * len(known)
        starts = [np.tile(known, (count // len(known), 1))]
        if len(known) == 1 and search.left:
            starts.append(_taking_turns(problem, starts[0]))
            search.consider(starts[1], 1)
        whole, copies = problem.graph.group, unrolled(problem, count)
        while starts and search.left and search.num_left >= 2 and count > 1:
            share = 0.95 / len(starts)  # the simulator has the last word
            begin = starts.pop()[:, whole].ravel()
            seconds, left = search.seconds_left, search.num_left
            answer = MacroSearch(
                start=lambda _, p=begin: Solution(p, np.inf),
                seconds=share * seconds if np.isfinite(seconds) else None,
                evaluations=max(2, int(share * left)) if np.isfinite(left) else None,
                seed=self.seed,
            )(copies)
            choice = search.choice(answer.placement.reshape(count, -1))
            search.consider(choice, int(answer.stats["evaluations"]))
        return search.solution()


def unrolled(problem: Problem, count: int) -> Problem:
    """``count`` copies of the graph that read the same parameters, each so much lighter.

    Its ``max_load`` is that of the periodic placement of ``count`` phases, one after another.
    """
    problem = problem.by_loads
    g, n, t = problem.graph, problem.num_ops, problem.graph.num_tensors
    copy = np.arange(count)[:, None]
    stays = np.isin(g.group, g.group[g.carried_op])  # in all phases on one device
    use = np.stack([g.use_tensor, g.use_dst], axis=1)
    uses = (use + copy[:, :, None] * np.array([t, n])).reshape(-1, 2)
    read = np.stack([g.param_use_op, g.param_use], axis=1)
    reads = (read + copy[:, :, None] * np.array([n, 0])).reshape(-1, 2)
    src = np.where(g.tensor_src >= 0, g.tensor_src + copy * n, -1)
    graph = OpGraph.build(
        f"{count} x {g.name}"[:1024],
        [f"{k}:{name}" for k in range(count) for name in g.op_name],
        src.ravel(),
        np.tile(g.tensor_bytes, count),
        uses,
        param_bytes=g.param_bytes,
        param_uses=reads,
        group=np.where(stays, g.group, g.group + copy * g.num_groups).ravel(),
    )
    profile = replace(
        problem.profile,
        compute_s=np.tile(problem.compute_s, (count, 1)) / count,
        spread_s=np.zeros((count * n, problem.num_devices)),
        loaded_s=None,
        io_s=np.tile(problem.io_s, (count, 1)) / count,
        transfer_s=None,
        workspace_bytes=None,
        library_bytes=None,
        predicted=None,
        graph_fingerprint="",
    )
    # A load is of one micro-batch.
    return replace(problem, graph=graph, profile=profile, max_phases=1, num_microbatches=1)


def _taking_turns(problem: Problem, choice: Ints) -> Ints:
    """Devices of a class change places from phase to phase: each has the mean of their loads."""
    rows, classes = choice.copy(), device_classes(problem)
    moves = np.ones(choice.shape[1], bool)
    moves[problem.graph.group[problem.graph.carried_op]] = False
    for kind in range(int(classes.max()) + 1):
        devices = np.flatnonzero(classes == kind)
        number = np.full(problem.num_devices, -1)
        number[devices] = np.arange(len(devices))
        for k, row in enumerate(choice):
            mine = (number[row] >= 0) & moves
            rows[k, mine] = devices[(number[row[mine]] + k) % len(devices)]
    return rows
