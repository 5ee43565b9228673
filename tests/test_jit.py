"""How kernels are compiled: what those without reference counts can do, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.errors import NumbaError

from placement.jit import average, copy, kernel, largest


@given(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 2.5, np.inf]), min_size=1, max_size=9))
def test_largest_is_argmax(values: list[float]) -> None:
    """The first of equal ones, among those that count."""
    a = np.array(values)
    for count in range(1, len(a) + 1):
        assert largest(a, count) == np.argmax(a[:count])


def test_copy() -> None:
    to = np.zeros(3)
    copy(to, np.array([1, 2, 3], np.int32))
    assert to.tolist() == [1, 2, 3]


def test_average() -> None:
    assert average(np.array([1.0, 2.0, 6.0])) == pytest.approx(3.0)


def test_a_kernel_that_makes_an_array_is_refused() -> None:
    """Nothing would free it."""

    @kernel(cache=False)
    def doubled(a):  # type: ignore[no-untyped-def]
        return np.zeros(len(a))[0]

    with pytest.raises(NumbaError):
        doubled(np.ones(2))


def test_without_numbas_private_option_kernels_still_run() -> None:
    """In a process of its own: the option is looked for once."""
    code = """
from numba.core.options import DefaultOptions
del DefaultOptions._nrt
from placement import jit
assert jit.kernel.keywords == {"cache": True, "nogil": True} == jit.allocating.keywords
"""
    subprocess.run([sys.executable, "-c", code], check=True)
