"""Do compiled runs compute what the module does? Many models, in two runs on two devices.

    python -m experiments.compiled_equality [MODEL ...]

Every model is cut in the middle of its groups, one half on each device; each run is compiled as the
kind that is the fastest. Results are compared with the module's. A run that is not compiled is
interpreted, which the table says with the reason. Models are those of
``experiments.pieces_equality``. What is finished lies in ``runs/compiled_equality``. Writes
``experiments/results/compiled_equality.md`` and ``.json``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from experiments.pieces_equality import FAMILIES, OTHERS, OWN, small
from experiments.runs import two_cores
from experiments.study import Option, Options, Study, run, say
from experiments.tables import Column
from placement.capturing import capture
from placement.executor import Runner
from placement.program import CaptureError
from placement.runs.ways import difference


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """One of each model; one that is finished is not tried again."""
    for name in options.models:
        yield options.finished.row(dict, (name,), partial(row, name), name=name)


def row(name: str) -> dict[str, Any]:
    """What came out of a model."""
    torch.set_num_threads(1)
    module, inputs = small(name)
    facts: dict[str, Any] = {"model": name, "ops": 0, "compiled": 0, "why": {}, "wrong": ""}
    try:
        graph = capture(module, inputs, name=name)
    except CaptureError as error:
        return facts | {"wrong": f"not captured: {error}"[:200]}
    halves = (graph.group >= graph.num_groups // 2).astype(int)
    with Runner(graph, two_cores(), halves) as runner:
        runner.compile()
        facts |= {"ops": graph.num_ops, "compiled": runner.num_compiled}
        facts["why"] = dict(Counter(runner.not_compiled.values()))
        facts["wrong"] = difference(runner, module, inputs)
    say(f"{name}: {facts['wrong'] or 'equal'}")
    return facts


def reasons(row: Any) -> str:
    """Why runs are interpreted, and how many."""
    return "; ".join(f"{count} x {why}" for why, count in row["why"].items())


STUDY = Study(
    name="compiled_equality",
    rows=rows,
    options={"models": Option((*OWN, *FAMILIES, *OTHERS), word=True, metavar="MODEL")},
    columns=(
        Column("model", "model"),
        Column("operators", "ops"),
        Column("runs that are compiled", "compiled"),
        Column("and that are not", reasons),
        Column("results", lambda r: r["wrong"] or "equal"),
    ),
    wrong=lambda rows, options: [r["model"] for r in rows if r["wrong"]],
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
