"""Compare planners on a problem file: predicted values, proved bounds, seconds of planning.

    python examples/compare_planners.py [PROBLEM]

PROBLEM is any file that ``placement plan`` takes; without, ``branches.json`` beside this script.
"""

from __future__ import annotations

import sys
from pathlib import Path

from placement import importers, planners
from placement.report.table import print_tables, tables
from placement.runs.compare import compare

PLANNERS = {
    "heft": {},
    "contiguous_dp": {},
    "local_search": {"seconds": 1.0},
    "macro_search": {"seconds": 1.0},
}


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("branches.json"))
    problem = importers.load(path)
    compared = {name: planners.load(name, **options) for name, options in PLANNERS.items()}
    # What is finished is kept in the folder: started again, it goes on from there.
    comparison = compare({path.stem: problem}, compared, (0, 1), out_dir="runs/compare_planners")
    print_tables(tables(comparison))
    best = comparison.best(path.stem)
    faster = "" if best.speedup is None else f", {best.speedup:.2f}x one device"
    print(f"best: {best.planner}, {best.value_s:.4g} s{faster}")


if __name__ == "__main__":
    main()
