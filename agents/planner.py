"""The learned policy as one planner among others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agents import dispatch
from agents.encoder import PolicyError
from agents.foresee import RELEASED as RELEASED_FORESIGHT
from agents.foresee import load_waits
from agents.store import GraphStore
from agents.trained import RELEASED as RELEASED_FOLDER
from agents.trained import TrainedPolicy, file_of, untrained_net, walk
from envs.problem_set import ProblemSet, canonical, choice_of
from envs.rules import check_range
from placement.bounds import lower_bound
from placement.cli import search_here
from placement.objective import Objective
from placement.planners import macro_search, order_search
from placement.problem import Placement, Planner, Problem, Solution
from placement.search.evaluation import INFEASIBLE, START_SHARE, Search, can_move, two_operators
from placement.search.pipeline import can_foresee, constructed
from placement.tools.clock import loads
from placement.tools.threads import torch_threads

RELEASED = RELEASED_FOLDER / "dispatch-latency.safetensors"
UNTRAINED = "untrained"
_AT_ONCE = 32  # samples that the network makes side by side
_FEW, _FEW_S = 8, 0.25  # evaluations and seconds, below which a search does not come to anything
# Evaluations of the baseline at least, of few this share; for latency decodes are better.
_START, _START_MOST = 24, 0.45
# Of limited evaluations that are left after samples, for decodes that draw a part of the best anew.
# Where these are no more than _ALL they get all: moves need hundreds. Orders need fewer, and get
# all where half the operators are more.
_AGAIN, _ALL = 0.5, 40
_FORESEEN = 2  # evaluations of a larger budget for what promises the least periods
_LOADS, _OTHERS = 1_000_000, 20_000  # evaluations of a search without a budget: some seconds

Stats = dict[str, Any]


@dataclass(frozen=True)
class PolicyPlanner:
    """Constructs placements with trained networks, then searches from the best one.

    ``baseline`` answers first, so that the answer is never worse than that. Then one of two
    constructors: a policy decodes greedily and ``k`` times at random; or, for a ``period`` where no
    policy is given and only evaluations are limited, a network foresees how long micro-batches wait
    for each other, and what promises the least is evaluated (``agents.foresee``). The search has
    what is left of the budget: of placements and orders where every order is timed without the
    simulator (``placement.planners.order_search``), of placements elsewhere
    (``placement.planners.macro_search``). With at most 8 evaluations, or 0.25 seconds, the
    constructor has all, but for the best single device; of a single one the decode whose own
    timetable ends first is evaluated (``agents.dispatch.promising``).

    On measured devices predictions have an error, and a search finds what they are wrong about:
    there the baseline's answer stays unless something is better by more than that (``margin``).
    ``stats`` keeps apart what is easily mixed up: ``baseline_value_s``, ``greedy_value_s`` (one
    decode), ``best_of_k_value_s`` (the best of the greedy and the sampled ones), ``again_value_s``
    (with parts drawn anew) and ``best_value_s`` (the best of everything); ``search`` is which one
    went on. ``network`` names the files of the networks that were asked, or is ``none``.

    Attributes:
        policy: a policy, the file of one, or the name of one that ships (``gnn-period``). None: for
            ``latency`` that is ``dispatch-latency``, otherwise none; ``untrained``: a new network,
            which samples placements a few groups away from the baseline's. A policy that improves
            placements plays episodes from the baseline's answer instead, each step evaluated, until
            the budget or one episode ends.
        k: sampled placements; at most a quarter of the evaluations that the baseline left, where a
            search follows. Half of what is left then, or all of 40 or less, goes to decodes of a
            policy that dispatches which draw a part of the best one anew; none where orders are
            searched and it is less than half the operators.
        search: False: the constructor alone, which of a policy that dispatches, or foresees, needs
            no baseline.
        seconds, evaluations: budget in all, of which the baseline gets a quarter, and, but for
            ``latency``, at least 24 evaluations, or 45 % of fewer; None is no limit. Without a
            budget the baseline runs to its end: the answer then is at most the least of all
            constructive planners and dynamic programs.
        seed: of what is drawn.
        baseline: where to start: the name of a planner, or a planner. None: ``best_of``.
        margin: share by which a placement must be better than the baseline's to be the answer; None
            is the error of the profile's predictions (``Profile.error``), 0 unless measured.
        foresight: the file of a network that foresees waits. None: the released one; ``untrained``:
            they are foreseen by hand.
        allow: names of code that is not ours, an encoder or a formulation, that the policy's file
            may ask for, as ``package.module:name`` (``TrainedPolicy.load``).
    """

    policy: str | Path | TrainedPolicy | None = None
    k: int = 32
    search: bool = True
    seconds: float | None = None
    evaluations: int | None = None
    seed: int = 0
    baseline: str | Planner | None = None
    margin: float | None = None
    foresight: str | Path | None = None
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range("k", self.k, 0, kind=PolicyError)
        check_range("seed", self.seed, 0, kind=PolicyError)
        if self.margin is not None and not 0 <= self.margin < 1:
            raise PolicyError(f"margin = {self.margin} must be a share, 0 <= margin < 1")
        # A bad file is told before a model is measured.
        if isinstance(self.policy, str | Path) and self.policy != UNTRAINED:
            self._load(self.policy)
        if self.foresight not in (None, UNTRAINED):
            load_waits(self.foresight)

    def __call__(self, problem: Problem) -> Solution:
        """Plan ``problem``.

        Raises:
            PolicyError: the policy's file cannot be read.
            PlannerError: no such baseline, or a budget that is not positive.
        """
        policy, name = self._policy(problem)
        if policy is not None:
            _warm_up(policy.formulation)
        # It takes a while: where seconds are limited evaluations bring more.
        foresees = policy is None and self.seconds is None and can_foresee(problem)
        few = (self.evaluations or _FEW + 1) <= _FEW or (self.seconds or _FEW_S + 1) <= _FEW_S
        dispatches = policy is not None and policy.formulation == "dispatch"
        if (few or not self.search) and self.baseline is None and (foresees or dispatches):
            answer = self._constructed(problem, policy if dispatches else None, few)
        else:
            answer = self._searched(problem, policy, foresees, few)
        return replace(answer, stats=answer.stats | {"policy": name} | _network(name, answer.stats))

    def _policy(self, problem: Problem) -> tuple[TrainedPolicy | None, str]:
        """Who constructs, and what ``stats`` call it."""
        if isinstance(self.policy, TrainedPolicy):
            return self.policy, "given"
        if self.policy == UNTRAINED:
            return TrainedPolicy(untrained_net(None, "sequential", self.seed)), UNTRAINED
        source = self.policy
        if source is None:
            if problem.objective is not Objective.LATENCY:
                return None, "none"
            source = RELEASED
        return self._load(source), file_of(source).name

    def _load(self, source: str | Path) -> TrainedPolicy:
        for name in self.allow:
            search_here(name)
        return TrainedPolicy.load(source, self.allow)

    def _constructed(self, problem: Problem, policy: TrainedPolicy | None, few: bool) -> Solution:
        """The best of what a network constructs, of few evaluations beside the best one device."""
        search = Search(problem, self.seconds, self.evaluations)
        alone_s = float(problem.group_compute_s.sum(axis=0).min())
        runs_alone = few and bool(np.isfinite(alone_s)) and self.evaluations != 1
        if policy is None:
            return _evaluated(search, self._foresee(search, np.inf, runs_alone))
        if few and self.evaluations == 1 and not problem.memory_may_bind:
            episode, promised_s = dispatch.promising(policy.net, search, self.k, self.seed)
            if alone_s < promised_s:
                search.run("single_device")
            else:
                dispatch.evaluate(search, episode)
            return _evaluated(search, {"promised_s": promised_s, "best_of_k_evaluations": 1})
        if not runs_alone:
            return _evaluated(search, dispatch.decode(policy.net, search, self.k, self.seed))
        # Decodes can be far worse than one device: where one runs everything, it is tried.
        start, stats = self._start(search, "single_device")
        stats |= dispatch.decode(policy.net, search, self.k, self.seed)
        return self._answer(search, start, stats)

    def _searched(
        self, problem: Problem, policy: TrainedPolicy | None, foresees: bool, few: bool
    ) -> Solution:
        """The best after the baseline, a constructor and, unless there is to be none, a search."""
        search = Search(problem, self.seconds, self.evaluations)
        start, stats = self._start(search, self.baseline or "best_of")
        warm, goes_on = start.placement, self.search and not few
        # Elsewhere every order of a search would be simulated, and moves of placements find more.
        orders = not (order_search.why_not(problem) or order_search.why_simulated(problem))
        if policy is not None and search.left:
            samples = int(min(self.k, search.num_left / 4)) if goes_on else self.k
            if not policy.kind.builds:
                self._improve(policy, search, warm, once=goes_on)
            elif policy.formulation == "dispatch":
                again = _again(search, samples, orders) if goes_on else 0.0
                stats |= dispatch.decode(policy.net, search, samples, self.seed, again)
            else:
                stats |= self._decode(policy, search, warm, samples)
        if foresees and search.left:
            stats |= self._foresee(search, _FORESEEN if goes_on else np.inf)
        if goes_on:
            search.limit(_LOADS if problem.objective is Objective.MAX_LOAD else _OTHERS)
            stats |= self._search(search, orders)
        return self._answer(search, start, stats)

    def _search(self, search: Search, orders: bool) -> Stats:
        """Spend what is left of the budget from the best on; what was done."""
        if orders:
            return {"search": "order_search"} | order_search.anneal(search, None, self.seed)
        assert search.best is not None
        if can_move(search.problem):
            planner = macro_search.MacroSearch(seed=self.seed)
            macro_search.anneal(planner, search, [search.best])
        return {"search": "macro_search"}

    def _start(self, search: Search, baseline: str | Planner) -> tuple[Solution, Stats]:
        """What the baseline answers on its share of the budget, and the first facts about it."""
        share = START_SHARE
        if self.evaluations and search.problem.objective is not Objective.LATENCY:
            share = max(share, min(_START / self.evaluations, _START_MOST))
        start = search.run_start(baseline, "baseline", share)
        stats = {"baseline_value_s": start.value_s}
        return start, stats | {"baseline_evaluations": search.num_evaluations}

    def _answer(self, search: Search, start: Solution, stats: Stats) -> Solution:
        """The best that was evaluated, or the baseline's answer where that may be better."""
        answer = search.solution(start.lower_bound_s, **stats)
        answer.stats["best_value_s"] = answer.value_s
        margin = search.problem.profile.error if self.margin is None else self.margin
        # From predictions that err by 100 % and more no gain can be told, but what fits can be.
        if np.isinf(start.value_s) or answer.value_s <= (1 - min(margin, 1.0)) * start.value_s:
            return answer
        # What was evaluated and is not taken is in ``best_value_s`` alone.
        curve = [(at, n, max(value, start.value_s)) for at, n, value in answer.stats["curve"]]
        stats = answer.stats | {"margin": margin, "curve": curve}
        stats.pop("list_order_value_s", None)
        ordered = {k: v for k, v in start.stats.items() if k == "list_order_value_s"}
        return replace(start, stats=stats | ordered)

    def _decode(
        self, policy: TrainedPolicy, search: Search, warm: Placement, samples: int
    ) -> Stats:
        """Evaluate the greedy placement and the ``samples`` sampled ones; what they are worth."""
        before = search.num_evaluations
        seconds: list[float] = []
        for sampled in range(0, max(samples, 1), _AT_ONCE):
            if not search.left:
                break
            number = min(_AT_ONCE, samples - sampled)
            rows = policy.place(search.problem, warm, number, self.seed + sampled)
            # The greedy placement comes first in every batch; it counts once.
            costs = search.costs(choice_of(search.problem, rows if sampled == 0 else rows[1:]))
            seconds += np.where(costs < INFEASIBLE, costs, np.inf).tolist()
        if not seconds:  # the time was over before the first was evaluated
            return {}
        stats: Stats = {"greedy_value_s": seconds[0], "greedy_evaluations": 1}
        if samples:
            stats["best_of_k_value_s"] = min(seconds)
            stats["best_of_k_evaluations"] = search.num_evaluations - before
        return stats

    def _foresee(self, search: Search, most: float, alone: bool = False) -> Stats:
        """Evaluate ``most`` of the placements that promise the least periods.

        After the first one, the fastest device ``alone``: that waking others takes longer than
        operators do is not foreseen.
        """
        net, stats = None, Stats()
        if self.foresight != UNTRAINED:
            file = self.foresight or RELEASED_FORESIGHT
            net, stats["foreseen_by"] = load_waits(file)[0].net(), Path(file).name
        begun, value_s = search.num_evaluations, np.inf
        for choice in constructed(search.problem, net, self.seed):
            if not search.left or search.num_evaluations - begun >= most:
                break
            cost = search.cost(choice)
            value_s = min(value_s, cost if cost < INFEASIBLE else np.inf)
            if "greedy_value_s" not in stats:
                stats |= {"greedy_value_s": value_s, "greedy_evaluations": 1}
                if alone and search.left and (choice != choice[0]).any():
                    search.run("single_device", share_of_evaluations=0.0)
            stats["best_of_k_value_s"] = value_s
            stats["best_of_k_evaluations"] = search.num_evaluations - begun
        return stats

    def _improve(self, policy: TrainedPolicy, search: Search, warm: Placement, once: bool) -> None:
        """Play an episode from ``warm`` by the policy's own rules, each step evaluated.

        Not ``once``, and within a budget: then others from the best, until that is spent.
        """
        problem = search.problem
        if not can_move(problem):
            return
        once |= np.isinf(search.num_left) and np.isinf(search.seconds_left)

        def evaluate(_: Problem, placements: Placement) -> NDArray[np.float64]:
            """Seconds float64 ``[B]``; inf where the budget has ended."""
            costs = search.costs(choice_of(problem, placements))
            costs = np.where(costs < INFEASIBLE, costs, np.inf)
            return np.pad(costs, (0, len(placements) - len(costs)), constant_values=np.inf)

        generator, problems = torch.Generator().manual_seed(self.seed), (problem,)
        while search.left:
            start = canonical(problem, warm)  # as in training, and worth the same
            rules = policy.kind.rules(ProblemSet(problems, np.ones(1), evaluate), 1, starts=[start])
            store = GraphStore([problem], [None if policy.cold else start])
            with torch_threads(1):
                walk(policy.net, store, rules, generator, lambda: search.left)
            if once:
                break
            assert search.best is not None
            warm = search.best[problem.graph.group]


@loads
def _warm_up(formulation: str) -> None:
    """Import and compile what a policy needs, or read it from a cache: outside of every budget."""
    policy = TrainedPolicy(untrained_net(None, formulation))
    planner = PolicyPlanner(policy, k=1, search=False, baseline="single_device")
    planner._searched(two_operators(), policy, False, False)


def _again(search: Search, samples: int, orders: bool) -> float:
    """Evaluations for decodes that draw a part of the best one anew."""
    again = search.num_left - samples if np.isfinite(search.num_left) else 0.0
    if orders and order_search.too_few(search):
        return 0.0
    return again * _AGAIN if again > _ALL else again


def _network(policy: str, stats: Mapping[str, Any]) -> dict[str, str]:
    """Which trained networks were asked."""
    names = [stats.get("foreseen_by", "none"), policy]
    return {"network": ", ".join(x for x in names if x not in ("none", UNTRAINED)) or "none"}


def _evaluated(search: Search, stats: Stats) -> Solution:
    """The best of what was evaluated, with ``stats``; where nothing fits, of ``best_of``."""
    if search.best_s == np.inf and search.left:
        search.run("best_of")
    answer = search.solution(lower_bound(search.problem), **stats)
    answer.stats["best_value_s"] = answer.value_s
    return answer
