"""``placement bench``: how far a planner stays from proved optima."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement import cli
from placement.cli.plan import load_planner

if TYPE_CHECKING:
    from placement.runs.bench import BenchRow
    from placement.workloads.suites import Case

EXAMPLE = """examples:
  placement bench synthetic --planner heft --only 'layered*'
  placement bench shops --data FOLDER --planner order_search --evaluations 1,75,2000 --only 'mk*'
  placement bench stg --data FOLDER --devices 4 --planner policy=policy.safetensors --seconds 1
  placement bench shops --data FOLDER --planner my_package.my_module:MyPlanner width=3 --json

Nothing is downloaded: without --data, or where files are missing, the command says where a suite is
published.

The machine-readable result (--json) is one object with suite, planner, gap (geometric mean of value
over best known, less 1) and rows, each with problem, devices, value, lower_bound, best_known, gap,
evaluations, seconds, feasible, device (index of the machine, per operation of the file, in its
order) and start (in the file's unit of time, per operation; null for objectives without a
timetable). A row's gap is over the lower bound where no best is known; such rows count in the mean
only in a suite of which nothing better is known. Rows without an answer do not count; unsolved says
how many. A value below a proved bound or the best known ends the command with exit code 70; a file
that cannot be read is a row without an answer, and in the end exit code 2. The same object is kept
in --out FILE after every problem, and the same command continues it.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = cli.adding(parser)
    add("suite", "shops, stg, neusight, wfformat, public or synthetic")
    add("--planner NAME", "or policy=FILE, or package.module:Class", required=True)
    add("--data FOLDER", "the suite's files, or a folder of theirs")
    add("--evaluations N", "budget of the planner; or N,N,...")
    add("--seconds", "budget of the planner, per problem", float)
    add("--seed", kind=int)
    add("--only GLOB", "problems of that name", default="*")
    add("--devices K", "processors, where files do not say (stg: all)", int)
    add("--out FILE", "keep the rows; the same command continues")
    add("options option=value", "an option of the planner", nargs="*", default=[])


def run(args: argparse.Namespace) -> int:
    from placement.workloads import suites

    cli.check_outputs(args.out)
    budgets = _budgets(args)
    if args.planner.startswith("policy="):
        args.options, args.planner = [args.planner, *args.options], "policy"
    every = [_with(args, evaluations=budget) for budget in budgets]
    planners = [load_planner(one) for one in every]
    cases = suites.cases(args.suite, args.data, args.devices, args.only)
    code: int = cli.OK
    for one, planner in zip(every, planners, strict=True):
        code = max(code, _one(one, planner, cases))
    return code


def _with(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | changes)


def _budgets(args: argparse.Namespace) -> list[int | None]:
    """Raises: UsageError, no numbers, or several where one object is asked for."""
    if args.evaluations is None:
        return [None]
    words = args.evaluations.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise cli.UsageError(f"--evaluations {args.evaluations}: give a number, or N,N,...")
    if len(words) > 1 and (args.json or args.out):
        raise cli.UsageError(
            f"--evaluations {args.evaluations}: --json and --out are of one budget"
        )
    return [int(word) for word in words]


