"""What a comparison has saved: solutions, and how placements and problems are told apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.problem import Placement, Solution
from placement.schedule import Schedule
from placement.tools.files import short


def placement_id(placement: Placement) -> str:
    """Equal for equal placements, int32 ``[N]`` or ``[K, N]``: 12 hexadecimal digits."""
    return digest(placement)[:12]


def solution_of(saved: Mapping[str, Any]) -> Solution:
    """A solution that was written as JSON with its arrays as lists.

    Raises:
        ValueError, LookupError, TypeError: it is none.
    """
    order, state = saved.get("schedule"), dict(saved)
    if order is not None:
        rows = tuple(map(np.array, order["order"]))
        state["schedule"] = Schedule(rows, order["num_microbatches"])
    for what in ("value_s", "lower_bound_s"):
        value: Any = state.get(what)
        if value is None and what == "lower_bound_s":
            continue
        if type(value) not in (int, float) or not value >= 0:  # comparisons with NaN are false
            raise ValueError(f"{what} = {short(value)} is no number of seconds")
    stats = state.get("stats", {})
    if not isinstance(stats, dict):
        raise ValueError(f"stats = {short(stats)} is no object")
    curve = np.array(stats.get("curve") or [], np.float64)
    if curve.size and (curve.ndim != 2 or curve.shape[1] != 3):
        raise ValueError("stats: curve must have rows of seconds, evaluations and value")
    placement = _whole(saved["placement"])
    state["placement"] = placement if placement.ndim == 2 else placement.ravel()
    return Solution(**state)


def _whole(values: Any) -> NDArray[np.int32]:
    """Nested lists of numbers from 0 to 2**31 - 1; of no numbers too."""
    numbers = np.array(values)
    if numbers.size and (numbers.dtype.kind != "i" or numbers.min() < 0 or numbers.max() >= 2**31):
        raise ValueError(f"{short(values)} are not all numbers of operators, devices or batches")
    return numbers.astype(np.int32)


def digest(*parts: Any) -> str:
    """SHA-256 (hex) of arrays, and of anything JSON can write."""
    h = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            h.update(f"{part.dtype.str}{part.shape}".encode())
            h.update(np.ascontiguousarray(part).tobytes())
        else:
            h.update(as_json(part).encode())
        h.update(b"|")
    return h.hexdigest()


def as_json(value: Any) -> str:
    """JSON with arrays as lists, dataclasses as objects, and anything else as its text."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
