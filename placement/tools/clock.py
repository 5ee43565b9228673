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
    """As ``time.perf_counter``, but it stands still while kernels, or packages, are loaded.

    Budgets, and seconds that are told, are by this clock.
    """
    return time.perf_counter() - _loading_s


@contextmanager
def loading() -> Iterator[None]:
    """``clock`` stands still meanwhile, as it does where a kernel is compiled, or read."""
    global _loading_s
    begun, before_s = time.perf_counter(), _loading_s
    try:
        yield
    finally:
        _loading_s = before_s + time.perf_counter() - begun  # with what was loaded meanwhile


def loads(function: Callable[P, None]) -> Callable[P, None]:
    """Of a function that imports, or does once what takes long at first; once for its arguments."""
    return cache(loading()(function))  # type: ignore[return-value]


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
