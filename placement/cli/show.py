"""``placement show | diff | validate | schema``: look at plans; torch only where a model is."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from placement import cli

if TYPE_CHECKING:
    from placement.cluster import Cluster
    from placement.graph import OpGraph
    from placement.plan import Plan
    from placement.problem import Problem

EXAMPLE = """example:
  placement show plan.json
"""
DIFF_EXAMPLE = """example:
  placement diff before.json after.json
"""
VALIDATE_EXAMPLE = """examples:
  placement validate plan.json
  placement validate plan.json --model my_package.my_module:my_function --cluster cluster.yaml

Exit code 1: the plan is not valid; every reason is listed.
"""
SCHEMA_EXAMPLE = """example:
  placement schema > plan.schema.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="plan.json")


def configure_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="a.json")
    parser.add_argument("b", metavar="b.json")


def configure_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="plan.json")
    parser.add_argument("--model", metavar="package.module:function", help="check it against this")
    parser.add_argument("--cluster", metavar="FILE", help="check it against these devices (YAML)")


def configure_schema(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    from placement.plan import load_plan

    plan = load_plan(args.plan)
    if args.json:
        cli.print_json(plan.model_dump(mode="json"))
    else:
        show_plan(plan)
    return cli.OK


def run_schema(args: argparse.Namespace) -> int:
    from placement.plan import schema_text

    print(schema_text(), end="")
    return cli.OK


def show_plan(plan: Plan) -> None:
    """Summary: the values, and what each device does."""
    from placement.plan.showing import tables

    values, devices, _ = tables(plan)
    cli.print_table(*values)
    if plan.doubt:
        cli.say(plan.doubt)
    if plan.predicted.period_s > 1.01 * plan.predicted.latency_s:  # or they look equal
        cli.say(
            "an item of a stream takes longer than a call: threads let items in and hand results "
            "out beside the operators, and devices slow each other down; larger batches take less"
        )
    if plan.predicted.energy_j is not None and plan.cluster.build().power_source == "declared":
        print("energy: from declared watts, not from measured ones")
    cli.print_table(*devices)
    print(
        f"graph {plan.graph.fingerprint[:12]}, cluster {plan.cluster.fingerprint[:12]}, "
        f"made {plan.provenance.created}"
    )


def run_diff(args: argparse.Namespace) -> int:
    from placement.plan import load_plan

    a, b = load_plan(args.a), load_plan(args.b)
    was_on, is_on = _wheres(a), _wheres(b)
    same = a.graph.fingerprint == b.graph.fingerprint
    two_models = not same and a.graph.name != b.graph.name
    both = [] if two_models else [op for op in was_on if op in is_on]
    moved = {op: [was_on[op], is_on[op]] for op in both if was_on[op] != is_on[op]}
    alone = len({*was_on} ^ {*is_on})
    names = ("num_microbatches", "max_in_flight", "second_j")
    pairs = {"model": [a.graph.name, b.graph.name], "planner": [a.planner.name, b.planner.name]}
    pairs["objective"] = [a.goal, b.goal]
    pairs |= {name: [getattr(a, name), getattr(b, name)] for name in names}
    pairs["graph"] = [p.graph.fingerprint[:12] for p in (a, b)]
    pairs["cluster"] = [p.cluster.fingerprint[:12] for p in (a, b)]
    settings = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    metrics: dict[str, list[float | None]] = {
        f"predicted {what}": [getattr(p.predicted, f"{what}_s") for p in (a, b)]
        for what in ("latency", "period")
    }
    for what in ("latency", "period"):
        pair = [p.measured_s(what) for p in (a, b)]
        if any(x is not None for x in pair):
            metrics[f"measured {what}"] = pair
    if args.json:
        answer = {"moved": moved, "settings": settings, "metrics_s": metrics}
        cli.print_json(answer | ({"two_models": True} if two_models else {}))
        return cli.OK
    rows = [
        [what, *("-" if x is None else cli.seconds(x) for x in pair), "" if two_models else by]
        for what, pair in metrics.items()
        for was, now in [pair]
        for by in [f"{now / was - 1:+.1%}" if was and now is not None else "-"]
    ]
    rows += [[key, str(was), str(now), ""] for key, (was, now) in settings.items()]
    cli.print_table("what differs", ["", "a", "b", "change"], rows)
    if moved:
        shown = [
            [op, was or "-", now or "-"]
            for op, (was, now) in list(moved.items())[: cli.LIMITS.rows]
        ]
        more = len(moved) - len(shown)
        cli.print_table(
            f"{cli.count(len(moved), 'operator')} moved"
            + (f", the first {cli.LIMITS.rows}" if more else ""),
            ["operator", "a", "b"],
            shown,
        )
    elif two_models:
        print(
            f"these are plans of two models ({a.graph.name}, {b.graph.name}): their values are not "
            "of the same work, and their operators are not compared"
        )
    else:
        print("every operator is on the same device")
    if alone and not two_models:
        print(f"{cli.count(alone, 'operator')} of one of the graphs not in the other")
    return cli.OK


def _wheres(plan: Plan) -> dict[str, str]:
    """Operator -> its device, or those of the phases one after another."""
    phases = plan.assignments
    return {op: " / ".join(on[op] for on in phases) for op in plan.assignment}


def run_validate(args: argparse.Namespace) -> int:
    from placement.plan import read_plan
    from placement.plan.checking import order_failures

    plan = read_plan(args.plan)
    failures, notes = plan.inconsistencies(), []
    if not failures:
        model = args.model or shipped(plan)
        if model is None:
            notes.append(f"not checked against its model: {unnamed(plan)}")
        else:
            with cli.progress() as report:
                mode, optimizer = plan.graph.mode, plan.graph.optimizer
                graph = plan.cut(cli.capture_workload(model, report, mode, optimizer))
            cluster = plan.cluster.build()
            failures += plan.graph_differences(graph) or order_failures(plan, graph, cluster)
        if args.cluster:
            failures += plan.cluster_differences(cli.cluster_of(args.cluster))
        missing = plan.missing_devices()
        if missing:
            more = f" (and {len(missing) - 1} more devices)" if len(missing) > 1 else ""
            notes.append(f"this machine cannot run it: {missing[0]}{more}")
    if args.json:
        cli.print_json({"valid": not failures, "failures": failures, "notes": notes})
    else:
        for line in failures:
            print(f"- {line}")
        for line in notes:
            cli.say(line)
        verdict = f"not valid, {cli.count(len(failures), 'failure')}" if failures else "valid"
        print(f"{args.plan}: {verdict}")
    return cli.NO if failures else cli.OK


def shipped(plan: Plan) -> str | None:
    """The plan's workload if it is one of ours: code that a plan names is not run otherwise."""
    from placement import workloads

    return plan.graph.workload if plan.graph.workload in workloads.names() else None


def unnamed(plan: Plan, remedy: str = "there is no model, unless you name the function") -> str:
    """What to type where a plan does not say what it is of, or says what is not ours."""
    if plan.graph.workload:
        model = shlex.quote(plan.graph.workload)
        return f"the plan is of a model of yours: name it with --model {model}"
    return (
        f"the plan was made from a problem file, or from a workload with options: {remedy} that "
        "makes the model with --model package.module:function"
    )


def costless_problem(graph: OpGraph, cluster: Cluster) -> Problem:
    """The problem for what asks only about graph and devices."""
    import numpy as np

    from placement.problem import Problem
    from placement.profile import Profile

    nothing: Any = np.zeros((graph.num_ops, cluster.num_devices))
    return Problem(graph, cluster, Profile(cluster.device_names, nothing, nothing))
