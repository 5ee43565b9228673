"""Nothing is called learned that is not: tables of the pages against who decided in committed rows.

A column (or row) of figures that claims a trained network stands beside one of the hand-written
score and one of the untrained network, each row leads to the study that it is from, and the figure
is that of a planner for which a trained network decided on every problem there. Only such a figure
may be bold. Rows of the learning table say of what kind their problems are, real ones first, and
each percentage of the sentences below it is one of the table or of a page that they lead to.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from experiments import results, study
from experiments.grid import best_known, policy_digests, released_folder
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


def chooser(planner: str, objective: str, released: str) -> str:
    """Who decided in a row of a study: network, untrained, hand, uniform, or none of them (rule).

    ``released`` names the policies that shipped when the row was made (``released_for``). Where
    none of them chooses moves for the objective, ``PolicyPlanner`` says ``hand`` in its stats.
    """
    words = planner.split(", ")
    if "untrained" in words or "frozen" in words:
        return "untrained"
    if "trained" in words or words[0] in ("greedy decode", "best of k", "samples alone"):
        return "network"
    if words[0] == "policy" or words[-1] == "then policy":
        return "network" if re.search(rf"(guided|order)_search-{objective}\b", released) else "hand"
    chosen = words[-1].removeprefix("then ")
    return words[0] if words[0] in ("hand", "uniform") else "hand" if chosen == "hand" else "rule"


def released_for(name: str) -> str:
    """Names of the policies that shipped when a study ran, from its page; else of today's."""
    _, noted = study.origin((RESULTS / f"{name}.md").read_text("utf-8"))
    return noted.get("policies") or " ".join(policy_digests(released_folder()))


@cache
def figures(name: str) -> dict[str, set[str]]:
    """Of a study: geometric means over the best known of all planners, and who decided there."""
    released, by_text = released_for(name), {}
    rows = results.rows_of(name, RESULTS)
    best_of_all = best_known(rows)
    best_in = {group: best_known(mine) for group, mine in groups(rows, "group").items()}
    parts = [((best_of_all, best_in[g]), mine) for g, mine in groups(rows, "group").items()]
    mine = [row for row in results.LEARNING if row.study == name]
    parts += [((best_of_all,), results.of_row(row, RESULTS)) for row in mine]
    planners = [(bests, *x) for bests, part in parts for x in groups(part, "planner").items()]
    for bests, planner, mine in planners:
        who = {chooser(planner, row.objective, released) for row in mine}
        for best in bests:
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
                if not any(claims(beside, name) for name in names if "against" not in name):
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
        (results_page, r"\| trained network \| hand-written", "| hand-written | trained network"),
        (results_page, r"\| hand-written \| untrained network \|", "| hand-written | frozen |"),
        (results_page, r"learned_zero_shot\.md", "learned_dispatch.md"),  # of another study
        (results_page, r"(\| `\w+` \| )([\d.]+)", r"\1**\2**"),
        (readme, r"\| ours, 1 core \|", "| policy (learned) |"),
        (readme, r"\| ([\d.]+ ms) \|", r"| **\1** |"),
    ):
        changed = re.sub(old, new, page, count=1)
        assert changed != page and wrong(changed), old


def test_every_row_of_the_first_table_is_of_who_it_names() -> None:
    for row in results.LEARNING:
        released = released_for(row.study)
        planners = row.trained, row.hand, row.untrained
        for planner, who in zip(planners, CLAIMS.values(), strict=True):
            mine = [c for c in results.of_row(row, RESULTS) if c.planner == planner]
            decided = {chooser(planner, c.objective, released) for c in mine}
            assert decided and decided <= who, (row.where, planner, decided)


# By suites of the study of one decode, else by how names of problems begin.
KINDS = {
    "real": r"pipedream: |moirai: |captured: ",
    "drawn": r"never drawn: |families: ",
    "shops": r"(mk|edata|rdata|vdata|other shops): ",
}


def test_rows_of_the_learning_table_are_of_problems_of_the_kind_that_they_name() -> None:
    numbers = {}
    for row in results.LEARNING:
        mine = [c for c in results.of_row(row, RESULTS) if c.planner == row.trained]
        names = {f"{c.suite}: {c.problem}" if hasattr(c, "suite") else c.problem for c in mine}
        assert all(re.match(KINDS[row.kind], name) for name in names), row.where
        numbers[row.where] = len(names)
        counted = re.search(r"(\d+) (graphs|pipelines|flexible)", row.where)
        assert counted is None or int(counted[1]) == len(names), row.where
    assert list(numbers.values()) == [20, 20, 42, 42, 42, 117]


def learned_sections() -> Iterator[tuple[Path, str]]:
    """What README and results say of learning: from its heading to the next."""
    for path, heading in (
        (ROOT / "README.md", "### What training adds\n"),
        (ROOT / "docs" / "results.md", "## Does learning help? Where?\n"),
    ):
        yield path, path.read_text("utf-8").split(heading)[1].partition("\n## ")[0]


def unsupported(path: Path, text: str) -> list[str]:
    """Percentages of sentences that are neither in the section's table nor on a page it names."""
    rows = "".join(re.findall(r"^\|.*\n", text, re.MULTILINE))
    pages = re.findall(r"\]\(([^)\s]*results/\w+\.md)", text)
    known = rows + results.decodes(RESULTS)
    known += "".join((path.parent / page).read_text("utf-8") for page in set(pages))
    prose = re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)
    return [x for x in re.findall(r"[-+]\d+\.\d", prose) if x not in known]


def test_percentages_of_learned_sentences_are_of_tables() -> None:
    for path, text in learned_sections():
        assert re.findall(r"^\| (\w+): ", text, re.MULTILINE)[:2] == ["real", "real"], path
        assert unsupported(path, text) == [], path
        assert unsupported(path, text + "\nTraining brings -77.7 %.") == ["-77.7"]


def test_pages_of_networks_that_no_longer_ship_say_so() -> None:
    ship = {Path(name).stem for name in policy_digests(released_folder())}
    for path in RESULTS.glob("*.md"):
        text = path.read_text("utf-8")
        noted = study.origin(text)[1].get("policies", "")
        for name in set(re.findall(r"'policy ([\w-]+)'", noted)) - ship:
            short = name.rpartition("-")[0]
            assert re.search(rf"`{short}[^.]*no longer ship", text), (path.name, name)


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
    assert chooser(planner, objective, "{'policy guided_search-latency': '5d'}") == who
