"""The best split by mixed-integer programming, with a proved bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from placement.bounds import lower_bound
from placement.objective import Objective
from placement.problem import Floats, Planner, Problem, Solution
from placement.relaxed import EXACT, MOST_GROUPS, TOLERANCE, Call, Pieces, proved, tighten
from placement.search import exact
from placement.search.evaluation import Search

_READING = 6.0  # HiGHS looks at its clock after so many times the seconds of writing it a program


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
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        search = Search(problem, self.seconds)
        if (program := self._program(problem)) is not None:
            return self._promised(program, search)
        split = exact.begin(search, self.start, self.contiguous, self.seconds)
        stages = exact.stages(problem, self.contiguous, search, split)
        known = stages.start is not None and stages.upper_s > 0
        unit_s = stages.upper_s if known else exact.largest_s(stages)
        try:
            check = exact.writing(search, _READING)
            rows, x, kind = _stages(problem, stages, unit_s, check)
            check()
        except exact.OutOfTime:
            return exact.finish(search, self.contiguous, 0.0, status=exact.UNWRITTEN, nodes=0)
        # SciPy cannot hand HiGHS a placement; at least it need not look for a worse one.
        rows.upper[0] = 1.0 + TOLERANCE if known else np.inf
        size = (len(rows.low), len(rows.upper))
        answer = milp(
            np.eye(1, size[1])[0],
            integrality=np.append(0, np.ones(size[1] - 1)),
            bounds=Bounds(0.0, rows.upper),
            constraints=LinearConstraint(
                csr_array((rows.value, rows.index, rows.start), shape=size), rows.low, rows.high
            ),
            options={
                "time_limit": max(0.05, self.seconds - search.seconds),
                "mip_rel_gap": TOLERANCE,
            },
        )
        if answer.x is not None:
            stage = np.where(x >= 0, answer.x[x], -1.0).argmax(axis=1)
            search.consider(
                stages.choice(problem, stage, answer.x[kind].argmax(axis=1).tolist()), 1
            )
        bound_s = proved(answer) * unit_s
        return exact.finish(
            search,
            self.contiguous,
            bound_s,
            status=answer.message,
            nodes=int(answer.get("mip_node_count") or 0),
        )

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
        before = np.zeros(0)
        while rows.answer is not None and search.seconds_left > 0:
            least = max(least, rows.whole(promise.whole, search.seconds_left))
            if rows.answer is None:
                break
            search.consider(promise.choice(rows.answer), 1)
            # Up to its tolerance the solver may obey rows that were added.
            if np.array_equal(rows.answer, before) or not promise.tighten(rows.answer):
                break
            before = rows.answer
        proved_s = least * promise.unit_s * EXACT
        bound_s = max(bound_s, min(proved_s, search.best_s))
        return search.solution(bound_s, solved=str(search.problem.objective))


class _Rows:
    """A program that is written row by row; column 0 is the load that is minimised."""

    def __init__(self) -> None:
        self.upper: list[float] = [np.inf]
        self.low: list[float] = []
        self.high: list[float] = []
        self.start: list[int] = [0]
        self.index: list[int] = []
        self.value: list[float] = []

    def binary(self) -> int:
        """A new column."""
        self.upper.append(1.0)
        return len(self.upper) - 1

    def row(self, low: float, high: float, terms: list[tuple[int, float]]) -> None:
        """``low <= sum(value * column) <= high``; columns -1 are 0."""
        total: dict[int, float] = {}
        for column, value in terms:
            if column >= 0 and value:
                total[column] = total.get(column, 0.0) + value
        self.index += total.keys()
        self.value += total.values()
        self.start.append(len(self.index))
        self.low.append(low)
        self.high.append(high)


def _stages(
    problem: Problem, stages: exact.Stages, unit_s: float, check: Callable[[], None]
) -> tuple[_Rows, np.ndarray, np.ndarray]:
    """The program, columns ``x [I, S]`` of blocks on stages (-1: not there), ``kind [S, K]``."""
    blocks, num_stages = stages.costs, problem.num_devices
    rows = _Rows()
    rank = np.argsort(exact.by_weight(blocks))
    x = np.full((blocks.num_blocks, num_stages), -1)
    for i in range(blocks.num_blocks):
        check()
        for c in range(num_stages):
            if stages.may_run(i, int(rank[i]), c):
                x[i, c] = rows.binary()
        rows.row(1, 1, [(column, 1.0) for column in x[i]])
    kind = np.array([[rows.binary() for _ in stages.kinds] for _ in range(num_stages)])
    for c in range(num_stages):
        rows.row(1, 1, [(column, 1.0) for column in kind[c]])
        if stages.kind is not None:
            rows.row(1, 1, [(kind[c, stages.kind[c]], 1.0)])
    if stages.kind is None:
        for k, members in enumerate(stages.kinds):
            rows.row(len(members), len(members), [(column, 1.0) for column in kind[:, k]])
        up = np.array(
            [[rows.binary() for _ in range(num_stages)] for _ in range(blocks.num_blocks)]
        )
        for i in range(blocks.num_blocks):
            check()
            rows.row(1, 1, [(up[i, -1], 1.0)])
            for c in range(num_stages):
                before = up[i, c - 1] if c else -1
                rows.row(0, 0, [(up[i, c], 1.0), (before, -1.0), (x[i, c], -1.0)])
        for first, then in stages.edges:
            check()
            for c in range(num_stages):
                rows.row(0, np.inf, [(up[first, c], 1.0), (up[then, c], -1.0)])
    for c in range(num_stages):
        paid = []
        for t in stages.paid_on(c):
            check()
            pays = rows.binary()
            paid.append((pays, t))
            here = x[blocks.src[t], c] if blocks.src[t] >= 0 else -1
            for u in blocks.use_dst[blocks.use_ptr[t] : blocks.use_ptr[t + 1]]:
                rows.row(0, np.inf, [(pays, 1.0), (x[u, c], -1.0), (here, 1.0)])
                rows.row(0, np.inf, [(pays, 1.0), (x[u, c], 1.0), (here, -1.0)])
        held = [(x[i, c], float(blocks.own_bytes[i])) for i in range(blocks.num_blocks)]
        for q, size in enumerate(blocks.tied_bytes):
            holds = rows.binary()
            held.append((holds, float(size)))
            for i in blocks.tied_dst[blocks.tied_ptr[q] : blocks.tied_ptr[q + 1]]:
                rows.row(0, np.inf, [(holds, 1.0), (x[i, c], -1.0)])
        for k in range(len(stages.kinds)) if stages.kind is None else [int(stages.kind[c])]:
            d = stages.kinds[k][0]
            runs = np.isfinite(blocks.compute_s[:, d])
            used = [(x[i, c], blocks.compute_s[i, d] / unit_s) for i in np.flatnonzero(runs)]
            used += [(pays, blocks.io_s[t, d] / unit_s) for pays, t in paid]
            most = sum(value for _, value in used)  # the row is off where the kind is another
            rows.row(-np.inf, most, [(0, -1.0), (kind[c, k], most), *used])
            capacity, total = float(problem.memory_bytes[d]), sum(v for _, v in held)
            if total > capacity:
                share = [(column, size / capacity) for column, size in held]
                off = total / capacity - 1.0
                rows.row(-np.inf, 1.0 + off, [(kind[c, k], off), *share])
            for i in np.flatnonzero(~runs).tolist():
                rows.row(-np.inf, 1, [(x[i, c], 1.0), (kind[c, k], 1.0)])
    return rows, x, kind
