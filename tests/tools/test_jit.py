"""How kernels are compiled: what those without reference counts can do, and what is refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from copy import deepcopy as copy_of
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.caching import FunctionCache
from numba.core.errors import NumbaError

from placement.tools import clock, jit
from placement.tools.jit import Struct, array, average, copy, kernel, largest


@given(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 2.5, np.inf]), min_size=1, max_size=9))
def test_largest_is_argmax(values: list[float]) -> None:
    """The first of equal ones, among those that count."""
    a = np.array(values)
    for count in range(1, len(a) + 1):
        assert largest(a, count) == np.argmax(a[:count])


def test_copy_and_average() -> None:
    to = np.zeros(3)
    copy(to, np.array([1, 2, 3], np.int32))
    assert to.tolist() == [1, 2, 3]
    assert average(np.array([1.0, 2.0, 6.0])) == pytest.approx(3.0)


def test_a_kernel_that_makes_an_array_is_refused() -> None:
    """Nothing would free it."""

    @kernel(cache=False)
    def doubled(a):
        return np.zeros(len(a))[0]

    with pytest.raises(NumbaError):
        doubled(np.ones(2))


def test_without_numbas_private_option_kernels_still_run() -> None:
    """In a process of its own: the option is looked for once."""
    code = """
from numba.core.options import DefaultOptions
del DefaultOptions._nrt
from placement.tools import clock, jit
assert jit.kernel.keywords == {} == jit.allocating.keywords
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Inner(Struct):
    weight: float
    rows: Any  # float64 [M, 2]


class Walk(Struct):
    place: Any  # int32 [N]
    steps: int
    open: bool
    inner: Inner


def walk(dtype: Any = np.int32) -> Walk:
    inner = Inner(weight=0.5, rows=np.arange(6.0).reshape(3, 2))
    return Walk(place=np.arange(3).astype(dtype), steps=2, open=True, inner=inner)


@kernel(cache=False)
def step(s: Any, by: Any) -> Any:
    s.steps += by
    s.inner.weight *= 2
    s.open = not s.open
    for i in range(len(s.place)):
        s.place[i] += s.inner.rows[i, 1]
    return s.inner.rows.shape[0] * 10 + s.inner.rows.shape[1]


def test_a_kernel_fills_arrays_and_changes_numbers_of_a_struct() -> None:
    s = walk()
    assert step(s, 3) == 32
    assert (s.steps, s.open, s.inner.weight, s.place.tolist()) == (5, False, 1.0, [1, 4, 7])
    s.steps, s.inner.weight = -7, 4.0
    step(s, 0)
    assert (s.steps, s.open, s.inner.weight) == (-7, True, 8.0)


