"""The same comparison one after another, in two processes, and on two workers of a local Ray.

    python -m experiments.side_by_side

Searches with a budget of evaluations on synthetic problems: the answers must be equal, and only the
wall-clock time may differ, the start of the workers included. Writes
``experiments/results/side_by_side.md``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments import _study
from experiments._study import say
from placement.compare import compare
from placement.files import write_atomic
from placement.parallel import check
from placement.planners import load
from placement.problem import Problem
from placement.workloads.synthetic import Family, layered

SEEDS = (0, 1)


def answers(problems: dict[str, Problem], way: str, evaluations: int) -> tuple[float, list[Any]]:
    """Wall-clock seconds of a comparison from nothing, and what it found."""
    planners = {n: load(n, evaluations=evaluations) for n in ("local_search", "cross_entropy")}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        found = compare(problems, planners, SEEDS, out_dir=Path(folder), parallel=way)
        took = time.perf_counter() - began
    return took, [(r.workload, r.planner, r.seed, r.placement_id, r.value_s) for r in found.rows]


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _study.common_options(parser, "side_by_side")
    parser.add_argument("--evaluations", type=int, default=300, help="of every search")
    parser.add_argument("--layers", type=int, default=20, help="of the graphs")
    parser.add_argument("--width", type=int, default=50, help="operators of a layer")
    parser.add_argument("--ways", nargs="+", default=["serial", "processes", "ray"])
    options = parser.parse_args(argv)

    def work() -> None:
        for way in options.ways:
            check(way)
        made = Family(layered(options.layers, options.width, 0.05), num_devices=4)
        problems = {f"layered-{seed}": made(seed) for seed in range(2)}
        _study.warm(["local_search", "cross_entropy"], ["period"])
        rows: list[list[str]] = []
        first: tuple[float, list[Any]] | None = None
        for way in options.ways:
            took, found = answers(problems, way, options.evaluations)
            first = first or (took, found)
            equal = "yes" if found == first[1] else "NO"
            rows.append([way, f"{took:.1f} s", f"{first[0] / took:.2f}", equal])
            say(" ".join(rows[-1]))
        table = _study.to_table(["way", "wall clock", "times as fast", "equal answers"], rows)
        write_atomic(
            options.out / "side_by_side.md",
            f"""# Searches side by side

`{_study.command_line("experiments.side_by_side", argv)}`

Two searches of {options.evaluations} evaluations, seeds 0 and 1, on two problems of
{options.layers * options.width:,} operators on four devices, with as many workers as cores; their
start is part of the time.

{table}
{_study.provenance()}""",
        )
        print(table)

    return _study.launch(work)


if __name__ == "__main__":
    sys.exit(main())
