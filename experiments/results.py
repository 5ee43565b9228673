"""``docs/results.md`` and its pictures, from the committed files in ``experiments/results``.

    python -m experiments.results            # writes docs/results.md and docs/img/results_*.png
    python -m experiments.results --check    # exit code 1 if the page is not up to date

Nothing is measured here. A study that has not been run is named with its command.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import _study
from experiments._study import RESULTS, ROOT, number, to_table
from experiments.learned import goals
from experiments.learned.cells import geometric
from placement.compare import SINGLE
from placement.files import write_atomic

DOCS = ROOT / "docs"
BEST_SHOWN = 12  # planners in tables and pictures
MOST_ROWS = 16  # of a table that is shown beside its link
LEARNED = ("against", "executed", "guided", "zero_shot", "giph", "doppler", "cost")
# Whose page begins with a table that says it all, in the order of the page.
MEASURED = (
    "pipelining",
    "measured",
    "peers",
    "training",
    "time_slices",
    "input_pipeline",
    "schedules_executed",
)

Rows = list[dict[str, str]]


def rows_of(name: str, results: Path = RESULTS) -> Rows:
    """The lines of ``NAME.csv``; none where there is no such file."""
    path = results / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def first_table(text: str) -> str:
    """The first Markdown table of a page, cut off after ``MOST_ROWS``."""
    found = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    lines = found[0].splitlines() if found else []
    more = len(lines) - 2 - MOST_ROWS
    cut = [*lines[: 2 + MOST_ROWS], f"\nand {more} more rows."] if more > 0 else lines
    return "\n".join([*cut, ""])


def command_of(text: str) -> str:
    """The command that a page of results says it was made with."""
    found = re.search(r"^`(python -m [^`]+)`$", text, re.MULTILINE)
    return found[1] if found else ""


# --- sections ------------------------------------------------------------------------------------


def learned(results: Path) -> str:
    """Each study of the learned planner: its first table, or the command that makes it."""
    parts = []
    for study in LEARNED:
        path = results / f"learned_{study}.md"
        if path.is_file():
            parts.append(_section(path))
            if (results / f"learned_{study}.json").is_file():
                parts.append(f"![Best so far over the best known](img/results_{study}.png)\n")
        else:
            parts.append(f"### {study}\n\nNot run yet: `python -m experiments.learned {study}`.\n")
    return "\n".join(parts)


def search(results: Path) -> str:
    """The field of planners at equal budgets, and the two pictures."""
    rows = rows_of("baselines", results)
    table = to_table(
        ["planner", "over the best found (95 %)", "best on", "median s"],
        [
            [
                planner,
                geometric(found).ratio(),
                f"{sum(min(v) <= 1 + 1e-6 for v in found.values())} of {len(found)}",
                number(_median(rows, planner), 2),
            ]
            for planner, found in list(_by_planner(rows).items())[:BEST_SHOWN]
        ],
    )
    command = command_of((results / "baselines.md").read_text(encoding="utf-8"))
    return f"""The {BEST_SHOWN} best planners, `{command}`,
[all of them](../experiments/results/baselines.md):

{table}
Performance profile: on how many problems a planner is at most so far above the best that any
planner found. Higher and further left is better.

![Share of problems on which a planner is within a factor of the best](img/results_profile.png)

The same runs over time:

