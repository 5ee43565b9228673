"""The clock of budgets, which stands still while something is loaded, and undisturbed timing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import ParamSpec

P = ParamSpec("P")

_loading_s = 0.0


def clock() -> float:
    """As ``time.perf_counter``, but it stands still in functions that ``loads`` marks."""
    return time.perf_counter() - _loading_s


def loads(function: Callable[P, None]) -> Callable[P, None]:
    """Of a function that only imports, or calls kernels so that they are compiled or read.

    It is called once for its arguments. Budgets, and seconds that are told, are by ``clock``.
    """

    @cache
    def once(*args: P.args, **kwargs: P.kwargs) -> None:
        global _loading_s
        begun, before_s = time.perf_counter(), _loading_s
        function(*args, **kwargs)
        _loading_s = before_s + time.perf_counter() - begun  # with what was loaded meanwhile

    return once  # type: ignore[return-value]


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No garbage is collected meanwhile, by any thread."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