@pytest.mark.parametrize("again", [copy_of, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_of_a_struct_is_another_one(again: Any) -> None:
    first = walk()
    second = again(first)
    step(second, 1)
    assert (first.steps, second.steps) == (2, 3)
    assert first.place.tolist() == [0, 1, 2] and second.place.tolist() == [1, 4, 7]
    assert second.inner.weight == 1.0 and first.inner.weight == 0.5


def test_kernels_are_compiled_for_dtypes_and_dimensions_not_for_values() -> None:
    kinds = {walk()._numba_type_, walk()._numba_type_, walk(np.int64)._numba_type_}
    assert len(kinds) == 2


class Declared(Struct):
    rows: Any = array("2, N*M+1", value=np.inf)
    here: Any = array("N", np.int32)
    steps: int
    share: float


def test_room_is_made_as_declared_and_what_has_the_name_is_taken() -> None:
    s = Declared.fresh({"N": 2, "M": 3}, steps=4)
    assert s.rows.shape == (2, 7) and np.isinf(s.rows).all() and s.rows.dtype == np.float64
    assert (s.here.dtype, s.here.tolist(), s.steps, s.share) == (np.int32, [0, 0], 4, 0.0)
    other = Declared.of(SimpleNamespace(here=np.ones(3, np.int32)), s, share=0.5)
    assert other.here.tolist() == [1, 1, 1] and other.rows is s.rows
    assert (other.steps, other.share) == (4, 0.5)
    with pytest.raises(KeyError, match="'M'"):
        Declared.fresh({"N": 2})


def test_what_a_struct_does_not_take() -> None:
    with pytest.raises(AssertionError):
        Inner(weight=1.0)
    with pytest.raises(AssertionError, match="as they lie"):
        Inner(weight=1.0, rows=np.zeros((2, 3)).T)
    with pytest.raises(AttributeError, match="colour"):
        _ = walk().colour
    with pytest.raises(NumbaError, match="colour"):
        kernel(cache=False)(lambda s: s.colour)(walk())


# --- what is compiled is kept ---------------------------------------------------------------------

USED = """
from placement.tools.jit import kernel
FIRST = 10
@kernel
def add(x):
    return x + 1
"""
USER = """
import used
from used import FIRST
from placement.tools.jit import kernel
@kernel
def both(x):
    return used.add(x) + FIRST
"""
ASK = """
from numba.core import event
class Count(event.Listener):
    number = 0
    def on_start(self, _):
        self.number += 1
    def on_end(self, _): ...
count = Count()
with event.install_listener("numba:compile", count):
    import user
    print(user.both(1), count.number)
"""


def asked(folder: Path, kept_in: str = "cache") -> subprocess.Popen[str]:
    """A process that calls the kernel: what it returns, and how many kernels were compiled."""
    path = os.pathsep.join([str(folder), *sys.path])
    cache = str(folder / kept_in) if kept_in else ""
    env = os.environ | {"PYTHONPATH": path, "NUMBA_CACHE_DIR": cache}
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # Python sees no edit within a second of as many bytes
    words = [sys.executable, "-c", ASK]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env, cwd=folder)


def answers(*processes: subprocess.Popen[str]) -> list[tuple[int, ...]]:
    return [tuple(map(int, p.communicate(timeout=120)[0].split())) for p in processes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "used.py").write_text(USED)
    (tmp_path / "user.py").write_text(USER)
    return tmp_path


def test_a_kernel_is_compiled_again_when_what_it_uses_has_changed(folder: Path) -> None:
    """Its own file is the same: an upgrade would go on with the kernels of before."""
    assert answers(asked(folder)) == [(12, 2)]
    (folder / "used.py").write_text(USED.replace("x + 1", "x + 2"))
    assert answers(asked(folder)) == [(13, 2)]
    (folder / "used.py").write_text(USED.replace("FIRST = 10", "FIRST = 20"))
    assert answers(asked(folder))[0][0] == 22
    assert answers(asked(folder)) == [(22, 0)]


def test_kernels_beside_the_source_serve_those_who_keep_theirs_elsewhere(folder: Path) -> None:
    """As users of a read-only installation do."""
    assert answers(asked(folder, "")) == [(12, 2)]
    assert answers(asked(folder)) == [(12, 0)]
    (folder / "used.py").write_text(USED.replace("x + 1", "x + 2"))
    assert answers(asked(folder)) == [(13, 2)]
    assert answers(asked(folder)) == [(13, 0)]


def test_two_processes_at_once_and_files_that_are_cut_off(folder: Path) -> None:
    for value, compiled in answers(asked(folder), asked(folder)):
        assert value == 12 and compiled in (0, 1, 2)
    assert answers(asked(folder)) == [(12, 0)]
    for suffix in ("nbi", "nbc"):  # as a full disk or a lost connection leaves them
        for path in (folder / "cache").rglob(f"*both*.{suffix}"):
            path.write_bytes(path.read_bytes()[:20])
        assert answers(asked(folder)) == [(12, 1)]
        assert answers(asked(folder)) == [(12, 0)]


def test_kernels_that_cannot_be_kept_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(function: Any) -> Any:
        raise RuntimeError("cannot cache function: no locator available")

    def is_full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jit, "_Cache", nowhere)
        assert kernel(lambda x: x + 1)(1) == 2
    monkeypatch.setattr(FunctionCache, "save_overload", is_full)
    assert kernel(lambda x: x + 2)(1) == 3


def test_no_budget_pays_for_a_kernel_that_is_compiled() -> None:
    inner = kernel(lambda x: x + 1, cache=False)
    outer = kernel(lambda x: inner(x) * 2, cache=False)
    for value in (1, 2.0, True):
        began, began_s = time.perf_counter(), clock.clock()
        outer(value)
        assert 0.0 <= clock.clock() - began_s < 0.5 * (time.perf_counter() - began)


def test_the_clock_stands_still_while_packages_are_loaded() -> None:
    @clock.loads
    def slow() -> None:
        time.sleep(0.2)

    began, began_s = time.perf_counter(), clock.clock()
    slow()
    slow()  # once is enough
    assert 0.0 <= clock.clock() - began_s < time.perf_counter() - began - 0.15