![Best value so far over the best found](../experiments/results/baselines.png)
"""


def public(results: Path) -> str:
    """What is known of public workloads, beside what was found."""
    exact = [r for r in rows_of("public_exact", results) if r["value_s"]]
    known = [r for r in exact if r["error"]]
    worst = max((abs(float(r["error"])) for r in known), default=np.nan)
    speed = [float(r["speedup"]) for r in exact if r["speedup"]]
    lines = [
        f"- contiguous optimum: found on {sum(r['is_optimum'] == 'True' for r in exact)} of "
        f"{len(exact)} files, within {worst:.0e} of the recorded values on all {len(known)} that "
        f"have one; {min(speed):.1f} to {max(speed):.0f} times as fast as the published program "
        "([files](../experiments/results/public_exact.md))"
    ]
    for name in ("public_search", "public_pipedream", "public_moirai"):
        rows = rows_of(name, results)
        best = _least(rows, lambda r: True)
        for planner in ("macro_search", "simulated_annealing", "heft", "ideal_dp"):
            mine = _least(rows, lambda r, p=planner: r["planner"] == p)  # type: ignore[misc]
            ratio = {k: [v / best[k]] for k, v in mine.items()}
            if ratio:
                lines.append(
                    f"- {name.removeprefix('public_')}, `{planner}`: {geometric(ratio).ratio()} of "
                    f"the best found, {len(ratio)} cases, [table](../experiments/results/{name}.md)"
                )
    return "\n".join(lines) + "\n"


def scale(results: Path) -> str:
    """The largest problem that each planner finished."""
    done: dict[str, tuple[int, int]] = {}
    for row in rows_of("scale", results):
        if row["status"] == "ok":
            size = int(row["operators"]), int(row["devices"])
            done[row["planner"]] = max(done.get(row["planner"], (0, 0)), size)
    by_size: dict[tuple[int, int], list[str]] = {}
    for planner, size in done.items():
        by_size.setdefault(size, []).append(planner)
    cells = [
        [f"{operators:,}", str(devices), ", ".join(sorted(planners))]
        for (operators, devices), planners in sorted(by_size.items(), reverse=True)
    ]
    return to_table(["operators", "devices", "finished by"], cells).replace(
        "|---|---:|---:|", "|---:|---:|---|"
    )


def schedules(results: Path) -> str:
    """Searched schedules beside published periods."""
    rows = [r for r in rows_of("schedules", results) if r["published_period"] and r["period"]]
    ratio = {
        f"{r['case']} {r['memory']}": [float(r["period"]) / float(r["published_period"])]
        for r in rows
    }
    as_short = sum(v[0] <= 1 + 1e-9 for v in ratio.values())
    return (
        f"As short as the published period on {as_short} of {len(rows)} cases; "
        f"{geometric(ratio).ratio()} of it "
        "([cases](../experiments/results/schedules.md)).\n"
    )


def fidelity(results: Path) -> str:
    """Mean absolute errors of predictions, by model."""
    rows = rows_of("fidelity", results)
    cells = []
    for workload in (*dict.fromkeys(r["workload"] for r in rows), "all"):
        mine = [r for r in rows if workload in ("all", r["workload"])]
        cells.append([workload, str(len(mine)), _error(mine, "latency"), _error(mine, "period")])
    return to_table(["model", "placements", "latency", "period"], cells)


def bench(results: Path) -> str:
    """Speeds, and the goals they had."""
    path = results / "bench.json"
    if not path.is_file():
        return ""
    cells = [
        [f"{r['name']} ({r['note']})", f"{r['value']:.4g} {r['unit']}", number(r["goal"], 0)]
        for r in json.loads(path.read_text(encoding="utf-8"))["rows"]
    ]
    return to_table(["what", "value", "goal"], cells)


def measured(results: Path) -> str:
    """What ran on real devices."""
    paths = [results / f"{name}.md" for name in MEASURED]
    return "\n".join(_section(path) for path in paths if path.is_file())


def _section(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    link = f"[{path.name}](../experiments/results/{path.name})"
    return f"### {title}\n\n`{command_of(text)}`, {link}\n\n{first_table(text)}"


def _by_planner(rows: Rows) -> dict[str, dict[str, list[float]]]:
    """Ratios to the best found, by planner and problem, best first; the worst for no answer."""
    found: dict[str, dict[str, list[float]]] = {}
    worst = {
        name: max(float(r["ratio"]) for r in rows if r["problem"] == name and r["ratio"])
        for name in dict.fromkeys(r["problem"] for r in rows)
    }
    for row in rows:
        if not row["planner"].startswith(SINGLE):
            ratio = float(row["ratio"] or worst[row["problem"]])
            found.setdefault(row["planner"], {}).setdefault(row["problem"], []).append(ratio)
    return dict(sorted(found.items(), key=lambda item: geometric(item[1], 1).value))


def _median(rows: Rows, planner: str) -> float:
    return float(np.median([float(r["seconds"]) for r in rows if r["planner"] == planner]))


def _least(rows: Rows, wanted: Callable[[dict[str, str]], bool]) -> dict[str, float]:
    """Least value by file, settings and objective."""
    found: dict[str, float] = {}
    for row in rows:
        if row["value_s"] and wanted(row):
            key = f"{row['file']} {row['settings']} {row['objective']}"
            found[key] = min(found.get(key, np.inf), float(row["value_s"]))
    return found


def _error(rows: Rows, what: str) -> str:
    errors = [
        abs(float(r[f"predicted_{what}_s"]) / float(r[f"measured_{what}_s"]) - 1) for r in rows
    ]
    return f"{100 * float(np.mean(errors)):.1f} %"


# --- pictures ------------------------------------------------------------------------------------


def plot_profile(by_planner: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Performance profile (Dolan and More, 2002): share of problems within a factor of the best."""
    from placement.report import gantt

    figure, axis = _axes()
    at = np.geomspace(1.0005, 3.0, 400)
    for k, (planner, problems) in enumerate(list(by_planner.items())[:BEST_SHOWN]):
        middle = np.array([np.exp(np.mean(np.log(v))) for v in problems.values()])
        within = (middle[:, None] <= at).mean(axis=0)
        axis.plot(100 * (at - 1), 100 * within, _dash(k), color=_colour(k), lw=1.6, label=planner)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axis.set_xlabel("at most so far above the best found", fontsize=9, color=gantt.INK)
    axis.set_ylabel("share of the problems, %", fontsize=9, color=gantt.INK)
    _finish(figure, axis, path)


