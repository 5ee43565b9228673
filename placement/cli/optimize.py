"""``placement optimize``: capture, measure, plan and run a model, in one command."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from placement import cli

if TYPE_CHECKING:
    from placement.optimizing import OptimizedRunner

EXAMPLE = """examples:
  placement optimize my_package.my_module:my_function --out plan.json
  placement optimize resnet50 --objective latency --seconds 30

It measures four ways in turns: the best plan, the best device alone, and plain PyTorch with its
threads, as it is and by torch.compile. The first two are compiled too, where that is faster. It
says which is the fastest. The plan that --out writes is the faster of the first two: one device,
unless several are faster by 5 %, and by more than the measurements vary.

--seconds counts neither measuring operators for the first time nor compiling, which takes seconds
to minutes, once; --no-compiled leaves it out.

The machine-readable result (--json) has the keys kept (the fastest: plan, single, plain or
compiled), objective, planner, assignments (one, or one for each turn of replicas), predicted,
compiled (whether the plan is), pieces (whether it is of pieces), compiled_as (what torch.compile
did), and measured (of plan, plain, compiled unless it fails and, if the plan uses several devices,
single).
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = cli.adding(parser)
    add("workload", f"a model: {cli.A_MODEL}")
    add("--objective NAME", "period or latency (%(default)s)", default="period")
    add("--cluster FILE", "devices (YAML); default: this machine")
    add("--seconds", "most that planning takes (%(default)g)", float, default=10.0)
    add(
        "--compiled",
        "compile, however long it takes; or do not; default: for 12 times --seconds at most",
        action=argparse.BooleanOptionalAction,
    )
    add(
        "--pieces K",
        "also try operators in so many pieces, or shares as 0.25,0.75; 1: whole ones only; "
        "default: 2, for latency on cores that are alike",
    )
    add("--out FILE", "write the plan there")


def run(args: argparse.Namespace) -> int:
    cli.check_is_model(args.workload)
    cli.check_outputs(args.out)
    from placement.optimizing import check_options, optimize

    cluster = cli.cluster_of(args.cluster)
    check_options(args.objective, args.seconds)
    pieces = 1 if args.pieces == "1" else cli.pieces_of(args.pieces)
    with cli.progress() as report:
        report(f"loading {args.workload}", None)
        module, inputs = cli.load_workload(args.workload)
    with cli.says_if_busy(), cli.says_nothing_in_answers():
        options = {"workload": args.workload, "compiled": args.compiled}
        options["pieces"] = pieces
        runner = optimize(module, inputs, cluster, args.objective, args.seconds, **options)
    runner.close()
    plan = runner.plan
    if args.out:
        cli.save_plan(plan, args.out)
    if args.json:
        cli.print_json(
            {
                "kept": runner.kept,
                "objective": plan.objective,
                "planner": plan.planner.name,
                "assignments": plan.assignments,
                "predicted": plan.predicted.model_dump(),
                "compiled": plan.compiled,
                "pieces": plan.pieces is not None,
                "compiled_as": runner.compiled_as or None,
                "measured": {way: m.model_dump() for way, m in runner.measured.items()},
            }
        )
    else:
        _show(runner)
    if not args.out:
        cli.say("the plan is not kept: --out plan.json keeps it")
        return cli.OK
    cli.say(
        f"plan written to {args.out}; next: {cli.run_command(args.out, args.workload)}, "
        f"or in Python: placement.load_plan({args.out!r}).bind(module)"
    )
    return cli.OK


def _show(runner: OptimizedRunner) -> None:
    import torch

    from placement.optimizing import devices_of

    plan = runner.plan
    is_moved = plan.planner.name != runner.planned.planner.name
    single = devices_of(plan)[0] if is_moved else "the best device"
    cut = ", in pieces" if plan.pieces else ""
    on = f"the plan, on {' and '.join(devices_of(plan))}{cut}"
    names = {
        "plan": "the plan" if runner.kept != "plan" else on,
        "single": f"{single} alone",
        "plain": f"plain PyTorch, {cli.count(torch.get_num_threads(), 'thread')}",
        "compiled": runner.compiled_as,
    }
    rows = []
    for way, measured in runner.measured.items():
        spreads = (measured.period_s, measured.latency_s)
        rows.append([names[way], *(cli.seconds(s.median_s) for s in spreads if s)])
    columns = ["measured in turns", "between two results", "of a call"]
    cli.print_table(f"{plan.graph.name}: the fastest is {names[runner.kept]}", columns, rows)
