"""Contracts that ship with the package: call them on your own classes in your own tests."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.objective import Objective
from placement.problem import Placement, Planner, Problem, ProblemError, Solution
from placement.profile import Profile
from placement.schedule import Schedule, ScheduleError
from placement.search.evaluation import supported_choice
from placement.simulator import simulate, value_of

if TYPE_CHECKING:
    from placement.exporters import Exporter
    from placement.plan import Plan
    from placement.schedulers import Scheduler


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


def check_scheduler(
    scheduler: Scheduler, cases: Sequence[tuple[Problem, Placement]] | None = None
) -> None:
    """Run ``scheduler`` twice on every case with 1, 2 and 5 micro-batches and check its promises.

    * It returns a ``Schedule`` of so many micro-batches that has every (operator, micro-batch)
      once, on its device, in an order that does not deadlock, and
    * twice the same; or
    * it raises ``SchedulerError``: it cannot order this placement.

    Args:
        scheduler: a configured scheduler.
        cases: problems with a placement int32 ``[N]``; ``small_placements()`` if not given.

    Raises:
        ContractError: the first promise that is broken, or every case was refused.
    """
    from placement.schedulers import SchedulerError

    refusal = ""
    answered = False
    for problem, placement in small_placements() if cases is None else cases:
        for num in (1, 2, 5):
            where = f"{scheduler!r} on {problem.graph.name!r} placed {placement}, {num} batches"
            try:
                schedule, again = (scheduler(problem, placement, num) for _ in range(2))
            except SchedulerError as error:
                refusal = str(error)
                continue
            answered = True
            _need(isinstance(schedule, Schedule), where, f"returned {type(schedule).__name__}")
            got = schedule.num_microbatches
            _need(got == num, where, f"is for {got} micro-batches")
            try:
                schedule.check(problem.graph, problem.cluster, placement)
            except ScheduleError as error:
                raise ContractError(f"{where}: {error}") from error
            simulate(problem, placement, schedule)
            same = all(map(np.array_equal, schedule.order, again.order))
            _need(same, where, "gave another order the second time")
    _need(answered, repr(scheduler), f"refused every case; the last time: {refusal}")


class Policy(Protocol):
    """Makes placements without evaluating any, e.g. ``agents.trained.TrainedPolicy``."""

    def place(
        self, problem: Problem, warm: Placement | None = None, num_samples: int = 0, seed: int = 0
    ) -> Placement:
        """int32 ``[1 + num_samples, N]``: the greedy placement, then sampled ones."""
        ...


def check_policy(policy: Policy, problems: Sequence[Problem] | None = None) -> None:
    """Let ``policy`` place every problem, with and without a warm start, and check its promises.

    * Placements are int32 ``[1 + num_samples, N]`` and obey support and colocation.
    * The same seed gives the same placements; the greedy one, which is the first, depends neither
      on the seed nor on the number of samples.
    * Sizes do not matter: one policy places problems of any number of operators and devices.

    Args:
        policy: one that makes placements; it need not be trained.
        problems: ``small_problems()`` if not given.

    Raises:
        ContractError: the first promise that is broken.
    """
    for problem in small_problems() if problems is None else problems:
        first = problem.supported.argmax(axis=1).astype(np.int32)
        for warm in (None, first):
            where = f"{type(policy).__name__} on {problem.graph.name!r} ({problem.objective})"
            rows = policy.place(problem, warm, 3, 1)
            _need(isinstance(rows, np.ndarray), where, f"returned a {type(rows).__name__}")
            shape = (4, problem.num_ops)
            right = rows.dtype == np.int32 and rows.shape == shape
            _need(right, where, f"placements are {rows.dtype} {rows.shape}, not int32 {shape}")
            for row in rows:
                try:
                    problem.check_placement(row)
                except ProblemError as error:
                    raise ContractError(f"{where}: {error}") from error
            same = np.array_equal(rows, policy.place(problem, warm, 3, 1))
            _need(same, where, "the same seed gave other placements")
            greedy = policy.place(problem, warm, 0, 2)[0]
            same = np.array_equal(rows[0], greedy)
            _need(same, where, f"the greedy placement was {rows[0]}, then {greedy}")


def check_workload(workload: str | Callable[[], Any]) -> None:
    """Build ``workload`` twice, capture it, run it scattered over devices, and check its promises.

    * The module is in evaluation mode and can be captured.
    * It is the same every time: the same graph, inputs of the same shapes, the same weights.
    * Operators placed at random on two CPU devices compute what the plain module computes.

    Args:
        workload: a name as on the command line, or a function that returns (module, inputs).

    Raises:
        ContractError: the first promise that is broken.
        CaptureError, WorkloadError: it cannot be captured, or there is no such workload.
    """
    import torch

    from placement.capturing import capture
    from placement.executor import Runner
    from placement.executor.equality import module_difference
    from placement.program import split_inputs
    from placement.workloads import load

    where = f"workload {workload if isinstance(workload, str) else workload.__name__!r}"
    make = (lambda: load(workload)) if isinstance(workload, str) else workload
    (module, inputs), (twin, others) = make(), make()
    _need(not module.training, where, "the module is in training mode; return module.eval()")
    graph, again = capture(module, inputs), capture(twin, others)
    same = graph.fingerprint == again.fingerprint
    _need(same, where, f"built twice it has {graph.num_ops} and {again.num_ops} operators, unlike")
    for (name, a), b in zip(module.state_dict().items(), twin.state_dict().values(), strict=True):
        advice = f"{name!r} is drawn anew every time; use placement.workloads.seeded"
        _need(torch.equal(a, b), where, advice)
    cluster = Cluster("two", (Device("cpu:0"), Device("cpu:1")))
    chosen = np.random.default_rng(0).integers(cluster.num_devices, size=graph.num_groups)
    args, kwargs = split_inputs(inputs)
    with Runner(graph, cluster, chosen[graph.group]) as runner, torch.inference_mode():
        wrong = module_difference(runner, module, args, kwargs, cluster)
        _need(not wrong, where, f"scattered, it computes otherwise: {wrong}")


def check_cluster(cluster: Cluster) -> None:
    """Check what a described cluster should say, so that predictions for it mean something.

    * Every ordered pair of devices has one link, or none has (they are measured then): a pair
      without a link costs nothing, which is hardly ever meant.
    * Every device states its memory; one that streams has none.

    Raises:
        ContractError: the first promise that is broken.
    """
    where, cluster = f"cluster {cluster.name!r}", cluster.workers
    pairs = [(link.src, link.dst) for link in cluster.links]
    names = cluster.device_names
    missing = [(names[a], names[b]) for a, b in np.argwhere(~cluster.joins).tolist() if a != b]
    _need(not pairs or not missing, where, f"no link for {missing[:3]}, which would cost nothing")
    twice = sorted({p for p in pairs if pairs.count(p) > 1})
    _need(not twice, where, f"more than one link for {twice[:3]}")
    endless = [d.name for d in cluster.devices if d.memory_bytes == Device("any").memory_bytes]
    _need(not endless, where, f"no memory_bytes for {endless}")


def _check_solution(problem: Problem, answer: Solution, where: str) -> None:
    _need(isinstance(answer, Solution), where, f"returned a {type(answer).__name__}")
    try:
        problem.check_placement(answer.placement)
    except ProblemError as error:
        raise ContractError(f"{where}: {error}") from error

    try:
        value, actual = answer.value_s, value_of(problem, answer)
    except ScheduleError as error:
        raise ContractError(f"{where}: {error}") from error
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
        has_numbers = bool(re.search(r"\d", why))
        _need(has_numbers, where, f"is worth inf, but stats['infeasible'] = {why!r} has no numbers")
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
    problems = []
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
        devices = tuple(Device(f"cpu:{i}", "cpu", (), 1, memory_bytes, 2.0, 1.0) for i in range(d))
        cluster = Cluster(name, devices)
        names = cluster.device_names
        links = tuple(Link(a, b, 0.1, 100.0) for a in names for b in names if a != b)
        profile = Profile(names, seconds, np.zeros((n, d)), links)
        problem = Problem(graph, cluster, profile, num_microbatches=16, max_in_flight=2)
        problems += [problem, problem.with_objective(Objective.LATENCY)]
    return problems


def small_placements() -> list[tuple[Problem, Placement]]:
    """Problems with a placement int32 ``[N]``: what a scheduler is asked to order.

    ``small_problems()`` on one device, scattered, and cut once; and a training step, forward
    through three devices and back again.
    """
    pairs = []
    for problem in small_problems():
        group = np.arange(problem.graph.num_groups)
        for wanted in (0 * group, group % problem.num_devices, 2 * group // len(group)):
            choice = supported_choice(problem, np.minimum(wanted, problem.num_devices - 1))
            pairs.append((problem, choice[problem.graph.group]))
    graph = OpGraph.build(
        "step",
        ["f0", "f1", "f2", "b2", "w2", "b1", "w1", "b0", "w0"],  # w: gradients of weights
        tensor_src=range(9),
        tensor_bytes=[10] * 9,
        uses=[(0, 1), (0, 7), (1, 2), (1, 5), (2, 3), (3, 4), (3, 5), (5, 6), (5, 7), (7, 8)],
        is_backward=[False] * 3 + [True] * 6,
    )
    cluster = Cluster("three", tuple(Device(f"cpu:{d}") for d in range(3)))
    profile = Profile(cluster.device_names, np.ones((9, 3)), np.zeros((9, 3)))
    step = Problem(graph, cluster, profile, num_microbatches=4)
    pairs.append((step, np.array([0, 1, 2, 2, 2, 1, 1, 0, 0], np.int32)))
    return pairs
