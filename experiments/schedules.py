"""How good are searched schedules: on published cases, and for real?

    python -m experiments.schedules [cases] [--cases vshape/4 mllm] [--data FOLDER]
    python -m experiments.schedules executed [WORKLOAD ...] [--rounds 7] [--microbatches 16]

``cases``: every case of ``schedules/cases.json`` (placements of the Tessel repository as data)
under every memory limit of ``truth.json``: period and proof of patterns of one micro-batch and
its seconds, period where patterns may hold more, makespan of 8, 16 and 32 micro-batches; beside
the published search (same machine type, one core), the best known makespans, GPipe and 1F1B.
Writes ``experiments/results/schedules.{csv,md}``.

``executed``: a model in four pieces that go back and forth between two one-core devices, run in
the order of each scheduler: interleaved rounds in one process, ratio of medians.
Writes ``experiments/results/schedules_executed.md``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments import _study
from placement import schedulers
from placement.files import write_atomic
from placement.problem import Placement, Problem
from placement.schedulers._blocks import Work, read_work
from placement.schedulers._repetend import search
from placement.schedulers._retime import earliest
from placement.schedulers._search import default_seconds, search_schedule

COUNTS = (8, 16, 32)
SCHEDULERS = ("searched", "one_f_one_b", "gpipe", "list_order")
# Two devices, twice each, with unequal pieces: GPipe and 1F1B leave one of them waiting.
PIECES = ((0, 0.4), (1, 0.1), (0, 0.1), (1, 0.4))


@dataclass(frozen=True)
class Row:
    """A case, a memory limit and a ``scale`` of the default budgets.

    Makespans are those of 8, 16 and 32 micro-batches; None: not known.
    """

    case: str
    memory: int | None
    period_one: float
    period_one_bound: float
    seconds: float
    period: float
    period_bound: float
    unroll: int
    makespan_8: int
    makespan_16: int
    makespan_32: int
    truth_period: float | None
    truth_8: int | None
    truth_16: int | None
    truth_32: int | None
    published_period: float | None
    published_seconds: float | None
    gpipe_32: int | None
    one_f_one_b_32: int | None
    scale: float = 1.0


def study(case: dict[str, Any], key: str, truth: dict[str, Any], scale: float = 1.0) -> Row:
    """One row; ``scale`` multiplies the default budget in seconds."""
    work, _ = read_work(case, truth["memory"])
    budget = scale * default_seconds(work)
    began = time.perf_counter()
    one = search(work, 1, budget)
    took = time.perf_counter() - began
    answers = [search_schedule(work, n, seconds=budget) for n in COUNTS]
    best = min(answers, key=lambda a: a.period)
    known = truth.get("best_makespan", {})
    published = truth.get("tessel") or truth.get("tessel_fast") or {}
    level = levels(work)
    batch = np.arange(COUNTS[-1])[:, None]
    counts: dict[str, Any] = {}
    for n, answer in zip(COUNTS, answers, strict=True):
        counts[f"makespan_{n}"] = answer.makespan
        counts[f"truth_{n}"] = known.get(str(n), [None])[0]
    return Row(
        case=key,
        memory=truth["memory"],
        period_one=float(one.pattern.per_micro_batch),
        period_one_bound=float(one.bound),
        seconds=took,
        period=float(best.period),
        period_bound=float(best.found.bound),
        unroll=best.found.pattern.unroll,
        truth_period=truth.get("period"),
        published_period=published.get("period"),
        published_seconds=published.get("seconds"),
        gpipe_32=fixed(work, level * len(batch) + batch),
        one_f_one_b_32=fixed(work, level + most_visits(work, level) * batch),
        scale=scale,
        **counts,
    )


def levels(work: Work) -> np.ndarray:
    """int64 ``[n]`` number of blocks on the longest way to each."""
    level = np.zeros(work.num_blocks, np.int64)
    for v, block in enumerate(work.blocks):
        for u, _ in block.preds:
            level[v] = max(level[v], level[u] + 1)
    return level


def most_visits(work: Work, level: np.ndarray) -> int:
    """How many levels the busiest device has."""
    return max(len(set(level[list(on)].tolist())) for on in work.on)


def fixed(work: Work, key: np.ndarray) -> int | None:
    """Makespan of the order of ``key [N, n]``; None if it does not fit into the memory."""
    starts = earliest(Work(work.blocks, work.num_devices), key)
    assert starts is not None
    if work.errors(starts):
        return None
    return int((starts + [b.time for b in work.blocks]).max())


def table(rows: Sequence[Row]) -> str:
    """What a reader compares, as Markdown."""

    def text(value: float | None) -> str:
        return "–" if value is None else f"{value:.4g}"

    def against(ours: int, known: int | None) -> str:
        mark = "" if known is None or ours == known else " (<)" if ours < known else " (>)"
        return f"{ours} / {text(known)}{mark}"

    header = ["case", "M", "period K=1", "bound", "truth", "s", "period", "K", "bound"]
    header += [f"N={n} / truth" for n in COUNTS]
    header += ["GPipe 32", "1F1B 32", "published period", "published s"]
    cells = [
        [
            r.case,
            text(r.memory),
            text(r.period_one),
            text(r.period_one_bound),
            text(r.truth_period),
            f"{r.seconds:.3f}",
            text(r.period),
            str(r.unroll),
            text(r.period_bound),
            against(r.makespan_8, r.truth_8),
            against(r.makespan_16, r.truth_16),
            against(r.makespan_32, r.truth_32),
            text(r.gpipe_32),
            text(r.one_f_one_b_32),
            text(r.published_period),
            text(r.published_seconds),
        ]
        for r in rows
    ]
    return _study.to_table(header, cells)


def summary(rows: Sequence[Row]) -> str:
    """How often what was to be shown holds."""
    known = [r for r in rows if r.truth_period is not None]
    pairs = [
        (ours, truth)
        for r in rows
        for ours, truth in (
            (r.makespan_8, r.truth_8),
            (r.makespan_16, r.truth_16),
            (r.makespan_32, r.truth_32),
        )
        if truth is not None
    ]
    proved = sum(r.period_one <= r.period_one_bound for r in rows)
    reached = sum(min(r.period, r.period_one) <= (r.truth_period or 0) for r in known)
    wider = sum(r.period < r.period_one for r in rows)
    return (
        f"- period of one micro-batch proved optimal: {proved} of {len(rows)}\n"
        f"- period of truth.json reached or less: {reached} of {len(known)}\n"
        f"- less with more micro-batches per period: {wider}\n"
        f"- makespan at or below the best known: {sum(a <= b for a, b in pairs)} of {len(pairs)}, "
        f"below: {sum(a < b for a, b in pairs)}\n"
        f"- longest search for one micro-batch per period: {max(r.seconds for r in rows):.2f} s\n"
    )


def _key(truth: dict[str, Any], scale: float) -> dict[str, Any]:
    return {"case": truth["case"], "memory": truth["memory"], "scale": scale}


def run_cases(options: argparse.Namespace, argv: Sequence[str] | None) -> None:
    """The study of published cases."""
    folder = options.data / "schedules"
    if not (folder / "cases.json").is_file():
        raise _study.StudyError(f"no {folder / 'cases.json'}; name the folder with --data")
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))["cases"]
    truths = json.loads((folder / "truth.json").read_text(encoding="utf-8"))["records"]
    chosen = [
        t
        for t in truths
        if t["case"] in cases
        and (not options.cases or any(part in t["case"] for part in options.cases))
    ]
    if not chosen:
        raise _study.StudyError(f"no case has one of {options.cases} in its name")
    search_schedule(read_work(cases[chosen[0]["case"]], None)[0], 2, seconds=0.1)  # compiles
    store = _study.Store(options.work / "rows.jsonl", Row, options.fresh)
    for i, truth in enumerate(chosen):
        if store.find(**_key(truth, options.scale)) is None:
            _study.say(f"{i + 1}/{len(chosen)} {truth['case']}, memory {truth['memory']}")
            store.add(study(cases[truth["case"]], truth["case"], truth, options.scale))
    rows = [r for t in chosen if (r := store.find(**_key(t, options.scale)))]
    write_atomic(options.out / "schedules.csv", _study.to_csv(rows))
    write_atomic(
        options.out / "schedules.md",
        "# Searched schedules of published cases\n\n"
        f"`{_study.command_line('experiments.schedules', argv)}`\n\n"
        "M: memory of each device. Periods are times per micro-batch, K micro-batches in a "
        "period; `bound` is proved for patterns of as many. `s`: search and proof for K = 1, one "
        "core. `published`: the Tessel search, seconds on one core.\n\n"
        f"{summary(rows)}\n{table(rows)}\n{_study.provenance()}",
    )
    print(summary(rows))


def folded(problem: Problem, pieces: Sequence[tuple[int, float]] = PIECES) -> Placement:
    """int32 ``[N]``: operators in their order, each (device, share of the seconds) a piece."""
    seconds = problem.compute_s.mean(axis=1)
    first = np.zeros(problem.graph.num_groups)
    middle = (np.cumsum(seconds) - seconds / 2) / seconds.sum()
    first[problem.graph.group[::-1]] = middle[::-1]  # a group goes with its first operator
    ends = np.cumsum([share for _, share in pieces])[:-1] / sum(share for _, share in pieces)
    devices = np.array([d for d, _ in pieces], np.int32)
    return devices[np.searchsorted(ends, first[problem.graph.group])]


def executed(
    problem: Problem, placement: Placement, num_microbatches: int, rounds: int
) -> dict[str, tuple[float, list[float]]]:
    """Predicted seconds per micro-batch, and measured ones of each round, per scheduler."""
    from placement.executor import Executor
    from placement.simulator import simulate

    orders = {
        name: schedulers.load(name)(problem, placement, num_microbatches) for name in SCHEDULERS
    }
    predicted = {
        name: simulate(problem, placement, order).makespan_s / num_microbatches
        for name, order in orders.items()
    }
    executor = Executor(problem)
    measured: dict[str, list[float]] = {name: [] for name in orders}
    for r in range(rounds + 1):
        for name, order in orders.items():
            took = executor.run(placement, order).makespan_s / num_microbatches
            if r > 0:  # the first round warms up
                measured[name].append(took)
    return {name: (predicted[name], measured[name]) for name in orders}


def run_executed(options: argparse.Namespace, argv: Sequence[str] | None) -> None:
    """The study on devices."""
    from placement.cluster import Cluster
    from placement.measure import measure
    from placement.program import capture
    from placement.workloads import load

    lines = []
    for workload in options.workloads:
        module, inputs = load(workload)
        graph = capture(module, inputs, name=workload)
        machine = Cluster.detect()
        if machine.num_devices < 2:
            raise _study.StudyError("executed needs two devices; this machine has one")
        cluster = Cluster("two", machine.devices[:2])
        problem = Problem(graph, cluster, measure(graph, cluster, repeats=options.repeats))
        found = executed(problem, folded(problem), options.microbatches, options.rounds)
        ours = float(np.median(found["searched"][1]))
        for name, (predicted, rounds) in found.items():
            median = float(np.median(rounds))
            spread = float(np.percentile(rounds, 75) - np.percentile(rounds, 25))
            lines.append(
                [
                    f"{workload}, {name}",
                    f"{1e3 * predicted:.2f}",
                    f"{1e3 * median:.2f}",
                    f"{1e3 * spread:.2f}",
                    f"{median / ours:.2f}x",
                ]
            )
    header = ["workload, scheduler", "predicted ms", "measured ms", "iqr", "of searched"]
    made = _study.to_table(header, lines)
    write_atomic(
        options.out / "schedules_executed.md",
        "# Schedules for real\n\n"
        f"`{_study.command_line('experiments.schedules', argv)}`\n\n"
        "Milliseconds per micro-batch, first start to last end, two one-core devices; pieces "
        + ", ".join(f"{share:.0%} on {d}" for d, share in PIECES)
        + f". Medians of {options.rounds} interleaved rounds of {options.microbatches} "
        f"micro-batches.\n\n{made}\n{_study.provenance()}",
    )
    print(made)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _study.common_options(parser, "schedules")
    parser.add_argument("study", nargs="?", default="cases", choices=("cases", "executed"))
    parser.add_argument("workloads", nargs="*", help="of executed (resnet50)")
    parser.add_argument(
        "--cases", nargs="*", default=[], help="those with one of these in the name"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="times the default seconds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=10, help="of every operator's measurement")
    parser.add_argument("--microbatches", type=int, default=16)
    options = parser.parse_args(argv)
    options.workloads = options.workloads or ["resnet50"]
    run = run_cases if options.study == "cases" else run_executed
    return _study.launch(lambda: run(options, argv))


if __name__ == "__main__":
    raise SystemExit(main())
