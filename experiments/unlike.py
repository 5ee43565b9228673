"""Two processors that are unlike per operator, on two cores of one machine.

The process of the second core computes with the vector instructions of 2008 (SSE 4.1), as PyTorch
does on an old processor: how much slower depends on the operator. Both are ranks of one plan, as
with ``placement run --distributed``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.distributed import links, start
from experiments.runs import Floats, in_turns, seconds_per_item, two_cores
from placement.capturing import capture
from placement.cluster import Cluster
from placement.costs.measure import measure
from placement.executor.distributed import DistributedRunner, pin
from placement.executor.distributed_world import World
from placement.problem import Placement, Problem
from placement.profile import Profile
from placement.workloads import load

OLD = "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41"


def unlike_problem(workload: str) -> Problem:
    """Each process has measured its own device, while the other one did; and their links."""
    cluster = two_cores("unlike")
    with tempfile.TemporaryDirectory() as folder:
        linked = links(Path(folder), cluster, False)
        ranks(Path(folder), cluster, workload, {})
        columns = [np.load(Path(folder) / f"{r}.npy") for r in range(2)]
    module, inputs = load(workload)
    graph = capture(module, inputs, name=workload)
    seconds = np.stack(columns, axis=1)
    profile = Profile(cluster.device_names, seconds, np.zeros_like(seconds), linked.links)
    return Problem(graph, linked, profile, max_phases=16)


def streamed(
    workload: str, problem: Problem, plans: dict[str, Placement], rounds: int, count: int
) -> dict[str, Floats]:
    """Seconds per item of each plan, float64 ``[rounds]``, in turns."""
    job: dict[str, Any] = {"rounds": rounds, "count": count, "in_flight": problem.max_in_flight}
    job |= {"plans": {way: p.tolist() for way, p in plans.items()}}
    job |= {"priority": problem.priority.tolist()}
    with tempfile.TemporaryDirectory() as folder:
        ranks(Path(folder), replace(problem.cluster, links=()), workload, job)
        seconds = json.loads((Path(folder) / "seconds.json").read_text())
    return {way: np.array(s) for way, s in seconds.items()}


def ranks(folder: Path, cluster: Cluster, workload: str, job: dict[str, Any]) -> None:
    """Two processes, of which the second is an old one, do what they are told.

    Raises:
        RuntimeError: one of them ended badly; with its last words.
    """
    cluster.to_yaml(folder / "cluster.yaml")
    (folder / "job.json").write_text(json.dumps({"workload": workload, **job}))
    switch = f'[ "$RANK" = 0 ] || export {OLD}; exec "$@"'
    command = ["sh", "-c", switch, "sh", sys.executable, "-m", "experiments.unlike", str(folder)]
    errors = [folder / f"{r}.err" for r in range(2)]
    for process, error in zip(start(command, 2, False, errors), errors, strict=True):
        process.communicate()
        if process.returncode:
            raise RuntimeError(error.read_text()[-2000:])


def rank(folder: Path) -> None:
    """Measure the device of this rank; or run the plans, of which rank 0 writes the seconds."""
    job = json.loads((folder / "job.json").read_text())
    cluster, me = Cluster.from_yaml(folder / "cluster.yaml"), int(os.environ["RANK"])
    torch.set_num_threads(1)
    module, inputs = load(job["workload"])
    graph = capture(module, inputs, name=job["workload"])
    pin(cluster)
    if "plans" not in job:
        own = Cluster("own", (cluster.devices[me],))
        np.save(folder / f"{me}.npy", measure(graph, own, repeats=10).compute_s[:, 0])
        return
    with World.join(120.0) as world:

        def run(way: str) -> float:
            runner = DistributedRunner(
                graph, cluster, np.array(job["plans"][way], np.int32), world=world,
                max_in_flight=job["in_flight"], priority=job["priority"],
            )  # fmt: skip
            if me:
                runner.serve()
                return 0.0
            with runner:
                list(runner.stream([inputs] * 4))  # it starts
                return seconds_per_item(
                    lambda items: runner.stream([inputs] * items), job["count"], runner.num_phases
                )

        ways = {way: partial(run, way) for way in job["plans"]}
        seconds = in_turns(ways, job["rounds"])
    if me == 0:
        text = json.dumps({way: s.tolist() for way, s in seconds.items()})
        (folder / "seconds.json").write_text(text)


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
