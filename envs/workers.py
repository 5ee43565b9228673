"""``Workers``: the episodes of ``envs.episodes`` in shares, played side by side.

Each worker plays its share with rules, a deck and a generator of its own, seeded by the seed and
its number. So results follow from the seed and the number of workers, whether these are in this
process or in processes of this machine. A worker that dies ends the run, which continues from its
checkpoint.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import chain, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.episodes import Episodes, Step
from envs.problems import EnvError, Floats, Measured
from envs.rules import Observation, Rules
from placement.problem import Problem
from placement.tools.parallel import ParallelError

# What a share met since the last answer: problems int64 [X] that it has a better answer for, its
# seconds float64 [X] and choices int32 [X, G], and how many placements it evaluated.
_News = tuple[NDArray[np.int64], Floats, NDArray[np.int32], int]


class Workers:
    """``B`` episodes as ``Episodes`` has them, in one share per worker.

    Args:
        rules: the share of each worker, not started; all of the same problems.
        seed: of the deals; one worker alone deals as ``Episodes(rules, seed)``.
        parallel: ``serial``: one share after another in this process; ``processes``.
        repeats: of ``Episodes``.

    Attributes:
        rules: the first worker's, as it was sent; keeps the best and the evaluations of all.
        observation_space, action_space: of one episode.
        allowed: int64 problems that are dealt; at first all. Holds from the next deal.
        num_envs: ``B``.

    Raises:
        EnvError: placements are measured: those that run side by side disturb each other.
        ParallelError: no such ``parallel``, rules that cannot be sent, or (from every method) a
            worker died.
    """

    def __init__(
        self,
        rules: Sequence[Rules],
        seed: int | None = 0,
        parallel: str = "serial",
        repeats: int = 1,
    ) -> None:
        if parallel not in ("serial", "processes"):
            raise ParallelError(
                f"parallel = {parallel!r}: episodes are played by workers of this machine; use "
                "serial or processes"
            )
        if any(isinstance(r.problems.evaluator, Measured) for r in rules):
            raise EnvError(
                f"{len(rules)} workers would measure placements side by side, and disturb each "
                f"other: use one, in this process (workers = 1, parallel = 'serial')"
            )
        self.rules = rules[0]
        self.observation_space = self.rules.observation_space
        self.action_space = self.rules.action_space
        self.allowed = np.arange(len(self.rules.problems.problems))
        at = np.cumsum([0, *(len(r.ids) for r in rules)]).tolist()
        self.num_envs = at[-1]
        self._rows = [slice(a, b) for a, b in pairwise(at)]
        self._workers: list[_Share | _Process] = []
        packed = [_pack(r) for r in rules]
        try:
            for w in range(len(rules)):  # all start before the first is asked
                self._workers.append(_Share() if parallel == "serial" else _Process(w))
            self._ask("begin", [(packed[w], *x, repeats) for w, x in enumerate(self._seeds(seed))])
        except BaseException:
            self.close()
            raise

    def reset(self) -> Observation:
        """Start every episode; observations ``[B, ...]``. All workers know the best from now on."""
        best = (self.allowed, self.rules.best_s, self.rules.best_choices)
        return _joined([self._learn(*x) for x in self._ask("reset", [best] * len(self._workers))])

    def step(self, actions: NDArray[Any]) -> Step:
        """Take actions ``[B, ...]``."""
        answers = self._ask("step", [(actions[rows], self.allowed) for rows in self._rows])
        obs, rewards, dones, infos = zip(*(self._learn(*x) for x in answers), strict=True)
        return _joined(obs), np.concatenate(rewards), np.concatenate(dones), list(chain(*infos))

    def masks(self) -> NDArray[np.bool_]:
        """bool ``[B, A]``, see ``Rules.masks``."""
        return np.concatenate(self._ask("masks", [()] * len(self._workers)))

    def seed(self, seed: int | None) -> None:
        """Seed every worker's choice of problems."""
        self._ask("seed", self._seeds(seed))

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs to go on from the next ``reset``, as JSON values."""
        return {"workers": self._ask("state", [()] * len(self._workers))}

    def restore(self, state: dict[str, Any]) -> None:
        """Deal the problems that followed when ``state()`` was taken; then ``reset()``."""
        self._ask("restore", [(x,) for x in state["workers"]])

    def draw(self) -> Problem:
        """Not supported: problems are drawn for who plays whole episodes without an environment."""
        raise EnvError("whole episodes are played in this process: use workers = 1")

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        while self._workers:
            self._workers.pop().close()

    def _ask(self, name: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What each worker answers; processes work at the same time."""
        calls = [w.call(name, some) for w, some in zip(self._workers, args, strict=True)]
        return [answer() for answer in calls]

    def _seeds(self, seed: int | None) -> list[tuple[list[int] | None]]:
        # The first worker's generator is that of the seed alone: zeros at the end do not count.
        return [(None if seed is None else [seed, w],) for w in range(len(self._workers))]

    def _learn(self, answer: Any, news: _News) -> Any:
        ids, seconds, choices, evaluations = news
        self.rules.keep(ids, choices, seconds)
        self.rules.num_evaluations += evaluations
        return answer


