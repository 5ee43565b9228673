"""A machine that is not what the simulator thinks, for tests of what measures and learns."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from placement.objective import Objective
from placement.problem import Problem
from placement.simulator import simulate
from placement.timeline import Timeline
from tests.problems import altered, graph_of, problem_on


def layered(num_ops: int, seed: int = 0, objective: Objective = "period") -> Problem:
    """A graph of short skips on two like devices with fast links; operators of 0.1 to 10 ms."""
    rng = np.random.default_rng(seed)
    uses = [(i - 1, i) for i in range(1, num_ops)]
    uses += [(max(0, i - 1 - int(rng.integers(0, 3))), i) for i in range(1, num_ops)]
    graph = graph_of(num_ops, uses, rng.integers(10_000, 1_000_000, num_ops), name="layered")
    seconds = np.repeat(1e-3 * rng.lognormal(0, 1, num_ops)[:, None], 2, axis=1)
    seconds *= rng.uniform(0.95, 1.05, seconds.shape)
    link, more = (20e-6, 2e9), {"objective": objective, "num_microbatches": 8}
    return problem_on(graph, seconds, link=link, **more)


class Biased:
    """Runs placements as a simulator of ``hidden`` would, times ``slow(number of the run)``.

    Attributes:
        runs: the placements, in the order they ran.
    """

    def __init__(self, hidden: Problem, slow: Callable[[int], float] = lambda run: 1.0) -> None:
        self.hidden = hidden
        self.slow = slow
        self.runs: list[tuple[int, ...]] = []

    def run(self, placement: ArrayLike, *, num_microbatches: int, max_in_flight=None) -> Timeline:
        problem = replace(self.hidden, max_in_flight=max_in_flight or self.hidden.max_in_flight)
        line = simulate(problem, placement, num_microbatches=num_microbatches)
        k = self.slow(len(self.runs))
        self.runs.append(tuple(np.asarray(placement).tolist()))
        times = ("start_s", "end_s", "transfer_start_s", "transfer_end_s")
        return replace(line, **{name: k * getattr(line, name) for name in times})


def with_errors(problem: Problem, spread: float, seed: int, link: float = 1.0) -> Problem:
    """Every time of the profile off by a factor of its own, log-normal; links slower too."""
    rng = np.random.default_rng(seed)
    profile = problem.profile
    seconds = profile.compute_s * np.exp(spread * rng.standard_normal(profile.compute_s.shape))
    return altered(problem, links={"latency_s": lambda x: link * x.latency_s}, compute_s=seconds)


def noise(spread: float, drift: float, seed: int) -> Callable[[int], float]:
    """A machine that is up to ``drift`` slower or faster for a while, and never quite steady."""
    rng = np.random.default_rng(seed)
    return lambda run: float(np.exp(spread * rng.normal()) * (1 + drift * np.sin(run / 15)))
