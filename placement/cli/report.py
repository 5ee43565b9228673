"""``placement report``: a run folder as one HTML page."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from placement import cli

EXAMPLE = """examples:
  placement report runs/compare/2026-01-31_12-00-00
  placement report plan.json --out page.html

The page needs no network and no other file. The machine-readable result (--json) has the keys
path, num_bytes, num_workloads, num_planners, num_predicted, num_measured, unread.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = cli.adding(parser)
    add("folder RUN_DIR", "folder of a comparison, a training or plans; or a plan")
    add("--out FILE", "default: report.html in the folder")


def run(args: argparse.Namespace) -> int:
    from placement.report.html import write_report

    source = Path(args.folder)
    home = source if source.is_dir() else source.parent
    cli.check_outputs(args.out or str(home / "report.html"))
    with cli.progress() as report:
        report(f"reading {args.folder}", None)
        written = write_report(args.folder, args.out, report)
    for line in written.unread:
        cli.say(f"left out, cannot be read: {line}")
    if not written.num_predicted + written.num_measured:
        cli.say(
            "no plan has a timeline here: that needs trace.json or problem.json beside it, from "
            "placement plan --trace trace.json, or placement import --out problem.json"
        )
    if args.json:
        cli.print_json(asdict(written) | {"path": str(written.path)})
    else:
        print(
            f"{written.path}: {cli.count(written.num_workloads, 'workload')}, "
            f"{cli.count(written.num_planners, 'planner')}, "
            f"{written.num_predicted} predicted and {written.num_measured} measured timelines, "
            f"{written.num_bytes / 2**20:.1f} MiB; open it in a browser"
        )
    return cli.OK
