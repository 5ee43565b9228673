"""Expert iteration: search solves many problems, a policy imitates, then PPO improves it.

``solve`` searches, and keeps what it found in one file; ``imitate`` trains a policy on it by
cross-entropy; ``agents.training.train(..., solutions=...)`` does that before PPO. The policy then
gives searches better starts, and their solutions are imitated in turn (Anthony, Tian and Barber,
"Thinking fast and slow with deep learning and tree search", NeurIPS 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from agents.encoder import PolicyError
from agents.policy import PlacementPolicy
from envs.formulations import FORMULATIONS, Formulation, formulation_of
from envs.problem_set import ProblemSet, canonical, choice_of
from placement.problem import Placement, Planner, Problem, ProblemError
from placement.simulator import score, simulate
from placement.tools.files import write_arrays
from placement.tools.parallel import parallel_map

_KEY = "solution of "  # before names in files: numpy would take the name "file" for itself
_PIECES = 4  # of a batch: about so many problems are in it


def solve(
    problems: Mapping[str, Problem],
    planner: Planner,
    path: str | Path,
    progress: Callable[[str, float], None] | None = None,
    parallel: str = "serial",
) -> list[Placement]:
    """A good placement int32 ``[N]`` of each problem, searched for or read from ``path``.

    The ``.npz`` file is written after each search, so an interrupted run goes on where it was. A
    solution in it stays if the problem of that name can run it (as many operators, devices that
    exist, whole colocation groups, memory that suffices); it is searched for again otherwise.
    ``parallel``: see ``placement.tools.parallel``.

    Raises:
        FileError: ``path`` cannot be written.
        PolicyError: it is not a file of solutions.
    """
    known = load_solutions(path) if Path(path).is_file() else {}
    todo = [n for n, p in problems.items() if n not in known or not _fits(p, known[n])]

    def keep(number: int, placement: Placement) -> None:
        known[todo[number]] = placement
        save_solutions(known, path)
        if progress is not None:
            progress(todo[number], (number + 1) / len(todo))

    # A program cannot be sent to a worker, and planners decide on data.
    wanted = [problems[name] for name in todo]
    bare = [replace(p, graph=p.graph.without_program()) for p in wanted]
    parallel_map(partial(_solved, planner), bare, parallel, done=keep)
    return [known[name] for name in problems]


def _solved(planner: Planner, problem: Problem) -> Placement:
    return np.asarray(planner(problem).placement, np.int32)


def save_solutions(solutions: Mapping[str, Placement], path: str | Path) -> None:
    """Write placements by name; ``load_solutions`` reads them.

    Raises:
        FileError: it cannot be written there.
    """
    write_arrays(path, **{_KEY + name: placement for name, placement in solutions.items()})


def load_solutions(path: str | Path) -> dict[str, Placement]:
    """Placements int32 ``[N]`` by name, of a file that ``save_solutions`` wrote.

    Raises:
        PolicyError: missing, truncated, or something else.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            return {key.removeprefix(_KEY): data[key].astype(np.int32) for key in data.files}
    except Exception as error:  # zip and numpy each raise their own kinds
        raise PolicyError(
            f"{path}: not a readable file of solutions ({error}); delete it to search again"
        ) from error


def _fits(problem: Problem, placement: Placement) -> bool:
    try:
        problem.check_placement(placement)
    except ProblemError:
        return False
    return bool(np.isfinite(score(problem, placement)[0]))


def demonstrations(
    problems: ProblemSet, solutions: Sequence[Placement], formulation: str
) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """What a policy would observe on its way to each solution, and what it should do.

    Observations ``[S, ...]`` and actions int64 ``[S]``, or ``[S, G]`` for ``one_shot``.
    Interchangeable devices are renamed in order of first use: of equivalent placements a policy
    can make exactly this one, and is not taught to tell apart what is equal. Solutions that the
    environment cannot express (memory was full before) are followed as far as possible.

    Raises:
        PolicyError: the formulation has no actions that make a given placement, there are too few
            solutions, or one splits a colocation group.
        ProblemError: one cannot run.
    """
    kind = formulation_of(formulation)
    if not _teachable(kind):
        known = sorted(n for n, f in FORMULATIONS.items() if _teachable(f))
        raise PolicyError(
            f"a {formulation} policy does not choose devices of groups, one after another or all "
            f"at once: nothing to imitate; use one of {known}"
        )
    if len(solutions) != len(problems.problems):
        raise PolicyError(f"{len(solutions)} solutions for {len(problems.problems)} problems")
    for i, (problem, placement) in enumerate(zip(problems.problems, solutions, strict=True)):
        if np.shape(placement) != (problem.num_ops,):
            raise PolicyError(
                f"solution {i} has shape {list(np.shape(placement))}, and there are "
                f"{problem.num_ops} operators"
            )
        split = np.flatnonzero(choice_of(problem, placement)[problem.graph.group] != placement)
        if len(split):
            raise PolicyError(
                f"solution {i} splits a colocation group at operator {split[0]} "
                f"({problem.graph.op_name[split[0]]!r}); solve the problem as it is trained on"
            )
        problem.check_placement(placement)
    count, width = len(solutions), problems.max_devices
    renamed = [canonical(p, s) for p, s in zip(problems.problems, solutions, strict=True)]
    target = problems.choices(renamed).astype(np.int64)
    rules: Any = kind.rules(problems, count)
    rules.start(np.arange(count), np.arange(count))
    begins: list[Placement | None] = [None] * count
    if "whose" in kind.sees:
        begins = [_begins(p, s) for p, s in zip(problems.problems, renamed, strict=True)]
    first = problems.choices(begins)
    seen: list[dict[str, NDArray[Any]]] = []
    done_before = np.zeros(count, bool)
    actions: list[NDArray[np.int64]] = []
    while not done_before.all():
        obs = rules.observe()
        wanted = target
        if "whose" in obs:
            wanted, illegal = _of_pairs(obs, target, first)
        elif kind.steps != 1:
            wanted = target[np.arange(count), obs["group"][:, 0]]  # the first of the ready groups
            legal = rules.masks().reshape(count, -1)[:, :width]
            illegal = ~legal[np.arange(count), wanted]
            wanted = np.where(illegal, legal.argmax(axis=1), wanted)
        else:
            illegal = np.zeros(count, bool)
        teach = ~done_before & ~illegal
        seen.append({k: rows[teach] for k, rows in obs.items()})
        actions.append(wanted[teach])
        done_before |= rules.decide(wanted)
    return (
        {k: np.concatenate([rows[k] for rows in seen]) for k in seen[0]},
        np.concatenate(actions),
    )


