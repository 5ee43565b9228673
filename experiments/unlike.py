"""Two processors that are unlike per operator, on two cores of one machine.

The process of the second core computes with the vector instructions of 2008 (SSE 4.1), as PyTorch
does on an old processor: how much slower depends on the operator. Both are ranks of one plan, as
with ``placement run --distributed``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from experiments.distributed import STREAMED, links
from experiments.ranks import Ranks
from experiments.runs import Floats, in_turns, seconds_per_item, two_cores
from placement.capturing import capture
from placement.cluster import Cluster
from placement.costs.measure import measure
from placement.executor.distributed import pin
from placement.problem import Placement, Problem
from placement.profile import Profile
from placement.workloads import load

OLD = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}


def unlike_problem(workload: str) -> Problem:
    """Each process has measured its own device, while the other one did; and their links."""
    cluster = two_cores("unlike")
    linked = links(cluster, False)
    job = {"workload": workload}
    with Ranks("experiments.unlike:measured", cluster, job, second=OLD) as ranks:
        columns = [ranks.answer(rank) for rank in range(2)]
    module, inputs = load(workload)
    graph = capture(module, inputs, name=workload)
    seconds = np.stack(columns, axis=1)
    profile = Profile(cluster.device_names, seconds, np.zeros_like(seconds), linked.links)
    return Problem(graph, linked, profile, max_phases=16)


def measured(job: dict[str, Any], rank: int) -> Iterator[list[float]]:
    """A rank: seconds of each operator on its device."""
    module, inputs = load(job["workload"])
    graph = capture(module, inputs, name=job["workload"])
    pin(job["cluster"])
    own = Cluster("own", (job["cluster"].devices[rank],))
    yield measure(graph, own, repeats=10).compute_s[:, 0].tolist()


def streamed(
    workload: str, problem: Problem, plans: dict[str, Placement], rounds: int, count: int
) -> dict[str, Floats]:
    """Seconds per item of each plan, float64 ``[rounds]``, in turns."""
    cluster = replace(problem.cluster, links=())
    about = {"workload": workload, "in_flight": problem.max_in_flight, "timeout_s": 120.0}
    about["priority"] = problem.priority.tolist()
    with ExitStack() as opened:
        by_way = {
            way: opened.enter_context(
                Ranks(STREAMED, cluster, about | {"placement": plan.tolist()}, second=OLD)
            )
            for way, plan in plans.items()
        }
        ways = {
            way: partial(seconds_per_item, ranks.ends, count, ranks.answer())
            for way, ranks in by_way.items()
        }
        return in_turns(ways, rounds)
