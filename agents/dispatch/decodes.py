"""Decodes of a dispatching network within the budget of a search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from agents.dispatch.network import DispatchNet
from envs.dispatch import MIXED, Dispatcher, Past, Weights, no_network
from envs.problem_set import choice_of
from placement.search.evaluation import INFEASIBLE, Search

_SHORT, _LONG = 5, 100  # decisions in a row that are drawn anew
PROMISES = 13  # samples, of which one is evaluated
_RULE = 4  # every so many samples are the rule's alone: those of a trained network are much alike
# Where a sample is worth this nearly what the greedy decode is, the next is drawn at twice the
# temperature, elsewhere at half: at most so much, and not below 1.
_ALIKE, _HOTTEST = 0.02, 16.0


def promising(
    net: DispatchNet, search: Search, samples: int, seed: int
) -> tuple[Dispatcher, float]:
    """Of decodes the one that ends first by the timetable that it makes, and when: in seconds.

    Greedy ones from either end, what the rule alone makes, and up to ``PROMISES`` samples, as far
    as the seconds of ``search`` go. Nothing is evaluated.
    """
    scale = net.config.finish_weight
    ways = [Dispatcher(search.problem)]
    if ways[0].ordered:
        ways.append(Dispatcher(search.problem, backward=True))
    weights = [net.weights(way.played) for way in ways]
    tries: list[tuple[Dispatcher, Weights, int | None]]
    tries = [(way, own, None) for way, own in zip(ways, weights, strict=True)]
    tries.append((ways[0], no_network(), None))
    for number, one in enumerate(draws(seed, min(samples, PROMISES))):
        way = number % len(ways)
        tries.append((ways[way], weights[way], one))

    best, best_s = 0, np.inf
    for number, (episode, network, drawn) in enumerate(tries):
        if number and not search.left:
            break
        episode.construct(network, scale, drawn)
        ends_s = float(episode.state.placed.finish_s.max())
        if ends_s < best_s:
            best, best_s = number, ends_s
    episode, network, drawn = tries[best]
    episode.construct(network, scale, drawn)
    return episode, best_s


def draws(seed: int, count: int) -> Iterator[int]:
    """The seeds of so many samples: none of another ``seed`` is drawn alike."""
    rng = np.random.default_rng(seed)
    return (int(rng.integers(2**62)) for _ in range(count))


def evaluate(search: Search, episode: Dispatcher) -> float:
    """The cost of an episode that is over, in its own order where orders can be timed."""
    if not episode.ordered:
        return search.cost(choice_of(search.problem, episode.placement))
    cost = episode.value_s()
    search.num_evaluations += 1
    search.consider_order(episode.placement, episode.sequence, cost)
    return cost


def hotter(net: Weights, heat: float) -> Weights:
    """``net`` with logits divided by ``heat``; the scale of the rule has to be divided, too."""
    linear, *hidden, out = net
    return linear / heat, *hidden, out / heat


def decode(
    net: DispatchNet,
    search: Search,
    samples: int,
    seed: int,
    again: float = 0.0,
    rule: tuple[float, ...] = MIXED,
) -> dict[str, Any]:
    """Evaluate the greedy decode, what the rule alone makes, then ``samples``; what each is worth.

    A quarter of the samples are of the rule alone; the others are drawn the hotter the more alike
    they are.

    As far as the budget goes, and each in its own order, where orders can be timed: there greedy
    decodes and samples are made from the last operator to the first, too. Where the greedy one does
    not fit in memory, the next count what groups produce, too. Then ``again`` evaluations draw a
    part of the best anew, by what has made it and as hot as the last sample, 5 to 100 decisions in
    a row: a result that is not worse is what the next begins with. ``rule``: of ``Dispatcher``.
    """
    decodes, begun = _Decodes(net, search, rule), search.num_evaluations
    stats: dict[str, Any] = decodes.greedily()
    decodes.sample(samples, seed)
    stats |= {"greedy_evaluations": 1, "best_of_k_value_s": decodes.best}
    stats["best_of_k_evaluations"] = search.num_evaluations - begun
    decodes.draw_parts(search.num_evaluations + again, seed)
    if again:
        stats["again_value_s"] = decodes.best
    return {k: np.inf if k.endswith("value_s") and v >= INFEASIBLE else v for k, v in stats.items()}


class _Decodes:
    """Decodes within the budget of a search; a decode is ruled if the rule alone makes it.

    Attributes:
        best: cost of the best decode.
    """

    def __init__(self, net: DispatchNet, search: Search, rule: tuple[float, ...] = MIXED) -> None:
        self.search, self.best, self._rule = search, np.inf, rule
        self._net, self._scale = net, net.config.finish_weight
        # From the first operator, and from the last.
        self._ways = [Dispatcher(search.problem, rule)]
        self._weights = [net.weights(search.problem)]  # of each
        self._greedy = [np.inf, np.inf]  # cost of each way's greedy decode
        self._heat = 1.0
        self._source: tuple[Dispatcher, Past, bool] | None = None  # of the best

    def greedily(self) -> dict[str, float]:
        """The greedy decodes: by the network from both ends, and by the rule."""
        problem, counted, costs = self.search.problem, 0, dict[str, float]()
        fitted: int | None = None
        order = (("greedy", 0), ("greedy", 1), ("backward", 0), ("rule", 0), ("rule", 1))
        for what, activations in order:
            if activations and (self.best < INFEASIBLE or not problem.memory_may_bind):
                continue
            if not self.search.left or (what == "backward" and not self._ways[0].ordered):
                continue
            if what == "backward":
                self._ways.append(Dispatcher(problem, self._rule, backward=True))
                self._weights.append(self._net.weights(self._ways[1].played))
            elif activations != counted:
                self._ways[0], counted = Dispatcher(problem, self._rule, activations), activations
            way, ruled = int(what == "backward"), what == "rule"
            self._ways[way].construct(*self._decided_by(way, ruled))
            cost = costs[f"{what}_value_s"] = self._evaluated(self._ways[way], ruled)
            if not ruled:
                self._greedy[way] = cost
            if what == "greedy" and cost < INFEASIBLE:
                fitted = activations
        if fitted not in (None, counted):  # samples are drawn of what fits
            self._ways[0] = Dispatcher(problem, self._rule, fitted)
        return costs

    def sample(self, count: int, seed: int) -> None:
        """So many decodes that are drawn, of each way in turn."""
        for number, drawn in enumerate(draws(seed, count)):
            if not self.search.left:
                return
            way, ruled = number % len(self._ways), number // len(self._ways) % _RULE == 1
            self._ways[way].construct(*self._decided_by(way, ruled), drawn)
            cost = self._evaluated(self._ways[way], ruled)
            if not ruled:
                alike = abs(cost - self._greedy[way]) < _ALIKE * self._greedy[way]
                self._heat = min(2 * self._heat, _HOTTEST) if alike else max(self._heat / 2, 1.0)

    def draw_parts(self, until: float, seed: int) -> None:
        """Parts of the best are drawn anew ``until`` the search has so many evaluations."""
        rng, num_ops = np.random.default_rng([seed, 1]), self.search.problem.num_ops
        most = max(_SHORT + 1, min(num_ops, _LONG))
        while self._source and self.search.left and self.search.num_evaluations + 1 <= until:
            width = int(np.exp(rng.uniform(np.log(_SHORT), np.log(most))))
            first = int(rng.integers(-width // 2, num_ops - width // 2))
            episode, past, ruled = self._source
            draw = int(rng.integers(2**62))
            way = int(episode.backward)
            episode.again(*self._decided_by(way, ruled), draw, past, first, first + width)
            self._evaluated(episode, ruled)

    def _decided_by(self, way: int, ruled: bool) -> tuple[Weights, float]:
        if ruled:
            return no_network(), self._scale
        return hotter(self._weights[way], self._heat), self._scale / self._heat

    def _evaluated(self, episode: Dispatcher, ruled: bool) -> float:
        cost = evaluate(self.search, episode)
        if cost <= self.best * (1 + 1e-12):
            self.best, self._source = cost, (episode, episode.past, ruled)
        return cost
