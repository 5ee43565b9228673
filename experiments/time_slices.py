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

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments._study import RESULTS
from experiments.pipelining import seconds_per_item
from placement import planners
from placement.cluster import Cluster
from placement.executor import Runner
from placement.files import write_atomic
from placement.grid import extrapolate
from placement.measure import measure, provenance
from placement.problem import Problem
from placement.program import capture
from placement.simulator import simulate
from placement.workloads.lstm import UnrolledLSTM, lstm

PUBLISHED = "14-19 % faster than one device, up to 38 % for large batches"
SHORT_STEPS = 5  # of the model whose middle slice predicts the whole one


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


def study(
    batch: int, size: dict[str, int], rounds: int, count: int, repeats: int, search_seconds: float
) -> dict[str, Any]:
    """Median seconds per batch of sequences of each way, predictions and what was cut how."""
    module, (x,) = lstm(batch, **size)
    graph = capture(module, (x,), name="lstm")
    cluster = Cluster("two", Cluster.detect().devices[:2])
    if cluster.num_devices < 2:
        raise ValueError("this study needs two cores, and this process may use one; see taskset")
    problem = Problem(graph, cluster, measure(graph, cluster, repeats=repeats))
    plans = {
        "one device": planners.load("single_device")(problem),
        "time_slices": planners.load("time_slices")(problem),
        "time_slices, time only": planners.load("time_slices", num_directions=1)(problem),
        "contiguous_dp": planners.load("contiguous_dp")(problem),
        "macro_search": planners.load("macro_search", seconds=search_seconds)(problem),
    }
    runners = {
        name: Runner(graph, cluster, plan.placement, priority=problem.priority)
        for name, plan in plans.items()
    }
    stack = fused(module)

    def plain(model: Callable[[Any], Any], threads: int) -> Callable[[], Iterator[Any]]:
        def run() -> Iterator[Any]:
            torch.set_num_threads(threads)
            with torch.inference_mode():
                for _ in range(count):
                    yield model(x)

        return run

    def placed(runner: Runner) -> Callable[[], Iterator[Any]]:
        return lambda: runner.stream([(x,)] * count)

    ways: dict[str, Callable[[], Iterator[Any]]] = {k: placed(r) for k, r in runners.items()}
    for threads in (1, 2):
        ways[f"plain, {threads} threads"] = plain(module, threads)
        ways[f"nn.LSTM, {threads} threads"] = plain(lambda inputs: stack(inputs)[0], threads)
    try:
        expected = next(plain(module, 1)())
        for run in ways.values():
            torch.testing.assert_close(next(iter(run())), expected, rtol=1e-4, atol=1e-5)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for r in range(rounds + 1):
            for name, run in ways.items():
                seconds = seconds_per_item(run, count)
                if r > 0:  # the first round warms up
                    taken[name].append(seconds)
    finally:
        for runner in runners.values():
            runner.close()
    ours = np.array(taken["time_slices"])
    return {
        "batch": batch,
        "operators": graph.num_ops,
        "seconds": {name: float(np.median(v)) for name, v in taken.items()},
        "ratio": {name: float(np.median(np.array(v) / ours)) for name, v in taken.items()},
        "predicted_s": {n: simulate(problem, p.placement).period_s for n, p in plans.items()},
        "order": problem.profile.order,
        "cut": {name: plans[name].stats["cut"] for name in plans if "time" in name},
        "extrapolation": extrapolation(problem, batch, size, repeats),
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


def report(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    names = list(rows[0]["seconds"])
    lines = [
        "| batch | " + " | ".join(names) + " |",
        "|---:|" + "---:|" * len(names),
    ]
    for row in rows:
        cells = [f"{1e3 * row['seconds'][n]:.1f} ms ({row['ratio'][n]:.2f}x)" for n in names]
        lines.append(f"| {row['batch']} | " + " | ".join(cells) + " |")
    lines += ["", f"In brackets: over time_slices, medians of rounds. Published: {PUBLISHED}.", ""]
    lines += [
        "| batch | faster than one device | cut | order | predicted | one slice predicts |",
        "|---:|---:|---|---|---:|---:|",
    ]
    for row in rows:
        guess = row["extrapolation"]
        lines.append(
            f"| {row['batch']} | {100 * (row['ratio']['one device'] - 1):.0f} % "
            f"| {row['cut']['time_slices']} | {row['order']} "
            f"| {1e3 * row['predicted_s']['time_slices']:.1f} ms "
            f"| {1e3 * guess['predicted_s']:.1f} of {1e3 * guess['measured_s']:.1f} ms, error "
            f"{100 * guess['error']:.1f} % |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=16, help="batches of sequences per round")
    parser.add_argument("--repeats", type=int, default=10, help="of every measurement of a profile")
    parser.add_argument("--search-seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    o = parser.parse_args(argv)
    size = {"layers": o.layers, "steps": o.steps, "hidden": o.hidden}
    rows = [study(b, size, o.rounds, o.count, o.repeats, o.search_seconds) for b in o.batches]
    facts = provenance(**size, rounds=o.rounds, count=o.count)
    text = report(rows)
    told = "\n".join(f"- {k}: {v}" for k, v in facts.items())
    write_atomic(
        o.out / "time_slices.json",
        json.dumps({"provenance": facts, "published": PUBLISHED, "rows": rows}, indent=1) + "\n",
    )
    write_atomic(
        o.out / "time_slices.md",
        "# Milliseconds per batch of sequences, LSTM stack on two one-core devices\n\n"
        f"`python -m experiments.time_slices`\n\n{text}\n{told}\n",
    )
    print(text)


if __name__ == "__main__":
    main()
