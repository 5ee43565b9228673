"""Speeds of the simulator, the planners and the environments.

    python -m experiments.bench

Prints one table and writes ``experiments/results/bench.json`` and ``.md``. A section is a function
that yields rows; ``SECTIONS`` lists them. Ratios come from runs that take turns, and every figure
is a median. The simulator runs in one thread: its seconds are processor seconds, which other
programs on the machine disturb least.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from experiments.runs import in_turns
from experiments.study import Options, Study, run, say
from experiments.tables import Column
from placement.bounds import lower_bounds
from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.problem import Placement, Problem
from placement.profile import Profile
from placement.simulator import kernels, score, simulate, simulate_reference

ROUNDS = 7


@dataclass(frozen=True)
class Row:
    """One figure. ``goal`` is met if ``value`` is at most it, or at least it if ``more``."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    more: bool = False
    note: str = ""


def medians_s(*runs: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Median processor seconds of each run; they take turns, the first round does not count."""

    def seconds(run: Callable[[], object]) -> float:
        began = time.process_time()
        run()
        return time.process_time() - began

    ways = {str(i): partial(seconds, run) for i, run in enumerate(runs)}
    return [float(np.median(s)) for s in in_turns(ways, rounds).values()]


def layered_problem(num_ops: int, num_devices: int, memory_bytes: int = 2**62) -> Problem:
    """Layers of 8 operators, each using 2 of the layer before: 2 edges per operator.

    Operators take 0 to 2 ms, transfers 10 us and 1 ns per byte of 1 to 100 kB.
    """
    rng = np.random.default_rng(num_ops)
    width = 8
    uses = [
        (int(src) + (i // width - 1) * width, i)
        for i in range(width, num_ops)
        for src in rng.choice(width, 2, replace=False)
    ]
    ops = np.arange(num_ops)
    graph = OpGraph.build(
        f"layered-{num_ops}",
        [f"op{i}" for i in ops],
        ops,
        rng.integers(1_000, 100_000, num_ops),
        uses,
        param_bytes=np.full(num_ops, 1_000),
        param_uses=np.stack([ops, ops], axis=1),
    )
    names = tuple(f"device:{d}" for d in range(num_devices))
    compute = rng.random((num_ops, 1)) * rng.uniform(0.5, 2, (num_ops, num_devices)) * 1e-3
    links = tuple(Link(a, b, 1e-5, 1e9) for a in names for b in names if a != b)
    return Problem(
        graph,
        Cluster("bench", tuple(Device(x, memory_bytes=memory_bytes) for x in names)),
        Profile(names, compute, np.zeros_like(compute), links),
        objective="latency",
    )


def random_batch(problem: Problem, size: int) -> Placement:
    """int32 ``[size, N]``: every operator on any device, the most transfers there can be."""
    shape = (size, problem.num_ops)
    return np.random.default_rng(1).integers(0, problem.num_devices, shape).astype(np.int32)


def block_batch(problem: Problem, size: int) -> Placement:
    """int32 ``[size, N]``: contiguous stages with random cuts, as planners make them."""
    rng = np.random.default_rng(1)
    cuts = np.sort(rng.integers(0, problem.num_ops, (size, problem.num_devices - 1)), axis=1)
    return (np.arange(problem.num_ops) >= cuts[:, :, None]).sum(axis=1).astype(np.int32)


KINDS = (("stages", block_batch), ("random", random_batch))


def kernel_against_reference() -> Iterator[Row]:
    """How much faster the kernel is than its definition."""
    problem = layered_problem(600, 4)
    for kind, batch in KINDS:
        placements = batch(problem, 100)
        many, one, reference = medians_s(
            partial(score, problem, placements),
            partial(simulate, problem, placements[0], num_microbatches=1),
            partial(simulate_reference, problem, placements[0], num_microbatches=1),
            rounds=5,
        )
        note = f"600 operators, 4 devices, {kind}"
        ratio = reference / (many / len(placements))
        yield Row("kernel against reference, batch", ratio, "x", 100, True, note)
        yield Row("kernel against reference, one timeline", reference / one, "x", None, True, note)


def seconds_per_operator() -> Iterator[Row]:
    """Event-driven cost per operator (and micro-batch of a pipelined run), contention included."""
    alone = [(num_ops, devices, 1) for num_ops in (100, 600, 2000) for devices in (2, 4)]
    for num_ops, devices, batches in (*alone, (600, 4, 8), (600, 4, 32)):
        # The second has memory that can bind, so that it is tracked.
        problem, limited = (layered_problem(num_ops, devices, size) for size in (2**62, 1))
        note = f"{num_ops} operators, {devices} devices"
        names, size = ("one micro-batch", "one micro-batch and its memory"), 120_000 // num_ops
        if batches > 1:
            many: Any = {"objective": "period", "num_microbatches": batches}
            problem, limited = replace(problem, **many), replace(limited, **many)
            names, size = ("pipelined", "pipelined and memory"), 200 // batches
            note += f", {batches} micro-batches"
        for kind, batch in KINDS:
            placements = batch(problem, size)
            took_s = medians_s(*(partial(score, q, placements) for q in (problem, limited)))
            goals = (80 if num_ops == 600 and batches == 1 else None, None)
            each = ", per operator" + " and micro-batch" * (batches > 1)
            for name, seconds, goal in zip(names, took_s, goals, strict=True):
                value = seconds * 1e9 / placements.size / batches
                yield Row(name + each, value, "ns", goal, note=f"{note}, {kind}")


def problem_tables() -> Iterator[Row]:
    """Everything that is computed once per problem."""
    for num_ops in (600, 2000):
        problem = layered_problem(num_ops, 4)
        build = partial(lambda p: kernels.tables(replace(p)), problem)
        tables, bounds = medians_s(build, partial(lower_bounds, problem))
        note = f"{num_ops} operators, 4 devices"
        goal = 300 if num_ops == 2000 else None
        yield Row("problem and its tables", tables * 1e3, "ms", goal, note=note)
        yield Row("lower bounds", bounds * 1e3, "ms", note=note)


def planners() -> Iterator[Row]:
    """The exact change of ``max_load`` by a move, the search on it, the program over ideals."""
    import numba

    from placement.planners import load
    from placement.search import macro
    from placement.search.evaluation import neighbours
    from placement.simulator.analytic import load_moves
    from placement.simulator.analytic_kernels import load_change
    from placement.workloads.synthetic import families

    @numba.njit
    def try_all(tables, state, group, where):  # type: ignore[no-untyped-def]
        total = 0.0
        for i in range(len(group)):
            total += load_change(tables, state, group[i], where[i])[1]
        return total

    count = 200_000
    for name in ("layered_wide", "transformer", "inception"):
        problem = families()[name](0).with_objective("max_load")
        state = load_moves(problem, load("contiguous_dp")(problem).placement)
        graph, best = neighbours(problem), state[1].device.copy()
        rng = np.random.default_rng(0)
        group = rng.integers(0, problem.graph.num_groups, count)
        where = rng.integers(0, problem.num_devices, count)

        compute_s = state[0].compute_s
        draws = [macro.draws_of(compute_s, graph, 0, x, 0.0, 64) for x in (np.ones(5), macro.SHARE)]
        budget = best, np.inf, count, 0.2, 1e-3, 6
        trials, single, several = medians_s(
            partial(try_all, *state, group, where),
            *(partial(macro.anneal, *state, one, *budget) for one in draws),
        )
        note = f"{name}, {problem.num_ops} operators, {problem.num_devices} devices"
        yield Row("incremental delta, moves/s", count / trials, "1/s", 2e6, True, note)
        yield Row("macro_search, moves of one group/s", count / single, "1/s", 2e6, True, note)
        yield Row("macro_search, moves/s", count / several, "1/s", None, True, note)
    for name in ("inception", "transformer_training", "deep_chain"):
        problem = families()[name](0).with_objective("max_load")
        (program,) = medians_s(partial(load("ideal_dp"), problem), rounds=3)
        ideals = load("ideal_dp")(problem).stats["ideals"]
        size = f"{problem.num_ops} operators, {problem.num_devices} devices, {ideals} ideals"
        yield Row("ideal_dp, seconds", program, "s", None, note=f"{name}, {size}")


# --- environments and training: per second of processor time of one thread -----------------------


def environments(seconds: float = 2.0) -> Iterator[Row]:
    """Environment steps per second, 64 episodes at once, random legal actions."""
    from envs.one_shot import OneShotRules
    from envs.problem_set import ProblemSet
    from envs.sb3 import PlacementVecEnv
    from envs.sequential import SequentialRules
    from envs.vector import Episodes

    problems = ProblemSet.build([random_problem(60)])
    rng = np.random.default_rng(0)
    for name, rules, goal in (
        ("DevicePlacement-v0", OneShotRules(problems, 64), None),
        ("SequentialDevicePlacement-v0", SequentialRules(problems, 64), 100_000.0),
    ):
        env = PlacementVecEnv(Episodes(rules))
        env.reset()
        shape = (64, *(env.action_space.shape or ()))
        env.step(np.zeros(shape, np.int64))  # compiles
        steps, began = 0, time.process_time()
        while time.process_time() - began < seconds:
            masks = rules.masks().reshape(*shape, -1)
            env.step((masks * rng.random(masks.shape)).argmax(axis=-1))
            steps += 64
        rate = steps / (time.process_time() - began)
        note = "60 operators, 4 devices, latency; choosing random actions included"
        yield Row(f"environment steps, {name}", rate, "1/s", goal, True, note)


def training(total_steps: int = 20_000) -> Iterator[Row]:
    """Steps of PPO per second, everything included: encoder, environment, updates, checks."""
    from agents.encoder import NetworkConfig
    from agents.training import TrainConfig, train

    problem = random_problem(60)
    for formulation, steps, goal in (
        ("sequential", total_steps, None),
        ("one_shot", total_steps // 4, 500.0),
    ):
        for hidden in (32, 64):
            config = TrainConfig(
                total_steps=steps,
                formulation=formulation,  # type: ignore[arg-type]
                network=NetworkConfig(hidden=hidden, layers=2),
                num_checks=1,
            )
            train([problem], config=replace(config, total_steps=1))  # compiles
            began = time.process_time()
            card = train([problem], config=config).card
            rate = card["steps"] / (time.process_time() - began)
            note = f"60 operators, 4 devices, hidden {hidden}, 2 layers, one thread"
            name = f"PPO steps, {formulation}, hidden {hidden}"
            yield Row(name, rate, "1/s", goal, True, note)


def random_problem(num_ops: int) -> Problem:
    """Random graph: every operator uses up to three of the ten before it."""
    rng = np.random.default_rng(0)
    uses = [
        (int(a), b)
        for b in range(1, num_ops)
        for a in set(rng.integers(max(0, b - 10), b, 3).tolist())
    ]
    graph = OpGraph.build(
        "bench", [f"op{i}" for i in range(num_ops)], range(num_ops), [1000] * num_ops, uses
    )
    cluster = Cluster("bench", tuple(Device(f"cpu:{i}") for i in range(4)))
    names = cluster.device_names
    links = tuple(Link(a, b, 1e-5, 1e8) for a in names for b in names if a != b)
    seconds = rng.uniform(1e-5, 1e-3, (num_ops, 4))
    profile = Profile(names, seconds, np.zeros_like(seconds), links)
    return Problem(graph, cluster, profile, "latency")


SECTIONS: tuple[Callable[[], Iterator[Row]], ...] = (
    kernel_against_reference,
    seconds_per_operator,
    problem_tables,
    planners,
    environments,
    training,
)


def rows(options: Options) -> Iterator[dict[str, Any]]:
    for section in SECTIONS:
        say(f"{section.__name__} ...")
        for row in section():
            yield asdict(row)


def goal(row: dict[str, Any]) -> str:
    """It and a tick if it is met; empty where there is none."""
    if row["goal"] is None:
        return ""
    more, value = row["more"], row["value"]
    met = value >= row["goal"] if more else value <= row["goal"]
    return f"{'≥' if more else '≤'} {row['goal']:g} {'✓' if met else '✗'}"


def value(row: dict[str, Any]) -> str:
    return f"{row['value']:,.0f}" if row["value"] >= 100 else f"{row['value']:.3g}"


STUDY = Study(
    name="bench",
    rows=rows,
    columns=(
        Column("what", "name"),
        Column("value", value),
        Column("unit", "unit"),
        Column("goal", goal),
        Column("with", "note"),
    ),
    facts=lambda options: {"load_average": os.getloadavg()[0]},
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
