"""Does cutting a recurrent model along its time slices pay?

    python -m experiments.time_slices [--batches 1 8 32] [--rounds 7] [--search-seconds 20]

A stack of LSTM layers, many batches of sequences, two one-core devices: the grid cut in equal
parts (``time_slices``, and along time alone as published) against one of the devices, against
``contiguous_dp`` and a search, and against plain PyTorch with one and two threads, unrolled and
as the fused ``nn.LSTM``. All ways compute the same function (checked), interleaved in one
process; medians of the rounds. Also how well one time slice predicts the whole model. Writes
``experiments/results/time_slices.json`` and ``.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.runs import in_turns, measured_problem, seconds_per_item, threads
from experiments.study import Option, Options, Rows, Study, run
from experiments.tables import Column, table
from placement import planners
from placement.capturing import capture
from placement.costs.measure import measure
from placement.executor import Runner
from placement.problem import Problem
from placement.search.grid import extrapolate
from placement.simulator import simulate
from placement.workloads.lstm import UnrolledLSTM, lstm

PUBLISHED = "14-19 % faster than one device, up to 38 % for large batches"
SHORT_STEPS = 5  # of the model whose middle slice predicts the whole one
SIZE = ("layers", "steps", "hidden")


def fused(module: UnrolledLSTM) -> nn.LSTM:
    """The same layers as one ``nn.LSTM`` with the same weights."""
    hidden, layers = module.cells[0].from_state.in_features, len(module.cells)
    stack = nn.LSTM(hidden, hidden, layers, batch_first=True).eval()
    with torch.no_grad():
        for k, cell in enumerate(module.cells):
            for source, suffix in ((cell.from_input, "ih"), (cell.from_state, "hh")):
                getattr(stack, f"weight_{suffix}_l{k}").copy_(source.weight)
                getattr(stack, f"bias_{suffix}_l{k}").copy_(source.bias)
    return stack


def rows(options: Options) -> Iterator[dict[str, Any]]:
    for batch in options.batches:
        yield row(batch, options)


def row(batch: int, options: Options) -> dict[str, Any]:
    """Median seconds per batch of sequences of each way, predictions and what was cut how."""
    size = {name: getattr(options, name) for name in SIZE}
    module, (x,) = lstm(batch, **size)
    graph = capture(module, (x,), name="lstm")
    problem = measured_problem(graph, options.repeats)
    plans = {
        "one device": planners.load("single_device")(problem),
        "time_slices": planners.load("time_slices")(problem),
        "time_slices, time only": planners.load("time_slices", num_directions=1)(problem),
        "contiguous_dp": planners.load("contiguous_dp")(problem),
        "macro_search": planners.load("macro_search", seconds=options.search_seconds)(problem),
    }
    runners = {
        name: Runner(graph, problem.cluster, plan.placement, priority=problem.priority)
        for name, plan in plans.items()
    }
    stack = fused(module)

    def plain(model: Callable[[Any], Any], count: int) -> Iterator[Any]:
        torch.set_num_threads(count)
        with torch.inference_mode():
            for _ in range(options.count):
                yield model(x)

    ways: dict[str, Callable[[], Iterator[Any]]] = {
        name: partial(runner.stream, [(x,)] * options.count) for name, runner in runners.items()
    }
    for count in (1, 2):
        ways[f"plain, {count} threads"] = partial(plain, module, count)
        ways[f"nn.LSTM, {count} threads"] = partial(plain, lambda inputs: stack(inputs)[0], count)
    try:
        with threads(torch.get_num_threads()):  # as they are afterwards
            expected = next(plain(module, 1))
            for way in ways.values():
                torch.testing.assert_close(next(iter(way())), expected, rtol=1e-4, atol=1e-5)
            seconds = in_turns(
                {n: partial(seconds_per_item, way, options.count) for n, way in ways.items()},
                options.rounds,
            )
    finally:
        for runner in runners.values():
            runner.close()
    return {
        "batch": batch,
        "operators": graph.num_ops,
        "seconds": {name: float(np.median(v)) for name, v in seconds.items()},
        "ratio": {n: float(np.median(v / seconds["time_slices"])) for n, v in seconds.items()},
        "predicted_s": {n: simulate(problem, p.placement).period_s for n, p in plans.items()},
        "order": problem.profile.order,
        "cut": {name: plans[name].stats["cut"] for name in plans if "time" in name},
        "extrapolation": extrapolation(problem, batch, size, options.repeats),
    }


def extrapolation(
    problem: Problem, batch: int, size: dict[str, int], repeats: int
) -> dict[str, float]:
    """Seconds of the whole model on the first device: measured, and from one slice."""
    module, inputs = lstm(batch, **(size | {"steps": SHORT_STEPS}))
    short = capture(module, inputs, name="short")
    profile = extrapolate(measure(short, problem.cluster, repeats=repeats), short, problem.graph)
    measured, predicted = problem.compute_s[:, 0].sum(), profile.compute_s[:, 0].sum()
    return {
        "measured_s": float(measured),
        "predicted_s": float(predicted),
        "error": float(abs(predicted / measured - 1.0)),
    }


def parts(rows: Rows, options: Options) -> dict[str, str]:
    def guess(row: dict[str, Any]) -> str:
        x = row["extrapolation"]
        seconds = f"{1e3 * x['predicted_s']:.1f} of {1e3 * x['measured_s']:.1f} ms"
        return f"{seconds}, error {100 * x['error']:.1f} %"

    def way(name: str, row: dict[str, Any]) -> str:
        return f"{1e3 * row['seconds'][name]:.1f} ms ({row['ratio'][name]:.2f}x)"

    batch = Column("batch", "batch")
    ways = (Column(name, partial(way, name)) for name in rows[0]["seconds"])
    details = (
        Column("faster than one device", lambda r: r["ratio"]["one device"] - 1, 0, 100, " %"),
        Column("cut", lambda r: r["cut"]["time_slices"]),
        Column("order", "order"),
        Column("predicted", lambda r: r["predicted_s"]["time_slices"], 1, 1e3, " ms"),
        Column("one slice predicts", guess),
    )
    return {
        "table": table(rows, batch, *ways),
        "published": PUBLISHED,
        "details": table(rows, batch, *details),
    }


STUDY = Study(
    name="time_slices",
    rows=rows,
    parts=parts,
    options={
        "batches": (1, 8, 32),
        "layers": 4,
        "steps": 16,
        "hidden": 512,
        "rounds": 7,
        "count": Option(16, "batches of sequences per round"),
        "repeats": Option(10, "of every measurement of a profile"),
        "search_seconds": 20.0,
    },
    facts=lambda options: {n: getattr(options, n) for n in (*SIZE, "rounds", "count")},
)
main = partial(run, (STUDY,))

if __name__ == "__main__":
    sys.exit(main())
