"""``parallel_map``: a function of every item, here or in processes; results in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar, get_args

T = TypeVar("T")
R = TypeVar("R")
Done = Callable[[int, R], None] | None  # told the number and the result of each item

Parallel = Literal["serial", "processes"]


class ParallelError(ValueError):
    """No such way to run in parallel, or workers that die again and again."""


def parallel_map(
    call: Callable[[T], R],
    items: Iterable[T],
    parallel: str = "serial",
    *,
    done: Done[R] = None,
    retries: int = 2,
) -> list[R]:
    """``[call(x) for x in items]``.

    ``call`` must depend on its item alone, seeds included: then the results are the same however
    it runs, except for what depends on a clock. An item whose worker died (killed, out of memory,
    its node lost) is tried again, ``retries`` times; an exception of ``call`` is raised as it is
    and ends the map.

    Args:
        parallel: ``serial``, or ``processes`` of this machine, one per usable core.
        done: told the number and the result of each item, as they come, in this thread.

    Raises:
        ParallelError: unknown ``parallel``, or a worker died too often.
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
    return _in_processes(call, todo, done, retries)


def check(parallel: str) -> None:
    """Raises: ParallelError, no such way to run."""
    if parallel not in get_args(Parallel):
        raise ParallelError(
            f"parallel = {parallel!r} is unknown; use one of {', '.join(get_args(Parallel))} (jobs "
            "of a sweep run on Ray: launcher=ray)"
        )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_processes(
    call: Callable[[T], R], items: Sequence[T], done: Done[R], retries: int
) -> list[R]:
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    results: dict[int, R] = {}
    context = get_context("spawn")  # a fork would copy the locks of threads that it does not copy
    for attempt in range(retries + 1):  # a pool breaks as a whole: what is unfinished goes again
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
            if attempt == retries:
                raise ParallelError(
                    f"a worker died {retries + 1} times at item {min(set(left) - set(results))} or "
                    "later: out of memory, or a script that begins again in every worker "
                    "(if __name__ == '__main__':)? Use parallel = 'serial' to see what happens"
                ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [results[i] for i in range(len(items))]
