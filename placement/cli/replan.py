"""``placement replan``: plan again without devices that are gone."""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from placement import cli

if TYPE_CHECKING:
    from pathlib import Path

    from placement.cluster import Cluster
    from placement.graph import OpGraph
    from placement.plan import Plan
    from placement.problem import Problem

EXAMPLE = """examples:
  placement replan plan.json --without cpu:1 --out smaller.json
  placement replan plan.json --without cuda:2,cuda:3 --model problem.json --json

The fastest way is a problem file, made while all devices were there (placement import): nothing is
captured and nothing is looked up. The machine-readable result (--json) is one object with the keys
planner, objective, without, value_s, was_value_s, lower_bound_s, seconds, evaluations, feasible,
assignment and moved.

Exit code 1: nothing that fits on the devices that are left was found.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="plan.json")
    parser.add_argument(
        "--without",
        required=True,
        action="append",
        metavar="DEVICE[,DEVICE]",
        help="what is gone; may be repeated",
    )
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help="what was planned, unless a shipped model: package.module:function or a problem file",
    )
    parser.add_argument("--profile", metavar="FILE", help="measured times; default: the saved ones")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="budget of the search (default 0.5)"
    )
    parser.add_argument("--evaluations", type=int, metavar="K", help="budget of the search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="FILE", help="write the new plan")


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from placement.cli.plan import check_budget, decision
    from placement.plan import load_plan, make_plan, proved_bound_s, whole_modules
    from placement.replan import NothingFits, replan

    check_budget(args)
    plan = load_plan(args.plan)
    cli.check_outputs(args.out)
    without = [name.strip() for text in args.without for name in text.split(",") if name.strip()]
    if not without:
        raise cli.UsageError(
            f"--without names no device; devices are {[d.name for d in plan.cluster.devices]}"
        )
    with cli.progress() as report, cli.says_when_compiling():
        problem = problem_of(plan, args, report)
        old = plan.placement(problem.graph, problem.cluster)
        report("planning", None)
        try:
            budget = {name: getattr(args, name) for name in ("seconds", "evaluations", "seed")}
            left, solution = replan(problem, old, without, **budget)
        except NothingFits as error:
            if args.json:
                cli.print_json({"feasible": False, "without": without, "why": str(error)})
            cli.say(str(error))
            return cli.NO
    feasible, stats = isfinite(solution.value_s), solution.stats
    devices = left.cluster.device_names
    on = [devices[d] for d in np.atleast_2d(solution.placement)[0].tolist()]
    if args.json:
        facts = {"was_value_s": plan.predicted.value_s}
        facts |= {"lower_bound_s": proved_bound_s(left, solution), "seconds": stats["seconds"]}
        answer = {"planner": "replan", "objective": left.objective, "without": without}
        cli.print_json(answer | decision(left, solution, **facts) | {"moved": stats["moved"]})
    if not feasible:
        cli.say(f"on {list(devices)}: {stats['infeasible']}")
        return cli.NO
    unit = left.objective.unit
    now, before = (cli.seconds(x, unit) for x in (solution.value_s, plan.predicted.value_s))
    cli.say(
        f"without {', '.join(without)}: {left.objective} {now}, before {before}; "
        f"{stats['moved']} of {left.num_ops} operators moved; {stats['seconds']:.2f} s"
    )
    if plan.order is not None:
        cli.say("the plan had an order of all micro-batches; the new one runs by priority")
    if args.json and not args.out:
        return cli.OK
    parameters = {"was": plan.planner.name, "without": without}
    new = make_plan(left, solution, planner="replan", parameters=parameters)
    # A problem file knows less of the same graph.
    where = whole_modules(plan.graph.modules, on) if plan.graph.modules else new.device_map
    new = new.model_copy(update={"graph": plan.graph, "device_map": where})
    if not args.json:
        from placement.cli.show import show_plan

        show_plan(new)
    if args.out:
        new.save(args.out)
        cli.say(f"plan written to {args.out}")
    return cli.OK


class NotMeasured(cli.UsageError):
    """There is no profile of what was planned."""


def problem_of(plan: Plan, args: argparse.Namespace, report: cli.Progress) -> Problem:
    """The problem that ``plan`` decided, on the plan's devices.

    Raises:
        UsageError: nobody says what was planned.
        NotMeasured: there is no profile of it.
    """
    from placement.cli.show import shipped, unnamed
    from placement.problem import Problem
    from placement.profile import Profile

    spec = args.model or shipped(plan)
    if spec is None:
        raise cli.UsageError(unnamed(plan, "name the file with --model FILE, or the function"))
    if cli.is_file(spec):
        return problem_in_file(plan, args, spec)
    cluster = plan.cluster.build()
    profile = None if args.profile is None else Profile.load(args.profile)
    graph = cli.capture_workload(spec, report, plan.graph.mode, plan.graph.optimizer)
    if profile is None:
        path = cached_profile(graph, cluster)
        if not path.exists():
            raise NotMeasured(
                f"no profile of {spec} with the plan's devices in the cache ({path}): name one "
                "with --profile, or a problem file with --model (placement import), or measure: "
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


def problem_in_file(plan: Plan, args: argparse.Namespace, path: str) -> Problem:
    """The problem in a file, with what ``plan`` decided and on its devices.

    Raises:
        UsageError: a profile is named, and a problem file has its own.
    """
    from placement import importers
    from placement.replan import remaining

    if args.profile is not None:
        raise cli.UsageError("--profile is for models; a problem file has its own")
    problem = replace(importers.load(path), **decided(plan))
    planned = {d.name for d in plan.cluster.devices}
    # Replanned before: the file still has what was gone then.
    gone = [name for name in problem.cluster.device_names if name not in planned]
    return remaining(problem, gone) if gone else problem


def decided(plan: Plan) -> dict[str, Any]:
    """What a plan says about its problem beside graph, devices and times."""
    names = ("objective", "num_microbatches", "max_in_flight", "second_j")
    return {name: getattr(plan, name) for name in names} | {"max_phases": len(plan.assignments)}
