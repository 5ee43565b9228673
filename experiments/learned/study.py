"""What the studies of the learned planner share: problems, policies, parts, and what is noted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from envs.generators import Generator
from experiments.grid import PROCESSES, Cell, digest_of, policy_digests, released_folder
from experiments.learned.problems import Problems
from experiments.runs import warm
from experiments.study import Option, Options, Study, StudyError, digest, say, slug
from placement.problem import Problem
from placement.runs.compare import problem_fingerprint
from placement.tools.files import write_atomic

OPTIONS = {
    "patterns": Option((), "of names of problems", word=True, metavar="PREFIX"),
    "also": Option([], "a further policy", metavar="NAME=PATH"),
} | PROCESSES


def learned_study(
    word: str,
    budget: Mapping[str, Option],
    problems: Callable[[Options], Problems],
    rows: Callable[[Options, Problems], Iterator[Cell]],
    **more: Any,
) -> Study:
    """A study of ``problems(options)`` with the numbers of ``budget``, a flag for each.

    ``rows(options, problems)`` yields the rows of those whose names begin with a word of the
    command.
    """
    return Study(
        name=f"learned_{word}",
        word=word,
        module="experiments.learned",
        rows=partial(_rows, problems, rows),
        row=Cell,
        options=OPTIONS | budget,
        facts=partial(_facts, budget),
        **more,
    )


def wants(options: Options, name: str) -> bool:
    """Whether problems whose names begin so, or a problem of this name, are asked for."""
    words = options.patterns
    return not words or any(name.startswith(w) or w.startswith(name) for w in words)


def further(options: Options) -> dict[str, str]:
    """Files of the policies beside the released ones, by name."""
    files = dict(pair.split("=", 1) for pair in options.also if "=" in pair)
    if missing := [pair for pair in options.also if not Path(pair.partition("=")[2]).is_file()]:
        raise StudyError(
            f"--also {missing[0]}: give NAME=PATH of a policy; placement-train makes one"
        )
    return files


def trained(
    name: str, config: Any, work: Path, problems: Sequence[Problem] | Generator = (), **start: Any
) -> tuple[Path, dict[str, Any]]:
    """The file of a policy that a study trains, and what that cost; made now if it is not there.

    An interrupted training goes on where it stopped. The ``name`` tells generators apart.
    """
    from agents.training import train

    drawn = [] if callable(problems) else [problem_fingerprint(p) for p in problems]
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
    problems: Callable[[Options], Problems],
    rows: Callable[[Options, Problems], Iterator[Cell]],
    options: Options,
) -> Iterator[Cell]:
    import torch

    further(options)
    words = options.patterns or [""]
    chosen = {n: p for n, p in problems(options).items() if any(n.startswith(w) for w in words)}
    if not chosen:
        raise StudyError(f"no problem begins with {' or '.join(words)}")
    say(f"{len(chosen)} problems; what is finished in {options.work} is not run again")
    torch.set_num_threads(1)  # loaded, and kernels too, before processes are forked
    searches = ("local_search", "macro_search", "best_of", "policy")
    warm(searches, sorted({p.objective for p in chosen.values()}))
    return rows(options, chosen)


def _facts(budget: Mapping[str, Option], options: Options) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in budget}
    changed = {name: v for name, v in values.items() if v != budget[name].default}
    digests = {f"policy {Path(n).stem}": d for n, d in policy_digests(released_folder()).items()}
    digests |= {name: digest_of(path) for name, path in further(options).items()}
    return {
        "budget": values,
        "as_written_before": f"no: {changed}" if changed else "yes",
        "policies": {name: content[:12] for name, content in digests.items()},
        "problems": " ".join(options.patterns) or "all",
    }
