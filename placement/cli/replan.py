"""``placement plan --start`` and exports: the problem that a plan decided, found again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from placement import cli

if TYPE_CHECKING:
    from pathlib import Path

    from placement.cluster import Cluster
    from placement.graph import OpGraph
    from placement.plan import Plan
    from placement.problem import Problem


class NotMeasured(cli.UsageError):
    """There is no profile of what was planned."""


def problem_of(
    plan: Plan, model: str | None, profile_path: str | None, report: cli.Progress, **for_file: Any
) -> Problem:
    """The problem that ``plan`` decided, on the plan's devices.

    ``model``: what was planned, unless it is a shipped model: a function, or a problem file.
    ``for_file``: what a file does not say, as ``importers.load`` takes it.

    Raises:
        UsageError: nobody says what was planned.
        NotMeasured: there is no profile of it.
    """
    from placement.cli.show import shipped, unnamed
    from placement.problem import Problem
    from placement.profile import Profile

    spec = model or shipped(plan)
    if spec is None:
        raise cli.UsageError(unnamed(plan, "name the file with --model FILE, or the function"))
    if cli.is_file(spec):
        return problem_in_file(plan, profile_path, spec, **for_file)
    cluster = plan.cluster.build()
    profile = None if profile_path is None else Profile.load(profile_path)
    graph = plan.cut(cli.capture_workload(spec, report, plan.graph.mode, plan.graph.optimizer))
    if profile is None:
        path = cached_profile(graph, cluster)
        if not path.exists():
            raise NotMeasured(
                f"no profile of {spec} with the plan's devices in the cache ({path}): name one "
                "with --profile, or a problem file (placement import), or measure: "
                f"placement profile {spec}"
            )
        profile = Profile.load(path)
    return Problem(graph, cluster, profile.for_cluster(cluster), **decided(plan))


def cached_profile(graph: OpGraph, cluster: Cluster) -> Path:
    """Where the cache has these devices' times, or would have them.

    Devices that are described in terms of others, and those that are left of this machine's, were
    measured with all of this machine's.
    """
    from placement.cluster import Cluster
    from placement.costs.measure import cached_path

    here = Cluster.detect()
    of_here = {d.like or d.name for d in cluster.devices} <= set(here.device_names)
    paths = [cached_path(graph, c) for c in ([cluster, here] if of_here else [cluster])]
    return next((p for p in paths if p.exists()), paths[0])


def problem_in_file(plan: Plan, profile_path: str | None, path: str, **for_file: Any) -> Problem:
    """The problem in a file, with what ``plan`` decided and on its devices.

    Raises:
        UsageError: a profile is named, and a problem file has its own.
    """
    from placement import importers
    from placement.replan import remaining

    if profile_path is not None:
        raise cli.UsageError("--profile is for models; a problem file has its own")
    problem = replace(importers.load(path, **for_file), **decided(plan))
    planned = {d.name for d in plan.cluster.devices}
    # Replanned before: the file still has what was gone then.
    gone = [name for name in problem.cluster.device_names if name not in planned]
    return remaining(problem, gone) if gone else problem


def decided(plan: Plan) -> dict[str, Any]:
    """What a plan says about its problem beside graph, devices and times."""
    names = ("objective", "num_microbatches", "max_in_flight", "second_j")
    return {name: getattr(plan, name) for name in names} | {"max_phases": len(plan.assignments)}
