"""``placement schedule``: the order of blocks given as data, searched, with proof."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from placement import cli
from placement.tools.files import read_json
from placement.tools.ownership import needing

if TYPE_CHECKING:
    from placement.schedulers.searched.blocks import Work
    from placement.schedulers.searched.search import Answer

EXAMPLE = """example:
  placement schedule cases.json --case vshape/4/train --memory 4 --micro-batches 8

FILE holds {"cases": {KEY: case}}. A case describes one micro-batch: {"ndevs": D, "mode": "train"
or "infer", "blocks": [...]}; a block is {"id", "name", "devices", "time", "memory", "deps"}: the
devices are all busy for the time (an integer), the memory is added to what each of them holds
when the block starts (nothing is counted in mode "infer"), deps are the ids of predecessors.

The machine-readable result (--json) is one object with the keys period (per micro-batch),
period_lower_bound and optimal (both for patterns of as many micro-batches as the search allowed:
--unroll, or those of the pattern found), makespan, seconds (of the search: start of the program,
imports and compilation are not in it), unroll, micro_batches, memory, starts: a list of
[micro_batch, block_id, start].
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = cli.adding(parser)
    add("file FILE", "cases (JSON)")
    add("--case KEY", "e.g. vshape/4/train", required=True)
    add("--memory M", "of each device; default: any", int)
    add("--micro-batches N", kind=int, required=True)
    add("--unroll K", "micro-batches per period; default: 1, and more where that is shorter", int)
    add("--seconds S", "budget (0.8; 8 for more than 4 devices)", float)


def run(args: argparse.Namespace) -> int:
    from placement.schedulers.searched.blocks import BlocksError, read_work
    from placement.schedulers.searched.search import search_schedule

    for name, most in (("micro_batches", 10_000), ("unroll", 64), ("seconds", 1e6)):
        value = getattr(args, name)
        if value is not None and not 0 < value <= most:
            raise cli.UsageError(
                f"--{name.replace('_', '-')} {value} must be positive, and at most {most:g}"
            )
    if args.memory is not None and not 0 <= args.memory < 2**60:
        raise cli.UsageError(f"--memory {args.memory} must not be negative, and below 2**60")
    try:
        work, ids = read_work(_case(args.file, args.case), args.memory)
        needs = needing("cp", "placement schedule needs OR-Tools", cli.UsageError)
        with cli.progress() as report, needs:
            report("searching the order of blocks", None)
            answer = search_schedule(
                work, args.micro_batches, unroll=args.unroll, seconds=args.seconds
            )
    except BlocksError as error:
        raise cli.UsageError(f"{args.file}, case {args.case[:60]!r}: {error}") from error
    if args.json:
        cli.print_json(_answer(args, answer, ids))
    else:
        _show(args, work, answer)
    return cli.OK


def _case(path: str, key: str) -> dict[str, Any]:
    """Raises: UsageError, no such file, not this format, or no such case."""
    data = read_json(path, cli.UsageError)
    cases = data.get("cases") if isinstance(data, dict) else None
    if not isinstance(cases, dict):
        raise cli.UsageError(f'{path}: no cases in it; expected {{"cases": {{"NAME": ...}}}}')
    if key not in cases:
        shown = ", ".join(text[:60] for text in sorted(cases)[:20])
        raise cli.UsageError(f"{path} has no case {key!r}; it has {shown}")
    case: dict[str, Any] = cases[key]
    return case


def _number(value: Any) -> int | float:
    """A fraction as JSON: whole where it is whole."""
    return int(value) if value == int(value) else float(value)


def _answer(args: argparse.Namespace, answer: Answer, ids: list[int]) -> dict[str, Any]:
    """What machines read; the keys are a contract."""
    import numpy as np

    return {
        "period": _number(answer.period),
        "period_lower_bound": _number(answer.outcome.bound),
        "optimal": answer.outcome.optimal,
        "makespan": answer.makespan,
        "seconds": round(answer.seconds, 6),
        "unroll": answer.outcome.pattern.unroll,
        "micro_batches": args.micro_batches,
        "memory": args.memory,
        "starts": [[j, ids[b], int(start)] for (j, b), start in np.ndenumerate(answer.starts)],
    }


def _show(args: argparse.Namespace, work: Work, answer: Answer) -> None:
    """A table, and the schedule as text: a line per device, a letter per micro-batch."""
    count, pattern = args.micro_batches, answer.outcome.pattern
    memory = "unlimited" if args.memory is None else args.memory
    proved = "optimal" if answer.outcome.optimal else f"at least {float(answer.outcome.bound):g}"
    rows = [
        [f"period (pattern of {pattern.unroll})", f"{float(answer.period):g}", proved],
        ["makespan", str(answer.makespan), f"at least {work.makespan_bound(count)}"],
        ["busiest device", str(count * max(work.load)), ""],
        ["search [s]", f"{answer.seconds:.2f}", ""],
    ]
    title = f"{args.case}, memory {memory}, {count} micro-batches"
    cli.print_table(title, ["", "time", "proved"], rows)
    print(gantt(work, answer.starts, cli.WIDTH))


def gantt(work: Work, starts: Any, width: int) -> str:
    """A line per device: letters are micro-batches, capitals release memory, dots are idle.

    One column is one unit of time where that fits, otherwise several.
    """
    end = max(int(start) + work.blocks[b].time for row in starts for b, start in enumerate(row))
    room = max(8, width - 10)
    step = -(-end // room)
    lines = []
    for d, on in enumerate(work.on):
        cells = ["."] * (-(-end // step))
        for j, row in enumerate(starts):
            letter = "abcdefghijklmnopqrstuvwxyz"[j % 26]
            for b in on:
                shown = letter.upper() if work.blocks[b].memory < 0 else letter
                first = int(row[b])
                for column in range(first // step, -(-(first + work.blocks[b].time) // step)):
                    cells[column] = shown
        lines.append(f"device {d:<2} " + "".join(cells))
    return "\n".join([*lines, f"one column is {step} of time; capitals release memory"])
