"""``placement plan``: let a planner decide."""

from __future__ import annotations

import argparse
import time
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from placement import cli
from placement.problem import OBJECTIVES, Planner, Problem, Solution

if TYPE_CHECKING:
    from placement.plan import Plan

EXAMPLE = """examples:
  placement plan resnet50 --planner local_search --seconds 10 --out plan.json
  placement plan bert_base --planner heft --objective latency --json

The machine-readable result (--json) is one object with the keys planner, objective, value_s,
lower_bound_s, seconds, evaluations, feasible, assignment.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload", help="a shipped model, your own package.module:function, or a problem file"
    )
    parser.add_argument("--planner", required=True, metavar="NAME", help="e.g. heft")
    parser.add_argument("--objective", choices=OBJECTIVES, default="period")
    parser.add_argument("--seconds", type=float, help="budget of the planner")
    parser.add_argument("--evaluations", type=int, help="budget of the planner")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--cluster", metavar="FILE", help="devices (YAML); default: this machine")
    parser.add_argument("--profile", metavar="FILE", help="measured before; default: the cache")
    parser.add_argument("--microbatches", type=int, default=32, metavar="M")
    parser.add_argument("--in-flight", type=int, default=4, metavar="W")
    parser.add_argument("--out", metavar="FILE", help="write the plan")
    parser.add_argument("--trace", metavar="FILE", help="write the predicted timeline")
    parser.add_argument("options", nargs="*", metavar="option=value", help="of the planner")


def run(args: argparse.Namespace) -> int:
    from placement.plan import make_plan, parameters_of

    planner = load_planner(args)
    with cli.progress() as report:
        problem = load_problem(args, report)
        report(f"planning with {args.planner}", None)
        began = time.perf_counter()
        solution = planner(problem)
        took = time.perf_counter() - began
    feasible = bool(np.isfinite(solution.value_s))
    plan = None
    if feasible:
        plan = make_plan(
            problem,
            solution,
            planner=args.planner,
            parameters=parameters_of(planner),
            workload=args.workload,
        )
    if args.json:
        cli.print_json(_answer(args, problem, solution, plan, took))
    elif plan is not None:
        from placement.cli.show import show_plan

        show_plan(plan)
    if plan is None:
        cli.say(f"no placement that fits was found: {solution.stats.get('infeasible', '')}")
        return cli.NO
    if args.out:
        plan.save(args.out)
        cli.say(f"plan written to {args.out}; next: placement run {args.out}")
    if args.trace:
        from placement.simulator import simulate

        timeline = simulate(problem, solution.placement)
        cli.write_trace(args.trace, timeline.to_trace(problem.graph.op_name))
    return cli.OK


def load_planner(args: argparse.Namespace) -> Planner:
    """The planner with its options; budget and seed go to planners that have such an option."""
    from placement import planners

    name = args.planner
    if name == "policy" and name not in planners.names():
        name = "agents.planner:PolicyPlanner"  # by name: this package must not import that one
    options = dict(_option(text) for text in args.options)
    kind = planners.find(name)
    known = {f.name for f in fields(kind)} if is_dataclass(kind) else set()
    for key in ("seconds", "evaluations", "seed"):
        value = getattr(args, key)
        if value is None:
            continue
        if key in known:
            options[key] = value
        else:
            cli.say(f"planner {args.planner!r} has no {key}: --{key} {value} is not used")
    return planners.load(name, **options)


def load_problem(args: argparse.Namespace, report: cli.Progress) -> Problem:
    """The problem of a workload on a cluster, measured where it has not been."""
    if cli.is_file(args.workload):
        raise cli.UsageError(f"{args.workload}: problem files cannot be read yet")
    from placement.measure import load_or_measure
    from placement.profile import Profile

    cluster = cli.cluster_of(args.cluster)
    graph = cli.capture_workload(args.workload, report)
    if args.profile is None:
        profile = load_or_measure(graph, cluster, progress=report)
    else:
        profile = Profile.load(args.profile).for_cluster(cluster)
    return Problem(
        graph,
        cluster,
        profile,
        objective=args.objective,
        num_microbatches=args.microbatches,
        max_in_flight=args.in_flight,
    )


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise cli.UsageError(f"{text!r}: planner options are given as option=value")
    return key, value


def _answer(
    args: argparse.Namespace,
    problem: Problem,
    solution: Solution,
    plan: Plan | None,
    took: float,
) -> dict[str, Any]:
    """What machines read; the keys are a contract."""
    bound = solution.lower_bound_s
    if plan is not None and plan.lower_bound_s is not None:
        bound = getattr(plan.lower_bound_s, problem.objective)
    devices = problem.cluster.device_names
    return {
        "planner": args.planner,
        "objective": problem.objective,
        "value_s": float(solution.value_s) if plan is not None else None,
        "lower_bound_s": bound,
        "seconds": float(solution.stats.get("seconds", took)),
        "evaluations": solution.stats.get("evaluations"),
        "feasible": plan is not None,
        "assignment": {
            op: devices[d]
            for op, d in zip(problem.graph.op_name, solution.placement.tolist(), strict=True)
        },
    }
