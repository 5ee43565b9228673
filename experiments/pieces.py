"""One call on two cores: operators whole, or in pieces?

    python -m experiments.pieces [WORKLOAD ...] [--rounds 7] [--seconds 20] [--compiled]

For every workload at batch 1, for latency: the best device alone, what ``best_of`` makes of whole
operators and of operators in two pieces, with ``--compiled`` also as compiled runs (which takes
minutes to build, as pieces make many); beside them plain PyTorch
and ``torch.compile`` (the better of frozen and not), with two threads. All take turns; medians of
the rounds. ``prediction`` is of the pieces, as they are. Writes ``experiments/results/pieces.md``
and ``.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from experiments.runs import in_turns, measured_problem
from experiments.study import Option, Options, Study, run, say
from experiments.tables import Column
from placement import pieces, planners
from placement.capturing import capture
from placement.executor import Runner
from placement.objective import Objective
from placement.problem import Problem
from placement.program import split_inputs
from placement.runs.ways import difference, inferring, timed, torch_compiled
from placement.simulator import evaluate
from placement.workloads import load

WORKLOADS = ("bert_base", "gpt2", "vit", "convnext", "resnet50")
OURS = ("one device", "whole", "pieces", "whole, compiled", "pieces, compiled")
PLAIN = ("plain, 2 threads", "torch.compile, 2 threads")


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """One of each workload; one that is finished is not measured again."""
    for name in options.workloads:
        what = (name, options.rounds, options.seconds, options.compiled)
        yield options.finished.row(dict, what, partial(row, name, options), name=name)


def row(name: str, options: Options) -> dict[str, Any]:
    """Its row, measured now."""
    module, inputs = load(name)
    args, kwargs = split_inputs(inputs)
    graph = capture(module, inputs, name=name)
    torch.set_num_threads(1)  # as a device has
    cut = pieces.split(graph, 2)
    torch.set_num_threads(2)
    whole, parts = (
        measured_problem(g, objective=Objective.LATENCY, max_in_flight=1) for g in (graph, cut)
    )
    best = planners.load("single_device")(whole).placement
    plans = {"one device": (whole, best)}
    for way, problem in (("whole", whole), ("pieces", parts)):
        plans[way] = problem, planners.load("best_of", seconds=options.seconds)(problem).placement
    runners = {way: _runner(*plans[way]) for way in plans}
    for way in ("whole", "pieces") if options.compiled else ():
        compiled = _runner(*plans[way])
        compiled.compiled = True
        runners[f"{way}, compiled"] = compiled
    calls = {way: partial(timed, partial(r, *args, **kwargs)) for way, r in runners.items()}
    calls[PLAIN[0]] = partial(timed, partial(inferring(module), *args, **kwargs))
    made = torch_compiled(module, inputs, whole.cluster, lambda *_: None)
    if made is not None:
        calls[PLAIN[1]] = partial(timed, partial(made, *args, **kwargs))
    wrong = {way: difference(r, module, inputs) for way, r in runners.items()}
    for way, why in wrong.items():
        if why:
            say(f"{name}, {way}: {why}")
    seconds = in_turns(calls, options.rounds)
    for runner in runners.values():
        runner.close()
    told = evaluate(parts, plans["pieces"][1][None]).latency_s[0]
    took = {way: float(np.median(seconds[way])) if way in seconds else None for way in calls}
    ours = min(runners.keys() - OURS[:1], key=lambda way: took[way] or np.inf)
    plain = min(PLAIN, key=lambda way: took.get(way) or np.inf)

    def ratio(a: str, b: str) -> float:
        return float(np.median(seconds[a] / seconds[b]))

    return {
        "case": name,
        "ops": graph.num_ops,
        "cut": len(cut.program.pieces.rules) if cut.program.pieces else 0,
        **{way: took.get(way) for way in (*OURS, *PLAIN)},
        "compiled": made.what if made else "-",
        "better": ours,
        "pieces over one device": ratio("one device", "pieces"),
        "better over one device": ratio("one device", ours),
        "better over plain": ratio(PLAIN[0], ours),
        "better over the best of PyTorch": ratio(plain, ours),
        "prediction": float(told / took["pieces"] - 1),
        "equal": not any(wrong.values()),
    }


def _runner(problem: Problem, placement: Any) -> Runner:
    return Runner(problem.graph, problem.cluster, placement, priority=problem.priority)


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
        "seconds": Option(20.0, "of each plan"),
        "compiled": Option(False, "ours too"),
    },
    columns=(
        Column("case", "case"),
        Column("ops", "ops"),
        Column("cut", "cut"),
        *(Column(way, way, 1, 1e3, " ms") for way in (*OURS, *PLAIN)),
        Column("better", "better"),
        *(Column(x, x, 2, unit="x") for x in RATIOS),
        Column("prediction", "prediction", 1, 100, " %"),
        Column("equal", "equal"),
    ),
    facts=lambda options: {"rounds": options.rounds, "seconds": options.seconds},
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
