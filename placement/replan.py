"""Plan again when devices are gone, from the plan as it was: seconds matter, a line is waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.cluster import Cluster, between
from placement.planners.balanced_split import split
from placement.planners.contiguous_dp import ContiguousDp
from placement.planners.data_parallel import DataParallel
from placement.planners.macro_search import MacroSearch
from placement.planners.replicated import Replicated
from placement.problem import Problem, Solution
from placement.search.evaluation import Choice, Search, cannot_fit

Floats = NDArray[np.float64]

SECONDS = 0.5  # of a search, unless another budget is given
_STARTS = 0.5  # of the budget is for the first placements
_HEIRS = 8  # devices of which each alone takes over all that lost its own
_DP = ContiguousDp(max_blocks=100, candidates=4)  # coarse: a twentieth of a second
_DP_DEVICES = 16  # its tables grow with them


class ReplanError(ValueError):
    """Nothing can be planned without these devices; the message says why, with the numbers."""


class NothingFits(ReplanError):
    """The devices that are left can run no placement at all."""


def remaining(problem: Problem, without: Sequence[str]) -> Problem:
    """The problem on the devices that are left, in their order, with their links.

    Raises:
        ReplanError: a device that is not there, or no device left.
        NothingFits: an operator that only ran on a device that is gone, or parameters that no
            longer fit.
    """
    names = problem.cluster.device_names
    unknown = [name for name in without if name not in names]
    if unknown:
        raise ReplanError(f"no device {unknown[0]!r} to do without; devices are {list(names)}")
    keep = [d for d, name in enumerate(names) if name not in without]
    if not keep:
        raise ReplanError(f"no device is left: without all of {list(names)} nothing can run")
    left = [names[d] for d in keep]
    stuck = np.flatnonzero(~np.isfinite(problem.group_compute_s[:, keep]).any(axis=1))
    if len(stuck):
        op = int(np.flatnonzero(problem.graph.group == stuck[0])[0])
        able = np.flatnonzero(problem.supported[op])
        raise NothingFits(
            f"operator {op} ({problem.graph.op_name[op]!r}) runs only on "
            f"{[names[d] for d in able]}, of which none is left; the others are {left}"
        )
    profile, cluster = problem.profile, problem.cluster
    rest = replace(
        problem,
        cluster=Cluster(
            cluster.name, tuple(cluster.devices[d] for d in keep), between(cluster.links, left)
        ),
        profile=profile.take(keep, left, between(profile.links, left)),
    )
    if why := cannot_fit(rest):
        raise NothingFits(f"{why}; the devices that are left are {left}")
    return rest


def replan(
    problem: Problem,
    placement: ArrayLike,
    without: Sequence[str],
    *,
    seconds: float | None = None,
    evaluations: int | None = None,
    seed: int = 0,
) -> tuple[Problem, Solution]:
    """A placement on the devices that are left, found from the one that was in use.

    First placements: what lost its device goes to one of the others, or is dealt out to the
    least loaded; the pipeline as it was is cut again, its order of operators and devices kept;
    contiguous stages from nothing. From the best of these ``macro_search`` goes on until the
    budget ends. Where micro-batches took turns, replicas on what is left are tried too.

    Args:
        problem: with all devices.
        placement: int32 ``[N]`` or ``[K, N]``, as it was planned on all devices.
        without: names of the devices that are gone.
        seconds, evaluations: budget of the search, half a second if neither is given. Only
            with ``evaluations`` alone is the answer the same on every machine.
        seed: of the search.

    Returns:
        The problem on the devices that are left, and the solution; ``stats["moved"]`` is how
        many operators have another device than before, in the first phase. Infeasible as any
        planner's answer is: ``value_s`` is inf, and ``stats["infeasible"]`` has the bytes.

    Raises:
        ReplanError: see ``remaining``.
        ProblemError: the placement is not one of ``problem``.
        PlannerError: a budget that is not positive.
    """
    old = problem.check_placement(placement)
    left = remaining(problem, without)
    if seconds is None and evaluations is None:
        seconds = SECONDS
    at = {name: d for d, name in enumerate(left.cluster.device_names)}
    number = np.array([at.get(name, -1) for name in problem.cluster.device_names], np.int32)
    was = np.full(left.graph.num_groups, -1, np.int32)
    first, *others = np.atleast_2d(old)
    was[left.graph.group] = number[first]
    search = MacroSearch(start=_Starts(was), seconds=seconds, evaluations=evaluations, seed=seed)
    solution = search(left)
    if others and left.objective.is_throughput:
        turns = replace(left, max_phases=max(left.max_phases, len(others) + 1))
        replicas = [planner(turns) for planner in (DataParallel(), Replicated())]
        best = min(replicas, key=lambda answer: answer.value_s)
        if best.value_s < solution.value_s:
            solution = replace(solution, placement=best.placement, value_s=best.value_s)
    moved = int((number[first] != np.atleast_2d(solution.placement)[0]).sum())
    return left, replace(solution, stats=solution.stats | {"moved": moved})


@dataclass(frozen=True, eq=False)
class _Starts:
    """The best of the first placements, ``was`` int32 ``[G]`` being the old one; -1: it is gone."""

    was: Choice
    seconds: float | None = None
    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        # A search gives its start a quarter of its seconds.
        seconds = None if self.seconds is None else 4 * _STARTS * self.seconds
        search = Search(problem, seconds, self.evaluations)
        search.costs(first_choices(problem, self.was))
        if search.left and 1 < problem.num_devices <= _DP_DEVICES:
            search.run(_DP)
        return search.solution()


def first_choices(problem: Problem, was: Choice) -> Choice:
    """int32 ``[K, G]``: complete choices from an old one, int32 ``[G]``, with -1 for a lost device.

    In this order: cut again; everything on one device; dealt out; each of the least loaded devices
    takes over what lost its own.
    """
    seconds = problem.group_compute_s
    able = np.isfinite(seconds)
    lost = np.flatnonzero(was < 0)
    fastest = np.where(able, seconds, 0.0).sum(axis=0) / able.sum(axis=0).clip(1)
    alone = np.where(able[:, fastest.argmin()], fastest.argmin(), able.argmax(axis=1))
    rows: list[Choice] = [_cut_again(problem, was), alone.astype(np.int32)]
    load = np.zeros(problem.num_devices)
    placed = np.flatnonzero(was >= 0)
    np.add.at(load, was[placed], seconds[placed, was[placed]])
    dealt, filled = was.copy(), load.copy()
    for group in lost[np.argsort(-seconds[lost].min(axis=1), kind="stable")]:
        dealt[group] = int(np.argmin(filled + seconds[group]))
        filled[dealt[group]] += seconds[group, dealt[group]]
    rows.append(dealt)
    if len(lost):
        for d in np.argsort(load, kind="stable")[:_HEIRS]:
            row = was.copy()
            row[lost] = np.where(able[lost, d], d, dealt[lost])
            rows.append(row)
    else:
        rows.insert(0, was)  # nothing was on what is gone
    return np.array(list({row.tobytes(): row for row in rows}.values()), np.int32)


def _cut_again(problem: Problem, was: Choice) -> Choice:
    """The groups as the old pipeline ran them, cut into new stages on the devices in old order.

    Old stages keep their place in the line, those of lost devices too, by the mean number of
    their operators; so branches that were apart stay apart. The largest load is made least.
    """
    seconds = problem.group_compute_s
    number = np.arange(len(was), dtype=np.float64)
    place = number.copy()  # what lost its device stands where its number puts it
    middle = np.full(problem.num_devices, np.inf)
    for d in range(problem.num_devices):
        if (mine := was == d).any():
            middle[d] = number[mine].mean()
            place[mine] = middle[d]
    line = np.lexsort((number, place))
    devices = np.argsort(middle, kind="stable").tolist()
    able, need = np.isfinite(seconds), np.zeros(len(was), np.int64)
    in_line = np.where(able, seconds, 0.0)[line]
    choice = np.empty(len(was), np.int32)
    choice[line] = split(in_line, devices, need, problem.memory_bytes)[1]
    fits = able[np.arange(len(choice)), choice]
    return np.where(fits, choice, np.where(able, seconds, np.inf).argmin(axis=1)).astype(np.int32)
