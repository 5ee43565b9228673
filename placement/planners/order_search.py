"""Search where operators run and in which order, together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.bounds import lower_bound
from placement.bounds.grain import grain_s
from placement.graph import OpGraph
from placement.objective import Objective
from placement.planners import PlannerError, check_least
from placement.planners.heft import Heft
from placement.problem import Placement, Planner, Problem, Solution
from placement.profile import Profile
from placement.schedule import Schedule
from placement.search import order, windows
from placement.search.evaluation import Search, two_operators
from placement.search.justification import justify
from placement.search.order_state import State, Tables
from placement.simulator import kernels, simulate
from placement.tools.limits import MOST

# Where else to begin, and the share of what is left then that finding it may take.
Starts = tuple[tuple[str | Planner, float], ...]
# Searches that go on, the share of the budget of each, and how far they cool down meanwhile.
Stages = tuple[tuple[int, float, float, float], ...]
STARTS: Starts = (
    ("heft", 0.1),
    (Heft(look_ahead=0.25, busy=True), 0.1),
    ("critical_path_first", 0.1),
    ("critical_path_greedy", 0.15),
)
_TABU_STARTS: Starts = (("m_etf", 0.1), *STARTS[1:])  # it goes far from any start
_BACKWARD = Heft(look_ahead=0.25, busy=True)  # from the end


class OrderParams(NamedTuple):
    """The numbers of ``OrderSearch``: how hot it is, what it spends on what."""

    warm: float = 5e-4  # temperature at first, of a few steps for each operator ...
    cold: float = 1e-5  # ... and at last
    simulated_warm: float = 3e-3  # at first where the simulator tells times: estimates know less
    # What they become with many steps: shares of what an operator of mean seconds makes of the
    # latency.
    warm_share: float = 0.2
    cold_share: float = 0.1
    few: float = 200.0  # steps for each operator ...
    many: float = 10_000.0  # ... in between temperatures are, too
    stages: Stages = ((9, 0.03, 0.0, 0.1), (3, 0.07, 0.1, 0.25), (1, 1.0, 0.25, 1.0))
    tabu_stages: Stages = ((2, 0.05, 0.0, 0.1), (1, 1.0, 0.1, 1.0))
    width: int = 16  # moves offered at each step ...
    wide: int = 64  # ... and with few evaluations: an estimate costs none
    tabu_width: int = 40  # the same of a tabu search ...
    tabu_wide: int = 160  # ... and of one without a clock
    few_for_width: float = 20.0  # evaluations for each operator, below which moves are ``wide``
    too_few: float = 0.5  # evaluations for each operator, below which starts are not raced
    body: int = 16  # most groups that move together
    between_rows: int = 32  # positions in the sequence at which a pass can begin
    first_windows: float = 0.15  # of the budget, for windows before the last search
    last: float = 0.75  # of it is used when windows get what is left
    least_windows: int = 6  # that must be affordable
    window: int = 40  # operators of a window at first ...
    least_window: int = 15  # ... and at least
    grows: float = 1.1  # factor, where a window closes
    in_vain: int = 40  # windows in a row that were no better: then it ends
    justifying: float = 0.3  # of the budget, for forward-backward improvement, at most
    passes: int = 30  # of it between two looks at what came out
    justify_in_vain: int = 2  # looks in a row at which nothing was as good as the best
    slice_s: float = 0.01  # between two looks at the clock


PARAMS = OrderParams()


@dataclass(frozen=True)
class OrderSearch:
    """Local search over placements and orders at once, for the latency of one sample.

    A list scheduler decides the order of what it is given, and answers a small change of the
    placement with another order of everything after it. Here the order is part of the answer
    (``Solution.schedule``), moves of it too, and what a move brings can be estimated: of ``width``
    offered moves one is drawn by the softmax of minus its estimate (``placement.search.order``).

    **What it refuses** (``why_not``): memory that may not suffice, and devices that stream.
    ``macro_search`` takes those; ``best_of`` and ``policy`` choose by themselves.

    **Measured machines.** Where times depend on what else happens meanwhile (``why_simulated``),
    every move that is tried is simulated in its order, and estimates know what handing over takes.
    A move takes about as long as one of ``macro_search``, several times as long as elsewhere.

    **Tabu search** where nothing takes time between devices, as in job shops: always the least
    estimate of ``width`` moves of the critical path is made, and what moved rests for some steps
    (Mastrolilli and Gambardella 2000). Elsewhere an estimate says less, and moves are annealed.

    **Forward-backward improvement** (``placement.search.justification``) of the best start comes
    before, within three tenths of the budget; a pass over all operators is an evaluation. What
    comes out is annealed beside the other starts.

    **Windows** (``placement.search.windows``): where OR-Tools is installed and the budget is large
    enough, two parts of it go to CP-SAT, which solves runs of the sequence exactly. A window counts
    as the evaluations that the annealing would have made meanwhile. ``stats`` has how many
    ``windows`` were solved, how many of them were ``better_windows``, and ``closed_windows``, in
    which nothing better is.

    With fewer evaluations left than half the operators the best start alone is improved. It ends
    where the latency is at a proved bound; ``lower_bound_s`` is that bound.

    Attributes:
        seconds, evaluations: budget in all, the start included; 20,000 evaluations if neither is
            given.
        width: moves offered at each step; None: 16, and 64 where fewer than 20 evaluations are
            left for each operator; of a tabu search 40, and 160 without a clock.
        seed: of the draws.
        start: a planner or its name; it gets a quarter of what is limited. None: ``best_of``, or
            ``heft`` where a tabu search races starts: it comes as far, in a tenth of the time.
    """

    seconds: float | None = None
    evaluations: int | None = None
    width: int | None = None
    seed: int = 0
    start: str | Planner | None = None

    def __call__(self, problem: Problem) -> Solution:
        """Plan ``problem``.

        Raises:
            PlannerError: not for this problem (``why_not``), or an option out of range.
        """
        check_least(self, 1, "width")
        check_least(self, 0, "seed")
        reason = why_not(problem)
        if reason:
            raise PlannerError(f"order_search: {reason}; use macro_search")
        search = Search(problem, self.seconds, self.evaluations, 20_000)
        search.bound_s = lower_bound(problem)
        quick = not sends(problem) and not too_few(search)
        search.run_start(self.start or ("heft" if quick else "best_of"))
        stats = anneal(search, self.width, self.seed)
        return search.solution(search.bound_s, **stats)


def why_not(problem: Problem) -> str:
    """Why orders of ``problem`` cannot be searched; empty if they can."""
    if problem.objective is not Objective.LATENCY:
        return f"it is for objective latency, not {problem.objective}"
    if problem.ready_order != "priority":
        return "devices run operators in the order of their arrival"
    if problem.cluster.streaming:
        return "a device streams its parameters, and so shares another one's order"
    if replace(problem, num_microbatches=1).memory_may_bind:
        return "memory may not suffice for every placement, and its peaks are not tracked"
    return ""


def why_simulated(problem: Problem) -> str:
    """What makes times of ``problem`` depend on what else happens meanwhile; empty: nothing does.

    Then one pass over a sequence is exact, elsewhere only the simulator is.
    """
    if problem.profile.loaded_s is not None:
        return "operators take longer beside busy devices (loaded_s)"
    if problem.link_blocking.any():
        return "links block their sender"
    handing = (problem.link_wake_s, problem.link_send_s, problem.link_send_s_per_byte)
    if any(x.any() for x in (*handing, problem.link_receive_s)):
        return "sending occupies the sender, or wakes the receiver, or receiving occupies that one"
    src, dst = np.nonzero(~np.eye(problem.num_devices, dtype=bool))
    channel = problem.link_channel[src, dst]
    sender = np.zeros(problem.num_channels + 1, np.intp)
    sender[channel] = src  # of those that share one, the last
    if problem.contention and (sender[channel] != src).any():
        return "devices share a channel"
    return ""


def turned(problem: Problem) -> Problem:
    """The same work from its end: operators and links are turned round, for orders alone.

    Each use of a tensor is a transfer of its own there, memory and model inputs are left out.
    """
    g, n, profile = problem.graph, problem.num_ops, problem.profile
    cluster = problem.cluster
    roomy = tuple(replace(d, memory_bytes=2**63 - 1) for d in cluster.devices)
    inner = np.flatnonzero(g.tensor_src[g.use_tensor] >= 0)
    inner = inner[np.argsort(-g.use_dst[inner], kind="stable")]
    tensor = g.use_tensor[inner]
    uses = np.stack([np.arange(len(inner)), n - 1 - g.tensor_src[tensor]], axis=1)
    pairs = profile.transfer_s
    return replace(
        problem,
        cluster=replace(cluster, devices=roomy),
        graph=OpGraph.build(
            g.name,
            g.op_name[::-1],
            n - 1 - g.use_dst[inner],
            np.minimum(g.tensor_bytes[tensor], MOST.graph_bytes // max(len(tensor), 1)),
            uses,
            group=g.group[::-1],
        ),
        profile=Profile(
            profile.device_names,
            profile.compute_s[::-1].copy(),
            profile.spread_s[::-1].copy(),
            tuple(replace(x, src=x.dst, dst=x.src) for x in profile.links),
            transfer_s=None if pairs is None else pairs[tensor].swapaxes(1, 2).copy(),
        ),
    )


def tables_of(problem: Problem) -> Tables:
    """What the kernels need of a problem."""
    g, n = problem.graph, problem.num_ops
    k = kernels.tables(problem)
    user = k.edge_dst
    in_edge = np.argsort(user, kind="stable")
    return Tables.of(
        k,
        edge_in=np.argsort(in_edge).astype(np.int32),
        in_edge=in_edge.astype(np.int32),
        in_src=np.repeat(np.arange(n + 1), np.diff(k.edge_ptr))[in_edge].astype(np.int32),
        channel=_channels(problem),
        local=problem.num_channels,
        group=g.group.astype(np.int32),
        op_ptr=g.group_ptr,
        op=g.group_op,
        simulated=bool(why_simulated(problem)),
        problem=k,
    )


def sends(problem: Problem) -> bool:
    """Whether devices wait for more than each other's ends; else the search is a tabu search."""
    return bool(why_simulated(problem) or (_channels(problem) != problem.num_channels).any())


