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
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from experiments import study
from experiments.grid import PROCESSES, Cell, Task, bounded_again, compare, every
from experiments.runs import warm
from experiments.study import Option, Options, Study, StudyError, run, say
from experiments.tables import DASH, Column, geometric_mean, groups, number, table
from placement import importers, planners
from placement.problem import Problem, Solution
from placement.report import gantt
from placement.report.row import SINGLE
from placement.report.table import geometric_interval
from placement.simulator import score
from placement.workloads.synthetic import families

FILES = (
    "dnn_partitioning/throughput/*/*.json",
    "dnn_partitioning/latency/*/*.json",
    "pipedream/*.txt",
    "moirai/*.json",
)
NEEDS_A_FILE = ("expert",)
# For few of these problems, and there it is what policy does; its answer is no placement.
APART = ("order_search", "replicated", "data_parallel", "phase_search")
TIES = 1 + 1e-6  # values this close are equal
LEAST = 0.05  # per cent above the best found that the picture tells from none
MEMORY_BYTES = 2**40  # of a PipeDream device: never binds
BANDWIDTH = 12e9  # bytes per second between them
IN_FLIGHT = 8  # micro-batches, two per device: with fewer, forward and backward wait in turns


def problems(data: Path, patterns: Sequence[str]) -> dict[str, Problem]:
    """Those whose name matches a pattern (all, without one), e.g. ``synthetic/*``.

    Raises:
        StudyError: nothing matches, or the public files are absent.
    """
    loaders: dict[str, Callable[[], Problem]] = {}
    only_drawn = patterns and all(p.startswith("synthetic/") for p in patterns)
    for path, file in {} if only_drawn else study.public(data, *FILES).items():
        name = path.rpartition(".")[0]
        if name.startswith("moirai/"):
            loaders[f"{name} latency"] = partial(importers.load, file, objective="latency")
        objective = {"objective": "piecewise_latency"} if "/latency/" in name else {}
        loaders[name] = partial(importers.load, file, **objective)
        if name.startswith("pipedream/"):
            loaders[name] = partial(pipedream, file)
    loaders |= {f"synthetic/{name}": partial(family, 0) for name, family in families().items()}
    chosen = {
        name: load()
        for name, load in loaders.items()
        if not patterns or any(fnmatch.fnmatch(name, p) for p in patterns)
    }
    if not chosen:
        raise StudyError(f"no problem matches {', '.join(patterns)}")
    return chosen


def pipedream(file: Path) -> Problem:
    problem = importers.load(
        file, devices=4, bandwidth=BANDWIDTH, memory=MEMORY_BYTES, mode="training"
    )
    return replace(problem, max_in_flight=IN_FLIGHT)


@dataclass(frozen=True)
class OnOne:
    """The placement on one device."""

    device: int

    def __call__(self, problem: Problem) -> Solution:
        placement = np.full(problem.num_ops, self.device, np.int32)
        problem.check_placement(placement)
        return Solution(placement, float(score(problem, placement)[0]))


def rows(
    options: Options, of: Callable[[Path, Sequence[str]], dict[str, Problem]] = problems
) -> Iterator[Cell]:
    """Every planner, and every device alone, on the problems ``of(data, patterns)``."""
    chosen = of(options.data, options.patterns)
    names = [n for n in planners.names() if n not in NEEDS_A_FILE + APART]
    if options.planners:
        names = options.planners.split(",")
    limits = {"seconds": options.seconds, "enforced": False, "bounded": True}
    field = {name: planners.load(name) for name in names}
    if "m_sct" in field:  # what takes its time is a linear program
        field["m_sct"] = planners.load("m_sct", lp_seconds=options.seconds)

    def tasks(_: str, problem: Problem) -> list[Task]:
        alone = {SINGLE + d: OnOne(i) for i, d in enumerate(problem.cluster.device_names)}
        return every(alone | field, range(options.seeds), **limits)

    say(f"{len(chosen)} problems, {len(names)} planners")
    warm(names, sorted({p.objective for p in chosen.values()}))
    return compare(chosen, tasks, options.finished, options.processes)


def with_bounds(rows: Sequence[Cell], options: Options) -> list[Cell]:
    """The rows with the bounds of today, where these are higher than what was proved then.

    Raises:
        StudyError: a single device has another value today, so the problem is another.
    """
    chosen = problems(options.data, options.patterns)
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
    return bounded_again(rows, chosen)


def below_its_bound(rows: Sequence[Cell], options: Options) -> list[Cell]:
    wrong = []
    for mine in groups(rows, "problem").values():
        bound_s = proved_s(mine)
        wrong += [r for r in mine if r.value_s is not None and r.value_s < (2 - TIES) * bound_s]
    for row in wrong:
        say(f"{row.problem}: {row.planner} has {row.value_s} s, below the bound {row.bound_s} s")
    return wrong


# --- the page ------------------------------------------------------------------------------------

Ratios = dict[str, dict[str, float]]  # by planner and problem


def proved_s(rows: Sequence[Cell]) -> float:
    """The best bound of a problem."""
    return max(r.bound_s or 0.0 for r in rows)


def best_s(rows: Sequence[Cell]) -> float:
    """The best value of a problem; inf without any."""
    return min((r.value_s for r in rows if r.value_s is not None), default=np.inf)


