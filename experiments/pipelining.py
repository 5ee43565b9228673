"""Two one-core devices: replicas, a cut, or one of them alone?

    python -m experiments.pipelining [CASE ...] [--rounds 7]

A case is a workload at batch 1, for throughput; ``WORKLOAD:0.6`` lets each device hold that share
of what the model takes on one device, ``WORKLOAD:latency`` is of one item alone. Two replicas take
turns, the best cut runs all items alike, and the best found may do both; beside them one device,
plain PyTorch with one and two threads, and the faster of ``torch.compile`` and the same with
freezing, with two; ours are not compiled (that is ``experiments.compiled``). All of a case are
interleaved; medians of the rounds. Writes ``experiments/results/pipelining.md``, ``.json`` and
``.png``: the cut of the first case, predicted and measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.runs import ended, in_turns, measured_problem, seconds_per_item
from experiments.study import Option, Options, Study, StudyError, run
from experiments.tables import Column
from placement import planners
from placement.capturing import capture
from placement.executor import Executor, Runner
from placement.objective import Objective
from placement.planners import PlannerError
from placement.problem import Placement, Problem
from placement.program import split_inputs
from placement.report import gantt
from placement.runs.ways import inferring, timed, torch_compiled
from placement.simulator import evaluate, simulate
from placement.tools.threads import torch_threads
from placement.workloads import load

PLANNED = {"one device": "single_device", "two replicas": "data_parallel", "best cut": "best_of"}
PLANNED |= {"best found": "phase_search"}
PLAIN, COMPILED = ("plain, 1 thread", "plain, 2 threads"), "torch.compile, 2 threads"
AGAINST = ("against one device", "against plain", "against torch.compile")
CASES = ("resnet50", "bert_base", "bert_tiny_hidden128", "lstm", "dlrm")
CASES += ("resnet50:0.6", "bert_base:0.6", "inception:latency")
ROUND_S = 0.1  # of a round: of items of less than a millisecond a few are only the beginning


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """Those of other cases, as they are; and workload after workload, unless a case is finished."""
    yield from STUDY.besides(case=options.cases)
    for workload in dict.fromkeys(case.partition(":")[0] for case in options.cases):
        for case in options.cases:
            if case.partition(":")[0] == workload:
                what = (case, options.rounds, options.count)
                yield options.finished.row(dict, what, partial(measured, options, case), name=case)


def measured(options: Options, case: str) -> dict[str, Any]:
    """Its row, measured now."""
    workload, _, limit = case.partition(":")
    module, inputs, problem = profiled(workload)
    picture = options.out / "pipelining.png" if case == options.cases[0] else None
    problem = under(problem, limit)
    return row(case, module, inputs, problem, options.rounds, options.count, picture)


@cache
def profiled(workload: str) -> tuple[Any, Any, Problem]:
    """The module, its inputs, and the problem that all of its cases share."""
    module, inputs = load(workload)
    return module, inputs, measured_problem(capture(module, inputs, name=workload))


def under(problem: Problem, limit: str) -> Problem:
    """The problem for throughput, one item alone, or with a share of one device's memory."""
    if limit == "latency":
        return replace(problem, objective=Objective.LATENCY, max_in_flight=1)
    problem = replace(problem, max_phases=16)
    if not limit:
        return problem
    try:
        share = float(limit)
    except ValueError:
        raise StudyError(f"{limit!r}: give a share of memory (0.6) or latency") from None
    whole = simulate(problem, np.zeros(problem.num_ops, np.int32)).peak_bytes
    assert whole is not None, "a prediction tracks memory"
    memory = int(share * whole.max())
    devices = tuple(replace(d, memory_bytes=memory) for d in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def decided(problem: Problem, planner: str) -> Placement | None:
    """What it answers; None where nothing fits, or micro-batches in turns do not help."""
    try:
        in_turns = planner in ("data_parallel", "phase_search")
        one = problem if in_turns else problem.one_phase
        answer = planners.load(planner)(one)
    except PlannerError:
        return None
    return answer.placement if np.isfinite(answer.value_s) else None


def planned(problem: Problem) -> dict[str, Placement]:
    """What each way answers, where it does."""
    by_way = {way: decided(problem, name) for way, name in PLANNED.items()}
    return {way: p for way, p in by_way.items() if p is not None}


def row(
    case: str, module: Any, inputs: Any, problem: Problem, rounds: int, count: int,
    picture: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One of them; ``picture``: of the cut, predicted and measured."""
    args, kwargs = split_inputs(inputs)
    plans = planned(problem)
    runners = {
        way: Runner(
            problem.graph, problem.cluster, plan, priority=problem.priority,
            max_in_flight=problem.max_in_flight,
        )
        for way, plan in plans.items()
    }  # fmt: skip

    def called(call: Callable[..., Any], threads: int, items: int) -> Iterator[Any]:
        torch.set_num_threads(threads)
        for _ in range(items):
            yield call(*args, **kwargs)

    def planned_s(runner: Runner, count: int) -> float:
        return seconds_per_item(
            lambda items: ended(runner.stream([inputs] * items)), count, runner.num_phases
        )

    count = max(count, int(ROUND_S / problem.compute_s.sum(axis=0).min()))
    streams = {way: partial(planned_s, runner, count) for way, runner in runners.items()}
    calls = [(way, inferring(module), k) for k, way in enumerate(PLAIN, 1)]
    with torch_threads(2):
        by_torch = torch_compiled(module, inputs, problem.cluster, lambda *_: None)
    if by_torch is not None:
        calls.append((COMPILED, by_torch.bare, 2))
    for way, call, k in calls:
        own = partial(called, call, k)
        streams[way] = partial(seconds_per_item, lambda n, own=own: ended(own(n)), count)
    seconds = in_turns(streams, rounds)
    if picture is not None:
        few = replace(problem, num_microbatches=8)
        measured = Executor(few).run(plans["best cut"])
        predicted = simulate(few, plans["best cut"])
        gantt.plot_gantt(predicted, measured, picture, f"{case}, cut by best_of")
    ways = (*PLANNED, *PLAIN, COMPILED)
    took = {way: float(np.median(seconds[way])) if way in seconds else None for way in ways}
    values = {way: evaluate(problem, plan[None]) for way, plan in plans.items()}
    alone = problem.objective is Objective.LATENCY
    predicted = {w: float((v.latency_s if alone else v.period_s)[0]) for w, v in values.items()}

    def ratio(a: str, b: str) -> float | None:
        both = a in seconds and b in seconds
        return float(np.median(seconds[a] / seconds[b])) if both else None

    def error(way: str) -> float | None:
        return predicted[way] / (took[way] or np.nan) - 1 if way in predicted else None

    alone_s = took[PLAIN[0]] or took["one device"]
    ours = min(("two replicas", "best cut", "best found"), key=lambda way: took[way] or np.inf)
    return {
        "case": case,
        "ops": problem.num_ops,
        **took,
        "better": ours,
        "against one device": ratio("one device", ours),
        "against plain": ratio(PLAIN[1], ours),
        "against torch.compile": ratio(COMPILED, ours),
        "error of replicas": error("two replicas"),
        "error of cut": error("best cut"),
        "dispatch share": _dispatch_s() * problem.num_ops / (alone_s or np.nan),
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
        "cases": Option(CASES, word=True, metavar="CASE"),
        "rounds": 7,
        "count": Option(16, "items of a round; more of short ones"),
    },
    columns=(
        Column("case", "case"),
        Column("ops", "ops"),
        *(Column(way, way, 1, 1e3, " ms") for way in (*PLANNED, *PLAIN, COMPILED)),
        Column("better", "better"),
        *(Column(x, x, 2, unit="x") for x in AGAINST),
        *(Column(x, x, 1, 100, " %") for x in ("error of replicas", "error of cut")),
        Column("dispatch share", "dispatch share", 0, 100, " %"),
    ),
    facts=lambda options: {"rounds": options.rounds},
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
