"""Does pipelining over two one-core devices pay?

    python -m experiments.pipelining [WORKLOAD ...] [--rounds 7]

Throughput of the planned split over two one-core devices against one of them, and against
plain PyTorch with both cores, at batch 1: interleaved in one process, medians of the rounds.
Writes ``experiments/results/pipelining.md``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from experiments._study import RESULTS
from placement import planners
from placement.cluster import Cluster
from placement.executor import Runner
from placement.files import write_atomic
from placement.measure import measure, provenance
from placement.problem import Problem
from placement.program import capture, split_inputs
from placement.simulator import simulate
from placement.workloads import load

WORKLOADS = ("resnet50", "bert_base", "bert_tiny_hidden128")


def seconds_per_item(run: Callable[[], Any], count: int) -> float:
    """Steady seconds per item of a stream: the first quarter is not counted."""
    ends = []
    for _ in run():
        ends.append(time.perf_counter())
    skip = count // 4
    return (ends[-1] - ends[skip]) / (count - 1 - skip)


def study(workload: str, rounds: int, count: int) -> dict[str, Any]:
    """Median milliseconds per item of each way to run the workload."""
    module, inputs = load(workload)
    args, kwargs = split_inputs(inputs)
    graph = capture(module, inputs, name=workload)
    machine = Cluster.detect()
    cluster = Cluster("two", machine.devices[:2])
    profile = measure(graph, cluster, repeats=10)
    problem = Problem(graph, cluster, profile)
    answer = planners.load("best_of")(problem)
    two = planners.load("contiguous_dp")(problem)
    single = planners.load("single_device")(problem)

    def plain(threads: int) -> Callable[[], Any]:
        def run() -> Any:
            torch.set_num_threads(threads)
            with torch.inference_mode():
                for _ in range(count):
                    yield module(*args, **kwargs)

        return run

    def placed(placement: Any) -> Callable[[], Any]:
        runner = Runner(graph, cluster, placement, priority=problem.priority)
        return lambda: runner.stream([inputs] * count)

    ways = {
        "one device": placed(single.placement),
        "planned": placed(answer.placement),
        "contiguous_dp": placed(two.placement),
        "plain, 1 thread": plain(1),
        "plain, 2 threads": plain(2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for r in range(rounds + 1):
        for name, run in ways.items():
            took = seconds_per_item(run, count)
            if r > 0:  # the first round warms up
                seconds[name].append(took)
    result: dict[str, Any] = {name: float(np.median(v)) for name, v in seconds.items()}
    paired = {name: np.array(v) for name, v in seconds.items()}
    result["against one device"] = float(np.median(paired["one device"] / paired["planned"]))
    result["against plain"] = float(np.median(paired["plain, 2 threads"] / paired["planned"]))
    result["predicted"] = simulate(problem, answer.placement).period_s
    result["dispatch share"] = _dispatch_share(graph.num_ops, result["one device"])
    return {"workload": workload, "operators": graph.num_ops, **result}


def _dispatch_share(num_ops: int, seconds: float) -> float:
    """Share of the time that calling an operator without work would take anyway."""
    x = torch.zeros(1)
    call = torch.ops.aten.relu.default
    with torch.inference_mode():
        began = time.perf_counter()
        for _ in range(2000):
            call(x)
        each = (time.perf_counter() - began) / 2000
    return each * num_ops / seconds


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=16)
    options = parser.parse_args(argv)
    rows = [study(w, options.rounds, options.count) for w in options.workloads or WORKLOADS]
    names = [k for k in rows[0] if k not in ("workload", "operators")]
    lines = [
        "| workload | ops | " + " | ".join(names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for row in rows:
        cells = [
            f"{row[k]:.2f}x"
            if "against" in k
            else f"{100 * row[k]:.0f} %"
            if "share" in k
            else f"{1e3 * row[k]:.1f} ms"
            for k in names
        ]
        lines.append(f"| {row['workload']} | {row['operators']} | " + " | ".join(cells) + " |")
    table = "\n".join(lines) + "\n"
    facts = "\n".join(f"- {k}: {v}" for k, v in provenance(rounds=options.rounds).items())
    write_atomic(
        RESULTS / "pipelining.md",
        "# Seconds per item at batch 1, two one-core devices\n\n"
        f"`python -m experiments.pipelining`\n\n{table}\n{facts}\n",
    )
    print(table)


if __name__ == "__main__":
    main()
