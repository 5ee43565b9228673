"""The same work on another machine: devices missing, faster or slower, links wider or narrower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.problem_set import EnvError
from placement.cluster import Cluster, Link, between, with_hosts
from placement.problem import Problem


@dataclass(frozen=True)
class Perturbation:
    """What may happen to a cluster between two episodes (domain randomisation).

    Machines are drawn beforehand, ``variants`` for each problem, and episodes choose among
    them: what depends on the machine alone (features, references) is computed once.

    Attributes:
        drop: probability that a device is missing. Two always stay, and so does a device
            without which some group could not run, or the parameters would not fit.
        speed: standard deviation of the logarithm of each device's factor of speed.
        bandwidth: the same for the bandwidth, one factor for all links of a machine.
        variants: machines drawn for each problem, besides its own; 0: none.
        seed: of the draws.

    Raises:
        EnvError: ``variants`` below 0.
    """

    drop: float = 0.25
    speed: float = 0.3
    bandwidth: float = 0.7
    variants: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.variants < 0:
            raise EnvError(f"variants = {self.variants} must be at least 0")

    def __call__(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems, then ``variants`` of each."""
        rng = np.random.default_rng(self.seed)
        drawn = [self.draw(p, rng) for p in problems for _ in range(self.variants)]
        return [*problems, *drawn]

    def draw(self, problem: Problem, rng: np.random.Generator) -> Problem:
        """``problem`` on one machine drawn with ``rng``."""
        devices = _staying(problem, self.drop, rng)
        each = rng.normal(0.0, self.speed, len(devices))
        bandwidth = float(np.exp(rng.normal(0.0, self.bandwidth)))
        profile, cluster = problem.profile, problem.cluster
        chosen = tuple(cluster.devices[d] for d in devices)
        names = tuple(d.name for d in chosen)

        def wider(links: Sequence[Link]) -> tuple[Link, ...]:
            return tuple(
                replace(x, bandwidth_bytes_per_s=x.bandwidth_bytes_per_s * bandwidth)
                for x in between(links, names)
            )

        made = Cluster(cluster.name, chosen, wider(cluster.links))
        speed = np.exp(each[made.worker])  # one that streams is as fast as what it streams for
        taken = profile.take(devices, names, wider(profile.links))

        def over(seconds: NDArray[np.float64] | None, by: Any) -> Any:
            return None if seconds is None else seconds / by

        return replace(
            problem,
            cluster=made,
            profile=replace(
                taken,
                compute_s=over(taken.compute_s, speed),
                spread_s=over(taken.spread_s, speed),
                loaded_s=over(taken.loaded_s, speed),
                transfer_s=over(taken.transfer_s, bandwidth),
                io_s=over(taken.io_s, bandwidth),
            ),
        )


def _staying(problem: Problem, drop: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Devices that stay, int64, ascending."""
    runs = np.isfinite(problem.group_compute_s)
    stays = np.ones(problem.num_devices, bool)
    for d in rng.permutation(problem.num_devices):
        if rng.random() >= drop or stays.sum() <= 2:
            continue
        others = [x for k, x in enumerate(problem.cluster.devices) if stays[k] and k != d]
        there = {x.name for x in with_hosts(others)}
        left = np.array([name in there for name in problem.cluster.device_names])
        room = problem.memory_bytes[left].sum(dtype=np.float64)
        enough = room >= 1.5 * problem.graph.param_bytes.sum() and left.sum() >= 2
        if enough and runs[:, left].any(axis=1).all():
            stays = left
    return np.flatnonzero(stays)
