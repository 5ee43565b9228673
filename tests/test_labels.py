"""Nothing is called learned that is not: tables of the pages against who decided in committed rows.

A column (or row) of figures that claims a trained network stands beside one of the hand-written
score and one of the untrained network, each row leads to the study that it is from, and the figure
is that of a planner for which a trained network decided on every problem there. Only such a figure
may be bold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from experiments import results
from experiments.grid import best_known
from experiments.study import RESULTS
from experiments.tables import groups

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(RESULTS.glob("*.md"))]
STUDIES = {row.study for row in results.LEARNING}
# What a heading claims, and who must have decided: whole words, so "untrained" claims no training.
CLAIMS = {
    r"\b(learned|trained|network)\b(?!.*against)(?<!untrained network)": {"network"},
    r"\bhand": {"hand", "rule"},
    r"\buntrained\b": {"untrained"},
}
LEARNED, HAND, UNTRAINED = CLAIMS


def tables(page: str) -> Iterator[list[list[str]]]:
    """Cells of each table, the heading first."""
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line.strip()[1:-1]) for line in block.splitlines()]
        yield [[cell.strip() for cell in row] for row in rows if set("".join(row)) - set("-: ")]


def claims(what: str, cell: str) -> bool:
    return re.search(what, cell) is not None


@cache
def figures(name: str) -> dict[str, set[str]]:
    """Of a study: geometric means over the best known of all planners, and who decided there."""
    released, by_text = results.released_for(name, RESULTS), {}
    rows = results.rows_of(name, RESULTS)
    best_of_all = best_known(rows)
    best_in = {group: best_known(mine) for group, mine in groups(rows, "group").items()}
    for (group, planner), mine in groups(rows, "group", "planner").items():
        who = {results.chooser(planner, row.objective, released) for row in mine}
        for best in (best_of_all, best_in[group]):
            by_problem = groups((r for r in mine if r.value_s), "problem").items()
            logs = [np.mean(np.log([r.value_s / best[n] for r in runs])) for n, runs in by_problem]
            if logs and len(who) == 1:
                by_text.setdefault(f"{np.exp(np.mean(logs)):.3f}", set()).update(who)
    return by_text


def wrong(page: str) -> list[str]:
    """What is called something that it is not."""
    messages = []
    for head, *rows in tables(page):
        if not any(re.match(r"[\d*]+", cell) for row in rows for cell in row[1:]):
            continue  # no figures
        learned = [i for i, cell in enumerate(head) if claims(LEARNED, cell)]
        first = [row[0] for row in rows]
        for names, here in ((head, bool(learned)), (first, any(claims(LEARNED, x) for x in first))):
            for beside in (HAND, UNTRAINED) if here else ():
                if not any(claims(beside, name) for name in names):
                    messages.append(f"{names}: nothing beside it is {beside}")
        for row in rows:
            bold = [i for i, cell in enumerate(row) if re.search(r"\*\*[^*]*\d[^*]*\*\*", cell)]
            if set(bold) - set(learned) and not claims(LEARNED, row[0]):
                messages.append(f"{row}: a bold figure that no network decided")
            for i, heading in enumerate(head if learned else ()):
                messages += wrong_figure(heading, row[i], row)
    return messages


def wrong_figure(heading: str, cell: str, row: list[str]) -> list[str]:
    """Whether the figure under a heading is that of somebody else."""
    wanted = [who for what, who in CLAIMS.items() if claims(what, heading)]
    if not wanted or not re.match(r"\d", cell):
        return []
    link = re.search(r"results/(\w+)\.md\)", " ".join(row))
    if link is None or link[1] not in STUDIES:
        return [f"{row}: no link to a study of `experiments.results.LEARNING`"]
    who = figures(link[1]).get(cell.split()[0], set())
    return [] if who & wanted[0] else [f"{heading} {cell}: was decided by {who or 'nobody'}"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_called_learned_is(page: Path) -> None:
    assert wrong(page.read_text(encoding="utf-8")) == []


def test_wrong_labels_are_found() -> None:
    results_page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page, old, new in (
        (results_page, r" hand-written \| untrained network \|", " learned | untrained network |"),
        (
            results_page,
            r"\| trained network \| hand-written \|",
            "| hand-written | trained network |",
        ),
        (results_page, r"\| hand-written \| untrained network \|", "| hand-written | frozen |"),
        (results_page, r"learned_guided\.md", "learned_giph.md"),  # figures of another study
        (results_page, r"(\| `\w+` \| )([\d.]+)", r"\1**\2**"),
        (readme, r"\| one device \|", "| policy (learned) |"),
        (readme, r"\| ([\d.]+ ms) \|", r"| **\1** |"),
    ):
        changed = re.sub(old, new, page, count=1)
        assert changed != page and wrong(changed), old


def test_every_row_of_the_first_table_is_of_who_it_names() -> None:
    for row in results.LEARNING:
        released = results.released_for(row.study, RESULTS)
        for planner, who in zip(
            (row.trained, row.hand, row.untrained), CLAIMS.values(), strict=True
        ):
            mine = [c for c in results.of_group(row, RESULTS) if c.planner == planner]
            decided = {results.chooser(planner, c.objective, released) for c in mine}
            assert decided and decided <= who, (row.where, planner, decided)


@pytest.mark.parametrize(
    ("planner", "objective", "who"),
    [
        ("policy", "latency", "network"),
        ("policy", "period", "hand"),
        ("policy, no clock", "max_load", "hand"),
        ("heft, then policy", "latency", "network"),
        ("heft, then hand", "latency", "hand"),
        ("hand, long", "latency", "hand"),
        ("frozen", "latency", "untrained"),
        ("samples alone, untrained, long", "latency", "untrained"),
        ("samples alone", "latency", "network"),
        ("uniform", "latency", "uniform"),
        ("macro_search", "latency", "rule"),
    ],
)
def test_who_decided(planner: str, objective: str, who: str) -> None:
    assert results.chooser(planner, objective, "{'policy guided_search-latency': '5d'}") == who
