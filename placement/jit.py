"""How kernels are compiled: cached, without the GIL, and mostly without counting references.

numba counts references to every array of every tuple that a kernel is called with, in every call
that it does not inline. Where a state of forty arrays is passed on that is most of the time
(``planners._order`` draws and describes a move in 0.5 us instead of 2), and nothing needs it in a
kernel that neither makes an array nor returns one. Such kernels fill arrays that they are given:
``a[:] = b``, ``a.max()``, ``a.mean()``, ``a.sort()`` and ``np.empty`` make some; ``copy``,
``largest`` and ``average`` do not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba as nb
from numba.core.options import DefaultOptions


def _counting(wanted: bool) -> dict[str, Any]:
    """numba's own name for it is private: without it kernels are slower, and still right."""
    return {"_nrt": wanted} if hasattr(DefaultOptions, "_nrt") else {}


kernel = partial(nb.njit, cache=True, nogil=True, **_counting(False))
inlined = partial(kernel, inline="always")
allocating = partial(nb.njit, cache=True, nogil=True, **_counting(True))


@inlined
def copy(to: Any, values: Any) -> None:
    """As ``to[:] = values``, of one dimension."""
    for i in range(len(to)):
        to[i] = values[i]


@inlined
def largest(values: Any, count: Any) -> Any:
    """As ``np.argmax(values[:count])``."""
    found = 0
    for i in range(1, count):
        if values[i] > values[found]:
            found = i
    return found


@inlined
def average(values: Any) -> Any:
    """As ``values.mean()``, up to rounding."""
    mean = 0.0
    for i in range(len(values)):
        mean += values[i] / len(values)
    return mean
