"""``Workers``: the episodes of ``envs.episodes`` in shares, played side by side.

Each worker plays its share with rules, a deck and a generator of its own, seeded by the seed and
its number. So results follow from the seed and the number of workers, wherever these are: in this
process, in processes of this machine, or on Ray.

A worker that dies (killed, out of memory, its node lost) is started again. What it was doing is
lost: its episodes end truncated where they were observed last, with reward 0 for the action that
was lost, and new ones begin. PPO then takes the value of that observation for what the action was
worth: its advantage is 0, and the steps before it count as in any episode that is cut off.
"""

from __future__ import annotations

import pickle
import signal
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import chain, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.base import Observation, Rules
from envs.episodes import Episodes, Step
from envs.problems import EnvError, Floats, Measured
from placement.parallel import RETRIES, ParallelError, check, died, start_ray

# What a share met since the last answer: problems int64 [X] that it has a better answer for, its
# seconds float64 [X] and choices int32 [X, G], and how many placements it evaluated.
_News = tuple[NDArray[np.int64], Floats, NDArray[np.int32], int]


class Workers:
    """``B`` episodes as ``Episodes`` has them, in one share per worker.

    Args:
        rules: the share of each worker, not started; all of the same problems.
        seed: of the deals; one worker alone deals as ``Episodes(rules, seed)``.
        parallel: ``serial``: one share after another in this process; ``processes``; ``ray``.
        retries: how often each worker is started again.
        repeats: of ``Episodes``.

    Attributes:
        rules: the first worker's, as it was sent; keeps the best and the evaluations of all.
        allowed: int64 problems that are dealt; at first all. Holds from the next deal.
        num_envs: ``B``.

    Raises:
        EnvError: placements are measured: those that run side by side disturb each other.
        ParallelError: unknown ``parallel``, Ray is missing or too small, rules that cannot be
            sent, or (from every method) a worker died too often.
    """

    def __init__(
        self,
        rules: Sequence[Rules],
        seed: int | None = 0,
        parallel: str = "serial",
        retries: int = RETRIES,
        repeats: int = 1,
    ) -> None:
        check(parallel)
        if any(isinstance(r.problems.evaluator, Measured) for r in rules):
            raise EnvError(
                f"{len(rules)} workers would measure placements side by side, and disturb each "
                f"other: use one, in this process (workers = 1, parallel = 'serial')"
            )
        self.rules = rules[0]
        self.allowed = np.arange(len(self.rules.problems.problems))
        at = np.cumsum([0, *(len(r.ids) for r in rules)]).tolist()
        self.num_envs = at[-1]
        self._rows = [slice(a, b) for a, b in pairwise(at)]
        self._packed = [_pack(r) for r in rules]
        self._seed, self._retries, self._repeats = seed, retries, repeats
        self._deaths = [0] * len(rules)
        kinds: dict[str, type[_Worker]] = {"serial": _Here, "processes": _Process, "ray": _Actor}
        self._kind = kinds[parallel]
        self._workers: list[_Worker] = []
        self._seen: Observation = {}  # what the caller observed last
        self._first: dict[int, Observation] = {}  # of workers started again since then
        self._ray_is_ours = parallel == "ray" and start_ray(len(rules))
        try:
            if parallel == "ray":
                _enough_cpus(len(rules))
            for _ in rules:  # all start before the first is asked
                self._workers.append(self._kind())
            self._surely("begin", {w: self._beginning(w) for w in range(len(rules))})
        except BaseException:
            self.close()
            raise

    def reset(self) -> Observation:
        """Start every episode; observations ``[B, ...]``. All workers know the best from now on."""
        found = self._ask("reset", dict.fromkeys(range(len(self._workers)), self._known()))
        parts = [
            self._first[w] if w not in found else self._told(*found[w])
            for w in range(len(self._workers))
        ]
        self._first.clear()
        self._seen = _joined(parts)
        return self._seen

    def step(self, actions: NDArray[Any]) -> Step:
        """Take actions ``[B, ...]``; episodes whose worker died are truncated (see above)."""
        asked = [w for w in range(len(self._workers)) if w not in self._first]
        found = self._ask("step", {w: (actions[self._rows[w]], self.allowed) for w in asked})
        parts = [
            self._told(*found[w]) if w in found else self._cut_off(w)
            for w in range(len(self._workers))
        ]
        obs, rewards, dones, infos = zip(*parts, strict=True)
        self._seen = _joined(obs)
        return self._seen, np.concatenate(rewards), np.concatenate(dones), list(chain(*infos))

    def masks(self) -> NDArray[np.bool_]:
        """bool ``[B, A]``, see ``Rules.masks``."""
        return np.concatenate(self._all("masks"))

    def seed(self, seed: int | None) -> None:
        """Seed every worker's choice of problems."""
        self._seed = seed
        self._surely("seed", {w: (self._seed_of(w),) for w in range(len(self._workers))})

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs to go on from the next ``reset``, as JSON values."""
        return {"workers": self._all("state")}

    def restore(self, state: dict[str, Any]) -> None:
        """Deal the problems that followed when ``state()`` was taken; then ``reset()``."""
        self._surely("restore", {w: (x,) for w, x in enumerate(state["workers"])})

    def close(self) -> None:
        """End the workers, whatever they are doing, and a Ray that was started for them."""
        while self._workers:
            self._workers.pop().close()
        if self._ray_is_ours:
            import ray

            self._ray_is_ours = False
            ray.shutdown()

    def _ask(self, name: str, args: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """What each worker answers; one that died is started again, and missing."""
        for w, some in args.items():
            self._workers[w].send(name, some)
        found = {}
        for w in args:
            try:
                found[w] = self._workers[w].receive()
            except _DiedError as error:
                self._first[w] = self._again(w, str(error))
        return found

    def _surely(self, name: str, args: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """What each worker answers, where one that was started again can be asked again."""
        found: dict[int, Any] = {}
        while len(found) < len(args):
            found |= self._ask(name, {w: some for w, some in args.items() if w not in found})
        return [found[w] for w in args]

    def _all(self, name: str) -> list[Any]:
        return self._surely(name, dict.fromkeys(range(len(self._workers)), ()))

    def _again(self, w: int, why: str) -> Observation:
        """Start worker ``w`` again: the first observations of its new episodes."""
        while True:
            self._deaths[w] += 1
            if self._deaths[w] > self._retries:
                raise died(f"a rollout ({why})", self._retries)
            warnings.warn(
                f"worker {w} died ({why}) and is started again, {self._deaths[w]} of at most "
                f"{self._retries} times; its episodes begin anew",
                RuntimeWarning,
                stacklevel=2,
            )
            self._workers[w].close()
            worker = self._workers[w] = self._kind()
            try:
                worker.send("begin", self._beginning(w))
                worker.receive()
                worker.send("reset", self._known())
                return self._told(*worker.receive())
            except _DiedError as error:
                why = str(error)

    def _beginning(self, w: int) -> tuple[bytes, list[int] | None, int]:
        return self._packed[w], self._seed_of(w), self._repeats

    def _seed_of(self, w: int) -> list[int] | None:
        # Other problems than those that a worker dealt before it died. Zeros at the end do not
        # count: the first worker's generator is that of the seed alone.
        return None if self._seed is None else [self._seed, w, self._deaths[w]]

    def _known(self) -> tuple[Any, ...]:
        return self.allowed, self.rules.best_s, self.rules.best_choices

    def _told(self, answer: Any, news: _News) -> Any:
        ids, seconds, choices, evaluations = news
        self.rules.keep(ids, choices, seconds)
        self.rules.num_evaluations += evaluations
        return answer

    def _cut_off(self, w: int) -> Step:
        """What a step means for the episodes of a worker that died: see the head of this file."""
        obs, rows = self._first.pop(w), range(self.num_envs)[self._rows[w]]
        infos: list[dict[str, Any]] = [
            {
                "TimeLimit.truncated": True,
                "terminal_observation": {k: x[b] for k, x in self._seen.items()},
            }
            for b in rows
        ]
        return obs, np.zeros(len(rows), np.float32), np.ones(len(rows), bool), infos


class _Share:
    """What a worker has: its episodes. Every method takes and answers what can be sent."""

    def begin(self, packed: bytes, seed: list[int] | None, repeats: int) -> None:
        # Packed here and not by Ray, whose arrays could not be written to.
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

    def masks(self) -> NDArray[np.bool_]:
        return self._episodes.masks()

    def seed(self, seed: list[int] | None) -> None:
        self._episodes.seed(seed)

    def state(self) -> dict[str, Any]:
        return self._episodes.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._episodes.restore(state)

    def _news(self) -> _News:
        rules = self._rules
        ids = np.flatnonzero(rules.best_s < self._told_s)
        self._told_s[ids] = rules.best_s[ids]
        evaluations, rules.num_evaluations = rules.num_evaluations, 0
        return ids, rules.best_s[ids], rules.best_choices[ids], evaluations


class _DiedError(Exception):
    """A worker is gone; the text says how."""


class _Worker(Protocol):
    """A ``_Share`` somewhere. Calls and answers take turns."""

    def send(self, name: str, args: tuple[Any, ...]) -> None:
        """Call a method; do not wait."""

    def receive(self) -> Any:
        """Its answer. Raises what it raised, or _DiedError."""

    def close(self) -> None:
        """End it at once."""


class _Here:
    def __init__(self) -> None:
        self._share = _Share()

    def send(self, name: str, args: tuple[Any, ...]) -> None:
        self._call = name, args

    def receive(self) -> Any:
        name, args = self._call
        return getattr(self._share, name)(*args)

    def close(self) -> None:
        pass


class _Process:
    def __init__(self) -> None:
        context = get_context("spawn")  # see placement.parallel
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does

    def send(self, name: str, args: tuple[Any, ...]) -> None:
        with suppress(ConnectionError):  # it is dead, as receive() will find
            self._pipe.send((name, args))

    def receive(self) -> Any:
        try:
            failed, answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join()
            raise _DiedError(f"exit code {self._process.exitcode}") from error
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


class _Actor:
    def __init__(self) -> None:
        import ray

        self._actor: Any = ray.remote(num_cpus=1)(_Share).remote()

    def send(self, name: str, args: tuple[Any, ...]) -> None:
        self._answer = getattr(self._actor, name).remote(*args)

    def receive(self) -> Any:
        import ray

        try:
            return ray.get(self._answer)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise _DiedError(type(error).__name__) from error

    def close(self) -> None:
        import ray

        ray.kill(self._actor)


def _enough_cpus(workers: int) -> None:
    """Raises: ParallelError, some workers would wait for ever for a processor."""
    import ray

    cpus = int(ray.cluster_resources().get("CPU", 0))
    if cpus < workers:
        raise ParallelError(f"{workers} workers need a processor each, and Ray has {cpus}")


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
