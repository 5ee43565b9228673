"""One call on two cores: one device, or operators in pieces on both?

    python -m experiments.pieces [WORKLOAD ...] [--rounds 7] [--seconds 20] [--placements 20]

For every workload at batch 1, for latency: one device alone, and what ``best_of`` makes of
operators in two pieces, each as operators and as compiled runs; pieces that are to be compiled are
cut and placed by compiled costs. Beside them plain PyTorch and ``torch.compile`` (the better of
frozen and not), with two threads. All take turns; medians of the rounds. ``prediction`` is of the
pieces as operators, then of the compiled ones; ``error`` and ``rank`` are of random placements of
pieces (``random_placements``), as operators: by how much their predicted latencies miss what they
take, on average, and Spearman's correlation. What is cut, and rows that are finished, lie in
``runs/pieces``: the same command continues. Writes ``experiments/results/pieces.md`` and ``.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from experiments.gpu.predictions import predicted
from experiments.runs import in_turns, two_cores
from experiments.study import Option, Options, Study, run, say
from experiments.tables import Column, geometric_mean, table
from placement import pieces, planners
from placement.capturing import capture
from placement.cluster import cpu_model
from placement.costs.calibration import run_placement
from placement.costs.fused import dealt_or, load_or_measure_compiled
from placement.costs.measure import measure
from placement.executor import Runner
from placement.graph import OpGraph
from placement.objective import Objective
from placement.pieces.rules import rule_of
from placement.problem import Problem
from placement.program import split_inputs
from placement.runs.ways import (
    compiled_in_words,
    difference,
    inferring,
    timed,
    torch_compiled,
)
from placement.tools.threads import torch_threads
from placement.workloads import load

WORKLOADS = ("bert_base", "gpt2", "vit", "convnext", "resnet50")
OURS = ("one device", "one device, compiled", "pieces", "pieces, compiled")
PLAIN = ("plain, 2 threads", "torch.compile, 2 threads")
REPEATS = 3  # of measuring operators, which rounds of seconds would make longer than the rest
CALLS = 3  # of a random placement


@dataclass
class Cut:
    """A graph in pieces, as operators or to be compiled, its costs, and where pieces are."""

    graph: OpGraph
    problem: Problem
    placement: NDArray[np.int32]

    @property
    def latency_s(self) -> float:
        """Of a call, as it is predicted."""
        return predicted(self.problem, self.placement)[0]


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """One of each workload, unless it is finished, after those of others and of other machines."""
    yield from STUDY.besides(machine=[cpu_model()], case=options.workloads)
    for name in options.workloads:
        what = name, options.rounds, options.seconds, options.placements
        yield options.finished.row(dict, what, partial(row, name, options), name=name)


def row(name: str, options: Options) -> dict[str, Any]:
    """Its row, measured now."""
    module, inputs = load(name)
    graph = capture(module, inputs, name=name)
    cuts = {way: cut(graph, way == OURS[3], options) for way in OURS[2:]}
    with torch_threads(2):
        return compare(graph, cuts, module, inputs, options)


def cut(graph: OpGraph, compiled: bool, options: Options) -> Cut:
    """The graph in pieces, measured and placed; the same pieces as the last time."""
    name = f"{graph.name} in pieces{', compiled' * compiled}"
    found = options.finished.row(dict, name, partial(rules, graph, compiled), name=name)
    chosen = {op: rule_of(*row) for op, row in found.items()}
    with torch_threads(1):  # as a device has
        parted = pieces.split(graph, pieces.Pieces((0.5, 0.5), chosen))
    say(f"{name}: costs")
    cluster = two_cores()
    latency: Any = {"objective": Objective.LATENCY, "max_in_flight": 1}
    profile = measure(parted, cluster, repeats=REPEATS)
    problem = Problem(parted, cluster, profile, **latency)
    if compiled:
        joined, profile = load_or_measure_compiled(parted, cluster, profile)
        problem = Problem(joined, cluster, profile, **latency)
    solution = planners.load("best_of", seconds=options.seconds)(problem)
    return Cut(parted, problem, dealt_or(problem, solution).placement)


def rules(graph: OpGraph, compiled: bool) -> dict[str, Any]:
    """How each operator is cut that is."""
    with torch_threads(1):
        parted = pieces.split(graph, 2, compiled=compiled)
    chosen = parted.program.pieces
    return {} if chosen is None else {op: astuple(rule) for op, rule in chosen.rules.items()}


def compare(
    graph: OpGraph, cuts: dict[str, Cut], module: Any, inputs: Any, options: Options
) -> dict[str, Any]:
    """The row, from ways that take turns."""
    name, cluster, (args, kwargs) = graph.name, two_cores(), split_inputs(inputs)
    plain = {PLAIN[0]: inferring(module)}
    compiled = torch_compiled(module, inputs, cluster, lambda *_: None)
    if compiled is not None:
        plain[PLAIN[1]] = compiled.bare
    one: Any = np.zeros(graph.num_ops, np.int32)
    runners = {way: Runner(graph, cluster, one, max_in_flight=1) for way in OURS[:2]}
    for way, own in cuts.items():
        order = {"priority": own.problem.priority, "max_in_flight": 1}
        runners[way] = Runner(own.graph, cluster, own.placement, **order)
    for way, runner in runners.items():
        if way.endswith("compiled"):
            runner.compile()
            say(f"{name}, {way}: {compiled_in_words(runner)}")
    calls = {
        way: partial(timed, partial(r, *args, **kwargs)) for way, r in {**runners, **plain}.items()
    }
    wrong = {way: difference(r, module, inputs) for way, r in runners.items()}
    for way, why in wrong.items():
        if why:
            say(f"{name}, {way}: {why}")
    seconds = in_turns(calls, options.rounds)
    for runner in runners.values():
        runner.close()
    told, took = random_runs(cuts[OURS[2]].problem, options.placements)
    own_s = {way: float(np.median(seconds[way])) for way in calls}
    ours = min(OURS, key=own_s.__getitem__)
    fastest = min(plain, key=own_s.__getitem__)

    def ratio(a: str, b: str) -> float:
        return float(np.median(seconds[a] / seconds[b]))

    return {
        "case": name,
        "machine": cpu_model(),
        "ops": graph.num_ops,
        "cut": len(cuts[OURS[2]].graph.program.pieces.rules),
        **{way: own_s.get(way) for way in (*OURS, *PLAIN)},
        "compiled": "-" if compiled is None else compiled.what,
        "better": ours,
        "pieces over one device": ratio(OURS[0], OURS[2]),
        "better over one device": ratio(OURS[0], ours),
        "better over plain": ratio(PLAIN[0], ours),
        "better over the best of PyTorch": ratio(fastest, ours),
        "prediction": cuts[OURS[2]].latency_s / own_s[OURS[2]] - 1,
        "prediction, compiled": cuts[OURS[3]].latency_s / own_s[OURS[3]] - 1,
        "error": float(np.abs(told / took - 1).mean()) if len(told) else None,
        "rank": float(spearmanr(told, took).statistic) if len(told) else None,
        "equal": not any(wrong.values()),
    }


def random_runs(problem: Problem, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of a call of random placements, ``[count]``: predicted, and measured."""
    placed = random_placements(problem, count)
    if not count:
        return np.zeros(0), np.zeros(0)
    took = [run_placement(problem, p, CALLS, 2, 1)[0] for p in placed]
    return np.array([predicted(problem, p)[0] for p in placed]), np.array(took)


