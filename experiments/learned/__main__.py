"""Studies of the learned planner, each at the budget that ``experiments.budgets`` writes down.

    python -m experiments.learned against                    # all constructive methods and DPs
    python -m experiments.learned executed                   # placements run for real, quiet
    python -m experiments.learned guided [--also NAME=PATH]  # ablations, searches, equal budgets
    python -m experiments.learned zero_shot [--recipe FILE]  # trains: one family left out
    python -m experiments.learned giph                       # 10-15 operators, 2 N evaluations
    python -m experiments.learned doppler                    # DOPPLER's graphs, equal budgets
    python -m experiments.learned cost                       # speed, time to the best baseline
    python -m experiments.learned goals                      # the table of goals, from the CSVs

Policies are the released ones, or ``--policy PATH``; ``--also`` names further ones, for example one
trained without the encoder. Each study writes ``experiments/results/learned_NAME.csv`` and ``.md``,
and curves to ``.json``. A budget of seconds is processor
time: every run has a process of its own, all kernels loaded, whose clock that is. What is finished
lies in ``runs/learned/NAME``, a file per run: the same command continues, and
``--part 0/2`` and ``--part 1/2`` share the work between two processes (pin them to a core each,
then run the command once without ``--part`` for the tables). Words after the study choose
problems: those whose name begins so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

from experiments import _study, budgets
from experiments._study import StudyError, say
from experiments.learned import cells as kept
from placement import cli
from placement.files import write_atomic

STUDIES: dict[str, Any] = {
    "against": budgets.Against,
    "executed": budgets.Executed,
    "guided": budgets.Guided,
    "zero_shot": budgets.ZeroShot,
    "giph": budgets.Giph,
    "doppler": budgets.Doppler,
    "cost": budgets.Cost,
}


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m experiments.learned")
    studies = parser.add_subparsers(dest="study", required=True)
    for name, kind in STUDIES.items():
        sub = studies.add_parser(name, help=(kind.__doc__ or "").splitlines()[0])
        _study.common_options(sub, f"learned/{name}")
        sub.add_argument("patterns", nargs="*", metavar="PREFIX", help="of names of problems")
        sub.add_argument("--policy", help="file, or folder of files named as the released ones")
        sub.add_argument("--also", action="append", default=[], metavar="NAME=PATH")
        sub.add_argument("--recipe", type=Path, help="YAML with a node 'training': TrainConfig")
        sub.add_argument(
            "--part", type=_part, default="0/1", metavar="K/N", help="every N-th problem from K"
        )
        sub.add_argument("--quick", action="store_true", help="fewer captured models")
        for field in fields(kind):
            flag = f"--{field.name.replace('_', '-')}"
            sub.add_argument(flag, type=type(field.default), default=field.default)
    sub = studies.add_parser("goals", help="the table of goals")
    sub.add_argument("--out", type=Path, default=_study.RESULTS, help="folder of the tables")
    options = parser.parse_args(argv)
    return _study.launch(lambda: _run(options, argv))


def _run(options: argparse.Namespace, argv: list[str] | None) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.study == "goals":
        from experiments.learned import goals

        cli.put(goals.page(options.out))
        return
    kind = STUDIES[options.study]
    options.budget = kind(**{f.name: getattr(options, f.name) for f in fields(kind)})
    options.wants = lambda name: (
        not options.patterns
        or any(name.startswith(p) or p.startswith(name) for p in options.patterns)
    )
    options.policies = _policies(options)
    module = importlib.import_module(f"experiments.learned.{options.study}")
    if options.fresh:
        shutil.rmtree(options.work, ignore_errors=True)
    warnings.simplefilter("ignore", RuntimeWarning)  # what planners say is in the table
    chosen = module.problems(options)
    chosen = {
        n: p
        for n, p in chosen.items()
        if not options.patterns or any(n.startswith(x) for x in options.patterns)
    }
    if not chosen:
        raise StudyError(f"no problem begins with {' or '.join(options.patterns)}")
    part, parts = options.part
    unit = getattr(module, "unit", str)
    units = list(dict.fromkeys(map(unit, chosen)))[part::parts]
    mine = {n: p for n, p in chosen.items() if unit(n) in units}
    say(f"{len(mine)} problems; what is finished in {options.work} is not run again")
    _warm_up(options, {p.objective for p in mine.values()})
    found = module.run(options, mine)
    if parts > 1:
        say("run the command without --part for the tables")
        return
    _write(options, module, found, _study.command_line("experiments.learned", argv))


def _part(text: str) -> tuple[int, int]:
    """``K, N`` of ``K/N``, K counted from 0."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: two halves are --part 0/2 and --part 1/2")
    return int(part), int(parts)


def _policies(options: argparse.Namespace) -> dict[str, str | None]:
    found = {"policy": options.policy}
    for given in options.also:
        name, _, path = given.partition("=")
        found[name] = path
    for path in found.values():
        if path is not None and not Path(path).exists():
            raise StudyError(f"no policy {path!r}; train one: placement-train")
    return found


def _warm_up(options: argparse.Namespace, objectives: set[Any]) -> None:
    names = (*budgets.BASELINES, *budgets.SEARCHES, "macro_search", "best_of")
    kept.warm_up(sorted(objectives), names)


def _write(options: argparse.Namespace, module: Any, found: list[Any], command: str) -> None:
    written = STUDIES[options.study]()
    changed = {
        f.name: getattr(options.budget, f.name)
        for f in fields(written)
        if getattr(options.budget, f.name) != getattr(written, f.name)
    }
    facts = _study.provenance(
        budget=options.budget,
        as_written_before="yes" if not changed else f"no: {changed}",
        policies=_digests(options.policies),
        problems="all" if not options.patterns else " ".join(options.patterns),
    )
    name = f"learned_{options.study}"
    to_csv = getattr(module, "to_csv", kept.to_csv)
    write_atomic(options.out / f"{name}.csv", to_csv(found))
    if hasattr(module, "curves"):
        points = module.curves(found)
        write_atomic(options.out / f"{name}.json", json.dumps(points) + "\n")
    text = module.report(found)
    title, _, rest = text.partition("\n")
    write_atomic(options.out / f"{name}.md", f"{title}\n\n`{command}`\n{rest}\n{facts}")
    print(text)
    say(f"written to {options.out}: {name}.csv, {name}.md")


def _digests(policies: dict[str, str | None]) -> dict[str, str]:
    """First digits of the SHA-256 of every file."""
    found = {}
    for name, given in policies.items():
        path = Path(given) if given else kept.released_folder()
        for file, content in kept.policy_digests(path).items():
            found[f"{name} {Path(file).stem}" if path.is_dir() else name] = content[:12]
    return found


if __name__ == "__main__":
    sys.exit(main())
