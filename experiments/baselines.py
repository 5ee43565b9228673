"""Every planner on public and synthetic workloads, equal budgets: one table.

    python -m experiments.baselines [PATTERN ...] [--seconds 2] [--seeds 3] [--processes 1]

Objectives are ``max_load`` and ``piecewise_latency`` of dnn-partitioning files, ``period`` of the
others, for Moirai files ``latency`` as well. Planners that draw run with every seed and use up
their seconds; the others run once, with the same budget where they take one. Each run has a
process and a core of its own, all kernels loaded. What is finished lies in ``runs/baselines``:
the same command continues. Writes ``experiments/results/baselines.csv``, ``.md`` and ``.png``.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from experiments import _study
from experiments._study import GIB, Guarded, GuardedSearch, number, say
from placement import importers, planners
from placement.compare import SINGLE, Comparison, compare, geometric_interval
from placement.files import write_atomic
from placement.problem import Planner, Problem
from placement.report.curves import plot_curves
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
APART = ("order_search", "replicated")
TIES = 1 + 1e-6  # values this close are equal
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

    def wanted(name: str) -> bool:
        return not patterns or any(fnmatch.fnmatch(name, p) for p in patterns)

    made = {
        name: family(0)
        for name, family in ((f"synthetic/{n}", f) for n, f in families().items())
        if wanted(name)
    }
    if patterns and all(p.startswith("synthetic/") for p in patterns) and made:
        return made
    found: dict[str, Problem] = {}
    for path, file in _study.public(data, *FILES).items():
        name = path.rpartition(".")[0]
        latency = f"{name} latency"
        if name.startswith("moirai/") and wanted(latency):
            found[latency] = importers.load(file, objective="latency")
        if not wanted(name):
            continue
        if name.startswith("pipedream/"):
            problem = importers.load(
                file, devices=4, bandwidth=BANDWIDTH, memory=MEMORY_BYTES, mode="training"
            )
            found[name] = replace(problem, max_in_flight=IN_FLIGHT)
        elif name.startswith("dnn_partitioning/latency/"):
            found[name] = importers.load(file, objective="piecewise_latency")
        else:
            found[name] = importers.load(file)
    if not found and not made:
        raise _study.StudyError(f"no problem matches {', '.join(patterns)}")
    return found | made


def field_of_planners(names: Sequence[str], seconds: float, limit_s: float) -> dict[str, Planner]:
    """Every planner in a process of its own, those that draw with a seed that ``compare`` sets."""
    made: dict[str, Planner] = {}
    for name in names:
        planner = _study.budgeted(name, seconds)
        kind = GuardedSearch if _study.is_search(name) else Guarded
        made[name] = kind(planner, limit_s, 8 * GIB)
    return made


def estimate_s(names: Sequence[str], seconds: float, num_seeds: int, num_problems: int) -> float:
    """About how long it takes: most planners with a budget that do not draw end before it."""
    each = 0.0
    for name in names:
        if _study.is_search(name):
            each += seconds * num_seeds
        else:
            each += 0.5 * seconds if "seconds" in _study.options_of(name) else 0.2
    return each * num_problems


def run(
    chosen: Mapping[str, Problem],
    field: Mapping[str, Planner],
    seeds: Sequence[int],
    work: Path,
    processes: int,
) -> Comparison:
    """``compare`` in ``processes`` processes, each on its own core and with every n-th problem."""
    if processes > 1:
        names = sorted(chosen, key=lambda n: -chosen[n].num_ops)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
            parts = [
                pool.submit(
                    _part,
                    {n: chosen[n] for n in names[k::processes]},
                    field,
                    seeds,
                    work,
                    cores[k % len(cores)],
                )
                for k in range(processes)
            ]
            for part in parts:
                part.result()
    # What the parts have finished lies in cells of their own, and is read from there.
    return compare(chosen, field, seeds, out_dir=work, progress=say)


def _part(
    chosen: Mapping[str, Problem],
    field: Mapping[str, Planner],
    seeds: Sequence[int],
    work: Path,
    core: int,
) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    compare(chosen, field, seeds, out_dir=work, progress=say)


def rows_of(comparison: Comparison) -> list[Row]:
    """The comparison as rows of the table, those of one device included."""
    made = []
    for cell in comparison.rows:
        best, _ = comparison.reference(cell.workload)
        solution = comparison.solutions.get((cell.workload, cell.planner, cell.seed))
        stats = solution.stats if solution else {}
        note, solved = cell.note, str(stats.get("solved", cell.objective))
        if not solved.startswith(cell.objective):
            note = "; ".join(x for x in (note, f"solved for {solved}") if x)
        made.append(
            Row(
                problem=cell.workload,
                objective=cell.objective,
                operators=cell.num_ops,
                devices=cell.num_devices,
                planner=cell.planner,
                seed=cell.seed,
                feasible=cell.feasible and bool(np.isfinite(cell.value_s)),
                value_s=_finite(cell.value_s),
                ratio=_finite(cell.value_s / best) if best > 0 else None,
                seconds=cell.plan_s,
                evaluations=cell.evaluations,
                bound_s=cell.bound_s,
                gap=cell.gap,
                peak_bytes=stats.get("peak_bytes"),
                note=note,
            )
        )
    return made


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def summary(comparison: Comparison, rows: Sequence[Row]) -> str:
    """A line per planner: geometric means of the ratio to the best found, and what it cost."""
    ratios = {k: v for k, v in comparison.ratios().items() if not k.startswith(SINGLE)}
    groups = sorted({_group(r.problem) for r in rows})
    best = {r.problem: comparison.reference(r.problem)[0] for r in rows}
    cells = []
    for planner in sorted(ratios, key=lambda p: _mean(ratios[p].values())):
        mine = [r for r in rows if r.planner == planner]
        low, high = geometric_interval(list(ratios[planner].values()))
        won = {r.problem for r in mine if r.value_s and r.value_s <= best[r.problem] * TIES}
        failed = sum(not r.feasible for r in mine)
        counted = [r.evaluations for r in mine if r.evaluations is not None]
        parts = [[v for k, v in ratios[planner].items() if _group(k) == g] for g in groups]
        cells.append(
            [
                planner,
                f"{_mean(ratios[planner].values()):.3f}",
                f"{low:.3f}–{high:.3f}",
                *(f"{_mean(p):.3f}" if p else "–" for p in parts),
                str(len(won)),
                f"{failed} of {len(mine)}",
                str(sum(bool(r.note) and r.feasible for r in mine)),
                f"{np.median([r.seconds for r in mine]):.2f}",
                f"{max(r.seconds for r in mine):.1f}",
                f"{np.median(counted):.0f}" if counted else "–",
            ]
        )
    return _study.to_table(
        [
            "planner",
            "ratio",
            "95 %",
            *groups,
            "best on",
            "no answer",
            "fell back",
            "median s",
            "longest s",
            "evaluations",
        ],
        cells,
    )


def _group(problem: str) -> str:
    """``throughput``, ``latency``, ``pipedream``, ``moirai`` or ``synthetic``."""
    return problem.removeprefix("dnn_partitioning/").partition("/")[0]


def _mean(values: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def per_problem(comparison: Comparison) -> str:
    """A line per problem: the best found, who found it, the proved gap, every planner's ratio."""
    ratios = {k: v for k, v in comparison.ratios().items() if not k.startswith(SINGLE)}
    order = sorted(ratios, key=lambda p: _mean(ratios[p].values()))
    cells = []
    for problem in dict.fromkeys(r.workload for r in comparison.rows):
        rows = [r for r in comparison.rows if r.workload == problem]
        best, _ = comparison.reference(problem)
        found = dict.fromkeys(r.planner for r in rows if r.value_s <= best * TIES)
        bound = rows[0].bound_s or 0.0
        failed = {p for p in order if not any(r.feasible for r in rows if r.planner == p)}
        cells.append(
            [
                problem,
                rows[0].objective,
                str(rows[0].num_ops),
                str(rows[0].num_devices),
                number(best, 4, 1e3),
                number(bound, 4, 1e3),
                number(best / bound - 1 if bound else None, 1, 100),
                ", ".join(found) if len(found) <= 3 else f"{len(found)} planners",
                *("–" if p in failed else number(ratios[p].get(problem)) for p in order),
            ]
        )
    header = ["problem", "objective", "operators", "devices", "best ms", "bound ms", "gap %"]
    return _study.to_table([*header, "found by", *order], cells)


