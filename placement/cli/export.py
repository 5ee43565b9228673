"""``placement export``: a plan in the format of the program that will use it."""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement import cli
from placement.cli.plan import option

if TYPE_CHECKING:
    from placement.exporters import Exported, Exporter, Inexpressible
    from placement.plan import Plan
    from placement.problem import Problem

EXAMPLE = """examples:
  placement export --list
  placement export plan.json --to huggingface --out device_map.json
  placement export plan.json --to vllm --out vllm.env --nearest layers=transformer.h
  placement export plan.json --to aoti --out FOLDER      compiled stages, and what pipelines them

Exit code 1: the program cannot express the plan; the message says which operator is in the way.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = cli.adding(parser)
    add("plan plan.json", nargs="?")
    add("options option=value", "an option of the exporter", nargs="*", default=[])
    add("--list", "the exporters, their options", bool)
    add("--to NAME", "an exporter, e.g. huggingface")
    add("--out FILE", "write it here")
    add(
        "--nearest",
        "if the plan cannot be expressed, the nearest one that can, and what it loses",
        bool,
    )
    add(
        "--model NAME",
        "the workload or problem file of the plan, for predictions; default: a shipped one's",
    )
    add("--profile FILE", "measured times; default: the saved ones")


def run(args: argparse.Namespace) -> int:
    from placement import exporters
    from placement.plan import load_plan
    from placement.problem import ProblemError

    if args.list:
        return _list(args)
    if args.plan is None and args.options:  # argparse leaves what follows a flag to the options
        args.plan = args.options.pop(0)
    options = (("the plan", args.plan), ("--to NAME", args.to), ("--out FILE", args.out))
    missing = [what for what, value in options if value is None]
    if missing:
        raise cli.UsageError(f"missing: {', '.join(missing)}; exporters: placement export --list")
    if args.to == "aoti":
        return _packages(args)
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
        if problem is None:
            problem = _problem(plan, args)
        reason = str(error).partition(". --nearest")[0]
        nearest = _nearest(exporter, plan, problem, error)
        moved = {op: d for op, d in nearest.assignment.items() if d != plan.assignment[op]}
        cli.say(reason)
        title = f"{len(moved)} of {plan.graph.num_ops} operators move"
        if problem is None:
            cli.say(
                f"{title}; what that costs is not known, nor whether it fits into memory; to know: "
                f"--model {shlex.quote(plan.graph.workload or 'MODEL')}, or --profile FILE"
            )
        else:
            try:
                predicted, rows, excess = _loss(plan, nearest, problem)
            except ProblemError as unsupported:
                excess = str(unsupported)
            if excess:
                why = f"the nearest plan that {args.to} can express does not fit: {excess}"
                if args.json:
                    _answer(args, [], moved, predicted, why)
                cli.say(why)
                return cli.NO
        exported = exporter(nearest, problem)
    paths = _write(exported, args.out, read=[args.plan, getattr(exporter, "model", None)])
    note = _filled_in(exported.note, plan.graph.workload, paths)
    if args.json:
        _answer(args, list(paths.values()), moved, predicted, note)
    elif predicted is not None:
        cli.print_table(title, ["predicted", "the plan", "the nearest", "change"], rows)
    cli.say(f"written: {', '.join(paths.values())}; {note}")
    return cli.OK


def _filled_in(note: str, workload: str | None, paths: Mapping[str, str]) -> str:
    """``note`` with the names of this export, to be typed as it stands."""
    from placement.workloads import family_of

    family = family_of().get(workload or "")
    function = f"placement.workloads.{family}:{workload}" if family else workload or ""
    if ":" in function:
        note = note.replace("package.module:function", shlex.quote(function))
    for suffix in sorted(paths, reverse=True):  # FILE itself last
        note = note.replace(f"FILE{suffix}", shlex.quote(paths[suffix]))
    return note


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


def _nearest(exporter: Exporter, plan: Plan, problem: Problem | None, error: Inexpressible) -> Plan:
    """The plan that ``error`` leads to: first nobody takes turns, then what is left is moved."""
    from placement import exporters

    if plan.phases:
        plan = exporters.moved(plan, error.nearest)
        try:
            exporter(plan, problem)
            return plan
        except exporters.Inexpressible as again:
            error = again
    return exporters.moved(plan, _priced(exporter, plan, problem, error).nearest)


def _priced(
    exporter: Exporter, plan: Plan, problem: Problem | None, error: Inexpressible
) -> Inexpressible:
    """``error``, raised without a problem, as it is with one: costs may decide what is nearest."""
    from placement import exporters

    if problem is not None:
        try:
            exporter(plan, problem)
        except exporters.Inexpressible as known:
            return known
    return error


def _loss(
    plan: Plan, nearest: Plan, problem: Problem
) -> tuple[dict[str, list[float]], list[list[str]], str]:
    """What the nearest plan costs, both simulated with the same profile.

    Returns:
        ``{"latency_s": [of the plan, of the nearest], ...}``; rows of a table that say it, and
        what each device has; what does not fit into memory.

    Raises:
        PlanMismatch: the problem is not that of the plan.
        ProblemError: a device cannot run an operator that the nearest plan has on it.
    """
    import numpy as np

    from placement.nearest import simulate_split
    from placement.plan import memory_excess

    devices = problem.cluster.device_names
    on = np.array([devices.index(name) for name in nearest.assignment.values()])
    one = plan.timeline(problem, 1), simulate_split(problem, on, 1)
    many = plan.timeline(problem), simulate_split(problem, on)
    values = {"latency_s": [t.latency_s for t in one], "period_s": [t.period_s for t in many]}
    rows = [
        [what, cli.seconds(was), cli.seconds(now), f"{now / was - 1:+.1%}" if was else "-"]
        for what, (was, now) in values.items()
    ]
    peak = [np.max([t.peak_bytes for t in pair], axis=0) for pair in zip(one, many, strict=True)]  # type: ignore[arg-type]
    if problem.objective.is_analytic:  # these count parameters only
        was_on = plan.placement(problem.graph, problem.cluster)
        peak = [problem.param_bytes_on(p) for p in (was_on, on)]
    for d, name in enumerate(devices):
        ops = [list(p.assignment.values()).count(name) for p in (plan, nearest)]
        if any(ops):
            has, *need = (cli.byte_size(float(x[d])) for x in (problem.memory_bytes, *peak))
            rows.append([f"operators on {name}", *map(str, ops), f"{ops[1] - ops[0]:+d}"])
            rows.append([f"memory of {name}", *need, f"of {has}"])
    return values, rows, "; ".join(memory_excess(problem, peak[1]))


def _problem(plan: Plan, args: argparse.Namespace) -> Problem | None:
    """The problem of the plan if its costs are at hand; nothing is measured.

    Raises:
        UsageError: a model was named, but its profile is not there.
    """
    from placement.cli.replan import NotMeasured, problem_of
    from placement.cli.show import shipped

    named = args.model or args.profile
    if not (named or shipped(plan)):
        return None
    try:
        with cli.progress() as report:
            return problem_of(plan, args.model, args.profile, report)
    except NotMeasured:
        if named:
            raise
        return None


def _write(exported: Exported, path_given: str, *, read: Sequence[str | None]) -> dict[str, str]:
    """Write the files and return their paths by suffix.

    Raises:
        UsageError: two of them, or one of them and one that was ``read``, are the same file.
    """
    from placement.tools.files import write_atomic

    out = Path(path_given)
    paths = {suffix: out.with_suffix(suffix) if suffix else out for suffix in exported.files}
    taken = [Path(path).resolve() for path in read if path]
    for suffix, path in paths.items():
        if path.resolve() in taken:
            beside = f"a {suffix} is written beside it, and " if suffix else ""
            raise cli.UsageError(f"--out {out}: {beside}{path} is in use; name another file")
        taken.append(path.resolve())
    for suffix, content in exported.files.items():
        write_atomic(paths[suffix], content)
    return {suffix: str(path) for suffix, path in paths.items()}


def _packages(args: argparse.Namespace) -> int:
    """``--to aoti``: compiled stages, which need the module and not the plan alone."""
    import torch

    from placement.cli.ways import model_of
    from placement.executor.packages import PackageError, write_packages
    from placement.plan import load_plan

    plan = load_plan(args.plan)
    if args.options or args.nearest or args.profile:
        raise cli.UsageError("--to aoti takes --model and --out FOLDER alone")
    with cli.progress() as report:
        report("loading and capturing the model", None)
        module, inputs = cli.load_workload(model_of(plan, args.model))
        with plan.bind(module, inputs) as runner:
            where = runner.graph, runner.cluster, runner.placement, plan.priority, args.out
        try:
            count = write_packages(*where, in_flight=plan.max_in_flight, report=report)
        except PackageError as error:
            if args.json:
                cli.print_json({"exported": False, "why": str(error)})
            cli.say(str(error))
            return cli.NO
    if args.json:
        cli.print_json({"exported": True, "folder": args.out, "packages": count})
    cli.say(
        f"{cli.count(count, 'package')} written to {args.out}, for PyTorch {torch.__version__} on "
        "this kind of processor; run.py and main.cpp there pipeline them without the model's code"
    )
    return cli.OK


def _list(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from placement import exporters

    rows: list[dict[str, Any]] = []
    for name in exporters.names():
        kind = exporters.find(name)
        options = {f.name: f.default for f in fields(kind)}
        what = kind.__doc__.splitlines()[0].replace("``", "")
        rows.append({"name": name, "what": what, "options": options})
    if args.json:
        cli.print_json({"exporters": rows})
        return cli.OK
    indent = max(len(row["name"]) for row in rows) + 2
    for row in rows:
        flags = "".join(f" [{key}=...]" for key in row["options"])
        print(
            textwrap.fill(
                f"{row['name']:<{indent}}{row['what']}{flags}",
                cli.WIDTH,
                subsequent_indent=" " * indent,
                break_on_hyphens=False,
            )
        )
    return cli.OK
