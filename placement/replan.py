"""Plan again when devices are gone, from the plan as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.cluster import Cluster, between, with_hosts
from placement.planners.contiguous_dp import ContiguousDp
from placement.problem import Problem, Solution
from placement.search.evaluation import Choice, Search, cannot_fit

_DP = ContiguousDp(max_blocks=100, candidates=4)  # coarse: a twentieth of a second


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
    devices = with_hosts(d for d in problem.cluster.devices if d.name not in without)
    keep = [problem.cluster.index(d.name) for d in devices]
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


@dataclass(frozen=True, eq=False)
class Kept:
    """The best placement that keeps what has its device still, as the ``start`` of a search.

    What lost its device goes to one of the others, or is dealt out to the least loaded; contiguous
    stages from nothing and one device alone are tried too.

    Attributes:
        on: the device that each operator had, by name.
        seconds, evaluations: budget.
    """

    on: tuple[str, ...]
    seconds: float | None = None
    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, self.seconds, self.evaluations)
        search.costs(first_choices(problem, self.was(problem)))
        if search.left and 1 < problem.num_devices <= 16:  # its tables grow with them
            search.run(_DP)
        return search.solution()

    def was(self, problem: Problem) -> Choice:
        """int32 ``[G]``: the device that each group had; -1: it is gone."""
        number = {name: d for d, name in enumerate(problem.cluster.device_names)}
        was = np.full(problem.graph.num_groups, -1, np.int32)
        was[problem.graph.group] = [number.get(name, -1) for name in self.on]
        return was


def first_choices(problem: Problem, was: Choice) -> Choice:
    """int32 ``[K, G]``: complete choices from an old one, int32 ``[G]``, with -1 for a lost device.

    In this order: everything on one device; dealt out; each of the least loaded devices takes over
    what lost its own.
    """
    seconds = problem.group_compute_s
    able = np.isfinite(seconds)
    lost = np.flatnonzero(was < 0)
    whole_s = np.where(able, seconds, 0.0).sum(axis=0)
    fastest = np.lexsort((whole_s, -able.sum(axis=0)))[0]  # of those that can run the most
    alone = np.where(able[:, fastest], fastest, able.argmax(axis=1))
    rows: list[Choice] = [alone.astype(np.int32)]
    load = np.zeros(problem.num_devices)
    placed = np.flatnonzero(was >= 0)
    np.add.at(load, was[placed], seconds[placed, was[placed]])
    dealt, filled = was.copy(), load.copy()
    for group in lost[np.argsort(-seconds[lost].min(axis=1), kind="stable")]:
        dealt[group] = int(np.argmin(filled + seconds[group]))
        filled[dealt[group]] += seconds[group, dealt[group]]
    rows.append(dealt)
    if len(lost):
        for d in np.argsort(load, kind="stable")[:8]:  # each alone takes over all
            row = was.copy()
            row[lost] = np.where(able[lost, d], d, dealt[lost])
            rows.append(row)
    else:
        rows.insert(0, was)  # nothing was on what is gone
    return np.array(list({row.tobytes(): row for row in rows}.values()), np.int32)
