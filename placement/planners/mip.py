"""The best split by mixed-integer programming, with a proved bound."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.bounds import lower_bound
from placement.bounds.loads import alike
from placement.graph import topological_order
from placement.objective import Objective
from placement.planners import PlannerError, load
from placement.planners.ideal_dp import contract
from placement.problem import Planner, Problem, Solution
from placement.search.evaluation import Search
from placement.simulator.analytic import device_loads
from placement.simulator.analytic_kernels import blocks
from placement.tools.lp import TOLERANCE, Program

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Mip:
    """Least ``max_load`` over all splits, or over all contiguous ones, by HiGHS: the one in
    SciPy, because highspy cannot be imported beside OR-Tools.

    The integer program of Tarnawski et al. (NeurIPS 2020): a binary for each group and device,
    and for each tensor and device whether it is paid there. Contiguous splits are those of
    ``ideal_dp``: the stages are ordered, a block is never before one it depends on, and the kind
    of device of a stage is switched by big-M rows.

    Under another objective the split of least ``max_load`` is scored by it,
    ``stats["solved"]`` says so; ``cp_sat`` solves ``latency`` and ``piecewise_latency``.

    Ctrl-C is heard when HiGHS returns, at the latest when ``seconds`` are over: SciPy cannot be
    told to stop, and HiGHS left behind in a thread aborts the process at its end.

    ``lower_bound_s`` holds for every split with one phase, up to the solver's tolerance of 1e-6,
    which is taken off; what is proved for contiguous ones only is ``stats["contiguous_bound_s"]``.

    Attributes:
        contiguous: only splits along the pipeline.
        start: planner of the first placement, which is improved on; None: ``macro_search``
            or, if contiguous, ``ideal_dp``, for ``start_share`` of the seconds. Before it,
            where the objective has no program, ``macro_search`` has half of them for that.
        seconds: budget. The problem is read and the start is made in any case; where too little
            is left for the program, the start is the answer (``stats["status"]``).
        start_share, most_start_s: of the seconds, for the start, and its seconds at most.
        own_share: of the seconds, for a search of an objective that is not the program's.
    """

    contiguous: bool = False
    start: str | Planner | None = None
    seconds: float = 60.0
    start_share: float = 0.1
    most_start_s: float = 5.0
    own_share: float = 0.5

    def __call__(self, problem: Problem) -> Solution:
        """The best split within the time."""
        search = Search(problem, self.seconds)
        splits = _Splits(problem, self.contiguous, self._begin(search))
        if self.contiguous and splits.known_s is None:
            search.best_cost = np.inf  # not an answer, unless the solver finds none
            search.curve.clear()
        bound_s = _solve(splits, search) * splits.unit_s
        stats = {"status": splits.program.status or UNWRITTEN, "nodes": splits.program.nodes}
        if search.best_cost == np.inf:
            assert search.best is not None
            search.consider(search.best, 0)
            stats["message"] = "no contiguous split that fits was found: this is the start"
        bound = lower_bound(problem)
        if problem.objective is Objective.MAX_LOAD:
            if bound_s > search.best_cost * (1 + 1e-6):
                # A solver that contradicts a placement we hold has proved nothing.
                stats["rejected_bound_s"] = bound_s
            elif self.contiguous:
                stats["contiguous_bound_s"] = min(bound_s, search.best_cost)
            else:
                bound = max(bound, min(bound_s, search.best_cost))
        return search.solution(bound, solved="max_load", contiguous=self.contiguous, **stats)

    def _begin(self, search: Search) -> Ints:
        """The first split, devices int32 ``[G]``.

        Of an objective that is not the solver's, ``search`` has the answer of a planner that knows
        it first, unless only some splits may answer.
        """
        problem, seconds = search.problem, min(self.most_start_s, self.start_share * self.seconds)
        if not (problem.objective.is_analytic or self.contiguous) and self.start is None:
            search.run("macro_search", self.own_share, self.own_share, one_phase=True)
        problem = problem.by_loads
        if self.start is not None:
            planner = load(self.start) if isinstance(self.start, str) else self.start
        elif self.contiguous:
            planner = load("ideal_dp", seconds=seconds)
        else:
            moves = problem.graph.num_groups * problem.num_devices
            planner = load("macro_search", seconds=seconds, evaluations=1000 * moves)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the start need not be optimal
            try:
                answer = planner(problem.one_phase)
            except PlannerError:  # ideal_dp: too many kinds of devices
                if self.start is not None:
                    raise
                answer = load("single_device")(problem)
        choice = search.choice(answer.placement)
        search.consider(choice, int(answer.stats.get("evaluations", 1)))
        return choice


UNWRITTEN = "the seconds were too few to write the program down: this is the start"


def _solve(splits: _Splits, search: Search) -> float:
    """The first column, at least, in whole numbers, whose placements are scored."""
    rows, before, least = splits.program, np.zeros(0), 0.0
    while search.seconds_left > 0:
        least = max(least, rows.whole(splits.whole, search.seconds_left))
        # Up to its tolerance the solver may obey rows that were added.
        if rows.answer is None or np.array_equal(rows.answer, before):
            break
        search.consider(splits.choice(rows.answer), 1)
        if not splits.tighten(rows.answer):
            break
        before = rows.answer
    return least


class _Splits:
    """A program of the largest load: blocks on ``S`` stages, and for each tensor where it is paid.

    A stage is a device of one kind. Without contiguity stage ``d`` is device ``d`` and blocks are
    the colocation groups. With it the stages are in the order of the pipeline, their kinds are
    open, and blocks are the items of ``ideal_dp`` (groups, cycles fused).

    Attributes:
        program, unit_s: rows and columns, and what the first column counts time in.
        whole: columns that are whole numbers in every split.
        known_s: the largest load of the split that is known; None: it is no such split.
    """

    def __init__(self, problem: Problem, contiguous: bool, split: Ints) -> None:
        self.problem, self.program, self.contiguous = problem, Program(), contiguous
        edges = np.zeros((0, 2), np.int64)
        self.block = problem.graph.group
        if contiguous:
            self.block, edges = contract(problem)
        self.costs = b = blocks(problem, self.block)
        about = [b.compute_s, b.io_s, problem.memory_bytes[None].astype(np.float64)]
        stage_kind = alike(np.concatenate(about))[1]
        self.kinds = [np.flatnonzero(stage_kind == k) for k in range(int(stage_kind.max()) + 1)]
        self.known_s = self._load_s(split[problem.graph.group], edges)
        self.unit_s = self.known_s or max(
            float(b.compute_s[np.isfinite(b.compute_s)].max()), float(b.io_s.max(initial=0.0)), 1e-9
        )
        program, many = self.program, problem.num_devices
        # SciPy cannot hand HiGHS a placement; at least it need not look for a worse one.
        program.upper[0] = 1.0 + TOLERANCE if self.known_s else np.inf
        self.x = x = program.shares(self._may(stage_kind))
        self.kind = kind = program.shares(np.ones((many, len(self.kinds)), bool))
        if contiguous:
            self._in_order(edges)
        else:
            program.upper[kind] = stage_kind[:, None] == np.arange(len(self.kinds))
        which = np.repeat(np.arange(len(b.src)), np.diff(b.use_ptr))
        self.tied = np.repeat(np.arange(len(b.tied_bytes)), np.diff(b.tied_ptr))
        held = b.own_bytes.astype(np.float64)
        for c in range(many):
            paid = (b.io_s if contiguous else b.io_s[:, [c]]).max(axis=1) > 0
            pays = program.columns(paid)
            used = paid[which]
            src, none = b.src[which[used]], np.zeros(used.sum())
            for sign in (1.0, -1.0):
                there, here = (x[b.use_dst[used], c], sign), (x[src, c], -sign * (src >= 0))
                program.rows(none, there, here, (pays[which[used]], -1.0))
            holds = program.columns(np.ones(len(b.tied_bytes)))
            reads = x[b.tied_dst, c], 1.0
            program.rows(np.zeros(len(self.tied)), reads, (holds[self.tied], -1.0))
            own = [(x[:, c], held), (holds, b.tied_bytes.astype(np.float64))]
            for k in range(len(self.kinds)) if contiguous else [int(stage_kind[c])]:
                d = self.kinds[k][0]
                runs, on = np.isfinite(b.compute_s[:, d]), kind[c, [k]]
                seconds = np.where(runs, b.compute_s[:, d], 0.0) / self.unit_s
                io = b.io_s[:, d] * paid / self.unit_s
                most = seconds.sum() + io.sum()  # the row is off where the kind is another
                time = np.zeros(1, np.intp), -1.0
                program.row(most, (x[:, c], seconds), (pays, io), (on, most), time)
                room = float(problem.memory_bytes[d])
                total = held.sum() + b.tied_bytes.sum()
                if total > room:
                    program.row(total, *own, (on, total - room))
                cannot = np.flatnonzero(~runs)
                program.rows(np.ones(len(cannot)), (x[cannot, c], 1.0), (on, 1.0))
        self.whole = np.arange(1, len(program.upper))

    def _load_s(self, placement: Ints, edges: NDArray[np.int64]) -> float | None:
        """The largest load of a placement that is such a split and fits."""
        problem, device = self.problem, np.full(self.costs.num_blocks, -1, np.int32)
        device[self.block] = placement
        if not np.array_equal(device[self.block], placement):
            return None
        if (problem.param_bytes_on(placement) > problem.memory_bytes).any():
            return None
        pairs = device[edges]
        pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
        if len(topological_order(pairs, problem.num_devices)) < problem.num_devices:
            return None  # devices wait for each other in a circle
        return float(device_loads(problem, placement).max())

    def _may(self, stage_kind: NDArray[np.intp]) -> NDArray[np.bool_]:
        """bool ``[I, S]``: whether a block may be on a stage.

        Devices of a kind can be renamed by the heaviest block they hold: the first block needs
        only the first of them, the second block only the first two.
        """
        compute_s = self.costs.compute_s
        if self.contiguous:
            return np.ones(compute_s.shape, bool)
        rank = np.argsort(np.argsort(-compute_s.min(axis=1), kind="stable"))
        place = np.zeros(len(stage_kind), np.intp)  # among those of its kind
        for members in self.kinds:
            place[members] = np.arange(len(members))
        return (place <= rank[:, None]) & np.isfinite(compute_s)

    def _in_order(self, edges: NDArray[np.int64]) -> None:
        """Kinds of stages are open, as many as there are devices, and no block is too early."""
        program, blocks, many = self.program, self.costs.num_blocks, len(self.kind)
        up = program.columns(np.ones(blocks * many)).reshape(blocks, many)  # there, or before
        first, then = edges.T
        for sign in (1.0, -1.0):
            for k, members in enumerate(self.kinds):
                program.row(sign * len(members), (self.kind[:, k], sign))
            for c in range(many):
                before = [(up[:, c - 1], -sign)] if c else []
                program.rows(np.zeros(blocks), (up[:, c], sign), (self.x[:, c], -sign), *before)
        for c in range(many):
            program.rows(np.zeros(len(then)), (up[then, c], 1.0), (up[first, c], -1.0))

    def tighten(self, x: NDArray[np.float64]) -> bool:
        """Add rows of what does not fit together, which the solver may put there within its
        tolerance. False: everything fits."""
        b, fits = self.costs, True
        for c, k in enumerate(x[self.kind].argmax(axis=1).tolist()):
            here = x[self.x[:, c]] > 0.5
            tied = np.unique(self.tied[here[b.tied_dst]])
            held = b.own_bytes[here].sum() + b.tied_bytes[tied].sum()
            if held > self.problem.memory_bytes[self.kinds[k][0]]:
                self.program.row(here.sum(), (self.x[here, c], 1.0), (self.kind[c, [k]], 1.0))
                fits = False
        return not fits

    def choice(self, x: NDArray[np.float64]) -> Ints:
        """The device of each group, int32 ``[G]``: each stage takes the next one of its kind."""
        device = np.arange(self.problem.num_devices)
        if self.contiguous:
            free = [iter(members) for members in self.kinds]
            device = np.array([next(free[k]) for k in x[self.kind].argmax(axis=1)])
        choice = np.zeros(self.problem.graph.num_groups, np.int32)
        choice[self.problem.graph.group] = device[x[self.x].argmax(axis=1)][self.block]
        return choice
