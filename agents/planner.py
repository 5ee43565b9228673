"""The learned policy as one planner among others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from agents import dispatch
from agents.encoder import PolicyError
from agents.guided import (
    CHOOSERS,
    Chooser,
    GuidedNet,
    anneal,
    default_budget,
)
from agents.store import GraphStore
from agents.trained import TrainedPolicy, untrained_net, walk
from agents.waits import RELEASED, load_waits
from envs.formulations import FORMULATIONS
from envs.problems import Evaluator, ProblemSet, canonical, choice_of
from envs.rules import check_range
from placement.bounds import lower_bound
from placement.cli import search_here
from placement.objective import Objective
from placement.planners.order_search import NO_NETWORK, sends, too_few, why_not, why_simulated
from placement.planners.order_search import anneal as anneal_orders
from placement.problem import Placement, Planner, Problem, Solution
from placement.runs.ways import torch_threads
from placement.search.chooser import TABU
from placement.search.descent import descend
from placement.search.evaluation import INFEASIBLE, START_SHARE, Search, can_move, two_operators
from placement.search.pipeline import can_foresee, constructed
from placement.simulator import score
from placement.tools.clock import loads

Kind = Literal["guided_search", "order_search"]  # of moves: of placements, or of orders too
Mode = Literal["auto", "zero_shot", "best_of_k", "finetune", "refine", "guided_search"]
SAMPLES_AT_ONCE = 32
FEW, FEW_S = 8, 0.25  # evaluations and seconds, below which a search does not come to anything
# Evaluations of the baseline at least, of few this share; for latency decodes are better.
START, START_MOST = 24, 0.45
# Of limited evaluations that are left after samples, for decodes that draw a part of the best anew.
# Where these are no more than ALL they get all: moves need hundreds. Orders need fewer, and get
# all where half the operators are more.
AGAIN, ALL = 0.5, 40
FORESEEN = 2  # evaluations of a larger budget for what promises the least periods
UNTRAINED = "untrained"


class _Mover(NamedTuple):
    """Who chooses the moves of a guided search: ``tabu``, or one of ``CHOOSERS``."""

    kind: Kind
    chooser: Any
    width: int | None  # moves that are offered
    net: GuidedNet | None = None
    name: str = "none"  # of its policy


@dataclass(frozen=True)
class PolicyPlanner:
    """Starts from the answer of ``baseline`` and returns the best placement ever evaluated.

    So it is never worse than its baseline. On measured devices predictions have an error, and a
    search finds what they are wrong about: there the baseline's answer stays unless something is
    better by more than that (``margin``). ``stats`` keeps apart what is easily mixed up, each
    with its number of evaluations: ``baseline_value_s``, ``greedy_value_s`` (one decode),
    ``best_of_k_value_s`` (the best of the greedy and the sampled placements), ``again_value_s``
    (with parts drawn anew) and ``best_value_s`` (the best of everything, training included).
    ``network`` names the files of the networks that were asked, or is ``none``.

    Attributes:
        policy: a policy, or the file of one; None is the released policy of this mode and the
            problem's objective (``released``), and ``untrained`` a new network, which samples
            placements a few groups away from the baseline's, or chooses as the hand-written
            score does. Where none is released, None is the hand-written score in a guided search,
            and a new network in other modes. ``stats["policy"]`` says which.
        mode: ``auto`` is that of the policy's formulation, and ``guided_search`` where no policy is
            given. ``guided_search`` spends the budget in an annealed search whose moves a policy of
            that formulation chooses (``agents.guided.default_budget`` without a budget);
            ``zero_shot`` decodes greedily; ``best_of_k`` samples ``k`` placements too;
            ``finetune`` first trains on this very problem for ``steps``, then does the same;
            ``refine`` re-places one group at a time, ``steps`` times, each time evaluated.
        k: sampled placements; of ``guided_search`` at most a quarter of the evaluations that the
            baseline left, 0: none. Half of what is left then, or all of 40 or less, goes to
            decodes of a policy that dispatches which draw a part of the best one anew; none where
            orders are searched and it is less than half the operators.
        steps: environment steps of ``finetune`` or ``refine``.
        seconds, evaluations: budget in all, of which the baseline gets a quarter, and, but for
            ``latency``, at least 24 evaluations, or 45 % of fewer; None is no limit. Without a
            budget the baseline runs to its end: the answer then is at most the least of all
            constructive planners and dynamic programs.
        seed: of sampling and training.
        baseline: where to start: the name of a planner, or a planner. None: ``best_of``, but a
            policy that dispatches begins at what its own rule makes, and asks ``best_of`` only
            where nothing else fits in memory.
        margin: share by which a placement must be better than the baseline's to be the answer; None
            is the error of the profile's predictions (``Profile.error``), 0 unless measured.
        chooser: of ``guided_search``: ``policy`` (where no trained one is given and nothing
            takes time between devices a tabu search: ``stats["chooser"]``), or for comparison the
            ``hand``-written score that a policy starts from (what an untrained one is), or
            ``uniform`` chance.
        order: of ``guided_search``: search the order of operators together with their placement,
            where that can be (``placement.planners.order_search.why_not``) and every order is timed
            without the simulator (``why_simulated``); the answer then has a
            ``schedule``. False, and wherever a policy for moves of placements alone is given: the
            list scheduler's order.
        rounds: of ``guided_search`` without orders: how often it is heated up.
        width: of ``guided_search``: moves offered at each step; None: as in the training, and as
            ``order_search`` does where orders are searched.
        allow: names of code that is not ours, an encoder or a formulation, that the policy's file
            may ask for, as ``package.module:name`` (``TrainedPolicy.load``).
        seed_policy: of ``guided_search``: a policy, or the file of one, whose greedy and ``k``
            sampled placements are evaluated first; the search starts from the best. None is the
            released constructor for ``latency``; of at most ``FEW`` evaluations, or ``FEW_S``
            seconds, it gets all but those of the best single device. A single evaluation is for
            that of up to 16 decodes whose own timetable ends first (``agents.dispatch.promising``).
        waits: of ``guided_search`` for a ``period`` without a clock: the file of a network that
            foresees how long micro-batches wait (``agents.waits``). Placements that promise the
            least are evaluated: two, or all of at most ``FEW`` evaluations. None: the released one;
            ``untrained``: foreseen by hand.
    """

    policy: str | Path | TrainedPolicy | None = None
    mode: Mode = "auto"
    k: int = 32
    steps: int = 4000
    seconds: float | None = None
    evaluations: int | None = None
    seed: int = 0
    baseline: str | Planner | None = None
    margin: float | None = None
    chooser: Chooser = "policy"
    order: bool = True
    rounds: int = 6
    width: int | None = None
    seed_policy: str | Path | TrainedPolicy | None = None
    waits: str | Path | None = None
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise PolicyError(f"mode {self.mode!r} is unknown; use one of {get_args(Mode)}")
        if self.chooser not in CHOOSERS:
            raise PolicyError(f"chooser {self.chooser!r} is unknown; use one of {list(CHOOSERS)}")
        for what, least in (("k", 0), ("seed", 0), ("steps", 1), ("rounds", 1), ("width", 1)):
            if (value := getattr(self, what)) is not None:
                check_range(what, value, least, kind=PolicyError)
        if self.margin is not None and not 0 <= self.margin < 1:
            raise PolicyError(f"margin = {self.margin} must be a share, 0 <= margin < 1")
        # A bad file is told before a model is measured.
        for file in (self.policy, self.seed_policy):
            if isinstance(file, str | Path) and file != UNTRAINED:
                self._load(file)
        if self.waits not in (None, UNTRAINED):
            load_waits(self.waits)

    def __call__(self, problem: Problem) -> Solution:
        """Plan ``problem``.

        Raises:
            PolicyError: the policy's file cannot be read, or is of another formulation.
            PlannerError: no such baseline, or a budget that is not positive.
        """
        answer = replace(self, mode=self._mode())._solve(problem)
        networks = (answer.stats.get(key, "none") for key in ("seed_policy", "policy"))
        names = ", ".join(dict.fromkeys(name for name in networks if name != "none"))
        return replace(answer, stats=answer.stats | {"network": names or "none"})

    def _solve(self, problem: Problem) -> Solution:
        mode: Any = self.mode
        if mode == "guided_search":
            own = self._own_policy()
            # The kernels know no rules but ours.
            if own is None or own.formulation in FORMULATIONS:
                return self._guided_search(problem)
        policy, name = self._policy(self.policy, problem, mode)
        if mode not in ("refine", "guided_search"):
            policy.check_makes_placements()
        _load_mode(mode, policy.formulation)
        return self._plan(problem, policy, name)

    def _mode(self) -> Mode:
        """``mode``, or that of the policy."""
        if self.mode != "auto":
            return self.mode
        own = self._own_policy()
        return "guided_search" if own is None else own.kind.mode

    def _own_policy(self) -> TrainedPolicy | None:
        """``policy``; None: the released network, or a new one."""
        if self.policy is None or self.policy == UNTRAINED:
            return None
        return self._load(self.policy)

    def _load(self, source: str | Path | TrainedPolicy) -> TrainedPolicy:
        if isinstance(source, TrainedPolicy):
            return source
        for name in self.allow:
            search_here(name)
        return TrainedPolicy.load(source, self.allow)

    def _start(self, problem: Problem, name: str) -> tuple[Search, Solution, dict[str, Any]]:
        """The budget, what the baseline answers on it, and the first facts about both."""
        search = Search(problem, self.seconds, self.evaluations)
        share = START_SHARE
        if self.evaluations and problem.objective is not Objective.LATENCY:
            share = max(share, min(START / self.evaluations, START_MOST))
        start = search.run_start(self.baseline or "best_of", "baseline", share)
        stats: dict[str, Any] = {
            "mode": self.mode,
            "policy": name,
            "baseline_value_s": start.value_s,
            "baseline_evaluations": search.num_evaluations,
        }
        return search, start, stats

    def _answer(self, search: Search, start: Solution, stats: dict[str, Any]) -> Solution:
        """The best that was found, or the baseline's answer where that may be the better one."""
        answer = search.solution(start.lower_bound_s, **stats)
        answer.stats["best_value_s"] = answer.value_s
        margin = search.problem.profile.error if self.margin is None else self.margin
        # From predictions that err by 100 % and more no gain can be told, but what fits can be.
        if np.isinf(start.value_s) or answer.value_s <= (1 - min(margin, 1.0)) * start.value_s:
            return answer
        # What was found and is not taken is in ``best_value_s`` alone.
        curve = [(at, n, max(value, start.value_s)) for at, n, value in answer.stats["curve"]]
        stats = answer.stats | {"margin": margin, "curve": curve}
        stats.pop("list_order_value_s", None)
        ordered = {k: v for k, v in start.stats.items() if k == "list_order_value_s"}
        return replace(start, stats=stats | ordered)

    def _dispatch(self, problem: Problem, policy: TrainedPolicy, name: str) -> Solution:
        """Greedy, what the rule makes, and samples: each an evaluation, and nothing besides."""
        search = Search(problem, self.seconds, self.evaluations)
        stats: dict[str, Any] = {"mode": self.mode, "policy": name}
        stats |= self._decode(policy, search, None, 0 if self.mode == "zero_shot" else self.k)
        return _evaluated(search, stats)

    def _promising(
        self, problem: Problem, policy: TrainedPolicy, name: str, alone_s: float
    ) -> Solution:
        """One evaluation: of the decode that promises the most, or of the fastest device alone."""
        search = Search(problem, self.seconds, 1)
        episode, promised_s = dispatch.promising(policy.net, search, self.k, self.seed)
        stats: dict[str, Any] = {"mode": "best_of_k", "policy": name, "promised_s": promised_s}
        if alone_s < promised_s:
            search.run("single_device")
        else:
            dispatch.evaluate(search, episode)
        return _evaluated(search, stats | {"best_of_k_evaluations": 1})

    def _plan(self, problem: Problem, policy: TrainedPolicy, name: str) -> Solution:
        dispatches = policy.formulation == "dispatch" and self.mode in ("zero_shot", "best_of_k")
        if dispatches and self.baseline is None:
            return self._dispatch(problem, policy, name)
        search, start, stats = self._start(problem, name)
        if self.mode == "finetune" and search.left:
            before = search.num_evaluations
            policy = self._finetune(policy, problem, start.placement, search)
            stats["training_evaluations"] = search.num_evaluations - before
        if self.mode in ("refine", "guided_search"):
            self._walk(policy, search, start.placement)
        else:
            samples = 0 if self.mode == "zero_shot" else self.k
            stats |= self._decode(policy, search, start.placement, samples)
        return self._answer(search, start, stats)

    def _decode(
        self,
        policy: TrainedPolicy,
        search: Search,
        warm: Placement | None,
        samples: int,
        again: float = 0.0,
    ) -> dict[str, Any]:
        """Evaluate the greedy placement and the ``samples`` sampled ones; what they are worth.

        Of a policy that dispatches, also parts of the best that are drawn ``again``.
        """
        if policy.formulation == "dispatch":  # not one of the user's: that has rules of its own
            return dispatch.decode(policy.net, search, samples, self.seed, again)
        before = search.num_evaluations
        seconds: list[float] = []
        for sampled in range(0, max(samples, 1), SAMPLES_AT_ONCE):
            if not search.left:
                break
            number = min(SAMPLES_AT_ONCE, samples - sampled)
            rows = policy.place(search.problem, warm, number, self.seed + sampled)
            # The greedy placement comes first in every batch; it counts once.
            costs = search.costs(choice_of(search.problem, rows if sampled == 0 else rows[1:]))
            seconds += np.where(costs < INFEASIBLE, costs, np.inf).tolist()
        if not seconds:
            return {}
        stats: dict[str, Any] = {"greedy_value_s": seconds[0], "greedy_evaluations": 1}
        if samples:
            stats["best_of_k_value_s"] = min(seconds)
            stats["best_of_k_evaluations"] = search.num_evaluations - before
        return stats

    def _foresee(self, search: Search, most: float, alone: bool = False) -> dict[str, Any]:
        """Evaluate ``most`` of the placements that promise the least periods.

        After the first one, the fastest device ``alone``: that waking others takes longer than
        operators do is not foreseen.
        """
        net = None
        if self.waits != UNTRAINED:
            file = self.waits or RELEASED
            net = load_waits(file)[0].net()
        begun, value_s = search.num_evaluations, np.inf
        stats: dict[str, Any] = {"chooser": self.chooser, "search": "guided_search"}
        for choice in constructed(search.problem, net, self.seed):
            if not search.left or search.num_evaluations - begun >= most:
                break
            cost = search.cost(choice)
            value_s = min(value_s, cost if cost < INFEASIBLE else np.inf)
            if "greedy_value_s" not in stats:
                stats |= {"greedy_value_s": value_s, "greedy_evaluations": 1}
                if net is not None:
                    stats["seed_policy"] = Path(file).name
                if alone and search.left and (choice != choice[0]).any():
                    search.run("single_device", share_of_evaluations=0.0)
            stats["best_of_k_value_s"] = value_s
            stats["best_of_k_evaluations"] = search.num_evaluations - begun
        return stats

    def _few(
        self, problem: Problem, seeds: tuple[TrainedPolicy, str] | None, foresees: bool
    ) -> Solution | None:
        """An answer without a search; None: the budget is not few, or a policy is given."""
        few = (self.evaluations or FEW + 1) <= FEW or (self.seconds or FEW_S + 1) <= FEW_S
        if not few or self.policy is not None or self.baseline is not None:
            return None
        alone_s = float(problem.group_compute_s.sum(axis=0).min())
        runs_alone = bool(np.isfinite(alone_s))
        if foresees:
            search = Search(problem, evaluations=self.evaluations)
            noted = {"mode": self.mode, "policy": "none"}
            return _evaluated(search, noted | self._foresee(search, np.inf, runs_alone))
        if seeds is None or seeds[0].formulation != "dispatch":
            return None
        # Decodes can be far worse than one device: where one runs everything, it is tried.
        if self.evaluations == 1 and not problem.memory_may_bind:
            return self._promising(problem, *seeds, alone_s)
        one = runs_alone and self.evaluations != 1
        sampling = replace(self, mode="best_of_k", baseline="single_device" if one else None)
        return sampling._plan(problem, *seeds)

    def _mover(self, problem: Problem) -> _Mover:
        """Who chooses the moves of a guided search, and of which kind they are."""
        kind: Kind = kind_of(problem) if self.order else "guided_search"
        ours = self.policy in (None, UNTRAINED)
        if self.chooser == "policy" and ours and kind == "order_search" and not sends(problem):
            return _Mover(kind, "tabu", self.width)  # no network has learned as much
        ships = released(kind, problem.objective).is_file()
        if self.chooser == "policy" and self.policy is None and not ships:
            return _Mover(kind, "hand", self.width)  # a new network makes the same choices slower
        if self.chooser != "policy":
            return _Mover(kind, self.chooser, self.width)
        policy, name = self._policy(self.policy, problem, kind)
        learned = policy.formulation
        if learned not in get_args(Kind):
            raise PolicyError(
                f"a {learned} policy cannot choose moves; give it as seed_policy, or "
                f"train one with training.formulation=guided_search"
            )
        if learned == "order_search" != kind:
            why = why_not(problem) or why_simulated(problem) or "order = False says not to"
            raise PolicyError(f"this policy searches orders, and {why}")
        width = self.width if learned == "order_search" else self.width or policy.width
        return _Mover(learned, "policy", width, policy.net, name)  # type: ignore[arg-type]

    def _guided_search(self, problem: Problem) -> Solution:
        seeds = self._seeds(problem)
        # It takes a while: where seconds are limited evaluations bring more.
        foresees = can_foresee(problem) and self.seconds is None and bool(self.k)
        answer = self._few(problem, seeds, foresees)
        if answer is not None:
            return answer
        kind, chooser, width, net, name = self._mover(problem)
        search, start, stats = self._start(problem, name)
        stats["chooser"], stats["search"] = chooser, kind
        if seeds is not None and search.left:
            samples = int(min(self.k, search.num_left / 4))
            again = search.num_left - samples if np.isfinite(search.num_left) else 0.0
            if kind == "order_search" and too_few(search):
                again = 0.0
            elif again > ALL:
                again *= AGAIN
            stats["seed_policy"] = seeds[1]
            stats |= self._decode(seeds[0], search, start.placement, samples, again)
        if foresees and search.left:
            stats |= self._foresee(search, FORESEEN)
        search.limit(default_budget(problem))
        with torch_threads(1):
            if kind == "order_search":
                weights = NO_NETWORK if net is None else net.weights()
                who = TABU if chooser == "tabu" else CHOOSERS[chooser]
                stats |= anneal_orders(search, weights, who, width, self.seed)
            else:
                descend(search, self.seed)
                stats["steps"] = anneal(search, net, chooser, self.rounds, width, self.seed)
        return self._answer(search, start, stats)

    def _seeds(self, problem: Problem) -> tuple[TrainedPolicy, str] | None:
        """Whose placements a guided search evaluates before it moves anything, and its name."""
        source = self.seed_policy
        if source is None and problem.objective is Objective.LATENCY:
            source = released("best_of_k", problem.objective)
        if source is None or not self.k:
            return None
        return self._policy(source, problem, "best_of_k")

    def _policy(
        self, source: str | Path | TrainedPolicy | None, problem: Problem, mode: Mode | Kind
    ) -> tuple[TrainedPolicy, str]:
        """A policy for ``mode``, and what ``stats`` call it."""
        if isinstance(source, TrainedPolicy):
            return source, "given"
        if source is None:
            ships = released(mode, problem.objective)
            source = ships if ships.is_file() else UNTRAINED
        if source != UNTRAINED:
            return self._load(source), Path(source).name
        formulation: Any = (
            mode if mode in ("guided_search", "order_search", "refine") else "sequential"
        )
        return TrainedPolicy(untrained_net(None, formulation, self.seed)), UNTRAINED

    def _walk(self, policy: TrainedPolicy, search: Search, warm: Placement) -> None:
        """Play from ``warm`` by the policy's own rules: an episode of ``refine``, or of a search.

        Of a search as many as the budget allows, as it was trained. What ``refine`` meets is
        evaluated here, and may be the answer; a search evaluates by itself.
        """
        problem, refines = search.problem, self.mode == "refine"
        if policy.kind.mode != self.mode:
            verb = "refine" if refines else "choose moves of"
            raise PolicyError(
                f"a {policy.formulation} policy cannot {verb} placements; train one with "
                f"training.formulation={self.mode}"
            )
        if not can_move(problem):
            return
        start = canonical(problem, warm)  # as in training, and worth the same
        evaluator, options = _evaluator(search), dict[str, Any](moves=self.steps)
        if not refines:
            search.limit(default_budget(problem))
            trained = policy.card.get("config", {})
            moves = max(1, int(min(trained.get("moves") or 256, search.num_left)))
            options = {"moves": moves, "again": trained.get("again", 0.5)}
            options["width"], evaluator = self.width or policy.width or 16, score
        chosen = ProblemSet((problem,), np.ones(1), evaluator)
        rules = policy.kind.rules(chosen, 1, starts=[start], **options)
        store = GraphStore([problem], [None if policy.cold else start])
        generator, rng = torch.Generator().manual_seed(self.seed), np.random.default_rng(self.seed)
        num_before = search.num_evaluations

        def go_on() -> bool:
            if not refines:
                search.num_evaluations = num_before + rules.num_evaluations
            return search.left

        with torch_threads(1):
            while search.left:
                choices, _ = walk(policy.net, store, rules, generator, rng, go_on)
                if refines:
                    return
                if (choices >= 0).all():  # an episode was over
                    search.consider(choices[0], 0)

    def _finetune(
        self, policy: TrainedPolicy, problem: Problem, warm: Placement, search: Search
    ) -> TrainedPolicy:
        """Train a copy of ``policy`` on this problem, within what is left of the budget."""
        from agents.training import TrainConfig, train

        limits: dict[str, Any] = {}
        if self.seconds is not None:
            limits["max_seconds"] = max(1e-3, 0.85 * (self.seconds - search.seconds))
        if self.evaluations is not None:
            left = self.evaluations - search.num_evaluations - self.k - 1
            limits["max_evaluations"] = max(1, left)
        config = TrainConfig(
            total_steps=self.steps,
            seed=self.seed,
            cold=policy.cold,
            groups=policy.groups,
            **limits,
        )
        return train(
            [problem], config=config, warm=[warm], policy=policy, evaluator=_evaluator(search)
        )


