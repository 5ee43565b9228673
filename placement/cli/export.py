"""``placement export``: a plan in the format of the program that will use it."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement import cli
from placement.cli.plan import option

if TYPE_CHECKING:
    from placement.exporters import Exported
    from placement.plan import Plan
    from placement.problem import Problem

EXAMPLE = """examples:
  placement export --list
  placement export plan.json --to huggingface --out device_map.json
  placement export plan.json --to vllm --out vllm.env --nearest layers=transformer.h

Exit code 1: the program cannot express the plan; the message says which operator is in the way.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="plan.json", nargs="?")
    parser.add_argument(
        "options", nargs="*", default=[], metavar="option=value", help="of the exporter"
    )
    parser.add_argument("--list", action="store_true", help="the exporters, their options")
    parser.add_argument("--to", metavar="NAME", help="an exporter, e.g. huggingface")
    parser.add_argument("--out", metavar="FILE", help="write it here")
    parser.add_argument(
        "--nearest",
        action="store_true",
        help="if the plan cannot be expressed, the nearest one that can, and what it loses",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="the workload or problem file of the plan, for predictions; default: a shipped one's",
    )
    parser.add_argument("--profile", metavar="FILE", help="measured before; default: the cache")


def run(args: argparse.Namespace) -> int:
    from placement import exporters
    from placement.plan import load_plan

    if args.list:
        return _list(args)
    if args.plan is None and args.options:  # argparse leaves what follows a flag to the options
        args.plan = args.options.pop(0)
    wanted = (("the plan", args.plan), ("--to NAME", args.to), ("--out FILE", args.out))
    missing = [what for what, given in wanted if given is None]
    if missing:
        raise cli.UsageError(f"missing: {', '.join(missing)}; exporters: placement export --list")
    cli.search_here(args.to)
    exporter = exporters.load(args.to, **dict(option(text, "exporter") for text in args.options))
    cli.check_outputs(args.out)
    plan = load_plan(args.plan)
    problem = _problem(plan, args) if args.model or args.profile else None
    predicted, moved = None, {}
    try:
        exported = exporter(plan, problem)
    except exporters.Inexpressible as error:
        if not args.nearest:
            if args.json:
                _answer(args, [], {}, None, str(error))
            cli.say(str(error))
            return cli.NO
        nearest = exporters.moved(plan, error.nearest)
        moved = {op: d for op, d in error.nearest.items() if d != plan.assignment[op]}
        problem = problem or _problem(plan, args)
        predicted, obstacle = _loss(plan, nearest, problem)
        cli.say(str(error).partition(". --nearest")[0])
        if predicted is None:
            cli.say(f"{len(moved)} of {plan.graph.num_ops} operators move; {obstacle}")
        elif obstacle:
            why = f"the nearest plan that {args.to} can express does not fit: {obstacle}"
            if args.json:
                _answer(args, [], moved, predicted, why)
            cli.say(why)
            return cli.NO
        exported = exporter(nearest, problem)
    paths = _write(exported, args.out, read=[args.plan, getattr(exporter, "model", None)])
    if args.json:
        _answer(args, paths, moved, predicted, exported.note)
    elif predicted is not None:
        rows = [
            [what, cli.seconds(was), cli.seconds(now), f"{now / was - 1:+.1%}" if was else "-"]
            for what, (was, now) in predicted.items()
        ]
        title = f"{len(moved)} of {plan.graph.num_ops} operators move"
        cli.print_table(title, ["predicted", "the plan", "the nearest", "change"], rows)
    cli.say(f"written: {', '.join(paths)}; {exported.note}")
    return cli.OK


def _answer(
    args: argparse.Namespace,
    files: list[str],
    moved: dict[str, str],
    predicted: dict[str, list[float]] | None,
    note: str,
) -> None:
    """What machines read; without files, ``note`` says why the plan cannot be expressed."""
    answer = {"to": args.to, "files": files, "moved": moved, "predicted": predicted}
    cli.print_json(answer | {"note": note})


