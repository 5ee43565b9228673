"""``parallel_map``: a function of every item, here, in processes, or on Ray; results in order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, get_args

T = TypeVar("T")
R = TypeVar("R")
Done = Callable[[int, R], None] | None  # told the number and the result of each item

Parallel = Literal["serial", "processes", "ray"]
RETRIES = 2


class ParallelError(ValueError):
    """No such way to run in parallel, or workers that die again and again."""


def parallel_map(
    call: Callable[[T], R],
    items: Iterable[T],
    parallel: str = "serial",
    *,
    done: Done[R] = None,
) -> list[R]:
    """``[call(x) for x in items]``.

    ``call`` must depend on its item alone, seeds included: then the results are the same however
    it runs, except for what depends on a clock. An item whose worker died (killed, out of memory,
    its node lost) is tried again, ``RETRIES`` times; an exception of ``call`` is raised as it is
    and ends the map.

    Args:
        parallel: ``serial``; ``processes`` of this machine; ``ray``: the cluster at
            ``RAY_ADDRESS``, a Ray that this program has started, or one of its own. A process per
            usable core; a cluster that is there has as many as it has.
        done: told the number and the result of each item, as they come, in this thread.

    Raises:
        ParallelError: unknown ``parallel``, Ray is not installed, or a worker died too often.
    """
    check(parallel)
    if parallel == "serial":
        results = []
        for i, item in enumerate(items):
            results.append(call(item))
            if done is not None:
                done(i, results[-1])
        return results
    todo = list(items)
    if not todo:
        return []
    return (_on_ray if parallel == "ray" else _in_processes)(call, todo, done)


def check(parallel: str) -> None:
    """Raises: ParallelError, no such way to run, or the package it needs is missing."""
    if parallel not in get_args(Parallel):
        raise ParallelError(
            f"parallel = {parallel!r} is unknown; use one of {', '.join(get_args(Parallel))}"
        )
    if parallel == "ray":
        from importlib.util import find_spec

        if find_spec("ray") is None:
            raise ParallelError(
                "parallel = 'ray' needs the package ray: pip install 'device-placement-rl[ray]' in "
                "an environment of its own, or use processes"
            )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_processes(call: Callable[[T], R], items: Sequence[T], done: Done[R]) -> list[R]:
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    results: dict[int, R] = {}
    context = get_context("spawn")  # a fork would copy the locks of threads that it does not copy
    for attempt in range(RETRIES + 1):  # a pool breaks as a whole: what is unfinished goes again
        left = [i for i in range(len(items)) if i not in results]
        pool = ProcessPoolExecutor(min(_num_cores(), len(left)), mp_context=context)
        try:
            pending = {pool.submit(call, items[i]): i for i in left}
            for future in as_completed(pending):
                i = pending[future]
                results[i] = future.result()
                if done is not None:
                    done(i, results[i])
            break
        except BrokenProcessPool as error:
            if attempt == RETRIES:
                raise _died(f"item {min(set(left) - set(results))} or later") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [results[i] for i in range(len(items))]


def _died(what: str) -> ParallelError:
    """The error of a worker that died once more than ``RETRIES`` times at ``what``."""
    return ParallelError(
        f"a worker died {RETRIES + 1} times at {what}: out of memory, or a script that begins "
        "again in every worker (if __name__ == '__main__':)? Use fewer workers, or "
        "parallel = 'serial' to see what happens"
    )


def _start_ray() -> bool:
    """Join the Ray at ``RAY_ADDRESS``, or start one.

    False: this program had one already, which is not ours to end (``ray.shutdown``).
    """
    import ray

    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS")
    here: dict[str, Any] = {} if address else {"num_cpus": _num_cores(), "include_dashboard": False}
    ray.init(
        address=address,
        log_to_driver=False,
        # Workers import what this process can import.
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}},
        **here,
    )
    return True


def _on_ray(call: Callable[[T], R], items: Sequence[T], done: Done[R]) -> list[R]:
    import ray

    ours = _start_ray()
    pending: dict[Any, int] = {}
    try:
        # Ray takes plain functions only, not what is callable otherwise.
        task: Any = ray.remote(num_cpus=1, max_retries=RETRIES)(lambda item: call(item))
        pending = {task.remote(item): i for i, item in enumerate(items)}
        results: dict[int, R] = {}
        while pending:
            ready, _ = ray.wait(list(pending))
            i = pending[ready[0]]
            try:
                results[i] = ray.get(ready[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise _died(f"item {i} ({type(error).__name__})") from error
            del pending[ready[0]]
            if done is not None:
                done(i, results[i])
        return [results[i] for i in range(len(items))]
    finally:
        if ours:
            ray.shutdown()
        else:
            for reference in pending:
                ray.cancel(reference, force=True)