def notes(rows: Sequence[Row]) -> str:
    """What planners said where they have no answer, or fell back; equal texts once."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note and not row.planner.startswith(SINGLE):
            text = re.sub(r"\d[\d.e+]*", "N", row.note)  # the CSV file has the numbers
            said.setdefault((row.planner, text), []).append(row.problem)
    lines = []
    for (planner, text), where in sorted(said.items()):
        places = list(dict.fromkeys(where))
        shown = ", ".join(places[:2]) + (f" and {len(places) - 2} more" * (len(places) > 2))
        lines.append(f"- `{planner}`: {text} ({shown})")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _study.common_options(parser, "baselines")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="names of problems")
    parser.add_argument("--seconds", type=float, default=2.0, help="budget of every planner")
    parser.add_argument("--seeds", type=int, default=3, help="of planners that draw")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one run, at most")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--planners", help="names, with commas; default: all")
    options = parser.parse_args(argv)

    def study() -> None:
        names = [n for n in planners.names() if n not in NEEDS_A_FILE + APART] + [LEARNED]
        if options.planners:
            names = options.planners.split(",")
        field = field_of_planners(names, options.seconds, options.limit)
        chosen = problems(options.data, options.patterns)
        if options.fresh:
            shutil.rmtree(options.work, ignore_errors=True)
        took = estimate_s(names, options.seconds, options.seeds, len(chosen)) / options.processes
        say(
            f"{len(chosen)} problems, {len(names)} planners: about {took / 60:.0f} minutes "
            f"(what is finished in {options.work} is not run again)"
        )
        warnings.simplefilter("ignore", RuntimeWarning)  # what they say is in the table
        _study.warm(names, sorted({p.objective for p in chosen.values()}))
        seeds = range(options.seeds)
        comparison = run(chosen, field, seeds, options.work, options.processes)
        write(comparison, options.out, _study.command_line("experiments.baselines", argv), options)
        say(f"written to {options.out}: baselines.csv, baselines.md, baselines.png")

    return _study.launch(study)


def write(comparison: Comparison, out: Path, command: str, options: argparse.Namespace) -> None:
    """The three files."""
    rows = rows_of(comparison)
    table = summary(comparison, rows)
    facts = _study.provenance(
        seconds=options.seconds, seeds=options.seeds, limit_s=options.limit, runs=len(rows)
    )
    write_atomic(out / "baselines.csv", _study.to_csv(rows))
    plot_curves(comparison, out / "baselines.png", f"{options.seconds:g} s each, one core")
    write_atomic(
        out / "baselines.md",
        f"""# Every planner, {options.seconds:g} s each

`{command}`

A ratio is a planner's value over the best that any of them found, 1 is best: the geometric mean
over {options.seeds} seeds and then over all problems, with a bootstrap 95 % interval over the
problems. A run without an answer counts as the best single device (where none fits, as the worst
answer). "Fell back": it answered, but said that it could not do what it is for; the texts are
below. Planners without a random draw run once. Every run has one core and a process of its own.
PipeDream files: training on four devices, 12e9 bytes/s between any two, memory that never binds,
{IN_FLIGHT} micro-batches in flight.

{table}
![Best value so far over time](baselines.png)

## Problems

Values in milliseconds; the gap is that of the best value to the best bound that is proved.
A dash: no answer. Single runs are in [baselines.csv](baselines.csv).

{per_problem(comparison)}
## What planners said

{notes(rows)}
{facts}""",
    )
    print(table)


if __name__ == "__main__":
    sys.exit(main())
