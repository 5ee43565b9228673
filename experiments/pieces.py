"""One call on two cores: one device, or operators in pieces on both?

    python -m experiments.pieces [WORKLOAD ...] [--rounds 7] [--seconds 20] [--placements 20]
        [--compiled]

For every workload at batch 1, for latency: one device alone, and what ``best_of`` makes of
operators in two pieces, with ``--compiled`` also as compiled runs (which takes minutes to build, as
pieces make many); beside them plain PyTorch and ``torch.compile`` (the better of frozen and not),
with two threads. All take turns; medians of the rounds. ``prediction`` is of the pieces, as they
are; ``error`` and ``rank`` are of random placements of pieces (``random_placements``): by how much
their predicted latencies miss what they take, on average, and Spearman's correlation. Writes
``experiments/results/pieces.md`` and ``.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

from experiments.runs import in_turns, two_cores
from experiments.study import Option, Options, Study, run, say
from experiments.tables import Column
from placement import pieces, planners
from placement.capturing import capture
from placement.cluster import cpu_model
from placement.costs.calibration import run_placement
from placement.costs.measure import measure
from placement.executor import Runner
from placement.graph import OpGraph
from placement.objective import Objective
from placement.problem import Problem
from placement.program import split_inputs
from placement.runs.ways import difference, inferring, timed, torch_compiled
from placement.simulator import evaluate
from placement.workloads import load

WORKLOADS = ("bert_base", "gpt2", "vit", "convnext", "resnet50")
OURS = ("one device", "pieces", "pieces, compiled")
PLAIN = ("plain, 2 threads", "torch.compile, 2 threads")
REPEATS = 3  # of measuring operators, which rounds of seconds would make longer than the rest
CALLS = 3  # of a random placement


@dataclass
class Case:
    """A workload, its graph in pieces, the plan of these, and what calls it with two threads."""

    name: str
    module: Any
    inputs: Any
    graph: OpGraph
    cut: OpGraph
    plain: dict[str, Callable[..., Any]]
    compiled_as: str
    problem: Problem | None = None
    placement: NDArray[np.int32] | None = None


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """Those of other machines, as they are; and one of each workload, unless it is finished."""
    yield from (x for x in STUDY.read() if x["machine"] != cpu_model())
    for name in options.workloads:
        what = what_decides(name, options)
        yield options.finished.row(dict, what, partial(row, name, options), name=name)


def what_decides(name: str, options: Options) -> tuple[Any, ...]:
    """A row, beside the machine."""
    return name, options.rounds, options.seconds, options.placements, options.compiled


def row(name: str, options: Options) -> dict[str, Any]:
    """Its row, measured now."""
    case = cut(name)
    profile(case)
    plan(case, options.seconds)
    return compare(case, options)


def cut(name: str) -> Case:
    """The workload, cut, and compiled by ``torch.compile``."""
    module, inputs = load(name)
    graph = capture(module, inputs, name=name)
    torch.set_num_threads(1)  # as a device has
    in_two = pieces.split(graph, 2)
    torch.set_num_threads(2)
    plain = {PLAIN[0]: inferring(module)}
    compiled = torch_compiled(module, inputs, two_cores(), lambda *_: None)
    if compiled is not None:
        plain[PLAIN[1]] = compiled
    return Case(name, module, inputs, graph, in_two, plain, compiled.what if compiled else "-")


def profile(case: Case) -> None:
    """Measure the pieces."""
    cluster = two_cores()
    measured = measure(case.cut, cluster, repeats=REPEATS)
    latency = {"objective": Objective.LATENCY, "max_in_flight": 1}
    case.problem = Problem(case.cut, cluster, measured, **latency)  # type: ignore[arg-type]


def plan(case: Case, seconds: float) -> None:
    """Place the pieces."""
    assert case.problem is not None
    case.placement = planners.load("best_of", seconds=seconds)(case.problem).placement


def compare(case: Case, options: Options) -> dict[str, Any]:
    """The row, from ways that take turns."""
    name, problem, placement = case.name, case.problem, case.placement
    assert problem is not None and placement is not None
    args, kwargs = split_inputs(case.inputs)
    one = np.zeros(case.graph.num_ops, np.int32)
    runners = {"one device": Runner(case.graph, problem.cluster, one, max_in_flight=1)}
    for way in OURS[1 : 3 if options.compiled else 2]:
        runners[way] = Runner(
            case.cut, problem.cluster, placement, max_in_flight=1, priority=problem.priority
        )
        runners[way].compiled = way == OURS[2]
    calls = {
        way: partial(timed, partial(r, *args, **kwargs))
        for way, r in {**runners, **case.plain}.items()
    }
    wrong = {way: difference(r, case.module, case.inputs) for way, r in runners.items()}
    for way, why in wrong.items():
        if why:
            say(f"{name}, {way}: {why}")
    seconds = in_turns(calls, options.rounds)
    for runner in runners.values():
        runner.close()
    told, took = random_runs(problem, options.placements)
    own = {way: float(np.median(seconds[way])) for way in calls}
    ours = min(runners.keys() - OURS[:1], key=own.__getitem__)
    plain = min(case.plain, key=own.__getitem__)
    own_s = evaluate(problem, placement[None]).latency_s[0]

    def ratio(a: str, b: str) -> float:
        return float(np.median(seconds[a] / seconds[b]))

    return {
        "case": name,
        "machine": cpu_model(),
        "ops": case.graph.num_ops,
        "cut": len(case.cut.program.pieces.rules) if case.cut.program.pieces else 0,
        **{way: own.get(way) for way in (*OURS, *PLAIN)},
        "compiled": case.compiled_as,
        "better": ours,
        "pieces over one device": ratio("one device", "pieces"),
        "better over one device": ratio("one device", ours),
        "better over plain": ratio(PLAIN[0], ours),
        "better over the best of PyTorch": ratio(plain, ours),
        "prediction": float(own_s / own["pieces"] - 1),
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
    return evaluate(problem, placed).latency_s, np.array(took)


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


RATIOS = (
    "pieces over one device",
    "better over one device",
    "better over plain",
    "better over the best of PyTorch",
)
STUDY = Study(
    name="pieces",
    rows=rows,
    options={
        "workloads": Option(WORKLOADS, word=True, metavar="WORKLOAD"),
        "rounds": 7,
        "seconds": Option(20.0, "of a plan"),
        "placements": Option(20, "that are predicted and run"),
        "compiled": Option(False, "ours too"),
    },
    columns=(
        Column("case", "case"),
        Column("machine", "machine"),
        Column("ops", "ops"),
        Column("cut", "cut"),
        *(Column(way, way, 1, 1e3, " ms") for way in (*OURS, *PLAIN)),
        Column("better", "better"),
        *(Column(x, x, 2, unit="x") for x in RATIOS),
        Column("prediction", "prediction", 1, 100, " %"),
        Column("error", "error", 1, 100, " %"),
        Column("rank", "rank", 2),
        Column("equal", "equal"),
    ),
    facts=lambda options: {"rounds": options.rounds, "seconds": options.seconds},
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
