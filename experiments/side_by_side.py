"""The same comparison one after another, in two processes, and on two workers of a local Ray.

    python -m experiments.side_by_side

Searches with a budget of evaluations on synthetic problems: the answers must be equal, and only the
wall-clock time may differ, the start of the workers included. Writes
``experiments/results/side_by_side.md`` and ``.json``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.runs import warm
from experiments.study import Option, Options, Rows, Study, run, say
from experiments.tables import Column, table
from placement.planners import load
from placement.runs.compare import compare
from placement.tools.parallel import check
from placement.workloads.synthetic import Family, layered

SEEDS = (0, 1)
WAYS = Option(("serial", "processes", "ray"), "the first is what the others are compared with")
COLUMNS = (
    Column("way", "way"),
    Column("wall clock", "seconds", 1, unit=" s"),
    Column("times as fast", "times as fast", 2),
)


def in_ways(
    ways: Sequence[str], work: Callable[[str], Any], equal: Callable[[Any, Any], bool]
) -> Iterator[dict[str, Any]]:
    """Wall-clock seconds of each way, beside the first one's, and whether both found the same."""
    first: tuple[float, Any] | None = None
    for way in ways:
        began = time.perf_counter()
        answer = work(way)
        seconds = time.perf_counter() - began
        first = first or (seconds, answer)
        same = "yes" if equal(answer, first[1]) else "NO"
        say(f"{way}: {seconds:.1f} s, equal: {same}")
        yield {"way": way, "seconds": seconds, "times as fast": first[0] / seconds, "equal": same}


def answers(problems: Any, evaluations: int, way: str) -> list[Any]:
    """What a comparison from nothing finds."""
    planners = {n: load(n, evaluations=evaluations) for n in ("local_search", "cross_entropy")}
    with tempfile.TemporaryDirectory() as folder:
        comparison = compare(problems, planners, SEEDS, out_dir=Path(folder), parallel=way)
    return [(r.workload, r.planner, r.seed, r.placement_id, r.value_s) for r in comparison.rows]


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """A row per way."""
    for way in options.ways:
        check(way)
    family = Family(layered(options.layers, options.width, 0.05), num_devices=4)
    problems = {f"layered-{seed}": family(seed) for seed in range(2)}
    warm(["local_search", "cross_entropy"], ["period"])
    work = partial(answers, problems, options.evaluations)
    yield from in_ways(options.ways, work, lambda a, b: a == b)


def parts(rows: Rows, options: Options) -> dict[str, Any]:
    shown = table(rows, *COLUMNS, Column("equal answers", "equal"))
    return {"operators": options.layers * options.width, "table": shown}


STUDY = Study(
    name="side_by_side",
    rows=rows,
    parts=parts,
    options={
        "evaluations": Option(300, "of every search"),
        "layers": Option(20, "of the graphs"),
        "width": Option(50, "operators of a layer"),
        "ways": WAYS,
    },
)
main = partial(run, (STUDY,))

if __name__ == "__main__":
    sys.exit(main())