def ratios(rows: Sequence[Cell]) -> Ratios:
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


def winners(rows: Sequence[Cell]) -> list[Cell]:
    """Those of a problem that are as good as the best that was found."""
    return [r for r in rows if r.value_s is not None and r.value_s <= TIES * best_s(rows)]


def summary(rows: Sequence[Cell], by_planner: Ratios) -> str:
    runs = groups(rows, "planner")
    won = [r for mine in groups(rows, "problem").values() for r in winners(mine)]
    num_seeds = Counter((r.planner, r.problem) for r in rows)
    kinds = sorted({_group(r.problem) for r in rows})

    def interval(planner: str) -> str:
        low, high = geometric_interval(list(by_planner[planner].values()))
        return f"{low:.3f}–{high:.3f}"

    def of_kind(kind: str, planner: str) -> float | None:
        some = [v for k, v in by_planner[planner].items() if _group(k) == kind]
        return geometric_mean(some) if some else None

    def evaluations(planner: str) -> float | None:
        counted = [r.used_evaluations for r in runs[planner] if r.used_evaluations is not None]
        return float(np.median(counted)) if counted else None

    def best_on(planner: str) -> float:
        """Of problems, on average over its seeds: several have no better chance than one."""
        return sum(1 / num_seeds[planner, r.problem] for r in won if r.planner == planner)

    def failed(planner: str) -> str:
        return f"{sum(r.status != 'ok' for r in runs[planner])} of {len(runs[planner])}"

    return table(
        by_planner,
        Column("planner", str),
        Column("ratio", lambda p: geometric_mean(by_planner[p].values())),
        Column("95 %", interval),
        *(Column(kind, partial(of_kind, kind)) for kind in kinds),
        Column("best on", best_on, 1),
        Column("no answer", failed),
        Column("fell back", lambda p: sum(bool(r.note) and r.status == "ok" for r in runs[p])),
        Column("median s", lambda p: float(np.median([r.used_s for r in runs[p]])), 2),
        Column("longest s", lambda p: max(r.used_s for r in runs[p]), 1),
        Column("evaluations", evaluations, 0),
    )


def _group(problem: str) -> str:
    """``throughput``, ``latency``, ``pipedream``, ``moirai`` or ``synthetic``."""
    return problem.removeprefix("dnn_partitioning/").partition("/")[0]


def per_problem(rows: Sequence[Cell], by_planner: Ratios) -> str:
    """A line per problem: the best found, who found it, the proved gap, every planner's ratio."""
    runs = groups(rows, "problem")
    answered = {(r.problem, r.planner) for r in rows if r.status == "ok"}

    def found_by(problem: str) -> str:
        names = dict.fromkeys(r.planner for r in winners(runs[problem]))
        return ", ".join(names) if len(names) <= 3 else f"{len(names)} planners"

    def gap(problem: str) -> float | None:
        bound_s = proved_s(runs[problem])
        return best_s(runs[problem]) / bound_s - 1 if bound_s else None

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
        Column("best ms", lambda n: best_s(runs[n]), 4, 1e3),
        Column("bound ms", lambda n: proved_s(runs[n]), 4, 1e3),
        Column("gap %", gap, 1, 100),
        Column("found by", found_by),
        *(Column(planner, partial(ratio, planner)) for planner in by_planner),
    )


def notes(rows: Sequence[Cell]) -> str:
    """What planners said where they have no answer, or fell back; equal texts once."""
    problems_of: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note and not row.planner.startswith(SINGLE):
            ended = "" if row.status in ("ok", "infeasible") else f"{row.status}: "
            text = re.sub(r"\d[\d.e+]*", "N", ended + row.note)  # the CSV file has the numbers
            problems_of.setdefault((row.planner, text), []).append(row.problem)
    lines = []
    for (planner, text), where in sorted(problems_of.items()):
        places = list(dict.fromkeys(where))
        examples = ", ".join(places[:2]) + (f" and {len(places) - 2} more" * (len(places) > 2))
        lines.append(f"- `{planner}`: {text} ({examples})\n")
    return "".join(lines)


def parts(rows: Sequence[Cell], options: Options) -> dict[str, str]:
    by_planner = ratios(rows)
    return {
        "table": summary(rows, by_planner),
        "problems": per_problem(rows, by_planner),
        "notes": notes(rows),
    }


def plot(rows: Sequence[Cell], path: Path, options: Options) -> None:
    """PNG: a line per planner, how far it ends above the best found and after how many seconds."""
    by_planner, runs = ratios(rows), groups(rows, "planner")
    figure = gantt.figure_class()(figsize=(9, 0.8 + 0.2 * len(by_planner)), dpi=130)
    far, long = axes = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    for line, (planner, each) in enumerate(by_planner.items()):
        seconds = [r.used_s for r in runs[planner]]
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
    "planners": Option(None, "names, with commas; default: all"),
} | PROCESSES


def facts(options: Options) -> dict[str, float]:
    return {"seconds": options.seconds, "seeds": options.seeds}


STUDY = Study(
    name="baselines",
    rows=rows,
    row=Cell,
    parts=parts,
    plot=plot,
    options=OPTIONS,
    facts=facts,
    wrong=below_its_bound,
    again=study.Again("bounds", study.ONLY_BOUNDS, with_bounds),
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
