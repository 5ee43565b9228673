"""Write the table of ``docs/reproduce.md`` from the files in ``experiments/results``.

    python docs/make_reproduction.py

Command, day and machine are read from the results themselves. What a study answers, how long it
takes and what it needs is written here. A result without a study, or a study without a result, is
an error.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "experiments" / "results"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


class Study(NamedTuple):
    """What a reader wants to know before starting one; ``minutes`` on the machine of the result."""

    answers: str
    minutes: float
    needs_data: bool = False


# By the name that the files of a result begin with.
STUDIES = {
    "pipelining": Study("Two cores: replicas, a cut, or plain PyTorch?", 6),
    "fidelity": Study("How far are predictions from measurements?", 57),
    "peers": Study("Throughput beside `torch.distributed.pipelining`", 1),
    "training": Study("Are losses plain PyTorch's, and how fast is a step?", 5),
    "schedules": Study("Are searched schedules as short as published ones?", 26, True),
    "baselines": Study("Every planner on 48 problems, equal budgets", 21, True),
    "leaderboard": Study("How far from proved optima does a planner stay?", 8, True),
    "public_replicas": Study("What do replicas bring on public throughput problems?", 3, True),
    "public_search": Study(
        "Public problems: how far from the best known, and from bounds?", 38, True
    ),
    "learned_dispatch": Study("A placement in one pass: what does training add?", 132, True),
    "learned_guided": Study("Who should choose the moves of a search?", 50, True),
    "learned_against": Study("Is the planner `policy` ever worse than a baseline?", 100, True),
    "learned_executed": Study("Are its placements faster for real?", 63),
    "learned_giph": Study("Few evaluations, on GiPH's own distribution", 12),
    "learned_doppler": Study("DOPPLER's own graphs, equal budgets", 20, True),
    "learned_few": Study("Ten evaluations and one for every four groups", 6, True),
    "learned_published": Study("Published learners, rules and searches: equal budgets", 45, True),
    "learned_resched": Study("Flexible job shops beside a published network, one decode", 8),
    "learned_zero_shot": Study("One evaluation, graphs of kinds never seen", 6, True),
    "measured": Study("How good is a plan after 100 measurements?", 38),
    "prediction": Study("How well are times of unseen models predicted?", 22),
    "scale": Study("Planners up to 100,000 operators", 22),
    "scale_out": Study("From 8 to 4,096 devices", 20),
    "distributed": Study("Plans over processes: equal results, as predicted, how fast?", 3),
    "neusight": Study("How well are times of a GPU predicted that was never measured?", 1, True),
    "decoding": Study("Seconds for a token: predicted and measured", 2),
    "homes": Study("Language models on clusters at home: how much faster?", 3),
    "gpu": Study("CPU cores and a GPU: results, speed, predictions, memory", 8),
    "gpu_plans": Study("What could plans gain on that machine?", 3),
    "bench": Study("Speeds of simulator, planners and training", 1),
}


def table() -> str:
    """Markdown: a row per study, and the machines.

    Raises:
        KeyError: a file of the results belongs to no study.
        FileNotFoundError: a study has no result.
    """
    rows = [
        "| result | what it answers | `python -m` | minutes | made |",
        "|---|---|---|---:|---|",
    ]
    machines: list[str] = []
    files = files_by_study([path.name for path in RESULTS.iterdir()])
    for stem, study in STUDIES.items():
        if not files[stem]:
            raise FileNotFoundError(f"no file in {RESULTS} begins with {stem!r}")
        command, facts = origin(stem)
        links = [f"[{Path(f).suffix[1:]}](../experiments/results/{f})" for f in files[stem]]
        machine = f"{short(facts['cpu'])}, {facts['cores']} cores"
        if machine not in machines:
            machines.append(machine)
        day = f"{facts['when'][:10]} {'ABCDEFGH'[machines.index(machine)]}"
        run = f"`{command.removeprefix('python -m ')}`{' (1)' if study.needs_data else ''}"
        cells = [", ".join(links), study.answers, run, f"{study.minutes:g}", day]
        rows.append(f"| {' | '.join(cells)} |")
    where = [f"Machine {letter}: {m}." for letter, m in zip("ABCDEFGH", machines, strict=False)]
    return "\n".join([*rows, "", *where]) + "\n"


def files_by_study(names: list[str]) -> dict[str, list[str]]:
    """The files of each study; what is read first comes first."""
    paths: dict[str, list[str]] = {stem: [] for stem in STUDIES}
    order = [".md", ".json", ".csv", ".png"]
    for name in sorted(names, key=lambda name: order.index(Path(name).suffix)):
        stem = Path(name).stem.removesuffix("_curve")
        if stem not in STUDIES:
            raise KeyError(f"experiments/results/{name} belongs to no study in {__file__}")
        paths[stem].append(name)
    return paths


def origin(stem: str) -> tuple[str, dict[str, str]]:
    """The command that made a result, and the facts it noted: when, cpu, cores, ..."""
    page = RESULTS / f"{stem}.md"
    if page.exists():
        text = page.read_text(encoding="utf-8")
        command = re.search(r"^`(python -m experiments\.[^`]+)`$", text, re.MULTILINE)
        if command is None:
            raise KeyError(f"{page} does not say which command made it")
        return command[1], dict(re.findall(r"^- (\w+): (.+)$", text, re.MULTILINE))
    facts = json.loads((RESULTS / f"{stem}.json").read_text(encoding="utf-8"))["provenance"]
    return f"python -m experiments.{stem}", {k: str(v) for k, v in facts.items()}


def short(cpu: str) -> str:
    return re.sub(r"\((R|TM)\)| Processor| CPU", "", cpu).replace("  ", " ")


def updated(page: str) -> str:
    """``page`` with a new table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    path = DOCS / "reproduce.md"
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
