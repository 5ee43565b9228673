"""Ways to carry a plan out, checked and timed side by side: what all modes of `run` share."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement import cli

if TYPE_CHECKING:
    from placement.executor import Runner
    from placement.plan import Measured, Plan, Spread

ROUNDS = 5


Way = tuple[Callable[[], Any], Callable[[], float]]  # a single call, and seconds of a period


def keep(
    args: argparse.Namespace, plan: Plan, measured: Measured, trace: dict[str, Any] | None
) -> None:
    """What ``--out``, ``--wandb`` and ``--trace`` ask for: the plan as measured, the trace."""
    plan = plan.model_copy(update={"measured": measured})
    if args.out:
        plan.save(args.out)
        cli.say(f"plan written to {args.out}")
    if args.wandb:
        mirror(args.wandb, Path(args.plan).parent, plan)
    if trace is not None:
        cli.write_trace(args.trace, trace)


def mirror(project: str, folder: Path, plan: Plan) -> None:
    """A W&B run of type ``run``: predicted and measured seconds, and the plan as an artifact."""
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
        WandbTracker(project).run(folder.resolve(), config, "run") as run,
    ):
        run.log(figures)
        plan.save(Path(temporary) / "plan.json")
        name = f"plan-{plan.graph.name}"
        run.artifact(name, "plan", Path(temporary) / "plan.json", aliases=["measured"])


def model_of(plan: Plan, model: str | None) -> str:
    """The workload to load. A plan is data: the code that it names runs only if it is ours."""
    from placement import workloads

    named = plan.graph.workload
    if model is not None:
        return model
    if named is None:
        raise cli.UsageError(
            "the plan was made from a problem file, or from a workload with options: there is no "
            "model to run; if there is one: --model package.module:function"
        )
    if named not in workloads.names():
        raise cli.UsageError(f"the plan is of a model of yours: name it with --model {named}")
    return named


def difference(runner: Runner, module: Any, inputs: Any) -> str:
    """How the runner's outputs differ from the plain module's; empty if they are close.

    The plain module runs with the threads of the devices: how a sum is split over threads
    decides its last digits, and many layers make more of them.
    """
    import torch

    from placement.executor.equality import module_difference
    from placement.program import split_inputs

    args, kwargs = split_inputs(inputs)
    was_training = [m for m in module.modules() if m.training]
    threads = torch.get_num_threads()
    module.eval()
    try:
        torch.set_num_threads(max(d.threads for d in runner.cluster.devices))
        return module_difference(runner, module, args, kwargs, runner.cluster)
    finally:
        torch.set_num_threads(threads)
        for m in was_training:
            m.training = True


def first_difference(runner: Runner, inputs: Any) -> str:
    """The first operator whose results on its device are not those of a plain call of it."""
    from dataclasses import replace

    import numpy as np
    from torch.utils import _pytree as pytree

    from placement.capturing.numerics import difference
    from placement.executor import Runner
    from placement.program import Ref, run_program, split_inputs

    graph, program = runner.graph, runner.graph.program
    assert program is not None
    tensors = [t for step in program.steps for t in step.outputs]
    leaves, tree = tuple(map(Ref, tensors)), pytree.tree_structure(tensors)
    every = replace(program, output_leaves=leaves, out_tree=tree)
    flat = program.flatten_inputs(*split_inputs(inputs))
    expected = run_program(every, flat)
    shown = replace(graph, program=every, output_tensor=np.array(sorted(tensors), np.int32))
    with Runner(shown, runner.cluster, runner.placement) as watched:
        (got,) = watched.stream_tensors([flat])
    for t, a, b in zip(tensors, got, expected, strict=True):
        wrong = difference([a.cpu()], [b.cpu()])
        if wrong:
            n = int(graph.tensor_src[t])
            device = runner.cluster.device_names[runner.placement[n]]
            return (
                f"; first in operator {graph.op_name[n]!r} (module {graph.op_module[n]!r}) on "
                f"{device!r}, whose {wrong}"
            )
    return "; no operator by itself differs by more than rounding, which its successors enlarge"


def alone(plan: Plan, runner: Runner, device: str) -> Runner:
    """The same program on one device."""
    import numpy as np

    from placement.executor import Runner

    placement = np.full(runner.graph.num_ops, runner.cluster.index(device), np.int32)
    options: Any = {"max_in_flight": plan.max_in_flight, "priority": plan.priority}
    return Runner(runner.graph, runner.cluster, placement, **options)


def calls(one: Runner, many: Runner, inputs: Any, batches: int) -> Way:
    """A single call of ``one``, and the period of a stream through ``many``."""
    import numpy as np

    from placement.program import split_inputs
    from placement.timeline import steady_period

    args, kwargs = split_inputs(inputs)

    def often() -> float:
        began = time.perf_counter()
        ends = [time.perf_counter() - began for _ in many.stream([inputs] * batches)]
        return float(steady_period(np.array(ends)))

    return lambda: one(*args, **kwargs), often


def measure(ways: dict[str, Way], report: cli.Progress) -> dict[str, Measured]:
    """Latency of single calls, and periods; the ways to run take turns, round by round."""
    import platform

    import numpy as np

    from placement.plan import Measured, Spread, now

    latency: dict[str, list[float]] = {name: [] for name in ways}
    periods: dict[str, list[float]] = {name: [] for name in ways}
    for r in range(-1, ROUNDS):  # round -1 warms up
        for name, (once, often) in ways.items():
            report(f"measuring, round {max(r, 0) + 1} of {ROUNDS}", max(r, 0) / ROUNDS)
            one = float(np.median([timed(once) for _ in range(3)]))
            many = often()
            if r >= 0:
                latency[name].append(one)
                periods[name].append(many)
    facts: dict[str, Any] = {"n": ROUNDS, "when": now(), "machine": platform.node()[:200]}
    spreads = {n: (Spread.of(latency[n]), Spread.of(periods[n])) for n in ways}
    return {n: Measured(latency_s=a, period_s=b, **facts) for n, (a, b) in spreads.items()}


def recorded_trace(plan: Plan, module: Any, inputs: Any, batches: int) -> dict[str, Any]:
    """The measured timeline of one more run, with everything recorded."""
    from placement.cli.show import costless_problem
    from placement.executor.executor import measured_timeline

    with plan.bind(module, inputs, in_order=True, record=True) as runner:
        for _ in runner.stream([inputs] * batches):
            pass
        first = runner.next_batch
        for _ in runner.stream([inputs] * batches):
            pass
        problem = costless_problem(runner.graph, runner.cluster)
        timeline = measured_timeline(problem, runner, first, batches)
        return timeline.to_trace(runner.graph.op_name)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def show(
    plan: Plan,
    measured: dict[str, Measured],
    single: str | None,
    *,
    as_json: bool,
    compared: bool = True,
) -> None:
    """What was measured; ``compared``: and found equal to the plain module's results."""
    mine, other = measured["plan"], measured.get("single")
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
