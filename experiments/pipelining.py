"""Does pipelining over two one-core devices pay?

    python -m experiments.pipelining [WORKLOAD ...] [--rounds 7]

Throughput of the planned split over two one-core devices against one of them, and against
plain PyTorch with both cores, at batch 1: interleaved in one process, medians of the rounds.
Writes ``experiments/results/pipelining.md``, ``.json`` and ``.png``: the first workload's pipeline,
predicted and measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.runs import in_turns, measured_problem, seconds_per_item, timed
from experiments.study import Option, Options, Study, run
from experiments.tables import Column
from placement import planners
from placement.capturing import capture
from placement.executor import Executor, Runner
from placement.program import split_inputs
from placement.report import gantt
from placement.simulator import simulate
from placement.workloads import load

WAYS = ("one device", "planned", "contiguous_dp", "plain, 1 thread", "plain, 2 threads")


def rows(options: Options) -> Iterator[dict[str, Any]]:
    for workload in options.workloads:
        picture = options.out / "pipelining.png" if workload == options.workloads[0] else None
        yield row(workload, options.rounds, options.count, picture)


def row(workload: str, rounds: int, count: int, picture: Path | None = None) -> dict[str, Any]:
    """One of them; ``picture``: of the planned placement, predicted and measured."""
    module, inputs = load(workload)
    args, kwargs = split_inputs(inputs)
    problem = measured_problem(capture(module, inputs, name=workload))
    graph = problem.graph
    plans = {
        way: planners.load(name)(problem).placement
        for way, name in zip(WAYS, ("single_device", "best_of", "contiguous_dp"), strict=False)
    }
    runners = {
        way: Runner(graph, problem.cluster, plan, priority=problem.priority)
        for way, plan in plans.items()
    }

    def plain(threads: int) -> Iterator[Any]:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            for _ in range(count):
                yield module(*args, **kwargs)

    streams: dict[str, Callable[[], Any]] = {
        way: partial(runner.stream, [inputs] * count) for way, runner in runners.items()
    } | {way: partial(plain, k) for k, way in enumerate(WAYS[3:], 1)}
    seconds = in_turns({w: partial(seconds_per_item, s, count) for w, s in streams.items()}, rounds)
    if picture is not None:
        few = replace(problem, num_microbatches=8)
        measured = Executor(few).run(plans["planned"])
        predicted = simulate(few, plans["planned"])
        gantt.plot_gantt(predicted, measured, picture, f"{workload}, planned by best_of")
    one, ours, both = (seconds[w] for w in ("one device", "planned", "plain, 2 threads"))
    return {
        "workload": workload,
        "ops": graph.num_ops,
        **{way: float(np.median(s)) for way, s in seconds.items()},
        "against one device": float(np.median(one / ours)),
        "against plain": float(np.median(both / ours)),
        "predicted": simulate(problem, plans["planned"]).period_s,
        "dispatch share": _dispatch_s() * graph.num_ops / float(np.median(one)),
    }


def _dispatch_s() -> float:
    """Seconds of calling an operator without work."""
    x, call = torch.zeros(1), torch.ops.aten.relu.default
    with torch.inference_mode():
        return timed(lambda: [call(x) for _ in range(2000)]) / 2000


STUDY = Study(
    name="pipelining",
    rows=rows,
    options={
        "workloads": Option(("resnet50", "bert_base", "bert_tiny_hidden128"), word=True),
        "rounds": 7,
        "count": Option(16, "items of a round"),
    },
    columns=(
        Column("workload", "workload"),
        Column("ops", "ops"),
        *(Column(way, way, 1, 1e3, " ms") for way in WAYS),
        *(Column(x, x, 2, unit="x") for x in ("against one device", "against plain")),
        Column("predicted", "predicted", 1, 1e3, " ms"),
        Column("dispatch share", "dispatch share", 0, 100, " %"),
    ),
    facts=lambda options: {"rounds": options.rounds},
)
main = partial(run, (STUDY,))

if __name__ == "__main__":
    sys.exit(main())