def _teachable(kind: Formulation) -> bool:
    """Whether an action is the device of a group that is observed, or of all groups."""
    return kind.builds and (kind.steps == 1 or bool({"group", "whose"} & set(kind.sees)))


def _begins(problem: Problem, placement: Placement) -> NDArray[np.int32]:
    """int32 ``[N]`` the place of each operator's group among all by when it begins to run."""
    start_s = simulate(problem, placement, num_microbatches=1).start_s.reshape(-1)
    first = problem.graph.per_group(start_s, np.minimum, np.inf)
    return np.argsort(np.argsort(first, kind="stable")).astype(np.int32)[problem.graph.group]


def _of_pairs(
    obs: dict[str, NDArray[Any]], target: NDArray[np.int64], first: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Of the pairs on the solution's device that whose group begins ``first``, int64 ``[B]``.

    And where no such pair is offered, bool ``[B]``: there it is the first.
    """
    rows = np.arange(len(target))[:, None]
    group, device = obs["whose"][..., 0], obs["whose"][..., 1]
    good = (obs["mask"] > 0) & (target[rows, group] == device)
    at = np.where(good, first[rows, group], np.iinfo(np.int32).max)
    return at.argmin(axis=1), ~good.any(axis=1)


def imitate(
    policy: PlacementPolicy,
    problems: ProblemSet,
    solutions: Sequence[Placement],
    *,
    epochs: int = 20,
    learning_rate: float = 1e-3,
    batch_size: int = 512,
    seed: int = 0,
) -> list[float]:
    """Train ``policy`` to make ``solutions``; mean cross-entropy per decision of each epoch.

    The value head learns what the solutions are worth, so that PPO does not begin blind.

    Raises:
        PolicyError: see ``demonstrations``.
    """
    obs, actions = demonstrations(problems, solutions, policy.net.formulation)
    ids, choices = np.arange(len(solutions)), problems.choices(solutions)
    worth = problems.rewards(ids, problems.seconds(ids, choices), choices)
    device = policy.device
    returns = torch.from_numpy(worth[obs["problem"][:, 0]].astype(np.float32)).to(device)
    tensors = {k: torch.from_numpy(rows).to(device) for k, rows in obs.items()}
    wanted = torch.from_numpy(actions).to(device)
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(policy.net.parameters(), lr=learning_rate)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for rows in _batches(rng, obs["problem"][:, 0], batch_size):
            some = torch.from_numpy(rows).to(device)
            values, log_prob, _ = policy.evaluate_actions(
                {k: v[some] for k, v in tensors.items()}, wanted[some]
            )
            loss = -log_prob.mean()
            whole = loss + 0.1 * nn.functional.mse_loss(values, returns[some])
            optimizer.zero_grad()
            whole.backward()
            nn.utils.clip_grad_norm_(policy.net.parameters(), 0.5)
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        losses.append(total / len(wanted))
    return losses


def _batches(
    rng: np.random.Generator, problem: NDArray[np.int64], size: int
) -> list[NDArray[np.int64]]:
    """Every row of ``problem [S]`` once, about ``size`` at a time, in random order.

    A batch encodes the graph of each of its problems. So it has rows of a few problems only: with
    rows of all of them, one epoch over 72 problems took 100 s.
    """
    order = rng.permutation(len(problem))
    order = order[np.argsort(problem[order], kind="stable")]
    pieces = np.array_split(order, max(1, round(_PIECES * len(order) / size)))
    rng.shuffle(pieces)  # type: ignore[arg-type]
    return [np.concatenate(pieces[i : i + _PIECES]) for i in range(0, len(pieces), _PIECES)]