class _Share:
    """What a worker has: its episodes. Every method takes and answers what can be sent."""

    def call(self, name: str, args: tuple[Any, ...]) -> Callable[[], Any]:
        """What answers, once it is asked."""
        return partial(getattr(self, name), *args)

    def begin(self, packed: bytes, seed: list[int] | None, repeats: int) -> None:
        self._rules: Rules = pickle.loads(packed)
        self._episodes = Episodes(self._rules, seed, repeats)

    def reset(
        self, allowed: NDArray[np.int64], best_s: Floats, best_choices: NDArray[np.int32]
    ) -> tuple[Observation, _News]:
        self._episodes.allowed = allowed
        self._rules.best_s[:], self._rules.best_choices[:] = best_s, best_choices
        self._told_s, self._rules.num_evaluations = best_s.copy(), 0
        return self._episodes.reset(), self._news()

    def step(self, actions: NDArray[Any], allowed: NDArray[np.int64]) -> tuple[Step, _News]:
        self._episodes.allowed = allowed
        return self._episodes.step(np.array(actions)), self._news()

    def __getattr__(self, name: str) -> Any:
        """``masks``, ``seed``, ``state`` and ``restore`` are those of the episodes."""
        return getattr(self._episodes, name)

    def close(self) -> None:
        """Nothing to end."""

    def _news(self) -> _News:
        rules = self._rules
        ids = np.flatnonzero(rules.best_s < self._told_s)
        self._told_s[ids] = rules.best_s[ids]
        evaluations, rules.num_evaluations = rules.num_evaluations, 0
        return ids, rules.best_s[ids], rules.best_choices[ids], evaluations


class _Process:
    """A share in a process of its own."""

    def __init__(self, number: int) -> None:
        self._number = number
        context = get_context("spawn")  # see placement.tools.parallel
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does

    def call(self, name: str, args: tuple[Any, ...]) -> Callable[[], Any]:
        with suppress(ConnectionError):  # it is dead, as the answer will say
            self._pipe.send((name, args))
        return self._receive

    def _receive(self) -> Any:
        try:
            failed, answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join()
            raise ParallelError(
                f"worker {self._number} died (exit code {self._process.exitcode}): out of memory? "
                "Use fewer workers, and resume=true to go on from the last checkpoint"
            ) from error
        if failed:
            raise answer
        return answer

    def close(self) -> None:
        self._process.kill()  # there is nothing in it that must be saved
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    """Answer calls until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody; the caller ends us
    share = _Share()
    with suppress(EOFError, ConnectionError):
        while True:
            name, args = pipe.recv()
            try:
                answer = False, getattr(share, name)(*args)
            except Exception as error:
                error.add_note(f"in a worker:\n{traceback.format_exc()}")
                answer = True, error
            pipe.send(answer)


def _pack(rules: Rules) -> bytes:
    """``rules`` to be sent: without programs, which rules do not need and nobody can send."""
    bare = copy(rules)
    bare.problems = rules.problems.without_programs()
    try:
        return pickle.dumps(bare)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ParallelError(
            f"the rules cannot be sent to a worker ({error}); an evaluator must be a function or "
            f"of a class that a module defines"
        ) from error


def _joined(parts: Sequence[Observation]) -> Observation:
    return {k: np.concatenate([x[k] for x in parts]) for k in parts[0]}