def random_placements(problem: Problem, count: int, seed: int = 0) -> NDArray[np.int32]:
    """int32 ``[count, N]``: parts of the order, in each of which pieces are apart, or are not.

    Of one part to sixteen. In a part all is on one device, or piece ``k`` on device ``k`` or on the
    other.
    """
    graph, rng = problem.graph, np.random.default_rng(seed)
    first = graph.per_group(problem.priority, np.minimum, graph.num_ops)
    number = graph.per_group(graph.piece, np.maximum)
    placed = []
    for _ in range(count):
        at = np.sort(rng.integers(0, graph.num_ops, rng.integers(0, 16)))
        part = np.searchsorted(at, first)
        apart, device = rng.integers(0, 2, (2, len(at) + 1))
        placed.append(((device[part] + apart[part] * number) % 2)[graph.group])
    return np.array(placed, np.int32).reshape(count, graph.num_ops)


def parts(found: Any, options: Options) -> dict[str, Any]:
    """The table, and geometric means of each machine."""
    lines = []
    for machine in dict.fromkeys(r["machine"] for r in found):
        own = [r for r in found if r["machine"] == machine]
        means = [f"{geometric_mean([r[x] for r in own]):.2f}x {x}" for x in RATIOS[1:]]
        lines.append(f"* {machine}, {len(own)} models: {', '.join(means)}")
    return {"table": table(found, *COLUMNS), "means": "\n".join(lines)}


RATIOS = (
    "pieces over one device",
    "better over one device",
    "better over plain",
    "better over the best of PyTorch",
)
COLUMNS = (
    Column("case", "case"),
    Column("machine", "machine"),
    Column("ops", "ops"),
    Column("cut", "cut"),
    *(Column(way, lambda r, way=way: r.get(way), 1, 1e3, " ms") for way in (*OURS, *PLAIN)),
    Column("better", "better"),
    *(Column(x, x, 2, unit="x") for x in RATIOS),
    Column("prediction", "prediction", 1, 100, " %"),
    Column("compiled", lambda r: r.get("prediction, compiled"), 1, 100, " %"),
    Column("error", "error", 1, 100, " %"),
    Column("rank", "rank", 2),
    Column("equal", "equal"),
)
STUDY = Study(
    name="pieces",
    rows=rows,
    options={
        "workloads": Option(WORKLOADS, word=True, metavar="WORKLOAD"),
        "rounds": 7,
        "seconds": Option(20.0, "of a plan"),
        "placements": Option(20, "that are predicted and run"),
    },
    parts=parts,
    facts=lambda options: {"rounds": options.rounds, "seconds": options.seconds},
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
