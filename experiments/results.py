"""``docs/results.md`` and its pictures, from the committed files in ``experiments/results``.

    python -m experiments.results            # writes docs/results.md and docs/img/results_*.png
    python -m experiments.results --check    # exit code 1 if the page is not up to date

Nothing is measured here. A study that has not been run is named with its command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from experiments import baselines, fidelity, public, scale, schedules
from experiments.learned import goals
from experiments.study import RESULTS, ROOT, filled, say
from experiments.tables import Column, geometric, groups, number, table
from placement.report import gantt
from placement.runs.row import SINGLE
from placement.tools.files import write_atomic

DOCS = ROOT / "docs"
BEST_SHOWN = 12  # planners in tables and pictures
MOST_ROWS = 16  # of a table that is shown beside its link
LEARNED = ("against", "executed", "guided", "zero_shot", "giph", "doppler")
# Whose page begins with a table that says it all, in the order of the page.
MEASURED = (
    "pipelining", "measured", "peers", "training", "time_slices", "input_pipeline",
    "schedules_executed",
)  # fmt: skip


def first_table(text: str) -> str:
    """The first Markdown table of a page, cut off after ``MOST_ROWS``."""
    match = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    lines = match[0].splitlines() if match else []
    more = len(lines) - 2 - MOST_ROWS
    cut = [*lines[: 2 + MOST_ROWS], f"\nand {more} more rows."] if more > 0 else lines
    return "\n".join([*cut, ""])


def command_of(text: str) -> str:
    """The command that a page of results says it was made with."""
    match = re.search(r"^`(python -m [^`]+)`$", text, re.MULTILINE)
    return match[1] if match else ""


# --- sections ------------------------------------------------------------------------------------


def learned(results: Path) -> str:
    """Each study of the learned planner: its first table, or the command that makes it."""
    sections = []
    for study in LEARNED:
        path = results / f"learned_{study}.md"
        if path.is_file():
            sections.append(_section(path))
            if (results / f"learned_{study}.json").is_file():
                sections.append(f"![Best so far over the best known](img/results_{study}.png)\n")
        else:
            sections.append(
                f"### {study}\n\nNot run yet: `python -m experiments.learned {study}`.\n"
            )
    return "\n".join(sections)


def search(results: Path) -> str:
    """The field of planners at equal budgets, and the two pictures."""
    rows = baselines.STUDY.read(results)
    field = dict(list(by_planner(rows).items())[:BEST_SHOWN])
    runs = groups(rows, "planner")

    def best_on(planner: str) -> str:
        problems = field[planner].values()
        return f"{sum(min(v) <= 1 + 1e-6 for v in problems)} of {len(problems)}"

    return table(
        field,
        Column("planner", str),
        Column("over the best found (95 %)", lambda p: geometric(field[p]).ratio()),
        Column("best on", best_on),
        Column("median s", lambda p: float(np.median([r.seconds for r in runs[p]])), 2),
    )


def known(results: Path) -> str:
    """What is known of public workloads, beside what was found."""
    studies = {study.word: study for study in public.STUDIES}
    exact = [r for r in studies["exact"].read(results) if r.value_s]
    errors = [r.error for r in exact if r.error is not None]
    speed = [r.speedup for r in exact if r.speedup]
    lines = [
        f"- contiguous optimum: found on {sum(r.is_optimum for r in exact)} of "
        f"{len(exact)} files, within {max(map(abs, errors), default=np.nan):.0e} of the recorded "
        f"values on all {len(errors)} that "
        f"have one; {min(speed):.1f} to {max(speed):.0f} times as fast as the published program "
        "([files](../experiments/results/public_exact.md))"
    ]
    cases = public.cases(studies["search"].read(results))
    for planner in ("macro_search", "ideal_dp"):
        ratios = {
            i: [case.value_s(planner) / case.value_s()]
            for i, case in enumerate(cases)
            if np.isfinite(case.value_s(planner))
        }
        lines.append(
            f"- search, `{planner}`: {geometric(ratios).ratio()} of the best found, "
            f"{len(ratios)} cases, [table](../experiments/results/public_search.md)"
        )
    return "\n".join(lines) + "\n"


def sizes(results: Path) -> str:
    """The largest problem that each planner finished."""
    runs = groups((r for r in scale.STUDIES[0].read(results) if r.status == "ok"), "subject")
    by_size: dict[tuple[int, int], list[str]] = {}
    for planner, mine in runs.items():
        largest = max((r.operators, r.devices) for r in mine)
        by_size.setdefault(largest, []).append(planner)
    return table(
        sorted(by_size, reverse=True),
        Column("operators", lambda size: f"{size[0]:,}"),
        Column("devices", lambda size: size[1]),
        Column("finished by", lambda size: ", ".join(sorted(by_size[size]))),
    ).replace("|---|---:|---:|", "|---:|---:|---|")


def periods(results: Path) -> str:
    """Searched schedules beside published periods."""
    rows = [r for r in schedules.STUDIES[0].read(results) if r.published_period and r.period]
    ratios = {f"{r.case} {r.memory}": [r.period / r.published_period] for r in rows}
    as_short = sum(v[0] <= 1 + 1e-9 for v in ratios.values())
    return (
        f"As short as the published period on {as_short} of {len(rows)} cases; "
        f"{geometric(ratios).ratio()} of it "
        "([cases](../experiments/results/schedules.md)).\n"
    )


def errors(results: Path) -> str:
    """Mean absolute errors of predictions, by model."""
    rows = fidelity.STUDY.read(results)
    by = {**groups(rows, "workload"), "all": rows}

    def error(what: str, name: str) -> float:
        pairs = [
            (getattr(r, f"predicted_{what}_s"), getattr(r, f"measured_{what}_s")) for r in by[name]
        ]
        return float(np.mean([abs(predicted / measured - 1) for predicted, measured in pairs]))

    return table(
        by,
        Column("model", str),
        Column("placements", lambda name: len(by[name])),
        Column("latency", partial(error, "latency"), 1, 100, " %"),
        Column("period", partial(error, "period"), 1, 100, " %"),
    )


def speeds(results: Path) -> str:
    """Speeds, and the goals they had."""
    path = results / "bench.json"
    if not path.is_file():
        return ""
    return table(
        json.loads(path.read_text(encoding="utf-8"))["rows"],
        Column("what", lambda r: f"{r['name']} ({r['note']})"),
        Column("value", lambda r: f"{r['value']:.4g} {r['unit']}"),
        Column("goal", lambda r: number(r["goal"], 0)),
    )


def measured(results: Path) -> str:
    """What ran on real devices."""
    paths = [results / f"{name}.md" for name in MEASURED]
    return "\n".join(_section(path) for path in paths if path.is_file())


def _section(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    link = f"[{path.name}](../experiments/results/{path.name})"
    return f"### {title}\n\n`{command_of(text)}`, {link}\n\n{first_table(text)}"


def by_planner(rows: Sequence[baselines.Row]) -> dict[str, dict[str, list[float]]]:
    """Ratios to the best found, by planner and problem, best first; the worst for no answer."""
    worst = {n: max(r.ratio or 0.0 for r in mine) for n, mine in groups(rows, "problem").items()}
    ratios: dict[str, dict[str, list[float]]] = {}
    for (planner, problem), mine in groups(rows, "planner", "problem").items():
        if not planner.startswith(SINGLE):
            each = [r.ratio or worst[problem] for r in mine]
            ratios.setdefault(planner, {})[problem] = each
    return dict(sorted(ratios.items(), key=lambda item: geometric(item[1], 1).value))


# --- pictures ------------------------------------------------------------------------------------


def plot_profile(ratios: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Performance profile (Dolan and More, 2002): share of problems within a factor of the best."""
    figure = gantt.figure_class()(figsize=(8, 4.5), dpi=100)
    axis = figure.subplots()
    at = np.geomspace(1.0005, 3.0, 400)
    for k, (planner, problems) in enumerate(list(ratios.items())[:BEST_SHOWN]):
        middle = np.array([np.exp(np.mean(np.log(v))) for v in problems.values()])
        within = (middle[:, None] <= at).mean(axis=0)
        axis.plot(100 * (at - 1), 100 * within, _dash(k), color=_colour(k), lw=1.6, label=planner)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axis.set_xlabel("at most so far above the best found", fontsize=9, color=gantt.INK)
    axis.set_ylabel("share of the problems, %", fontsize=9, color=gantt.INK)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    gantt.plain_axis(axis)
    axis.tick_params(axis="y", colors=gantt.FAINT, labelsize=9)
    axis.grid(color=gantt.FAINT, alpha=0.25, lw=0.6)
    figure.tight_layout()
    gantt.save_figure(figure, path)


