"""``placement dataset``: graphs of many models with measured times, as one folder."""

from __future__ import annotations

import argparse
from dataclasses import asdict, astuple, fields
from typing import TYPE_CHECKING

from placement import cli

if TYPE_CHECKING:
    from placement.workloads.dataset import Built

EXAMPLE = """examples:
  placement dataset build default --out measured --seconds 3600
  placement dataset build my_models.txt --out measured      a line each: resnet50 batch=8
  placement dataset show measured
  placement dataset load measured --out operators.csv       a row per operator and device
  placement plan measured/MACHINE/GRAPH.json.gz --planner heft

The same command continues what a time budget or Ctrl-C ended.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["build", "show", "load"])
    parser.add_argument("source", help="build: a list of models, or default; else the folder")
    parser.add_argument("--out", metavar="PATH", help="folder to build, or CSV file to load into")
    parser.add_argument("--cluster", metavar="FILE", help="devices to measure (YAML), all here")
    parser.add_argument("--seconds", type=float, help="build: begin no graph after so long")
    parser.add_argument("--repeats", type=int, default=10, help="rounds (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    if args.action == "build":
        return _build(args)
    return _show(args) if args.action == "show" else _load(args)


def _build(args: argparse.Namespace) -> int:
    if args.out is None:
        raise cli.UsageError("--out FOLDER is missing: where shall the data set be?")
    from placement.workloads import dataset

    is_default = args.source == "default"
    entries = dataset.default_entries() if is_default else dataset.read_list(args.source)
    for entry in entries:
        cli.search_here(entry.spec)
    seconds = float("inf") if args.seconds is None else args.seconds
    cluster = dataset.this_machine() if args.cluster is None else cli.cluster_of(args.cluster)
    with cli.progress() as report:
        built = dataset.build(
            entries,
            args.out,
            cluster=cluster,
            seconds=seconds,
            repeats=args.repeats,
            progress=report,
        )
    if args.json:
        cli.print_json({"folder": str(args.out), **asdict(built)})
    else:
        _say(built, args.out)
    return cli.NO if built.failed else cli.OK


def _say(built: Built, folder: str) -> None:
    print(
        f"{cli.count(len(built.made), 'graph')} measured, {len(built.kept)} were there, "
        f"{len(built.failed)} failed, {len(built.left)} left; next: placement dataset show {folder}"
    )
    for name, reason in list(built.failed.items())[: cli.LIMITS.rows]:
        cli.say(f"{name}: {reason}")
    if len(built.failed) > cli.LIMITS.rows:
        cli.say(f"{len(built.failed) - cli.LIMITS.rows} more failed; all of them: --json")
    if built.left:
        cli.say("the time is over; the same command measures what is left")


def _show(args: argparse.Namespace) -> int:
    from placement.workloads.dataset import summary

    card = summary(args.source)
    if args.json:
        cli.print_json({"folder": str(args.source), **asdict(card)})
        return cli.NO if card.damaged else cli.OK
    rows = [[kind, *map(str, numbers)] for kind, numbers in card.kinds.items()]
    rows.append(["all", str(card.num_graphs), str(card.num_ops), ""])
    cli.print_table(str(args.source), ["kind", "graphs", "operators", "families"], rows)
    for name, devices in card.machines.items():
        print(f"machine {name}: {', '.join(devices)}")
    print(
        f"{card.num_signatures} distinct operators (by signature), "
        f"{card.seconds / 3600:.2f} hours, {cli.byte_size(card.num_bytes)}"
    )
    print(
        f"interquartile range over time, median: {card.spread:.1%} of an operator, "
        f"{card.whole_spread:.1%} of a whole run"
    )
    if card.whole_spread > 0.1:
        cli.say("these times are noisy: build it again on a machine that does nothing else")
    for reason in card.damaged.values():
        cli.say(f"damaged: {reason}")
    return cli.NO if card.damaged else cli.OK


def _load(args: argparse.Namespace) -> int:
    from placement.workloads import dataset

    cli.check_outputs(args.out)
    problems = dataset.load(args.source)
    rows = dataset.operators(problems)
    facts = {"graphs": len(problems), "operators": sum(p.num_ops for p in problems.values())}
    if args.out is not None:
        from placement.tools.files import csv_text, write_atomic

        header = [f.name for f in fields(dataset.Operators)]
        write_atomic(args.out, csv_text(header, map(astuple, rows)))
    if args.json:
        cli.print_json(facts | {"rows": len(rows), "out": args.out})
    else:
        print(f"{facts['graphs']} graphs are whole, {facts['operators']} operators")
        if args.out is not None:
            print(f"{len(rows)} rows (distinct operator x device) written to {args.out}")
    return cli.OK
