"""The ``placement`` command; ``placement VERB --help`` explains each verb.

Exit codes: 0 done; 1 the answer is no (not valid, not equal, nothing fits); 2 bad input;
70 a defect of ours; 130 interrupted.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before anything else is imported, as Ctrl-C may come meanwhile
    from placement import commands

    sys.exit(commands.placement())

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from placement import cli
from placement.cli import (
    audit,
    bench,
    completion,
    dataset,
    doctor,
    export,
    import_problem,
    optimize,
    plan,
    profile,
    report,
    run,
    schedule,
    show,
)
from placement.cli.parser import Help, Parser
from placement.tools.ownership import version


class Verb(NamedTuple):
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    example: str
    first_page: bool = True  # of `placement --help`


def _of(module: Any, help: str, first_page: bool = True) -> Verb:
    """The verb that has a file of its own."""
    return Verb(help, module.configure, module.run, module.EXAMPLE, first_page)


VERBS = {
    "optimize": _of(optimize, "capture, measure, plan and run a model, in one command"),
    "profile": _of(profile, "measure every operator on every device"),
    "dataset": _of(dataset, "graphs of many models with measured times: build, show, load"),
    "import": _of(import_problem, "write any problem as one file of our own format"),
    "plan": _of(plan, "let a planner decide"),
    "bench": _of(bench, "how far a planner stays from optima that are proved"),
    "run": _of(run, "carry a plan out, check its results, measure it"),
    "schedule": _of(schedule, "search the order of blocks that are given as data"),
    "validate": Verb(
        "check a plan: against itself, a model, devices",
        show.configure_validate,
        show.run_validate,
        show.VALIDATE_EXAMPLE,
    ),
    "show": _of(show, "summarise a plan"),
    "diff": Verb("what two plans differ in", show.configure_diff, show.run_diff, show.DIFF_EXAMPLE),
    "export": _of(export, "write a plan in the format of another program"),
    "audit": _of(audit, "what a runtime did with a plan, from its log"),
    "report": _of(report, "one HTML page of a run folder"),
    "schema": Verb(
        "print the JSON schema of plans",
        show.configure_schema,
        show.run_schema,
        show.SCHEMA_EXAMPLE,
        first_page=False,
    ),
    "doctor": _of(doctor, "what this machine offers, and what is missing"),
    "completion": _of(
        completion, "let the Tab key of a shell complete this command", first_page=False
    ),
}


# What went, and what to type instead.
GONE = {
    "replan": "placement plan --without DEVICE --start plan.json",
    "features": "placement profile MODEL --features",
    "power": "placement doctor --power",
    "pull": "wandb artifact get ENTITY/PROJECT/NAME:ALIAS; validate checks a plan",
}

_START = """start with:
  placement doctor
  placement optimize resnet50           or your own package.module:function
  placement VERB --help                 examples of a verb

other commands: placement-compare (a table of planners), placement-train, placement-sweep-report
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command; ``args.verb`` is the name of the verb."""
    parser = Parser(
        prog="placement",
        description="Decide where every operator of a model runs, prove it, run it.",
        epilog=f"{_START}\n{cli.EXIT_CODES}",
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version()}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, verb in VERBS.items():
        shown: Any = {"help": verb.help} if verb.first_page else {}
        sub = verbs.add_parser(
            name,
            **shown,
            description=verb.help,
            epilog=f"{verb.example}\n{cli.EXIT_CODES}",
            formatter_class=Help,
        )
        verb.configure(sub)
        sub.add_argument("--json", action="store_true", help="one JSON object for machines")
        sub.add_argument("--debug", action="store_true", help="show where an error comes from")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    cli.any_output()
    parser = build_parser()
    completion.answer(parser)
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in GONE:
        parser.error(f"there is no verb {words[0]} any more; type {GONE[words[0]]}")
    args, rest = parser.parse_known_args(argv)
    # argparse gives up on positional arguments that follow an option.
    if rest and (not hasattr(args, "options") or any(x.startswith("-") for x in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.options += rest
    trials = f", as are runs in {args.trials}" if getattr(args, "trials", None) else ""
    return cli.guarded(
        lambda: VERBS[args.verb].run(args),
        cli.explain,
        debug=args.debug,
        interrupted=f"interrupted; {cli.AFTER_INTERRUPT}{trials}",
    )
