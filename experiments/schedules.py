"""How good are searched schedules on published cases?

    python -m experiments.schedules [--cases vshape/4 mllm] [--data FOLDER]

Every case of ``schedules/cases.json`` (placements of the Tessel repository as data)
under every memory limit of ``truth.json``: period and proof of patterns of one micro-batch and
its seconds, period where patterns may hold more, makespan of 8, 16 and 32 micro-batches; beside
the published search (same machine type, one core), the best known makespans, GPipe and 1F1B.
Writes ``experiments/results/schedules.{csv,md}``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from experiments.study import Option, Options, Study, StudyError, run, say
from experiments.tables import DASH, Column, table
from placement.schedulers.searched.blocks import Work, read_work
from placement.schedulers.searched.repetend import search
from placement.schedulers.searched.retime import earliest
from placement.schedulers.searched.search import default_seconds, search_schedule

COUNTS = (8, 16, 32)


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


def row_of(case: dict[str, Any], key: str, truth: dict[str, Any], scale: float = 1.0) -> Row:
    """One row; ``scale`` multiplies the default budget in seconds."""
    work, _ = read_work(case, truth["memory"])
    budget = scale * default_seconds(work)
    began = time.perf_counter()
    one = search(work, 1, budget)
    took = time.perf_counter() - began
    answers = [search_schedule(work, n, seconds=budget) for n in COUNTS]
    best = min(answers, key=lambda a: a.period)
    published = truth.get("tessel") or truth.get("tessel_fast") or {}
    batch = np.arange(COUNTS[-1])[:, None]
    level = np.zeros(work.num_blocks, np.int64)  # blocks on the longest way to each
    for v, block in enumerate(work.blocks):
        level[v] = max((level[u] + 1 for u, _ in block.preds), default=0)
    most_visits = max(len(set(level[list(on)].tolist())) for on in work.on)
    counts: dict[str, Any] = {}
    for n, answer in zip(COUNTS, answers, strict=True):
        counts[f"makespan_{n}"] = answer.makespan
        counts[f"truth_{n}"] = truth.get("best_makespan", {}).get(str(n), [None])[0]
    return Row(
        case=key,
        memory=truth["memory"],
        period_one=float(one.pattern.per_micro_batch),
        period_one_bound=float(one.bound),
        seconds=took,
        period=float(best.period),
        period_bound=float(best.outcome.bound),
        unroll=best.outcome.pattern.unroll,
        truth_period=truth.get("period"),
        published_period=published.get("period"),
        published_seconds=published.get("seconds"),
        gpipe_32=fixed(work, level * len(batch) + batch),
        one_f_one_b_32=fixed(work, level + most_visits * batch),
        scale=scale,
        **counts,
    )


def fixed(work: Work, key: np.ndarray) -> int | None:
    """Makespan of the order of ``key [N, n]``; None if it does not fit into the memory."""
    starts = earliest(Work(work.blocks, work.num_devices), key)
    assert starts is not None
    if work.errors(starts):
        return None
    return int((starts + [b.time for b in work.blocks]).max())


def rows(options: Options) -> Iterator[Row]:
    """Every case under every limit of memory, those of ``--cases`` alone."""
    folder = options.data / "schedules"
    if not (folder / "cases.json").is_file():
        raise StudyError(f"no {folder / 'cases.json'}; name the folder with --data")
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))["cases"]
    truths = json.loads((folder / "truth.json").read_text(encoding="utf-8"))["records"]
    names = [name for name in cases if any(part in name for part in options.cases or [""])]
    chosen = [t for t in truths if t["case"] in names]
    if not chosen:
        raise StudyError(f"no case has one of {options.cases} in its name")
    search_schedule(read_work(cases[chosen[0]["case"]], None)[0], 2, seconds=0.1)  # compiles
    for i, truth in enumerate(chosen, 1):
        name, memory = truth["case"], truth["memory"]
        say(f"{i}/{len(chosen)} {name}, memory {memory}")
        make = partial(row_of, cases[name], name, truth, options.scale)
        yield options.finished.row(Row, [name, memory, options.scale], make, name)


def parts(rows: Sequence[Row], options: Options) -> dict[str, str]:
    def general(value: float | None) -> str:
        return DASH if value is None else f"{value:.4g}"

    def figure(name: str, row: Row) -> str:
        return general(getattr(row, name))

    def against(n: int, row: Row) -> str:
        ours, best = getattr(row, f"makespan_{n}"), getattr(row, f"truth_{n}")
        mark = "" if best is None or ours == best else " (<)" if ours < best else " (>)"
        return f"{ours} / {general(best)}{mark}"

    columns = (
        Column("case", "case"),
        Column("M", partial(figure, "memory")),
        Column("period K=1", partial(figure, "period_one")),
        Column("bound", partial(figure, "period_one_bound")),
        Column("truth", partial(figure, "truth_period")),
        Column("s", "seconds"),
        Column("period", partial(figure, "period")),
        Column("K", "unroll"),
        Column("bound", partial(figure, "period_bound")),
        *(Column(f"N={n} / truth", partial(against, n)) for n in COUNTS),
        Column("GPipe 32", partial(figure, "gpipe_32")),
        Column("1F1B 32", partial(figure, "one_f_one_b_32")),
        Column("published period", partial(figure, "published_period")),
        Column("published s", partial(figure, "published_seconds")),
    )
    return {"summary": summary(rows), "table": table(rows, *columns)}


def summary(rows: Sequence[Row]) -> str:
    """How often what was to be shown holds."""
    proved = sum(r.period_one <= r.period_one_bound for r in rows)
    with_truth = [r for r in rows if r.truth_period is not None]
    reached = sum(min(r.period, r.period_one) <= (r.truth_period or 0) for r in with_truth)
    each = [(getattr(r, f"makespan_{n}"), getattr(r, f"truth_{n}")) for r in rows for n in COUNTS]
    pairs = [(ours, best) for ours, best in each if best is not None]
    return (
        f"- period of one micro-batch proved optimal: {proved} of {len(rows)}\n"
        f"- period of truth.json reached or less: {reached} of {len(with_truth)}\n"
        "- less with more micro-batches per period: "
        f"{sum(r.period < r.period_one for r in rows)}\n"
        f"- makespan at or below the best known: {sum(a <= b for a, b in pairs)} of {len(pairs)}, "
        f"below: {sum(a < b for a, b in pairs)}\n"
        f"- longest search for one micro-batch per period: {max(r.seconds for r in rows):.2f} s\n"
    )


STUDY = Study(
    name="schedules",
    rows=rows,
    row=Row,
    parts=parts,
    options={
        "cases": Option((), "those with one of these in the name"),
        "scale": Option(1.0, "times the default seconds"),
    },
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