def _channels(problem: Problem) -> NDArray[np.int32]:
    """That of each link, as in ``kernels.tables``; one on which nothing takes time is not needed.

    What takes no time waits, too, for what its channel carries.
    """
    k = kernels.tables(problem)
    channel: NDArray[np.int32] = k.link_channel.copy()
    if not len(k.transfer_s):
        free = (k.link_latency_s == 0) & (k.link_s_per_byte == 0)
        channel[free & ~np.isin(channel, channel[~free])] = problem.num_channels
    return channel


def state_of(problem: Problem, width: int) -> State:
    """Room for a search of ``width`` moves per step."""
    n, d = problem.num_ops, problem.num_devices
    channels = problem.num_channels if sends(problem) else 0
    edges = len(problem.graph.use_dst)
    rows = -(-n // max(PARAMS.between_rows, channels // 8))  # to note one takes a time, too
    sizes = {"N": n, "D": d, "channels": channels, "E": edges, "R": rows, "C": width}
    sizes["L"] = min(PARAMS.body, problem.graph.num_groups) + 1
    run = problem if why_simulated(problem) else two_operators()
    orders = np.zeros((run.num_ops, 2), np.int32), np.zeros(run.num_devices + 1, np.int32)
    sent = len(run.graph.use_dst)
    return State.fresh(sizes, run=kernels.state_of(run, 1, 1, False, orders, sent))


def sequence_of(
    problem: Problem, placement: Placement, schedule: Schedule | None = None
) -> NDArray[np.int32]:
    """int32 ``[N]``: operators by when they begin in ``schedule``; None: the list scheduler's."""
    run = simulate(problem, placement, schedule, num_microbatches=1)
    return np.lexsort((run.end_s[0], run.start_s[0])).astype(np.int32)


def start(
    tables: Tables,
    state: State,
    placement: Placement,
    sequence: NDArray[np.int32],
    rng: np.random.Generator,
) -> None:
    """Begin at ``placement`` in ``sequence``, int32 ``[N]`` each; ``rng`` seeds what is drawn."""
    state.random[0] = rng.integers(1, 2**64, dtype=np.uint64)
    state.warm, state.cold = PARAMS.warm, PARAMS.cold
    state.place[:] = placement
    state.sequence[:] = sequence
    order.begin(tables, state)


def anneal(search: Search, width: int | None, seed: int) -> dict[str, Any]:
    """Spend what is left of ``search``'s budget; what was done, for ``Solution.stats``.

    Which start leads furthest its own value does not tell: all of ``STARTS``, a list schedule from
    the end and the best so far are tried for a while, the best three for longer, and the best of
    those to the end; of a tabu search the best two for a while, and the better one to the end.
    """
    problem, few = search.problem, too_few(search)
    assert search.best is not None
    # One device is busy from its beginning to its end, unless model inputs come from elsewhere.
    if problem.num_ops < 2 or (problem.num_devices < 2 and not problem.io_s.any()):
        return {"steps": 0}
    walk = _Walk(search, seed)
    place = search.best[problem.graph.group]
    starts = [(place, sequence_of(problem, place, search.schedule))]
    others, stages = STARTS, PARAMS.stages
    if walk.tabu:
        others, stages = _TABU_STARTS, PARAMS.tabu_stages
    for name, share in () if few else others:
        if search.left:
            place = search.run(name, share, share).placement
            if not any(np.array_equal(place, other) for other, _ in starts):
                starts.append((place, sequence_of(problem, place)))
    if not few:
        starts.append(_from_end(problem))
    walk.width = width or walk.usual_width()
    runs: list[State] = []
    for place, sequence in starts:
        if not search.left:
            break
        runs.append(walk.begin(place, sequence))
        search.num_evaluations += 1
        walk.consider(runs[-1])
    if search.left and not few:
        runs.append(walk.justified(min(runs, key=lambda x: x.best_s)))
    begun = search.used
    for num_runs, share, cool, cooled in stages[-1:] if few else stages:
        runs = sorted(runs, key=lambda x: x.best_s)[:num_runs]
        last = runs[0] if num_runs == 1 and runs else None
        if last and walk.solve_windows(last, search.used + PARAMS.first_windows):
            walk.spend(last, PARAMS.last, cool, cooled)
            walk.solve_windows(last, 1.0)
            cool = cooled
        for run in runs:
            walk.spend(run, min(1.0, search.used + share * (1.0 - begun)), cool, cooled)
    return walk.stats


def _from_end(problem: Problem) -> tuple[Placement, NDArray[np.int32]]:
    """The list schedule of the problem ``turned`` round: devices, and operators in order."""
    other = turned(problem)
    place = _BACKWARD(other).placement
    run = simulate(other, place, num_microbatches=1)
    order = np.lexsort((run.start_s[0], run.end_s[0]))  # what ends there begins here
    return place[::-1].copy(), (problem.num_ops - 1 - order[::-1]).astype(np.int32)


def too_few(search: Search) -> bool:
    """Whether the evaluations that are left do for one descent alone."""
    return search.num_left < PARAMS.too_few * search.problem.num_ops


class _Walk:
    """What the runs of a search have in common.

    Attributes:
        search, tables, rng: whose budget they spend, its problem, and the draws.
        tabu, width: whether they are tabu searches, and moves offered at each step.
        stats: what was done.
    """

    def __init__(self, search: Search, seed: int) -> None:
        self.search, self.tables = search, tables_of(search.problem)
        self.rng, self.tabu, self.width = np.random.default_rng(seed), not sends(search.problem), 0
        self.stats: dict[str, Any] = {"steps": 0, "windows": 0}

    def usual_width(self) -> int:
        """Moves offered at each step where nobody says how many."""
        if self.tabu:
            timed = np.isfinite(self.search.seconds_left)
            return PARAMS.tabu_width if timed else PARAMS.tabu_wide
        many = self.search.num_left >= PARAMS.few_for_width * self.search.problem.num_ops
        return PARAMS.width if many else PARAMS.wide

    def begin(
        self, place: Placement, sequence: NDArray[np.int32], run: State | None = None
    ) -> State:
        """A run, or this one, from there."""
        run = state_of(self.search.problem, self.width) if run is None else run
        start(self.tables, run, place, sequence, self.rng)
        return run

    def consider(self, run: State) -> None:
        """What a run found is an answer."""
        self.search.consider_order(run.best_place, run.best_sequence, run.best_s)

    def justified(self, best: State) -> State:
        """A run that begins where forward-backward improvement comes to from ``best``."""
        search, run = self.search, self.begin(best.best_place, best.best_sequence)
        until, passes, in_vain = search.used + PARAMS.justifying * (1.0 - search.used), 0, 0
        while in_vain < PARAMS.justify_in_vain and search.used < until and search.left:
            num_kept, until_passes = run.num_kept, passes + int(min(PARAMS.passes, search.num_left))
            bound_s = search.bound_s * (1 + 1e-9)
            then = justify(self.tables, run, passes, until_passes, bound_s)
            if then == passes:
                break
            search.num_evaluations += then - passes
            passes = then
            self.consider(run)
            in_vain = 0 if run.num_kept > num_kept else in_vain + 1
        return self.begin(run.best_place, run.best_sequence, run)

    def solve_windows(self, run: State, until: float) -> bool:
        """Solve windows of the best of ``run`` until so much of the budget is used.

        It ends where none of the last ``in_vain`` was better. What one takes counts as the
        evaluations that the annealing would have made meanwhile, so nothing is done, and the answer
        is False, where they would be few, or without OR-Tools.
        """
        search, tables, stats, n = self.search, self.tables, self.stats, len(run.place)
        left = (until - search.used) * self._total()
        if tables.simulated:  # windows have exact times alone
            return False
        written = windows.EFFORT.per_operator * PARAMS.window
        if left < 2 * PARAMS.least_windows * written or not search.left:
            return False
        worth = min(windows.EFFORT.most, left / PARAMS.least_windows)
        if not windows.available():
            stats["windows"] = "none: OR-Tools is not installed (the extra cp)"
            return False
        grain, size, in_vain = grain_s(search.problem), float(min(PARAMS.window, n)), 0
        for name in ("better_windows", "closed_windows"):
            stats.setdefault(name, 0)
        self.begin(run.best_place, run.best_sequence, run)
        while in_vain < PARAMS.in_vain and search.used < until and search.left:
            cost, width = run.cost_s, min(int(size), n)
            if search.num_left < worth + windows.EFFORT.per_operator * width:
                break
            place, sequence = run.place.copy(), run.sequence.copy()
            first = int(self.rng.integers(n - width + 1))
            stats["windows"] += 1
            in_vain += 1
            if windows.rest_s(tables, run, first, first + width) >= cost * (1 - 1e-9):
                search.num_evaluations += 1
                continue
            part, seed = range(first, first + width), stats["windows"]
            answer = windows.solve(tables, run, part, grain, seed, worth, search.seconds_left)
            search.num_evaluations += answer.evaluations
            stats["closed_windows"] += answer.closed
            if answer.place is not None and answer.sequence is not None:
                self.begin(answer.place, answer.sequence, run)
                if run.cost_s > cost * (1 + 1e-12):  # channels were busy
                    self.begin(place, sequence, run)
                elif run.cost_s < cost * (1 - 1e-12):
                    stats["better_windows"] += 1
                    in_vain = 0
                    cost = run.cost_s
                    self.consider(run)
            if answer.closed and width == n and grain:
                search.bound_s = max(search.bound_s, cost)  # all there is
            shrunk = max(size / PARAMS.grows, min(PARAMS.least_window, n))
            size = size * PARAMS.grows if answer.closed else shrunk
        return True

    def _total(self) -> float:
        """Evaluations that the whole budget will have been."""
        return self.search.num_evaluations / max(self.search.used, 1e-12)

    def _heat(self, run: State) -> None:
        """Set the temperatures, by how many evaluations there will have been in all.

        A short search can only go down; a long one stays where a move of one operator, whose
        seconds are some share of the latency, is undone now and then.
        """
        seconds = self.tables.compute_s[np.arange(len(run.place)), run.best_place]
        share = float(seconds.mean()) / max(run.best_s, 1e-300)
        warm = PARAMS.simulated_warm if self.tables.simulated else PARAMS.warm
        per_op, few = self._total() / len(run.place), PARAMS.few
        much = float(np.clip(np.log(per_op / few) / np.log(PARAMS.many / few), 0.0, 1.0))
        cold, cold_share = PARAMS.cold, PARAMS.cold_share * share
        run.warm = warm * (max(PARAMS.warm_share * share, warm) / warm) ** much
        run.cold = cold * (max(cold_share, cold) / cold) ** much

    def spend(self, run: State, until: float, cool: float, cooled: float) -> None:
        """Go on until so much of the budget is used, while it cools down from ``cool`` on."""
        # Temperatures change a hundred times, wherever the budget is counted. The clock is looked
        # at only where seconds are limited: otherwise the seed decides everything.
        search, first = self.search, self.search.used
        most = max(1.0, search.num_left * (until - first) / 100.0)
        slice_s = PARAMS.slice_s if np.isfinite(search.seconds_left) else np.inf
        rate = 2000.0
        while search.used < until and search.left and search.num_left > 1:
            part = (search.used - first) / max(until - first, 1e-12)
            self._heat(run)
            before = search.seconds
            steps = int(max(1, min(most, slice_s * rate, search.num_left)))
            used = cool + (cooled - cool) * min(part, 1.0)
            order.play(self.tables, run, steps, self.tabu, used)
            rate = steps / max(search.seconds - before, 1e-9)
            self.stats["steps"] += steps
            search.num_evaluations += steps
            self.consider(run)
