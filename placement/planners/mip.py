"""The best split by mixed-integer programming, with a proved bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.bounds import lower_bound
from placement.objective import Objective
from placement.problem import Floats, Planner, Problem, Solution
from placement.relaxed import EXACT, MOST_GROUPS, TOLERANCE, Call, Pieces, Program, tighten
from placement.search import exact
from placement.search.evaluation import Search


@dataclass(frozen=True)
class Mip:
    """Least ``max_load`` over all splits, or over all contiguous ones, by HiGHS: the one in
    SciPy, because highspy cannot be imported beside OR-Tools.

    The integer program of Tarnawski et al. (NeurIPS 2020): a binary for each group and device,
    and for each tensor and device whether it is paid there. Contiguous splits are those of
    ``ideal_dp``, as in ``cp_sat``, whose rows of stages these are; the kind of device of a
    stage is switched by big-M rows.

    ``piecewise_latency`` and ``latency`` have programs that promise no more than any placement
    takes: which groups share an accelerator (``relaxed.Pieces``), and a call whose operators wait
    for their device only as far as between a fork and a join (``relaxed.Call``). What their whole
    numbers prove is the bound; the placements that they are of are scored as all others. Under
    another objective the split of least ``max_load`` is scored by it, ``stats["solved"]`` says so.

    Ctrl-C is heard when HiGHS returns, at the latest when ``seconds`` are over: SciPy cannot be
    told to stop, and HiGHS left behind in a thread aborts the process at its end. ``cp_sat`` hears
    it at once.

    ``lower_bound_s`` holds for every split with one phase, up to the solver's tolerance of 1e-6,
    which is taken off; what is proved for contiguous ones only is ``stats["contiguous_bound_s"]``.

    Attributes:
        contiguous: only splits along the pipeline.
        start: planner of the first placement, which is improved on; None: ``macro_search``
            or, if contiguous, ``ideal_dp``, for a tenth of the seconds, at most 5. Before it,
            where the objective has no program, ``macro_search`` has half of them for that.
        seconds: budget. The problem is read and the start is made in any case; where too little
            is left for the program, the start is the answer (``stats["status"]``).
    """

    contiguous: bool = False
    start: str | Planner | None = None
    seconds: float = 60.0

    def __call__(self, problem: Problem) -> Solution:
        """The best split within the time."""
        search = Search(problem, self.seconds)
        if (program := self._program(problem)) is not None:
            return self._promised(program, search)
        split = exact.begin(search, self.start, self.contiguous, self.seconds)
        stages = exact.stages(problem, self.contiguous, search, split)
        splits = _Splits(problem, stages)
        bound_s = self._whole(splits, search, 0.0) * splits.unit_s
        status, nodes = splits.program.status or exact.UNWRITTEN, splits.program.nodes
        return exact.finish(search, self.contiguous, bound_s, status=status, nodes=nodes)

    def _program(self, problem: Problem) -> type[Call | Pieces] | None:
        if self.contiguous:
            return None
        if problem.objective is Objective.PIECEWISE_LATENCY:
            return Pieces if problem.graph.num_groups <= MOST_GROUPS else None
        return Call if problem.objective is Objective.LATENCY and problem.num_workers > 1 else None

    def _promised(self, program: type[Call | Pieces], search: Search) -> Solution:
        share = min(exact.MOST_START_S, exact.START_SHARE * self.seconds) / self.seconds
        search.run(self.start or "macro_search", share, share, one_phase=True)
        known = search.best_s < np.inf
        promise = program(search.problem, search.best_s * (1 + TOLERANCE) if known else None)
        rows, bound_s = promise.program, lower_bound(search.problem)

        def more(x: Floats) -> bool:
            return search.seconds_left > self.seconds / 2 and promise.tighten(x)

        least = tighten(rows, more, np.inf, lambda: search.seconds_left)
        if rows.answer is not None:
            least = self._whole(promise, search, least)
        proved_s = least * promise.unit_s * EXACT
        bound_s = max(bound_s, min(proved_s, search.best_s))
        return search.solution(bound_s, solved=str(search.problem.objective))

    def _whole(self, program: Call | Pieces | _Splits, search: Search, least: float) -> float:
        """The first column, at least, in whole numbers, whose placements are scored."""
        rows, before = program.program, np.zeros(0)
        while search.seconds_left > 0:
            least = max(least, rows.whole(program.whole, search.seconds_left))
            # Up to its tolerance the solver may obey rows that were added.
            if rows.answer is None or np.array_equal(rows.answer, before):
                break
            search.consider(program.choice(rows.answer), 1)
            if not program.tighten(rows.answer):
                break
            before = rows.answer
        return least


class _Splits:
    """A program of the largest load: blocks on stages, and for each tensor where it is paid.

    Attributes:
        program, unit_s: rows and columns, and what the first column counts time in.
        whole: columns that are whole numbers in every split.
    """

    def __init__(self, problem: Problem, stages: exact.Stages) -> None:
        self.problem, self.stages, self.program = problem, stages, Program()
        blocks, program, many = stages.costs, self.program, problem.num_devices
        known = stages.start is not None and stages.upper_s > 0
        self.unit_s = stages.upper_s if known else exact.largest_s(stages)
        # SciPy cannot hand HiGHS a placement; at least it need not look for a worse one.
        program.upper[0] = 1.0 + TOLERANCE if known else np.inf
        rank = np.argsort(exact.by_weight(blocks))
        may = [[stages.may_run(i, int(r), c) for c in range(many)] for i, r in enumerate(rank)]
        self.x = x = program.shares(np.array(may))
        self.kind = kind = program.shares(np.ones((many, len(stages.kinds)), bool))
        if stages.kind is None:
            self._in_order()
        else:
            program.upper[kind] = stages.kind[:, None] == np.arange(len(stages.kinds))
        which = np.repeat(np.arange(len(blocks.src)), np.diff(blocks.use_ptr))
        self.tied = np.repeat(np.arange(len(blocks.tied_bytes)), np.diff(blocks.tied_ptr))
        held = blocks.own_bytes.astype(np.float64)
        for c in range(many):
            paid = np.zeros(len(blocks.src), bool)
            paid[stages.paid_on(c)] = True
            pays = program.columns(paid)
            used = paid[which]
            src, none = blocks.src[which[used]], np.zeros(used.sum())
            for sign in (1.0, -1.0):
                there, here = (x[blocks.use_dst[used], c], sign), (x[src, c], -sign * (src >= 0))
                program.rows(none, there, here, (pays[which[used]], -1.0))
            holds = program.columns(np.ones(len(blocks.tied_bytes)))
            reads = x[blocks.tied_dst, c], 1.0
            program.rows(np.zeros(len(self.tied)), reads, (holds[self.tied], -1.0))
            own = [(x[:, c], held), (holds, blocks.tied_bytes.astype(np.float64))]
            for k in range(len(stages.kinds)) if stages.kind is None else [int(stages.kind[c])]:
                d = stages.kinds[k][0]
                runs, on = np.isfinite(blocks.compute_s[:, d]), kind[c, [k]]
                seconds = np.where(runs, blocks.compute_s[:, d], 0.0) / self.unit_s
                io = blocks.io_s[:, d] * paid / self.unit_s
                most = seconds.sum() + io.sum()  # the row is off where the kind is another
                time = np.zeros(1, np.intp), -1.0
                program.row(most, (x[:, c], seconds), (pays, io), (on, most), time)
                room = float(problem.memory_bytes[d])
                total = held.sum() + blocks.tied_bytes.sum()
                if total > room:
                    program.row(total, *own, (on, total - room))
                cannot = np.flatnonzero(~runs)
                program.rows(np.ones(len(cannot)), (x[cannot, c], 1.0), (on, 1.0))
        self.whole = np.arange(1, len(program.upper))

    def _in_order(self) -> None:
        """Kinds of stages are open, as many as there are devices, and no block is too early."""
        program, blocks, many = self.program, self.stages.costs.num_blocks, len(self.kind)
        up = program.columns(np.ones(blocks * many)).reshape(blocks, many)  # there, or before
        first, then = np.array(sorted(self.stages.edges), np.intp).reshape(-1, 2).T
        for sign in (1.0, -1.0):
            for k, members in enumerate(self.stages.kinds):
                program.row(sign * len(members), (self.kind[:, k], sign))
            for c in range(many):
                before = [(up[:, c - 1], -sign)] if c else []
                program.rows(np.zeros(blocks), (up[:, c], sign), (self.x[:, c], -sign), *before)
        for c in range(many):
            program.rows(np.zeros(len(then)), (up[then, c], 1.0), (up[first, c], -1.0))

    def tighten(self, x: Floats) -> bool:
        """Add rows of what does not fit together, which the solver may put there within its
        tolerance. False: everything fits."""
        blocks, fits = self.stages.costs, True
        for c, k in enumerate(x[self.kind].argmax(axis=1).tolist()):
            here = x[self.x[:, c]] > 0.5
            tied = np.unique(self.tied[here[blocks.tied_dst]])
            held = blocks.own_bytes[here].sum() + blocks.tied_bytes[tied].sum()
            if held > self.problem.memory_bytes[self.stages.kinds[k][0]]:
                self.program.row(here.sum(), (self.x[here, c], 1.0), (self.kind[c, [k]], 1.0))
                fits = False
        return not fits

    def choice(self, x: Floats) -> NDArray[np.int32]:
        """The device of each group, int32 ``[G]``."""
        stage, kind = x[self.x].argmax(axis=1), x[self.kind].argmax(axis=1)
        return self.stages.choice(self.problem, stage, kind.tolist())