@loads
def _load_mode(mode: Mode, formulation: str) -> None:
    """Import and compile what a mode needs, or read it from its cache: outside of every budget."""
    policy = TrainedPolicy(untrained_net(None, formulation))
    few = 32 if mode == "guided_search" else None
    planner = PolicyPlanner(policy, mode, k=1, steps=1, baseline="single_device", evaluations=few)
    planner._plan(two_operators(), policy, "given")


def kind_of(problem: Problem) -> Kind:
    """The moves of a guided search: of orders too wherever those have exact times unsimulated."""
    return "guided_search" if why_not(problem) or why_simulated(problem) else "order_search"


def released(mode: Mode | Kind, objective: Objective) -> Path:
    """The file of the policy that ships with this package; its model card lies beside it.

    One that searches or refines serves the objective that it was trained for, a constructor for
    ``max_load`` pipelines too. Not every file exists.
    """
    if mode in ("guided_search", "order_search", "refine"):
        name = f"{mode}-{objective}"
    else:
        throughput = Objective(objective).is_throughput
        name = "sequential-max_load" if throughput else "dispatch-latency"
    return Path(__file__).with_name("released") / f"{name}.safetensors"


def _evaluated(search: Search, stats: dict[str, Any]) -> Solution:
    """The best of what was evaluated, with ``stats``; where nothing fits, of ``best_of``."""
    if search.best_s == np.inf and search.left:
        search.run("best_of")
    answer = search.solution(lower_bound(search.problem), **stats)
    answer.stats["best_value_s"] = answer.value_s
    return answer


def _evaluator(search: Search) -> Evaluator:
    """Seconds float64 ``[B]`` of placements, counted by ``search``; inf where its budget ended."""

    def evaluate(_: Problem, placements: Placement) -> NDArray[np.float64]:
        costs = search.costs(choice_of(search.problem, placements))
        costs = np.where(costs < INFEASIBLE, costs, np.inf)
        return np.pad(costs, (0, len(placements) - len(costs)), constant_values=np.inf)

    return evaluate
