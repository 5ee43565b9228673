"""What the studies of the learned planner share: problems, policies, parts, and what is noted."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.learned.cells import policy_digests, released_folder, warm_up
from experiments.learned.problems import Problems
from experiments.study import Option, Options, Study, StudyError, digest, say, slug
from placement.problem import Problem
from placement.runs.compare import problem_fingerprint
from placement.tools.files import write_atomic


def learned_study(
    word: str,
    budget: Mapping[str, Option],
    problems: Callable[[Options], Problems],
    rows: Callable[[Options, Problems], Iterator[Any]],
    unit: Callable[[str], str] = str,
    **more: Any,
) -> Study:
    """A study of ``problems(options)`` with the numbers of ``budget``, a flag for each.

    ``rows(options, problems)`` yields the rows; ``--part`` shares out what ``unit`` makes of the
    problems' names.
    """
    return Study(
        name=f"learned_{word}",
        word=word,
        module="experiments.learned",
        rows=partial(_rows, budget, problems, rows, unit),
        options=OPTIONS | budget,
        facts=partial(_facts, budget),
        **more,
    )


def _part(text: str) -> tuple[int, int]:
    """``K, N`` of ``K/N``, K counted from 0."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: two halves are --part 0/2 and --part 1/2")
    return int(part), int(parts)


OPTIONS = {
    "patterns": Option((), "of names of problems", word=True, metavar="PREFIX"),
    "policy": Option(None, "file, or folder of files named as the released ones"),
    "also": Option([], "a further policy", metavar="NAME=PATH"),
    "part": Option("0/1", "every N-th problem from K", kind=_part, metavar="K/N"),
    "quick": Option(False, "fewer captured models"),
}


def budget_of(budget: Mapping[str, Option], options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in budget}


def wants(options: Options, name: str) -> bool:
    """Whether problems whose names begin so, or a problem of this name, are asked for."""
    words = options.patterns
    return not words or any(name.startswith(w) or w.startswith(name) for w in words)


def policies(options: Options) -> dict[str, str | None]:
    """Files of the policies, by name; None is the released one."""
    files = {"policy": options.policy}
    for pair in options.also:
        name, _, path = pair.partition("=")
        files[name] = path
    for path in files.values():
        if path is not None and not Path(path).exists():
            raise StudyError(f"no policy {path!r}; train one: placement-train")
    return files


def trained(
    name: str, config: Any, work: Path, problems: Sequence[Problem] = (), **start: Any
) -> tuple[Path, dict[str, Any]]:
    """The file of a policy that a study trains, and what that cost; made now if it is not there.

    An interrupted training goes on where it stopped.
    """
    from agents.training import train

    drawn = [problem_fingerprint(p) for p in problems]
    folder = work / f"{slug(name)}-{config.seed}-{digest(drawn, repr(config))[:12]}"
    path, cost = folder / "trained.safetensors", folder / "cost.json"
    if not cost.is_file():
        say(f"{name}, seed {config.seed}: training")
        began = time.process_time()
        policy = train(problems, config=config, out_dir=folder, resume=True, **start)
        policy.save(path)
        facts = {"seconds": time.process_time() - began, "steps": policy.card["steps"]}
        write_atomic(cost, json.dumps(facts))
    return path, json.loads(cost.read_text(encoding="utf-8"))


def untrained_dispatcher(options: Options) -> str:
    """The file of a dispatcher in whose network nothing was trained."""
    from agents.trained import TrainedPolicy, untrained_net

    path = options.work / "untrained.safetensors"
    if not path.is_file():
        TrainedPolicy(untrained_net(None, "dispatch")).save(path)
    return str(path)


def _rows(
    budget: Mapping[str, Option],
    problems: Callable[[Options], Problems],
    rows: Callable[[Options, Problems], Iterator[Any]],
    unit: Callable[[str], str],
    options: Options,
) -> Iterator[Any] | None:
    options.budget = budget_of(budget, options)
    policies(options)
    words = options.patterns
    chosen = {
        n: p
        for n, p in problems(options).items()
        if not words or any(n.startswith(w) for w in words)
    }
    if not chosen:
        raise StudyError(f"no problem begins with {' or '.join(words)}")
    part, parts = options.part
    units = list(dict.fromkeys(map(unit, chosen)))[part::parts]
    mine = {n: p for n, p in chosen.items() if unit(n) in units}
    say(f"{len(mine)} problems; what is finished in {options.work} is not run again")
    warm_up(
        sorted({p.objective for p in mine.values()}), ("local_search", "macro_search", "best_of")
    )
    if parts == 1:
        return rows(options, mine)
    for _ in rows(options, mine):  # each is kept
        pass
    say("run the command without --part for the tables")
    return None


def _facts(budget: Mapping[str, Option], options: Options) -> dict[str, Any]:
    values = budget_of(budget, options)
    changed = {name: v for name, v in values.items() if v != budget[name].default}
    return {
        "budget": values,
        "as_written_before": f"no: {changed}" if changed else "yes",
        "policies": _digests(policies(options)),
        "problems": " ".join(options.patterns) or "all",
    }


def _digests(files: Mapping[str, str | None]) -> dict[str, str]:
    """First digits of the SHA-256 of every file."""
    digests = {}
    for name, file in files.items():
        path = Path(file) if file else released_folder()
        for part, content in policy_digests(path).items():
            digests[f"{name} {Path(part).stem}" if path.is_dir() else name] = content[:12]
    return digests
