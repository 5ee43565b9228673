"""``placement-sweep-report DIR``: the jobs of a sweep as one table, over seeds and workloads."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before anything else is imported, as Ctrl-C may come meanwhile
    from placement import commands

    sys.exit(commands.sweep_report())

import argparse
from collections.abc import Sequence
from pathlib import Path

from agents.cli import sweeps
from agents.cli.job import explain
from placement import cli
from placement.report import table
from placement.tools.files import write_atomic

EPILOG = """examples:
  placement-sweep-report runs/sweep/planners
  placement-sweep-report runs/sweep/planners --json | jq .aggregates

DIR is hydra.sweep.dir of placement-compare or placement-train with -m or sweep=NAME.
Exit codes: 0 done; 1 a job failed, or none has finished; 2 bad input; 70 a defect;
130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="placement-sweep-report",
        description="Aggregate a sweep over its seeds: sweep.csv and sweep.md in DIR, and a table.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--json", action="store_true", help="one JSON object for machines")
    args = parser.parse_args(argv)
    return cli.guarded(lambda: _report(Path(args.folder), args.json), explain)


def _report(folder: Path, as_json: bool) -> int:
    report = sweeps.aggregate(sweeps.read_sweep(folder), sweeps.num_asked(folder))
    shown = sweeps.to_table(report)
    write_atomic(folder / "sweep.csv", sweeps.to_csv(report))
    write_atomic(folder / "sweep.md", table.as_markdown(shown))
    if as_json:
        cli.print_json(sweeps.to_json(report))
    else:
        table.print_tables([shown])
        print(f"in {folder}: sweep.csv, sweep.md")
    wrong = report.named("failed") or not report.named("finished")
    return cli.NO if wrong else cli.OK
