"""Long and wide graphs: no planner takes all memory, and one that would is named."""

import resource
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from experiments.runs import limited
from placement import bounds, planners
from placement.objective import Objective
from placement.planners import PlannerError, load
from placement.planners.heft import Heft
from placement.problem import Problem, Solution
from tests.problems import chain, graph_of, problem_on, random_problem

LIMIT = 4 << 30
SECONDS = 0.2
# Other reasons to refuse: a file is wanted, a package may lack, a planner is for one objective.
REFUSE = ("needs a file", "needs the package", "latency is of one alone", "order_search:")


def layers(num: int, share_of_memory: float, devices: int = 2) -> Problem:
    """A chain of layers with two groups each, of which one device holds a share."""
    n = 2 * num
    modules = [f"layers.{i // 2}" for i in range(n)]
    graph = graph_of(n, chain(n), 4096, param_bytes=1 << 20, op_module=modules)
    return on_devices(graph, Objective.LATENCY, devices, int(share_of_memory * (n << 20)))


def experts(num: int) -> Problem:
    """One operator, ``num`` beside each other, and one that reads them all."""
    inner = range(1, num + 1)
    uses = [(0, i) for i in inner] + [(i, num + 1) for i in inner]
    facts = {"param_bytes": [1 << 20] * num, "param_uses": [(i, i - 1) for i in inner]}
    graph = graph_of(num + 2, uses, 4096, **facts)
    return on_devices(graph, Objective.PERIOD, 2, int(0.6 * (num << 20)), max_phases=4)


def tables(num: int) -> Problem:
    """``num`` tables and what sums up the rows of each, then two operators for all of them."""
    uses = [x for i in range(num) for x in ((i, num + i), (num + i, 2 * num))]
    facts = {"param_bytes": [1 << 20] * num, "param_uses": [(i, i) for i in range(num)]}
    graph = graph_of(2 * num + 2, [*uses, (2 * num, 2 * num + 1)], 4096, **facts)
    return on_devices(graph, Objective.PERIOD, 4, int(0.3 * (num << 20)), max_phases=4)


def on_devices(graph, objective, devices, memory, **settings) -> Problem:
    """On unlike devices."""
    rng = np.random.default_rng(0)
    seconds = rng.uniform(1e-5, 1e-3, (graph.num_ops, 1)) * np.linspace(1, 1.5, devices)
    facts = {"memory_bytes": memory, "link": (3e-5, 8e9), "objective": objective}
    return problem_on(graph, seconds, **facts, **settings)


def answers() -> dict[str, dict[str, str]]:
    """What each planner says of each problem: nothing, or why it refuses.

    This process gets ``LIMIT`` bytes more than it has.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = pages * resource.getpagesize() + LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    problems = {"2,000 blocks": layers(2000, 0.6), "4,000 experts": experts(4000)}
    problems |= {"300 tables": tables(300)}
    return {which: of_each(problem) for which, problem in problems.items()}


def of_each(problem: Problem) -> dict[str, str]:
    said = {}
    for name in planners.names():
        own = {f.name for f in fields(planners.find(name))}
        options = {"seconds": SECONDS} if "seconds" in own else {}
        if name in ("order_search", "policy", "phase_search"):
            options |= {"evaluations": 4}
        try:
            solution = planners.solve(load(name, **options), problem)
            skipped = solution.stats.get("skipped", {}).values()
            said[name] = "; ".join(why for why in skipped if "memory for" in why)
        except PlannerError as error:
            said[name] = str(error)
    assert bounds.lower_bound(problem) > 0.0
    return said


def test_no_planner_takes_all_memory() -> None:
    run = limited(answers, 280)
    assert run.status == "ok", run.note
    for which, said in run.value.items():
        assert set(said) == set(planners.names())
        more = {n: why for n, why in said.items() if why and not any(x in why for x in REFUSE)}
        assert not more, which


def test_layers_with_a_helper_that_has_room_for_all_need_no_table_of_counts() -> None:
    """[U, C + 1, C + 1] of int64 would take 301 * 302**2 * 8 bytes, 220 MB, and of 2,000, 64 GB."""
    problem = layers(300, 0.55)
    half = load("layer_dp", helpers=False)(problem)
    solution = load("layer_dp")(problem)
    assert "no_helpers" not in solution.stats
    assert solution.value_s <= half.value_s < np.inf
    solution = load("layer_dp", max_blocks=100)(problem)
    assert "301 layers are more than max_blocks = 100" in solution.stats["no_helpers"]
    assert half.value_s <= solution.value_s < np.inf


def no_memory(problem: Problem) -> Solution:
    raise MemoryError("Unable to allocate 50.5 GiB")


def test_a_planner_without_memory_is_named() -> None:
    with pytest.raises(PlannerError, match=r"no_memory: not enough memory for 5 operators in 5"):
        planners.solve(no_memory, random_problem(0, num_ops=5))


def test_best_of_goes_on_without_a_planner_that_has_no_memory(monkeypatch):
    monkeypatch.setattr(Heft, "__call__", lambda self, problem: no_memory(problem))
    with pytest.warns(RuntimeWarning, match=r"goes on without one: planner heft: not enough"):
        solution = load("best_of", planners=("single_device", "heft"))(random_problem(0))
    assert solution.stats["winner"] == "single_device"
    assert "Unable to allocate 50.5 GiB" in solution.stats["skipped"]["heft"]