def plot_curves(curves: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Best so far over the best known, one panel per group of ``learned_guided.json``."""
    from placement.report import gantt

    figure = gantt.figure_class()(figsize=(10, 3.2 * -(-len(curves) // 2)), dpi=100)
    axes = figure.subplots(-(-len(curves) // 2), 2, squeeze=False).ravel()
    planners = list(dict.fromkeys(p for lines in curves.values() for p in lines if p != "at"))
    for axis, (group, lines) in zip(axes, curves.items(), strict=False):
        for k, planner in enumerate(planners):  # of one colour in all panels
            if planner not in lines:
                continue
            ratio = lines[planner]
            above = np.maximum(100 * (np.asarray(ratio) - 1), 0.02)
            axis.plot(lines["at"], above, _dash(k), color=_colour(k), lw=1.4, label=planner)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(group, fontsize=9, color=gantt.INK, loc="left")
        axis.set_ylabel("above the best known, %", fontsize=8, color=gantt.INK)
        gantt.plain_axis(axis)
    for axis in axes[len(curves) :]:
        axis.set_axis_off()
    axes[0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    gantt.save_figure(figure, path)


def _axes() -> tuple[Any, Any]:
    from placement.report import gantt

    figure = gantt.figure_class()(figsize=(8, 4.5), dpi=100)
    return figure, figure.subplots()


def _finish(figure: Any, axis: Any, path: Path) -> None:
    from placement.report import gantt

    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    gantt.plain_axis(axis)
    axis.tick_params(axis="y", colors=gantt.FAINT, labelsize=9)
    axis.grid(color=gantt.FAINT, alpha=0.25, lw=0.6)
    figure.tight_layout()
    gantt.save_figure(figure, path)


def _colour(k: int) -> str:
    from placement.report.gantt import COLOURS

    return COLOURS[k % len(COLOURS)]


def _dash(k: int) -> str:
    from placement.report.gantt import COLOURS

    return ("-", "--", ":")[min(2, k // len(COLOURS))]


# --- the page ------------------------------------------------------------------------------------


def sources(results: Path) -> str:
    """First digits of the SHA-256 over all files of the results: pictures follow from them."""
    state = hashlib.sha256()
    for path in sorted(results.iterdir()):
        if path.suffix in (".csv", ".json", ".md"):
            state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()[:12]


def page(results: Path = RESULTS) -> str:
    """``docs/results.md``."""
    return f"""# Results

<!-- made by: python -m experiments.results, from files with the digest {sources(results)} -->

Every figure on this page comes from a committed file; [Reproduce](reproduce.md) has the commands,
machines and times. What came out badly is in the [log](../experiments/LOG.md). Brackets are 95 %
intervals; ratios are geometric means.

## Goals

What was aimed for before the runs ([budgets and splits](../experiments/budgets.py)), and what was
reached. Rows that are not reached stay; beside them stands what they would say if every run had
found the best value that any run of any planner found. For three of the four throughput graphs
[that is proved to be the optimum](../experiments/results/public_search.md).

{goals.page(results)}
## The learned planner

{learned(results)}
## Search against the field

{search(results)}
## Public workloads

{public(results)}
## On real devices

{measured(results)}
### Prediction error

Mean absolute error of predicted against measured,
[placements](../experiments/results/fidelity.md):

{fidelity(results)}
## Schedules

{schedules(results)}
## Sizes

The largest graph that a planner finished within its limits,
[table](../experiments/results/scale.md):

{scale(results)}
## Speeds

{bench(results)}"""


def pictures(results: Path, folder: Path) -> None:
    """The pictures of the page."""
    plot_profile(_by_planner(rows_of("baselines", results)), folder / "results_profile.png")
    for study in LEARNED:
        path = results / f"learned_{study}.json"
        if path.is_file():
            curves = json.loads(path.read_text(encoding="utf-8"))
            plot_curves(curves, folder / f"results_{study}.png")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(argv)
    path, text = options.docs / "results.md", page(options.results)
    if options.check:
        known = path.read_text(encoding="utf-8") if path.is_file() else ""
        if known != text:
            _study.say(f"{path} is not up to date; run: python -m experiments.results")
        return int(known != text)
    write_atomic(path, text)
    pictures(options.results, options.docs / "img")
    _study.say(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
