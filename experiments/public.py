"""Public throughput problems where micro-batches may take turns on replicas.

    python -m experiments.public replicas

Writes ``experiments/results/public_replicas.csv`` and ``.md``. Every run has one core and a process
of its own, all kernels loaded. What is finished lies in ``runs/public``: the same command
continues. (How far planners stay from what is known of public files: ``placement bench public``.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from experiments import study
from experiments.runs import GIB, limited, warm
from experiments.study import Option, Options, Study, StudyError, run, say
from experiments.tables import Column, finite, groups, table
from placement import importers, planners
from placement.bounds import lower_bound
from placement.plan import proved_bound_s
from placement.problem import Problem
from placement.simulator import score, value_of

MEMORY_BYTES = 8 * GIB  # address space of a planner
LIMIT_S = 600.0  # of one run, over its budget: none is expected to need it
TURNS = ("data_parallel", "replicated", "phase_search")
LOADS = ("dnn_partitioning/throughput/*/*.json", "pipedream/vgg16.txt", "pipedream/alexnet.txt")


# --- one planner on one problem ------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One run of a planner; seconds throughout, None where there is none.

    ``value_s``: in the simulator, or in the analytic model. ``bound_s``: proved, for every
    placement; ``restricted_bound_s``: for one piece per accelerator only. ``status``: ``ok``, or
    what stopped it, see ``note``.
    """

    file: str
    objective: str
    operators: int
    devices: int
    planner: str
    seed: int | None
    budget_s: float | None
    value_s: float | None
    bound_s: float | None
    restricted_bound_s: float | None
    seconds: float
    evaluations: int | None
    peak_bytes: int | None
    status: str
    note: str


def answer(
    options: Options,
    file: str,
    problem: Problem,
    planner: str,
    budget_s: float | None = None,
    seed: int | None = None,
) -> Row:
    """The row of a run: one that is finished, or made now."""
    key = (file, problem.objective, problem.num_ops, problem.num_devices)
    key += (planner, seed, budget_s)
    return options.finished.row(Row, key, partial(_answer, problem, *key), f"{file}-{planner}")


def _answer(problem: Problem, *key: Any) -> Row:
    file, objective, _, num_devices, planner, seed, budget_s = key
    drawn = "" if seed is None else f", seed {seed}"
    say(f"{file}, {objective}, {num_devices} devices: {planner}{drawn}")
    options = {"seconds": budget_s, "seed": seed}
    ready = planners.load(planner, **{k: v for k, v in options.items() if v is not None})
    score(problem, np.zeros(problem.num_ops, np.int32))  # what is derived from a problem, once
    done = limited(lambda: ready(problem), (budget_s or 0.0) + LIMIT_S, MEMORY_BYTES)
    stats: Mapping[str, Any] = done.value.stats if done.value else {}
    value_s, bound_s = np.inf, lower_bound(problem)
    if done.value is not None:
        problem.check_placement(done.value.placement)
        value_s = value_of(problem, done.value)
        bound_s = proved_bound_s(problem, done.value)
    stages = [f"{x['num_ops']} on {len(x['devices'])}" for x in stats.get("stages", ())]
    said = [done.note, ", ".join(stages)]
    said += [str(stats.get(key, "")) for key in ("message", "infeasible")]
    return Row(
        *key,
        value_s=finite(value_s),
        bound_s=bound_s,
        restricted_bound_s=stats.get("one_piece_bound_s"),
        seconds=done.seconds,
        evaluations=stats.get("evaluations"),
        peak_bytes=done.peak_bytes,
        status=done.status,
        note="; ".join(x for x in said if x),
    )


@dataclass(frozen=True)
class Case:
    """All runs on one problem: what the tables have a line for."""

    rows: Sequence[Row]

    @property
    def file(self) -> str:
        """Its path, without what all have in common."""
        return short(self.rows[0].file)

    def of(self, planner: str) -> Row | None:
        return next((r for r in self.rows if r.planner == planner), None)

    def value_s(self, *names: str) -> float:
        """The least of these planners (of all, without one); inf if none has an answer."""
        mine = (r for r in self.rows if r.planner in names or not names)
        return min((r.value_s for r in mine if r.value_s is not None), default=np.inf)


def cases(rows: Sequence[Row]) -> list[Case]:
    return [Case(mine) for mine in groups(rows, "file", "objective").values()]


def short(file: str) -> str:
    return file.removeprefix("dnn_partitioning/").rpartition(".")[0]


def replicas(options: Options) -> Iterator[Row]:
    files = study.public(options.data, *LOADS)
    some = {f: p for f, p in files.items() if any(w in f for w in options.words)}
    if options.words and not some:
        raise StudyError(f"no file has {' or '.join(options.words)} in its path")
    files = some or files
    say(f"{len(files)} files: about {len(files) * (2 * options.seconds + 2) / 60:.0f} minutes")
    warm(["macro_search", "single_device"], ["max_load"])
    for file, path in files.items():
        problem = importers.load(path, objective="max_load")
        yield answer(options, file, problem, "single_device")
        yield answer(options, file, problem, "macro_search", options.seconds, 0)
        free = replace(problem, max_phases=options.phases)
        for name in TURNS:
            budget = (options.seconds, 0) if name == "phase_search" else ()
            yield answer(options, file, free, name, *budget)


def below_its_bound(rows: Sequence[Row], options: Options) -> list[str]:
    """Runs whose value is less than what is proved for as many phases: a mistake."""
    wrong = [r for r in rows if (r.value_s or np.inf) < (r.bound_s or 0.0) * (1 - 1e-9)]
    return [f"{r.file} by {r.planner}" for r in wrong]


def replicas_parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    def value(*names: str) -> Callable[[Case], float | None]:
        return lambda case: finite(case.value_s(*names))

    def bound(planner: str) -> Callable[[Case], float | None]:
        return lambda case: getattr(case.of(planner), "bound_s", None)

    def gain(case: Case) -> float:
        return case.value_s("single_device", "macro_search") / case.value_s()

    shown = table(
        cases(rows),
        Column("file", "file"),
        Column("devices", lambda c: c.rows[0].devices),
        Column("one device ms", value("single_device"), 2, 1e3),
        Column("one phase ms", value("macro_search"), 2, 1e3),
        Column("its bound", bound("macro_search"), 2, 1e3),
        *(Column(f"{name} ms", value(name), 2, 1e3) for name in TURNS),
        Column("stages of replicated", lambda c: getattr(c.of("replicated"), "note", "")),
        Column("bound", bound("replicated"), 2, 1e3),
        Column("replicas bring", gain, 2, unit="x"),
    )
    gains = [gain(c) for c in cases(rows)]
    helped = f"{sum(x > 1.005 for x in gains)} of {len(gains)}"
    below = ", ".join(below_its_bound(rows, options))
    wrong = f"\n\n**Below a proved bound, which is a mistake: {below}**" if below else ""
    return {"table": shown, "helped": helped, "most": max(gains), "wrong": wrong}


STUDY = Study(
    name="public_replicas",
    module="experiments.public",
    word="replicas",
    rows=replicas,
    row=Row,
    parts=replicas_parts,
    wrong=below_its_bound,
    options={
        "words": Option((), "only files with it in the path", word=True, metavar="WORD"),
        "seconds": Option(10.0, "of a search"),
        "phases": Option(12, "most that replicas take turns in"),
    },
)
main = partial(run, (STUDY,))

if __name__ == "__main__":
    raise SystemExit(main())
