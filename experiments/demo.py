"""The whole path on this machine, in minutes: what `make demo` runs.

    python -m experiments.demo [--workload resnet50] [--out runs/demo] [--seconds 20]

Captures a model, measures every operator on every device, places it with baselines, with a GNN
policy that PPO trains on the spot and with a search that the released policy guides, runs every
placement for real in one pipelined runtime, compares them in one table, and exports the best as a
plan.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from placement import cli

if TYPE_CHECKING:
    from placement.problem import Problem, Solution

BASELINES = ("round_robin", "heft", "contiguous_dp", "random_search")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="resnet50", help="a name, or package.module:function")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    budget = "budget of each search, the policy and its training included"
    parser.add_argument("--seconds", type=float, default=20.0, help=budget)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved measurements")
    options = parser.parse_args(argv)
    # Workers bring their own threads; spinning ones of this process would only disturb them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        with cli.interruptible():
            demo(options.workload, options.out, options.seconds, options.rounds)
    except KeyboardInterrupt:
        print("\ninterrupted; what was finished is in", options.out, file=sys.stderr)
        sys.exit(130)


class Narrator:
    """A line for each step of the path, with the seconds since it began."""

    def __init__(self) -> None:
        self.console = Console(width=min(Console().width, 100), highlight=False)
        self.began, self.said = time.perf_counter(), 0.0

    def step(self, text: str) -> None:
        seconds = time.perf_counter() - self.began
        self.console.print(f"[dim]{seconds:5.0f} s[/dim]  {text}")

    def now_and_then(self, text: str, share: float | None = None) -> None:
        if time.perf_counter() - self.said > 4:
            self.said = time.perf_counter()
            self.step(f"   {text}")

    def planners_and_runs(self, text: str) -> None:
        """Each planner has its line, or one would seem to take the seconds of the next."""
        if ", placement " in text:
            self.now_and_then(text)
        else:
            self.step(f"   {text}")


def demo(workload: str, out: Path, seconds: float, rounds: int) -> None:
    """Every step of the path, each with a line of what it found."""
    narrator = Narrator()
    step = narrator.step
    step(f"[bold]1. capture[/bold] {workload} (loading PyTorch takes some seconds)")
    import torch

    from agents.planner import PolicyPlanner, released
    from experiments.runs import threads
    from placement import planners
    from placement.capturing import capture
    from placement.cluster import Cluster
    from placement.costs.measure import measure
    from placement.executor import Executor
    from placement.plan import load_plan, make_plan, parameters_of
    from placement.problem import Problem
    from placement.program import split_inputs
    from placement.report import table
    from placement.runs.compare import compare
    from placement.search.budget import Budget
    from placement.workloads import load

    module, inputs = load(workload)
    graph = capture(module, inputs, name=workload)
    mib = graph.param_bytes.sum() / 2**20
    step(f"   {graph.num_ops} operators, {len(graph.edges)} edges, {mib:.0f} MiB of parameters")

    cluster = Cluster.detect()
    devices = ", ".join(cluster.device_names)
    step(f"[bold]2. measure[/bold] every operator on {devices}")
    profile = measure(graph, cluster, repeats=8, progress=narrator.now_and_then)
    profile.save(out / "profile.npz")
    totals = zip(cluster.device_names, 1e3 * profile.compute_s.sum(axis=0), strict=True)
    step("   one inference alone: " + ", ".join(f"{d} {ms:.1f} ms" for d, ms in totals))

    step(
        f"[bold]3. place[/bold] with {', '.join(BASELINES)}, a GNN policy trained with PPO and a "
        f"search guided by the released policy (budget {seconds:.0f} s each), [bold]4. run[/bold] "
        "each for real"
    )
    problem = Problem(graph, cluster, profile, objective="period", num_microbatches=16)
    methods = {name: planners.load(name) for name in BASELINES}
    methods["policy"] = PolicyPlanner(mode="finetune", steps=1_000_000)
    # It was trained for latency; on periods it chooses as well as the hand-written score.
    methods["guided"] = PolicyPlanner(released("guided_search", "latency"))
    comparison = compare(
        {workload: problem},
        methods,
        out_dir=out,
        budget=Budget(seconds=seconds),
        executor=Executor,
        rounds=rounds,
        progress=narrator.planners_and_runs,
    )
    narrator.console.print()
    table.print_tables(table.tables(comparison))
    for (_, name, _), answer in comparison.solutions.items():
        drawn(out, f"{workload}, {name}", replace(problem, num_microbatches=8), answer)

    best = comparison.best(workload)
    solution = comparison.solutions.get((workload, best.planner, best.seed))
    assert solution is not None, "the best row has an answer"
    step(f"[bold]5. export[/bold] the best measured one ({best.planner}) and use it")
    parameters = parameters_of(methods.get(best.planner))
    named = {"planner": best.planner, "workload": workload}
    make_plan(problem, solution, parameters=parameters, **named).save(out / "plan.json")

    args, kwargs = split_inputs(inputs)
    bound = load_plan(out / "plan.json").bind(module, inputs)
    with threads(1), bound as runner, torch.inference_mode():
        torch.testing.assert_close(runner(*args, **kwargs), module(*args, **kwargs))
    step("   the plan, loaded from its file and bound to the module, computes the same numbers")
    console = narrator.console
    console.print(f"\nIn {out}: plan.json, compare.csv, compare.md, a picture per placement")
    console.print("(gantt-*.png) and a trace of it for https://ui.perfetto.dev (trace-*.json).")
    command = Path(sys.executable).with_name("placement")
    console.print(f"Next:  {os.path.relpath(command)} show {out}/plan.json", style="bold")
    console.print(f"       {os.path.relpath(command)} run {out}/plan.json", style="bold")


def drawn(out: Path, title: str, problem: Problem, answer: Solution) -> None:
    """The picture and the trace of a placement, predicted and measured."""
    from placement.executor import Executor
    from placement.report import gantt, trace
    from placement.simulator import simulate

    predicted = simulate(problem, answer.placement)
    measured = Executor(problem).run(answer.placement)
    file = title.rpartition(", ")[2].replace(":", "-")
    gantt.plot_gantt(predicted, measured, out / f"gantt-{file}.png", title)
    both = {"predicted": predicted, "measured": measured}
    trace.write_trace(out / f"trace-{file}.json", both, problem.graph.op_name)


if __name__ == "__main__":
    main()
