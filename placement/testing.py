"""Contracts that ship with the package: call them on your own classes in your own tests."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.problem import Planner, Problem, ProblemError, Solution
from placement.profile import Profile
from placement.simulator import score

if TYPE_CHECKING:
    from placement.exporters import Exporter
    from placement.plan import Plan


class ContractError(ValueError):
    """A contract is broken; the message says by what, on which problem, with the numbers."""


def check_planner(planner: Planner, problems: Sequence[Problem] | None = None) -> None:
    """Run ``planner`` twice on every problem and check what every planner promises.

    * The placement is int32 ``[N]`` and obeys support and colocation.
    * ``value_s`` is what the simulator says; inf, and ``stats["infeasible"]`` a text with the
      bytes, where it does not fit in memory, or with the operators whose pieces wait for each
      other (``piecewise_latency``).
    * ``lower_bound_s`` is None or at most ``value_s``.
    * ``stats`` has ``seconds`` and ``evaluations``; a ``curve`` of (seconds, evaluations,
      value) improves and ends at ``value_s``.
    * The second run gives the same placement (unless the planner has a ``seconds`` budget).
    * ``evaluations`` and ``seconds`` fields are obeyed (the latter within a half plus 1 s).

    Args:
        planner: a configured planner.
        problems: ``small_problems()`` if not given.

    Raises:
        ContractError: the first promise that is broken.
    """
    for problem in small_problems() if problems is None else problems:
        where = f"{planner!r} on {problem.graph.name!r} ({problem.objective})"
        began = time.perf_counter()
        answer = planner(problem)
        took_s = time.perf_counter() - began
        _check_solution(problem, answer, where)
        _check_budget(planner, answer, took_s, where)
        if getattr(planner, "seconds", None) is None:
            again = planner(problem)
            same = np.array_equal(again.placement, answer.placement)
            _need(same, where, f"gave {answer.placement} and then {again.placement}")


def check_exporter(exporter: Exporter, plans: Sequence[Plan]) -> None:
    """Run ``exporter`` twice on every plan and check what every exporter promises.

    * It returns ``Exported`` with text or bytes for the suffix ``""``, twice the same, or
    * raises ``Inexpressible``, whose ``nearest`` has the same operators on devices of the plan,
      differs from it (or the plan has an order, which is given up), and can be exported.

    Args:
        exporter: a configured exporter.
        plans: some that it can express, some that it cannot.

    Raises:
        ContractError: the first promise that is broken.
    """
    from placement.exporters import Exported, Inexpressible, moved

    for plan in plans:
        where = f"{exporter!r} on the plan of {plan.graph.name!r}"
        try:
            exported = exporter(plan)
        except Inexpressible as error:
            nearest = error.nearest
            _need([*nearest] == [*plan.assignment], where, "nearest has other operators")
            strange = {*nearest.values()} - {d.name for d in plan.cluster.devices}
            _need(not strange, where, f"nearest uses {strange}, which are not of the cluster")
            same = nearest == plan.assignment and plan.order is None
            _need(not same, where, "nearest is the plan itself")
            plan = moved(plan, nearest)
            try:
                exported = exporter(plan)
            except Inexpressible as again:
                raise ContractError(f"{where}: its own nearest plan is refused: {again}") from again
        _need(isinstance(exported, Exported), where, f"returned a {type(exported).__name__}")
        _need("" in exported.files, where, f"writes only {[*exported.files]}, not ''")
        for suffix, content in exported.files.items():
            _need(isinstance(content, str | bytes), where, f"{suffix!r} is no text and no bytes")
        _need(exporter(plan) == exported, where, "wrote something else the second time")


def _check_solution(problem: Problem, answer: Solution, where: str) -> None:
    _need(isinstance(answer, Solution), where, f"returned a {type(answer).__name__}")
    placement = answer.placement
    _need(isinstance(placement, np.ndarray), where, "the placement is not an array")
    _need(placement.dtype == np.int32, where, f"the placement is {placement.dtype}, not int32")
    try:
        problem.check_placement(placement)
    except ProblemError as error:
        raise ContractError(f"{where}: {error}") from error

    value, actual = answer.value_s, float(score(problem, placement)[0])
    close = value == actual or abs(value - actual) <= 1e-9 * abs(actual)
    _need(close, where, f"value_s = {value}, but the simulator says {actual}")
    bound = answer.lower_bound_s
    proved = bound is None or bound <= value * (1 + 1e-9)
    _need(proved, where, f"lower_bound_s = {bound} is above value_s = {value}")

    stats = answer.stats
    for key in ("seconds", "evaluations"):
        _need(key in stats, where, f"stats lack {key!r}; they have {sorted(stats)}")
        _need(stats[key] >= 0, where, f"stats[{key!r}] = {stats[key]}")
    if np.isinf(value):
        why = str(stats.get("infeasible", ""))
        told = bool(re.search(r"\d", why))
        _need(told, where, f"is worth inf, but stats['infeasible'] = {why!r} has no numbers")
    else:
        _need("infeasible" not in stats, where, f"is worth {value} s and infeasible")
    if "curve" in stats:
        curve = np.asarray(stats["curve"], dtype=float).reshape(-1, 3)
        steps = list(zip(curve[:-1].tolist(), curve[1:].tolist(), strict=True))
        better = all(a[0] <= b[0] and a[1] <= b[1] and a[2] >= b[2] for a, b in steps)
        _need(better, where, f"the curve does not improve: {stats['curve']}")
        _need(curve[-1, 2] == value, where, f"the curve ends at {curve[-1, 2]}, not at {value}")


def _check_budget(planner: Planner, answer: Solution, took_s: float, where: str) -> None:
    evaluations = getattr(planner, "evaluations", None)
    used = answer.stats["evaluations"]
    within = evaluations is None or used <= evaluations
    _need(within, where, f"used {used} evaluations, {evaluations} were allowed")
    seconds = getattr(planner, "seconds", None)
    within = seconds is None or took_s <= 1.5 * seconds + 1.0
    _need(within, where, f"took {took_s:.2f} s, {seconds} s were allowed")


def _need(holds: bool, where: str, otherwise: str) -> None:
    if not holds:
        raise ContractError(f"{where}: {otherwise}")


def small_problems() -> list[Problem]:
    """A few problems of at most six operators, each with one difficulty.

    Equal devices, unlike devices with unsupported operators and a colocation group, memory
    that forces a split, and memory that nothing fits in; each for both objectives.
    """
    found = []
    for name, compute_s, memory_bytes, group in (
        ("equal", [[2, 2], [1, 1], [3, 3], [1, 1], [2, 2]], 10**9, None),
        ("alone", [[2], [0], [1]], 10**9, None),
        (
            "unlike",
            [[4, 1, 2], [4, 1, 2], [1, np.inf, 2], [3, 1, np.inf], [1, 1, 1], [2, 9, 1]],
            10**9,
            [0, 1, 0, 2, 3, 4],
        ),
        ("tight", [[2, 1], [2, 1], [2, 1], [2, 1]], 270, None),
        ("impossible", [[2, 1], [2, 1], [2, 1]], 90, None),
    ):
        seconds = np.array(compute_s, dtype=np.float64)
        n, d = seconds.shape
        # A chain with one skip, from the first operator to the last.
        uses = [(i, i + 1) for i in range(n - 1)] + ([(0, n - 1)] if n > 2 else [])
        graph = OpGraph.build(
            name,
            [f"op{i}" for i in range(n)],
            tensor_src=range(n),
            tensor_bytes=[10] * n,
            uses=uses,
            param_bytes=[100] * n,
            param_uses=[(i, i) for i in range(n)],
            group=group,
            output_tensor=[n - 1],
        )
        devices = tuple(Device(f"cpu:{i}", memory_bytes=memory_bytes) for i in range(d))
        cluster = Cluster(name, devices)
        names = cluster.device_names
        links = tuple(Link(a, b, 0.1, 100.0) for a in names for b in names if a != b)
        profile = Profile(names, seconds, np.zeros((n, d)), links)
        problem = Problem(graph, cluster, profile, "period", num_microbatches=16, max_in_flight=2)
        found += [problem, problem.with_objective("latency")]
    return found
