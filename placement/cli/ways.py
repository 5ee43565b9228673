"""What all modes of `run` share: which model, how it is measured, what is kept and shown."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from placement import cli
from placement.runs.ways import Way, alone, calls, difference, measure, one_by_one

if TYPE_CHECKING:
    from placement.plan import Measured, Plan, Spread
    from placement.timeline import Timeline


class Differs(ValueError):
    """Results are not those of the plain module; the message says where."""


class Work(NamedTuple):
    """What inference and training do each in their own way; a runner is a ``Trainer`` there.

    ``make`` takes ``in_order`` and ``record`` as ``Plan.bind``. ``difference`` says how a runner's
    results differ from the plain module's, or nothing; None: nobody can tell. ``way`` is how a
    runner is measured, ``alone`` the same on one device, ``run`` all micro-batches once.
    """

    make: Callable[..., Any]
    difference: Callable[[Any], str] | None
    way: Callable[[Any], Way]
    alone: Callable[[Any, str], Any]
    run: Callable[[Any], Any]


def inference(plan: Plan, make: Any, module: Any, inputs: Any, batches: int) -> Work:
    """``make`` as in ``Work``; without a module nothing is compared."""
    return Work(
        make,
        None if module is None else lambda runner: difference(runner, module, inputs),
        lambda runner: calls(runner, runner, inputs, batches),
        partial(alone, plan),
        lambda runner: list(runner.stream([inputs] * batches)),
    )


def carry_out(
    args: argparse.Namespace, plan: Plan, batches: int, work: Work, report: cli.Progress
) -> int:
    """Compare, measure, and record a trace; show and write what ``args`` ask for.

    Runners come one after another, as ``turns`` has them: other ranks can serve one at a time.
    The best device alone takes turns with each that is measured. The exit code: 0.

    Raises:
        Differs: the results are not those of the plain module.
    """
    single = plan.fallback.device if args.against_single_device and plan.fallback else None
    measured: dict[str, Measured] = {}
    trace, op_name, compared = None, (), False
    for in_order, record in turns(args, plan):
        with ExitStack() as runners:
            runner = runners.enter_context(work.make(in_order=in_order, record=record))
            if record:
                report("recording a trace", None)
                recorded = getattr(runner, "runner", runner)
                trace, op_name = (
                    trace_of(recorded, partial(work.run, runner)),
                    recorded.graph.op_name,
                )
                continue
            if not measured and work.difference and not runner.graph.program.is_random:
                compared = True
                if wrong := work.difference(runner):
                    if args.json:
                        cli.print_json({"numerics_equal": False, "difference": wrong})
                    whose = "plain PyTorch" if plan.graph.mode == "training" else "the plain module"
                    raise Differs(f"the results differ from those of {whose}: {wrong}")
            each = {"plan": runner}
            if single:
                each["single"] = runners.enter_context(work.alone(runner, single))
            ways = {name: work.way(one) for name, one in each.items()}
            for name, (once, often) in ways.items():  # one call at a time has no order to follow
                is_streamed = in_order or plan.order is None
                ways[name] = (lambda: None) if in_order else once, often if is_streamed else float
            short = any(device.streams for device in plan.cluster.devices)
            latest = one_by_one(ways, each, report) if short else measure(ways, report)
        if measured:
            what = "period_s" if in_order else "latency_s"
            new = {name: {what: getattr(one, what)} for name, one in latest.items()}
            latest = {name: one.model_copy(update=new[name]) for name, one in measured.items()}
        measured = latest
    from placement.report.trace import write_trace

    plan = plan.model_copy(update={"measured": measured["plan"]})
    if args.out:  # files come before talk: whoever reads that may have gone
        cli.save_plan(plan, args.out)
    if trace is not None:
        write_trace(args.trace, [trace], op_name)
    show(plan, measured, as_json=args.json, compared=compared)
    if args.out:
        cli.say(f"plan written to {args.out}")
    if trace is not None:
        cli.say(cli.TRACE_WRITTEN.format(args.trace))
    if args.wandb:
        mirror(args.wandb, Path(args.plan), plan)
    return cli.OK


def turns(args: argparse.Namespace, plan: Plan) -> list[tuple[bool, bool]]:
    """``(in_order, record)`` of each runner that a run makes, on every rank.

    The first is compared: a call of inference has no order, a step of training has.
    """
    every = [(False, False), (True, False)][: 1 if plan.order is None else 2]
    return sorted(every, reverse=plan.graph.mode == "training") + [(True, True)] * bool(args.trace)


def mirror(project: str, path: Path, plan: Plan) -> None:
    """A W&B run of type ``run``: predicted and measured seconds, and the plan as an artifact.

    ``path``: of the plan, beside which the run lies if it is offline.
    """
    from placement.runs.tracking import WandbTracker

    figures = {}
    for what in ("latency", "period"):
        figures[f"{what}_s/predicted"] = getattr(plan.predicted, f"{what}_s")
        measured_s = plan.measured_s(what)
        if measured_s is not None:
            figures[f"{what}_s/measured"] = measured_s
    config = {"graph": plan.graph.name, "planner": plan.planner.model_dump()}
    with (
        tempfile.TemporaryDirectory() as temporary,
        WandbTracker(project, name=path.stem).run(path.resolve().parent, config, "run") as run,
    ):
        run.log(figures)
        plan.save(Path(temporary) / "plan.json")
        name = f"plan-{plan.graph.name}"
        run.artifact(name, "plan", Path(temporary) / "plan.json", aliases=["measured"])


def model_of(plan: Plan, model: str | None) -> str:
    """The workload to load. A plan is data: the code that it names runs only if it is ours."""
    from placement.cli.show import shipped, unnamed

    spec = model or shipped(plan)
    if spec is None:
        raise cli.UsageError(unnamed(plan))
    return spec


def trace_of(runner: Any, run: Callable[[], Any]) -> Timeline:
    """The timeline that a runner recorded of the second of two runs of all micro-batches."""
    from placement.cli.show import costless_problem
    from placement.executor.executor import measured_timeline

    run()
    first = runner.next_batch
    run()
    if hasattr(runner, "collect"):  # from other ranks
        runner.collect(first)
        cli.say(f"clocks of the ranks agree to {cli.seconds(runner.clock_error_s)} or better")
    problem = costless_problem(runner.graph, runner.cluster)
    count = runner.next_batch - first
    return measured_timeline(problem, runner, first, count)


def show(
    plan: Plan,
    measured: dict[str, Measured],
    *,
    as_json: bool,
    compared: bool = True,
) -> None:
    """What was measured; ``compared``: and found equal to the plain module's results."""
    mine, other = measured["plan"], measured.get("single")
    single = plan.fallback.device if plan.fallback else None
    predicted = {"latency": plan.predicted.latency_s, "period": plan.predicted.period_s}
    spreads: dict[str, Spread] = {what: getattr(mine, f"{what}_s") for what in predicted}
    alone_s: dict[str, float] = {}
    if other is not None:
        alone_s = {what: getattr(other, f"{what}_s").median_s for what in predicted}
    ratios = {what: took_s / spreads[what].median_s for what, took_s in alone_s.items()} or None
    if as_json:
        answer: dict[str, Any] = {"numerics_equal": True if compared else None}
        answer |= {"predicted": {f"{k}_s": v for k, v in predicted.items()}}
        answer |= {"measured": mine.model_dump(), "single_device": None}
        if other is not None:
            answer["single_device"] = {"device": single, "measured": other.model_dump()}
        cli.print_json(answer | {"speedup_over_single_device": ratios})
        return
    rows = []
    for what, spread in spreads.items():
        row = [
            what,
            cli.seconds(predicted[what]),
            f"{cli.seconds(spread.median_s)} ± {cli.seconds(spread.iqr_s / 2)}",
            f"{spread.median_s / predicted[what]:.2f}" if predicted[what] else "-",
        ]
        if ratios is not None:
            row += [cli.seconds(alone_s[what]), f"{ratios[what]:.2f}x"]
        rows.append(row)
    columns = ["", "predicted", "measured", "ratio"]
    if other is not None:
        columns += [f"{single} alone", "speed-up"]
    equal = "results equal the plain module's" if compared else "results are not compared"
    cli.print_table(f"{plan.graph.name}: {equal}", columns, rows)
    if ratios is not None and all({*phase.values()} == {single} for phase in plan.assignments):
        cli.say(f"the plan is {single} alone: what differs is chance")
    elif ratios is not None and ratios.get(plan.objective, 1.0) < 1.0:
        model = shlex.quote(plan.graph.workload or "MODEL")
        cli.say(f"{single} alone is faster; placement optimize {model} keeps whatever is fastest")
