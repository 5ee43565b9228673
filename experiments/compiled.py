"""Compiled: the module by torch.compile, and our runs, on one core and on two.

    python -m experiments.compiled [WORKLOAD ...] [--rounds 7] [--placements 20]

At batch 1, seconds between two results of a stream. With one thread: plain PyTorch, the faster of
``torch.compile`` and the same with freezing (under ``torch.no_grad``), and our runtime on one
device, compiled. With two: the same two, two copies of PyTorch (processes with one core, one thread
and the weights each, plain and compiled), and what ``optimize`` keeps. All of a case take turns,
each with threads of its own; medians of the rounds. A second process then loads what was compiled,
and a stream of five seconds says how much of both cores it uses. ``--placements``: so many random
placements of compiled runs are predicted and measured, of the same five blocks, as every run that
no other has is compiled; 0: none. What is finished lies in ``runs/compiled``: the same command
continues. Writes ``experiments/results/compiled.md`` and ``.json``, where rows of other workloads
and machines stay as they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from subprocess import PIPE
from typing import Any

import numpy as np

from experiments.runs import ended, in_turns, seconds_per_item, two_cores
from experiments.study import Option, Options, Study, StudyError, provenance, run, say
from experiments.tables import Column, table
from placement.capturing import capture
from placement.cluster import cpu_model
from placement.costs.fused import load_or_measure_compiled
from placement.costs.measure import load_or_measure
from placement.executor import Runner
from placement.optimizing import optimize
from placement.problem import Placement, Problem
from placement.program import split_inputs
from placement.report.table import geometric_mean, mape, spearman
from placement.runs.ways import difference, inferring, torch_compiled
from placement.simulator import simulate
from placement.tools.threads import torch_threads
from placement.workloads import load

WORKLOADS = ("resnet50", "bert_base", "bert_tiny_hidden128", "lstm", "dlrm", "inception")
WORKLOADS += ("convnext", "gpt2")
ROUND_S, STREAM_S = 0.2, 5.0  # of a round, as items may be short; and of the stream of both cores
TURNS, ITEMS = 4, 24  # of random placements, and micro-batches of each
TWO_CORES = ("plain, 2 core", "compiled, 2 core")
PLAIN_COPIES, COPIES = "plain, 2 copies", "compiled, 2 copies"
WAYS = ("plain, 1 core", "compiled, 1 core", "our run", *TWO_CORES, PLAIN_COPIES, COPIES, "kept")
BLOCKS = 5  # of which random placements are made: at most fifteen runs to compile
SECOND = """
import sys, time
from placement.capturing import capture
from placement.cluster import Cluster
from placement.executor import Runner
from placement.workloads import load
from experiments.runs import two_cores
module, inputs = load(sys.argv[1])
graph = capture(module, inputs)
began = time.perf_counter()
with Runner(graph, two_cores(), [0] * graph.num_ops) as runner:
    runner.compile()
    for _ in runner.stream([inputs]):
        pass
    print(time.perf_counter() - began, runner.compile_s)
