"""The ``placement`` command; ``placement VERB --help`` explains each verb.

Exit codes: 0 done; 1 the answer is no (not valid, not equal, nothing fits); 2 bad input;
70 a defect of ours; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from placement import cli
from placement.cli import (
    completion,
    dataset,
    doctor,
    export,
    features,
    import_problem,
    optimize,
    plan,
    power,
    profile,
    pull,
    replan,
    report,
    run,
    schedule,
    show,
)
from placement.cli.parser import Parser
from placement.tools.ownership import version

_OURS = ("placement", "envs", "agents")


class Verb(NamedTuple):
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    example: str
    first_page: bool = True  # of `placement --help`


VERBS = {
    "optimize": Verb(
        "capture, measure, plan and run a model, in one command",
        optimize.configure,
        optimize.run,
        optimize.EXAMPLE,
    ),
    "profile": Verb(
        "measure every operator on every device",
        profile.configure,
        profile.run,
        profile.EXAMPLE,
    ),
    "features": Verb(
        "what every operator costs by its description; nothing is measured",
        features.configure,
        features.run,
        features.EXAMPLE,
    ),
    "dataset": Verb(
        "graphs of many models with measured times: build, show, load",
        dataset.configure,
        dataset.run,
        dataset.EXAMPLE,
    ),
    "power": Verb(
        "watts of this machine's devices, where it has meters",
        power.configure,
        power.run,
        power.EXAMPLE,
    ),
    "import": Verb(
        "write any problem as one file of our own format",
        import_problem.configure,
        import_problem.run,
        import_problem.EXAMPLE,
    ),
    "plan": Verb("let a planner decide", plan.configure, plan.run, plan.EXAMPLE),
    "run": Verb(
        "carry a plan out, check its results, measure it", run.configure, run.run, run.EXAMPLE
    ),
    "schedule": Verb(
        "search the order of blocks that are given as data",
        schedule.configure,
        schedule.run,
        schedule.EXAMPLE,
    ),
    "replan": Verb(
        "plan again without devices that are gone", replan.configure, replan.run, replan.EXAMPLE
    ),
    "validate": Verb(
        "check a plan: against itself, a model, devices",
        show.configure_validate,
        show.run_validate,
        show.VALIDATE_EXAMPLE,
    ),
    "show": Verb("summarise a plan", show.configure, show.run, show.EXAMPLE),
    "diff": Verb("what two plans differ in", show.configure_diff, show.run_diff, show.DIFF_EXAMPLE),
    "export": Verb(
        "write a plan in the format of another program",
        export.configure,
        export.run,
        export.EXAMPLE,
    ),
    "report": Verb("one HTML page of a run folder", report.configure, report.run, report.EXAMPLE),
    "pull": Verb("fetch a plan or a policy from W&B", pull.configure, pull.run, pull.EXAMPLE),
    "schema": Verb(
        "print the JSON schema of plans",
        show.configure_schema,
        show.run_schema,
        show.SCHEMA_EXAMPLE,
        first_page=False,
    ),
    "doctor": Verb(
        "what this machine offers, and what is missing",
        doctor.configure,
        doctor.run,
        doctor.EXAMPLE,
    ),
    "completion": Verb(
        "let the Tab key of a shell complete this command",
        completion.configure,
        completion.run,
        completion.EXAMPLE,
        first_page=False,
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command; ``args.verb`` is the name of the verb."""
    parser = Parser(
        prog="placement",
        description="Decide where every operator of a model runs, prove it, run it.",
        epilog=cli.EXIT_CODES,
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
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.configure(sub)
        sub.set_defaults(parser=parser)
        sub.add_argument("--json", action="store_true", help="one JSON object for machines")
        sub.add_argument("--debug", action="store_true", help="show where an error comes from")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    cli.any_output()
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    # argparse gives up on positional arguments that follow an option.
    if rest and not (hasattr(args, "options") and all(_is_option(text) for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.options += rest
    try:
        with cli.interruptible(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _checked(args)
    except KeyboardInterrupt:
        cli.say(f"interrupted; {cli.AFTER_INTERRUPT}")
        return cli.INTERRUPTED
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        cli.close_output()
        return cli.OK
    except Exception as error:
        # A mistake of the user has a class of ours; anything else is a mistake of ours.
        is_ours = type(error).__module__.partition(".")[0] in _OURS
        is_known = is_ours or isinstance(error, OSError | MemoryError)
        if args.debug or not is_known:
            traceback.print_exc()
        if not is_known:
            cli.say(cli.A_DEFECT)
            return cli.DEFECT
        full = cli.full_output(error)
        cli.say(f"error: {full or cli.one_line(str(error)) or cli.NO_MEMORY}")
        return cli.BAD_INPUT


def _checked(args: argparse.Namespace) -> int:
    from placement.tools.ownership import check_packages

    check_packages()
    code = VERBS[args.verb].run(args)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the answer was not read to its end, and is what it is
        cli.close_output()
    return code


def _is_option(text: str) -> bool:
    return not text.startswith("-")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    cli.say(f"warning: {message}")


if __name__ == "__main__":
    sys.exit(main())
