"""The executor on this machine: pinned devices, problems that cost nothing, and who still runs."""

import os
import threading
from typing import Any

import numpy as np

from placement.cluster import Cluster, Device
from placement.graph import OpGraph
from placement.problem import Placement, Problem
from tests.problems import problem_on

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def pinned(count: int) -> Cluster:
    """So many devices even where there are fewer cores: results must not depend on it."""
    cores = [(CORES[i % len(CORES)],) for i in range(count)]
    return Cluster("tests", tuple(Device(f"cpu:{i}", "cpu", x) for i, x in enumerate(cores)))


TWO, THREE = pinned(2), pinned(3)


def problem_of(graph: OpGraph, cluster: Cluster = THREE, **options: Any) -> Problem:
    """Every operator takes 10 us on every device."""
    seconds = np.full((graph.num_ops, cluster.num_devices), 1e-5)
    return problem_on(graph, seconds, cluster=cluster, **options)


def random_placement(graph: OpGraph, seed: int, num_devices: int = 3, *phases: int) -> Placement:
    """int32 ``[N]``, or ``[phases, N]``: colocation groups anywhere."""
    groups = np.random.default_rng(seed).integers(0, num_devices, (*phases, graph.num_groups))
    return groups[..., graph.group].astype(np.int32)


def alive() -> list[str]:
    """The threads of runners that have not ended."""
    return [t.name for t in threading.enumerate() if t.name.startswith("placement-")]