def _one(args: argparse.Namespace, planner: Any, cases: Sequence[Case]) -> int:
    """All cases with one budget; what is finished is shown whatever ends it."""
    from placement.importers import FormatError
    from placement.report.saved import digest
    from placement.runs.bench import answer, measure, unread
    from placement.runs.compare import describe
    from placement.tools.files import write_atomic

    facts = {
        "options": dict(word.split("=", 1) for word in args.options),
        "budget": {"evaluations": args.evaluations, "seconds": args.seconds},
        "seed": args.seed,
        "digest": digest(describe(planner)),
    }
    done = _finished(args, facts)
    rows: list[BenchRow] = []
    try:
        with cli.progress() as report, cli.says_when_compiling(), cli.says_nothing_in_answers():
            for k, case in enumerate(cases):
                report(f"{args.suite}: {case.problem}", k / len(cases))
                key = (case.problem, case.devices)
                try:
                    rows.append(done[key] if key in done else measure(case, planner))
                except FormatError as error:
                    rows.append(unread(case, str(error)))
                if args.out and key not in done:
                    kept = [*rows, *_to_come(done, rows)]
                    object_ = answer(args.suite, args.planner, kept, **facts)
                    write_atomic(args.out, json.dumps(object_, indent=1, allow_nan=False) + "\n")
    finally:
        if rows:
            if args.json:
                cli.print_json(answer(args.suite, args.planner, rows, **facts))
            else:
                _show(args, rows)
    unsolved = sorted((row for row in rows if not row.feasible), key=lambda row: not row.unread)
    for row in unsolved[:3]:
        cli.say(f"{row.problem}: no answer: {cli.one_line(row.note)}")
    if len(unsolved) > 3:
        cli.say(f"and {len(unsolved) - 3} more of {len(rows)} without an answer")
    wrong = [row for row in rows if row.impossible]
    for row in wrong:
        cli.say(
            f"{row.problem} on {row.devices} devices: {row.value} is below {row.impossible}: that "
            "is wrong, or the simulator is"
        )
    if wrong:
        return cli.DEFECT
    if any(row.unread for row in rows):
        return cli.BAD_INPUT
    return cli.OK if any(row.feasible for row in rows) else cli.NO


def _finished(
    args: argparse.Namespace, facts: dict[str, Any]
) -> dict[tuple[str, int | None], BenchRow]:
    """The rows in ``--out`` of an earlier run of the same command.

    Raises:
        UsageError: the file is of something else.
    """
    from placement.runs.bench import BenchRow
    from placement.tools.files import parse_json, read_text

    if not args.out or not Path(args.out).exists():
        return {}
    try:
        earlier = parse_json(read_text(args.out))
        same = {"suite": args.suite, "planner": args.planner, **facts}
        if any(earlier.get(key) != value for key, value in same.items()):
            raise ValueError("it is of another suite, planner, weights, options or budget")
        rows = [BenchRow(**row) for row in earlier["rows"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise cli.UsageError(
            f"--out {args.out} cannot be continued ({error}); name another file, or remove it"
        ) from error
    # A case whose file describes its devices asks for none.
    return {
        (row.problem, count): row for row in rows if not row.unread for count in (row.devices, None)
    }


def _to_come(
    done: Mapping[tuple[str, int | None], BenchRow], rows: Sequence[BenchRow]
) -> list[BenchRow]:
    """Rows of an earlier run whose cases are not among ``rows``: their file keeps them."""
    seen = {(row.problem, row.devices) for row in rows}
    return [row for key, row in done.items() if key[1] is not None and key not in seen]


def _show(args: argparse.Namespace, rows: Sequence[BenchRow]) -> None:
    from placement.runs.bench import mean_of

    wide = 18  # of a problem's name; of longer ones the end says more
    cells = [
        [
            row.problem if len(row.problem) <= wide else f"…{row.problem[1 - wide :]}",
            str(row.devices),
            *map(_figure, (row.value, row.lower_bound, row.best_known)),
            _gap(row),
            "-" if row.evaluations is None else str(row.evaluations),
            f"{row.seconds:.2f}",
        ]
        for row in rows
    ]
    budget = "" if args.evaluations is None else f", {args.evaluations} evaluations"
    header = ["problem", "on", "value", "bound", "best", "gap", "evals", "s"]
    cli.print_table(f"{args.suite}: {args.planner}{budget}", header, cells)
    mean = mean_of(rows)
    if mean.gap is not None:
        print(
            f"gap {mean.gap:.2%} (95 % interval {mean.low:.2%} to {mean.high:.2%}), geometric mean "
            f"of {cli.count(mean.count, 'problem')}; * proved optimal: {mean.optimal:.1%}"
        )


def _gap(row: BenchRow) -> str:
    """Of a problem whose best is not known, at most so much: over the bound."""
    if row.gap is None:
        return "-"
    most = "" if row.best_known is not None or row.optimal else "<="
    return f"{most}{row.gap:.2%}" + ("*" if row.optimal else "")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
