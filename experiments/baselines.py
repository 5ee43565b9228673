"""Every planner on public and synthetic workloads, equal budgets: one table.

    python -m experiments.baselines [PATTERN ...] [--seconds 2] [--seeds 3] [--processes 1]

Objectives are ``max_load`` and ``piecewise_latency`` of dnn-partitioning files, ``period`` of the
others, for Moirai files ``latency`` as well. Planners that draw run with every seed and use up
their seconds; the others run once, with the same budget where they take one. Each run has a
process and a core of its own, all kernels loaded. What is finished lies in ``runs/baselines``:
the same command continues. Writes ``experiments/results/baselines.csv``, ``.md`` and ``.png``.
``--bounds`` proves the bounds of these rows again, in ten seconds.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from experiments import study
from experiments.runs import GIB, Guarded, GuardedSearch, budgeted, is_search, options_of, warm
from experiments.study import Option, Options, Study, StudyError, run, say
from experiments.tables import DASH, Column, finite, geometric_mean, groups, number, table
from placement import importers, planners
from placement.bounds import lower_bound
from placement.problem import Planner, Problem
from placement.report import gantt
from placement.runs.compare import Comparison, compare, geometric_interval
from placement.runs.row import SINGLE
from placement.simulator import score
from placement.workloads.synthetic import families

FILES = (
    "dnn_partitioning/throughput/*/*.json",
    "dnn_partitioning/latency/*/*.json",
    "pipedream/*.txt",
    "moirai/*.json",
)
LEARNED = "policy"  # as it is by default: a search whose moves the released policies choose
NEEDS_A_FILE = ("expert",)
# For few of these problems, and there it is what LEARNED does; its answer is no placement.
APART = ("order_search", "replicated", "data_parallel", "phase_search")
TIES = 1 + 1e-6  # values this close are equal
LEAST = 0.05  # per cent above the best found that the picture tells from none
MEMORY_BYTES = 2**40  # of a PipeDream device: never binds
BANDWIDTH = 12e9  # bytes per second between them
IN_FLIGHT = 8  # micro-batches, two per device: with fewer, forward and backward wait in turns


@dataclass(frozen=True)
class Row:
    """One planner with one seed on one problem; seconds throughout, None where not known.

    ``ratio``: value over the best that any planner found; ``bound_s``: best proved lower bound,
    and ``gap``, ``value_s / bound_s - 1``; ``peak_bytes``: resident memory of the process.
    """

    problem: str
    objective: str
    operators: int
    devices: int
    planner: str
    seed: int | None
    feasible: bool
    value_s: float | None
    ratio: float | None
    seconds: float
    evaluations: int | None
    bound_s: float | None
    gap: float | None
    peak_bytes: int | None
    note: str


def problems(data: Path, patterns: Sequence[str]) -> dict[str, Problem]:
    """Those whose name matches a pattern (all, without one), e.g. ``synthetic/*``.

    Raises:
        StudyError: nothing matches, or the public files are absent.
    """

    def is_chosen(name: str) -> bool:
        return not patterns or any(fnmatch.fnmatch(name, p) for p in patterns)

    drawn = {f"synthetic/{n}": family for n, family in families().items()}
    synthetic = {name: family(0) for name, family in drawn.items() if is_chosen(name)}
    if patterns and all(p.startswith("synthetic/") for p in patterns) and synthetic:
        return synthetic
    chosen: dict[str, Problem] = {}
    for path, file in study.public(data, *FILES).items():
        name = path.rpartition(".")[0]
        latency = f"{name} latency"
        if name.startswith("moirai/") and is_chosen(latency):
            chosen[latency] = importers.load(file, objective="latency")
        if not is_chosen(name):
            continue
        if name.startswith("pipedream/"):
            chosen[name] = pipedream(file)
        elif name.startswith("dnn_partitioning/latency/"):
            chosen[name] = importers.load(file, objective="piecewise_latency")
        else:
            chosen[name] = importers.load(file)
    if not chosen and not synthetic:
        raise StudyError(f"no problem matches {', '.join(patterns)}")
    return chosen | synthetic


def pipedream(file: Path) -> Problem:
    problem = importers.load(
        file, devices=4, bandwidth=BANDWIDTH, memory=MEMORY_BYTES, mode="training"
    )
    return replace(problem, max_in_flight=IN_FLIGHT)


def estimate_s(names: Sequence[str], seconds: float, num_seeds: int, num_problems: int) -> float:
    """About how long it takes: most planners with a budget that do not draw end before it."""
    each = 0.0
    for name in names:
        if is_search(name):
            each += seconds * num_seeds
        else:
            each += 0.5 * seconds if "seconds" in options_of(name) else 0.2
    return each * num_problems


def guarded(name: str, seconds: float, limit_s: float) -> Planner:
    """A planner in a process of its own; if it draws, with a seed that ``compare`` sets."""
    kind = GuardedSearch if is_search(name) else Guarded
    return kind(budgeted(name, seconds), limit_s, 8 * GIB)


def comparison(options: Options, chosen: Mapping[str, Problem]) -> Comparison:
    """``compare`` in processes, each on its own core and with every n-th problem."""
    names = [n for n in planners.names() if n not in NEEDS_A_FILE + APART]
    if options.planners:
        names = options.planners.split(",")
    field = {name: guarded(name, options.seconds, options.limit) for name in names}
    seeds, count = range(options.seeds), options.processes
    took_s = estimate_s(names, options.seconds, options.seeds, len(chosen)) / count
    say(
        f"{len(chosen)} problems, {len(names)} planners: about {took_s / 60:.0f} minutes "
        f"(what is finished in {options.work} is not run again)"
    )
    warm(names, sorted({p.objective for p in chosen.values()}))
    if count > 1:
        large_first = sorted(chosen, key=lambda n: -chosen[n].num_ops)
        with ProcessPoolExecutor(count, mp_context=get_context("fork")) as pool:
            parts = [{n: chosen[n] for n in large_first[k::count]} for k in range(count)]
            work = [pool.submit(_part, k, part, field, seeds, options.work)
                    for k, part in enumerate(parts)]  # fmt: skip
            for part in work:
                part.result()
    # What the parts have finished lies in cells of their own, and is read from there.
    return compare(chosen, field, seeds, out_dir=options.work, progress=say)


def _part(
    number: int,
    chosen: Mapping[str, Problem],
    field: Mapping[str, Planner],
    seeds: Sequence[int],
    work: Path,
) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    compare(chosen, field, seeds, out_dir=work, progress=say)


def rows(options: Options, of: Callable[..., dict[str, Problem]] = problems) -> list[Row]:
    """The comparison of the problems ``of(data, patterns)``, those of one device included."""
    answers = comparison(options, of(options.data, options.patterns))
    table_rows = []
    for cell in answers.rows:
        best, _ = answers.reference(cell.workload)
        solution = answers.solutions.get((cell.workload, cell.planner, cell.seed))
        stats = solution.stats if solution else {}
        note, solved = cell.note, str(stats.get("solved", cell.objective))
        if not solved.startswith(cell.objective):
            note = "; ".join(x for x in (note, f"solved for {solved}") if x)
        about = cell.workload, cell.objective, cell.num_ops, cell.num_devices, cell.planner
        value_s = finite(cell.value_s)
        ratio = finite(cell.value_s / best) if best > 0 else None
        answer = cell.feasible and value_s is not None, value_s, ratio, cell.plan_s
        peak_bytes = stats.get("peak_bytes")
        proved = cell.evaluations, cell.bound_s, cell.gap
        table_rows.append(Row(*about, cell.seed, *answer, *proved, peak_bytes, note))
    return table_rows


def with_bounds(rows: Sequence[Row], options: Options) -> list[Row]:
    """The rows with the bounds of today, where these are higher than what was proved then.

    Raises:
        StudyError: a single device has another value today, so the problem is another.
    """
    chosen = problems(options.data, options.patterns)
    bounds: dict[str, float] = {}
    for name, mine in groups(rows, "problem").items():
        problem = chosen[name]
        names = [SINGLE + device for device in problem.cluster.device_names]
        for row in mine:
            if row.planner in names and row.value_s is not None:
                alone = np.full(problem.num_ops, names.index(row.planner), np.int32)
                now_s = float(score(problem, alone)[0])
                if not np.isclose(now_s, row.value_s, rtol=1e-9, atol=0):
                    raise StudyError(
                        f"{name}: {row.planner} takes {now_s} s, and took {row.value_s} s when the "
                        "rows were made: run the study without --bounds"
                    )
        bounds[name] = study.higher(mine[0].bound_s, lower_bound(problem))
        say(f"{name}: bound of {bounds[name]} s, {mine[0].bound_s} s before")
    return [
        replace(r, bound_s=bounds[r.problem], gap=r.value_s and r.value_s / bounds[r.problem] - 1)
        for r in rows
    ]


def below_its_bound(rows: Sequence[Row], options: Options) -> list[Row]:
    wrong = [r for r in rows if r.gap is not None and r.gap < 1 - TIES]
    for row in wrong:
        say(f"{row.problem}: {row.planner} has {row.value_s} s, below the bound {row.bound_s} s")
    return wrong


# --- the page ------------------------------------------------------------------------------------

Ratios = dict[str, dict[str, float]]  # by planner and problem


def ratios(rows: Sequence[Row]) -> Ratios:
    """Geometric mean over seeds of the values over the best found, the best planner first.

    A run without an answer counts as the best single device, or as the worst answer.
    """
    by_planner: dict[str, dict[str, float]] = {}
    for problem, mine in groups(rows, "problem").items():
        values = [r.value_s for r in mine if r.value_s is not None]
        if not values:
            continue
        single = [r.value_s for r in mine if r.planner.startswith(SINGLE) and r.value_s]
        fallback = min(single, default=max(values))
        for planner, runs in groups(mine, "planner").items():
            each = [(r.value_s or fallback) / min(values) for r in runs]
            if not planner.startswith(SINGLE):
                by_planner.setdefault(planner, {})[problem] = geometric_mean(each)
    order = sorted(by_planner, key=lambda p: geometric_mean(by_planner[p].values()))
    return {planner: by_planner[planner] for planner in order}


def won(row: Row) -> bool:
    """It is as good as the best that was found."""
    return row.ratio is not None and row.ratio <= TIES


def summary(rows: Sequence[Row], by_planner: Ratios) -> str:
    runs = groups(rows, "planner")
    kinds = sorted({_group(r.problem) for r in rows})

    def interval(planner: str) -> str:
        low, high = geometric_interval(list(by_planner[planner].values()))
        return f"{low:.3f}–{high:.3f}"

    def of_kind(kind: str, planner: str) -> float | None:
        some = [v for k, v in by_planner[planner].items() if _group(k) == kind]
        return geometric_mean(some) if some else None

    def evaluations(planner: str) -> float | None:
        counted = [r.evaluations for r in runs[planner] if r.evaluations is not None]
        return float(np.median(counted)) if counted else None

    def failed(planner: str) -> str:
        return f"{sum(not r.feasible for r in runs[planner])} of {len(runs[planner])}"

    return table(
        by_planner,
        Column("planner", str),
        Column("ratio", lambda p: geometric_mean(by_planner[p].values())),
        Column("95 %", interval),
        *(Column(kind, partial(of_kind, kind)) for kind in kinds),
        Column("best on", lambda p: len({r.problem for r in runs[p] if won(r)})),
        Column("no answer", failed),
        Column("fell back", lambda p: sum(bool(r.note) and r.feasible for r in runs[p])),
        Column("median s", lambda p: float(np.median([r.seconds for r in runs[p]])), 2),
        Column("longest s", lambda p: max(r.seconds for r in runs[p]), 1),
        Column("evaluations", evaluations, 0),
    )


def _group(problem: str) -> str:
    """``throughput``, ``latency``, ``pipedream``, ``moirai`` or ``synthetic``."""
    return problem.removeprefix("dnn_partitioning/").partition("/")[0]


def per_problem(rows: Sequence[Row], by_planner: Ratios) -> str:
    """A line per problem: the best found, who found it, the proved gap, every planner's ratio."""
    runs = groups(rows, "problem")
    answered = {(r.problem, r.planner) for r in rows if r.feasible}

    def best_s(problem: str) -> float:
        return min(r.value_s for r in runs[problem] if r.value_s is not None)

    def winners(problem: str) -> str:
        names = dict.fromkeys(r.planner for r in runs[problem] if won(r))
        return ", ".join(names) if len(names) <= 3 else f"{len(names)} planners"

    def gap(problem: str) -> float | None:
        bound_s = runs[problem][0].bound_s
        return best_s(problem) / bound_s - 1 if bound_s else None

    def ratio(planner: str, problem: str) -> str:
        if (problem, planner) not in answered:
            return DASH
        return number(by_planner[planner].get(problem))

    return table(
        runs,
        Column("problem", str),
        Column("objective", lambda n: runs[n][0].objective),
        Column("operators", lambda n: runs[n][0].operators),
        Column("devices", lambda n: runs[n][0].devices),
        Column("best ms", best_s, 4, 1e3),
        Column("bound ms", lambda n: runs[n][0].bound_s or 0.0, 4, 1e3),
        Column("gap %", gap, 1, 100),
        Column("found by", winners),
        *(Column(planner, partial(ratio, planner)) for planner in by_planner),
    )


def notes(rows: Sequence[Row]) -> str:
    """What planners said where they have no answer, or fell back; equal texts once."""
    problems_of: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note and not row.planner.startswith(SINGLE):
            text = re.sub(r"\d[\d.e+]*", "N", row.note)  # the CSV file has the numbers
            problems_of.setdefault((row.planner, text), []).append(row.problem)
    lines = []
    for (planner, text), where in sorted(problems_of.items()):
        places = list(dict.fromkeys(where))
        examples = ", ".join(places[:2]) + (f" and {len(places) - 2} more" * (len(places) > 2))
        lines.append(f"- `{planner}`: {text} ({examples})\n")
    return "".join(lines)


def parts(rows: Sequence[Row], options: Options) -> dict[str, str]:
    by_planner = ratios(rows)
    return {
        "table": summary(rows, by_planner),
        "problems": per_problem(rows, by_planner),
        "notes": notes(rows),
    }


def plot(rows: Sequence[Row], path: Path, options: Options) -> None:
    """PNG: a line per planner, how far it ends above the best found and after how many seconds."""
    by_planner, runs = ratios(rows), groups(rows, "planner")
    figure = gantt.figure_class()(figsize=(9, 0.8 + 0.2 * len(by_planner)), dpi=130)
    far, long = axes = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    for line, (planner, each) in enumerate(by_planner.items()):
        seconds = [r.seconds for r in runs[planner]]
        ends = geometric_interval(list(each.values()))
        above = [max(LEAST, 100 * (x - 1)) for x in (*ends, geometric_mean(each.values()))]
        spent = [min(seconds), max(seconds), float(np.median(seconds))]
        for axis, (low, high, middle) in ((far, above), (long, spent)):
            axis.plot((low, high), (line, line), color=gantt.COLOURS[0], lw=1.5)
            axis.plot(middle, line, "o", color=gantt.COLOURS[0], ms=5)
    for axis in axes:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.minorticks_off()
        gantt.plain_axis(axis)
        axis.tick_params(axis="y", length=0, labelsize=8)
        axis.grid(axis="y", color=gantt.FAINT, alpha=0.25, lw=0.6)
    far.set_yticks(range(len(by_planner)), by_planner)
    far.set_ylim(len(by_planner) - 0.5, -0.5)  # the best planner on top
    far.set_xlabel("per cent above the best found: geometric mean, 95 % interval", fontsize=9)
    long.set_xlabel("seconds of planning: median, range", fontsize=9)
    figure.tight_layout()
    gantt.save_figure(figure, path)


OPTIONS = {
    "patterns": Option((), "names of problems", word=True, metavar="PATTERN"),
    "seconds": Option(2.0, "budget of every planner"),
    "seeds": Option(3, "of planners that draw"),
    "limit": Option(60.0, "seconds of one run, at most"),
    "processes": 1,
    "planners": Option(None, "names, with commas; default: all"),
}


def facts(options: Options) -> dict[str, float]:
    return {"seconds": options.seconds, "seeds": options.seeds, "limit_s": options.limit}


STUDY = Study(
    name="baselines",
    rows=rows,
    row=Row,
    parts=parts,
    plot=plot,
    options=OPTIONS,
    facts=facts,
    wrong=below_its_bound,
    again=study.Again("bounds", study.ONLY_BOUNDS, with_bounds),
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