def _loss(
    plan: Plan, nearest: Plan, problem: Problem | None
) -> tuple[dict[str, list[float]] | None, str]:
    """``({"latency_s": [of the plan, of the nearest], ...}, what is wrong with the nearest)``.

    Both are simulated with the same profile; None, and why, where that is not possible.
    """
    import numpy as np

    from placement.plan import memory_excess

    if problem is None:
        return None, "what that costs is not known, the profile is not at hand: --model, --profile"
    try:
        one, many = [[p.timeline(problem, m) for p in (plan, nearest)] for m in (1, None)]
    except ValueError as error:
        return None, f"what that costs is not known, as it cannot be simulated: {error}"
    values = {"latency_s": [t.latency_s for t in one], "period_s": [t.period_s for t in many]}
    peaks = [t.peak_bytes for t in (one[1], many[1]) if t.peak_bytes is not None]
    excess = memory_excess(problem, np.max(peaks, axis=0)) if peaks else []
    return values, "; ".join(excess)


def _problem(plan: Plan, args: argparse.Namespace) -> Problem | None:
    """The problem of the plan if its costs are at hand; nothing is measured.

    Raises:
        UsageError: a model was named, but its profile is not there.
    """
    from placement import workloads
    from placement.cli.replan import cached_profile, decided, problem_in_file
    from placement.problem import Problem
    from placement.profile import Profile

    model = args.model
    if model is None and plan.graph.workload in workloads.names():
        model = plan.graph.workload
    if model is None:
        if args.profile:
            raise cli.UsageError("--profile is about a model: name it with --model")
        return None
    if cli.is_file(model):
        return problem_in_file(plan, args, model)
    with cli.progress() as report:
        graph = cli.capture_workload(model, report, plan.graph.mode, plan.graph.optimizer)
    cluster = plan.cluster.build()
    path = Path(args.profile) if args.profile else cached_profile(graph, cluster)
    if not path.exists():
        if args.model or args.profile:
            raise cli.UsageError(
                f"{path}: no such profile; measure first: placement profile {model}"
            )
        return None
    profile = Profile.load(path).for_cluster(cluster)
    return Problem(graph, cluster, profile, **decided(plan))


def _write(exported: Exported, given: str, *, read: Sequence[str | None]) -> list[str]:
    """Write the files and return their paths.

    Raises:
        UsageError: two of them, or one of them and one that was ``read``, are the same file.
    """
    from placement.files import write_atomic

    out = Path(given)
    paths = {suffix: out.with_suffix(suffix) if suffix else out for suffix in exported.files}
    taken = [Path(path).resolve() for path in read if path]
    for suffix, path in paths.items():
        if path.resolve() in taken:
            beside = f"a {suffix} is written beside it, and " if suffix else ""
            raise cli.UsageError(f"--out {out}: {beside}{path} is in use; name another file")
        taken.append(path.resolve())
    for suffix, content in exported.files.items():
        write_atomic(paths[suffix], content)
    return [str(path) for path in paths.values()]


def _list(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from placement import exporters

    rows: list[dict[str, Any]] = []
    for name in exporters.names():
        found = exporters.find(name)
        options = {f.name: f.default for f in fields(found)}
        what = found.__doc__.splitlines()[0].replace("``", "")
        rows.append({"name": name, "what": what, "options": options})
    if args.json:
        cli.print_json({"exporters": rows})
        return cli.OK
    indent = max(len(row["name"]) for row in rows) + 2
    for row in rows:
        given = "".join(f" [{key}=...]" for key in row["options"])
        print(
            textwrap.fill(
                f"{row['name']:<{indent}}{row['what']}{given}",
                cli.WIDTH,
                subsequent_indent=" " * indent,
                break_on_hyphens=False,
            )
        )
    return cli.OK