def plot_curves(curves: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Best so far over the best known, one panel per group of ``learned_guided.json``."""
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


def _colour(k: int) -> str:
    return gantt.COLOURS[k % len(gantt.COLOURS)]


def _dash(k: int) -> str:
    return ("-", "--", ":")[min(2, k // len(gantt.COLOURS))]


# --- the page ------------------------------------------------------------------------------------


def sources(results: Path) -> str:
    """First digits of the SHA-256 over all files of the results: pictures follow from them."""
    state = hashlib.sha256()
    for path in sorted(results.iterdir()):
        if path.suffix in (".csv", ".json", ".md"):
            state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()[:12]


def page(results: Path = RESULTS) -> str:
    parts = {
        "digest": sources(results),
        "goals": goals.page(results),
        "learned": learned(results),
        "count": BEST_SHOWN,
        "command": command_of((results / "baselines.md").read_text(encoding="utf-8")),
        "search": search(results),
        "known": known(results),
        "measured": measured(results),
        "errors": errors(results),
        "periods": periods(results),
        "sizes": sizes(results),
        "speeds": speeds(results),
    }
    return filled("results", parts)


def pictures(results: Path, folder: Path) -> None:
    plot_profile(by_planner(baselines.STUDY.read(results)), folder / "results_profile.png")
    for study in LEARNED:
        path = results / f"learned_{study}.json"
        if path.is_file():
            curves = json.loads(path.read_text(encoding="utf-8"))
            plot_curves(curves, folder / f"results_{study}.png")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(argv)
    path, text = options.docs / "results.md", page(options.results)
    if options.check:
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        if before != text:
            say(f"{path} is not up to date; run: python -m experiments.results")
        return int(before != text)
    write_atomic(path, text)
    pictures(options.results, options.docs / "img")
    say(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