"""


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """One of each workload, unless it is finished, after those of others and of other machines."""
    yield from STUDY.besides(machine=[cpu_model()], workload=options.workloads)
    for name in options.workloads:
        what = (name, options.rounds, options.seconds, options.placements)
        yield options.finished.row(dict, what, partial(row, name, options), name=name)


def row(name: str, options: Options) -> dict[str, Any]:
    """One workload, measured now."""
    module, inputs = load(name)
    args, kwargs = split_inputs(inputs)
    cluster = two_cores()
    graph = capture(module, inputs, name=name)
    by_torch: dict[int, Any] = {}
    for k in (1, 2):
        say(f"{name}: torch.compile, {k} threads")
        with torch_threads(k):
            by_torch[k] = torch_compiled(module, inputs, cluster, lambda *_: None)
    say(f"{name}: one device")
    one = Runner(graph, cluster, [0] * graph.num_ops)
    with torch_threads(2):
        one.compile()
        say(f"{name}: optimize")
        best = optimize(
            module, inputs, cluster, seconds=options.seconds, quiet=True, workload=name,
            compiled=True,
        )  # fmt: skip

    def called(call: Callable[..., Any], threads: int, count: int) -> float:
        with torch_threads(threads):
            return seconds_per_item(
                lambda items: ended(call(*args, **kwargs) for _ in range(items)), count
            )

    def streamed(runner: Runner, count: int) -> float:
        with torch_threads(2):
            return seconds_per_item(
                lambda items: ended(runner.stream([inputs] * items)), count, runner.num_phases
            )

    plain = inferring(module)
    once_s = called(plain, 1, 4)
    count = max(8, int(ROUND_S / once_s))
    ways = {f"plain, {k} core": partial(called, plain, k, count) for k in (1, 2)}
    for k, call in by_torch.items():
        if call is not None:
            ways[f"compiled, {k} core"] = partial(called, call.bare, k, count)
    say(f"{name}: two copies of PyTorch")
    copies = [Copy(name, core) for core in sorted(os.sched_getaffinity(0))[:2]]
    ways |= {way: partial(side_by_side, copies, way, count) for way in copies[0].ways}
    ways |= {"our run": partial(streamed, one, count), "kept": partial(streamed, best, count)}
    took = {way: float(np.median(s)) for way, s in in_turns(ways, options.rounds).items()}
    for copy in copies:
        copy.close()
    share = cores_used(best, inputs, took["kept"])
    wrong = difference(one, module, inputs)
    facts: dict[str, Any] = {
        "workload": name,
        "machine": cpu_model(),
        "when": provenance()["when"],
        "ops": graph.num_ops,
        **{f"{way}_s": took.get(way) for way in WAYS},
        "by torch": "; ".join(x.what for x in by_torch.values() if x is not None) or None,
        "our compile_s": one.compile_s,
        "packed_bytes": one.packed_bytes,
        "interpreted": one.not_compiled,
        "kept": best.kept + ", compiled" * (best.plan.compiled and best.kept in ("plan", "single")),
        "cores": share,
        "results": wrong or "equal",
    }
    one.close()
    best.close()
    facts["second process_s"] = second_process_s(name)
    say(f"{name}: {options.placements} placements")
    return facts | prediction(graph, cluster, inputs, options.placements)


class Copy:
    """A process with the module and one thread on a core; it says when each of its items ended."""

    def __init__(self, name: str, core: int) -> None:
        code = f"from experiments.compiled import copied; copied({name!r}, {core})"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE)
        self.ways: list[str] = self.told()

    def ask(self, way: str, count: int) -> None:
        """To run so many items."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps([way, count])}\n".encode())
        self.process.stdin.flush()

    def told(self) -> Any:
        """What it says next."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise StudyError("a copy of PyTorch ended: what it says is above")

    def ends_of(self, count: int) -> list[float]:
        """When each of the items ended that it was asked for."""
        ends: list[float] = self.told()
        assert len(ends) == count
        return ends

    def close(self) -> None:
        """Ends it."""
        self.process.communicate()


def copied(name: str, core: int) -> None:
    """What a copy does until nothing more is asked."""
    import torch

    torch.set_num_threads(1)
    module, inputs = load(name)
    args, kwargs = split_inputs(inputs)
    by_torch = torch_compiled(module, inputs, two_cores(), lambda *_: None)
    calls = {PLAIN_COPIES: inferring(module)}
    if by_torch is not None:
        calls[COPIES] = by_torch.bare
    os.sched_setaffinity(0, {core})
    print(json.dumps([*calls]), flush=True)
    for line in sys.stdin:
        way, count = json.loads(line)
        print(json.dumps(ended(calls[way](*args, **kwargs) for _ in range(count))), flush=True)


def side_by_side(copies: Sequence[Copy], way: str, count: int) -> float:
    """Seconds between two results of copies that run at once, each so many items."""
    for copy in copies:
        copy.ask(way, count)
    each_s = [seconds_per_item(copy.ends_of, count) for copy in copies]
    return 1 / sum(1 / s for s in each_s)


def cores_used(runner: Runner, inputs: Any, period_s: float) -> float:
    """Processor seconds a second of a stream."""
    with torch_threads(2):
        began, worked = time.perf_counter(), time.process_time()
        for _ in runner.stream([inputs] * max(2, int(STREAM_S / period_s))):
            pass
        return (time.process_time() - worked) / (time.perf_counter() - began)


def second_process_s(name: str) -> float | None:
    """Seconds to the first results there after imports and capture; None: it compiled again."""
    answer = subprocess.run(
        [sys.executable, "-c", SECOND, name], check=True, capture_output=True, text=True
    )
    took_s, compile_s = map(float, answer.stdout.split())
    return took_s if compile_s == 0 else None


def placements(problem: Problem, count: int) -> list[Placement]:
    """Random ones of five blocks of groups, none on one device alone: they share compiled runs."""
    rng, groups = np.random.default_rng(0), problem.graph.num_groups
    blocks = min(BLOCKS, groups)
    cuts = np.sort(rng.choice(np.arange(1, groups), blocks - 1, replace=False))
    block = np.searchsorted(cuts, np.arange(groups), side="right")
    every = np.array([*product(range(problem.num_devices), repeat=blocks)], np.int32)
    mixed = rng.permutation(every[every.min(axis=1) < every.max(axis=1)])
    return [device[block][problem.graph.group] for device in mixed[:count]]


def prediction(graph: Any, cluster: Any, inputs: Any, count: int) -> dict[str, Any]:
    """Mean relative error of predicted periods, and their rank correlation."""
    if not count:
        return {"error": None, "rank": None}
    costs = load_or_measure_compiled(graph, cluster, load_or_measure(graph, cluster))
    problem = Problem(costs[0], cluster, costs[1])
    few = replace(problem, num_microbatches=ITEMS)
    options: Any = {"priority": problem.priority, "max_in_flight": problem.max_in_flight}
    predicted, ways = [], dict[str, Callable[[], float]]()
    with ExitStack() as opened:
        for i, answer in enumerate(placements(problem, count)):
            predicted.append(simulate(few, answer).period_s)
            runner = opened.enter_context(Runner(graph, cluster, answer, **options))
            runner.compile()
            ways[str(i)] = partial(period_s, runner, inputs, predicted[-1])
        rounds = in_turns(ways, TURNS, warm_up=1)
    measured = [float(np.median(rounds[way])) for way in ways]
    a, b = np.array(predicted), np.array(measured)
    rank = spearman(a, b) if count > 1 else None
    return {"error": mape(a, b), "rank": rank, "predicted_s": predicted, "measured_s": measured}


def period_s(runner: Runner, inputs: Any, predicted_s: float) -> float:
    """Seconds between two results of a stream that is long enough to be steady."""
    items = max(ITEMS, int(ROUND_S / predicted_s))
    return runner.period_of(runner.stream([inputs] * items))


def _ratio(a: str, b: str) -> Callable[[Any], float | None]:
    """By how much ``b`` is faster than the fastest of the ways ``a``."""

    def ratio(row: Any) -> float | None:
        took = [s for x in a.split(" / ") if (s := row.get(f"{x}_s")) is not None]
        return min(took) / row[f"{b}_s"] if took else None

    return ratio


THREADS, TWO_COPIES = " / ".join(TWO_CORES), f"{PLAIN_COPIES} / {COPIES}"
BEST = "two devices, against the best of both"
RATIOS = {
    "one device, against compiled": _ratio("compiled, 1 core", "our run"),
    "two devices, against two threads": _ratio(THREADS, "kept"),
    "two devices, against two copies": _ratio(TWO_COPIES, "kept"),
    BEST: _ratio(f"{THREADS} / {TWO_COPIES}", "kept"),
}


def took(way: str) -> Callable[[Any], float | None]:
    """Of a row; earlier ones did not have all of the ways."""
    return lambda row: row.get(f"{way}_s")


def parts(found: Any, options: Options) -> dict[str, Any]:
    """Geometric means, and the worst."""
    lines = []
    for name, ratio in RATIOS.items():
        values = [x for x in map(ratio, found) if x is not None]
        if values:
            mean = geometric_mean(values)
            lines.append(f"* {name}: {mean:.2f}x, geometric mean; {min(values):.2f}x at least")
    errors = [r["error"] for r in found if r["error"] is not None]
    ranks = [r["rank"] for r in found if r["rank"] is not None]
    if errors:
        lines.append(
            f"* predicted periods: {100 * np.mean(errors):.1f} % mean error, rank "
            f"{np.mean(ranks) if ranks else np.nan:.3f}"
        )
    return {"table": table(found, *COLUMNS), "summary": "\n".join(lines)}


COLUMNS = (
    Column("workload", "workload"),
    Column("machine", "machine"),
    Column("measured", "when"),
    *(Column(f"{way}{'s' * way.endswith('2 core')}", took(way), 2, 1e3, " ms") for way in WAYS),
    Column("what is kept", "kept"),
    *(Column(name, ratio, 2, unit="x") for name, ratio in RATIOS.items()),
    Column("torch.compile", "by torch"),
    Column("our compiling", "our compile_s", 0, unit=" s"),
    Column("packed", "packed_bytes", 0, 2**-20, " MiB"),
    Column("second process", "second process_s", 2, unit=" s"),
    Column("cores used", "cores", 2),
    Column("results", "results"),
    Column("error", "error", 1, 100, " %"),
    Column("rank", "rank", 3),
)

STUDY = Study(
    name="compiled",
    rows=rows,
    options={
        "workloads": Option(WORKLOADS, word=True, metavar="WORKLOAD"),
        "rounds": 7,
        "seconds": Option(30.0, "that optimize plans"),
        "placements": Option(20, "random placements that are predicted and measured"),
    },
    parts=parts,
    facts=lambda options: {"rounds": options.rounds},
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
