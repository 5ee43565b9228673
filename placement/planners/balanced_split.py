"""Contiguous ranges of operators, balanced over unlike accelerators, without running anything."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.planners import Among
from placement.problem import Problem, Solution
from placement.search.evaluation import Choice, Search, device_classes, supported_choice
from placement.search.list_schedule import first_that_fits, held_bytes

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BalancedSplit:
    """Static balanced split (Wang et al., Computer Engineering and Science 42(9), 2020).

    The operators in their order are cut into one range per device so that the slowest range
    takes the least seconds; only work and memory are looked at, never transfers. For one order
    of the devices the least time is found by bisection: every device in turn takes as many
    operators as fit into that time and into its memory.

    Deviations: seconds are those of the profile, which for an unmeasured model are predicted
    from its static description (the paper divides operations by peak rates); every order of
    at most 8 devices is tried, those that may be swapped count as one, while there are at most
    120, and otherwise the cluster's order alone; a colocation group is placed whole,
    at its first operator; an operator that breaks a range because no device there can run it
    leaves the split unbalanced: it goes to the first device that can.
    """

    among = Among(quick=True, loads=5)

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        orders = _orders(device_classes(problem))

        def plan(activations: int) -> tuple[Choice, float]:
            need = held_bytes(problem, activations)
            groups, memory_bytes = problem.group_compute_s, problem.memory_bytes
            splits = [(*split(groups, order, need, memory_bytes), order) for order in orders]
            split_s, choice, _ = min(splits, key=lambda f: (f[0], f[2]))
            return supported_choice(problem, choice), split_s

        return search.solution(split_s=first_that_fits(search, plan), num_orders=len(orders))


def _orders(classes: NDArray[np.int32]) -> list[tuple[int, ...]]:
    """Orders of the devices that differ, the cluster's own first.

    It alone of more than eight devices, or if there are more than 120.
    """
    own = tuple(range(len(classes)))
    if len(classes) > 8:
        return [own]
    orders: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in itertools.permutations(own):
        orders.setdefault(tuple(classes[list(order)]), order)
        if len(orders) > 120:
            return [own]
    return list(orders.values())


def split(
    groups: Floats,
    order: Sequence[int],
    need: NDArray[np.int64],
    memory_bytes: NDArray[np.int64],
) -> tuple[float, Choice]:
    """The least time of the slowest range, inf if there is no split, and int32 ``[G]`` devices.

    ``groups`` float64 ``[G, D]`` are seconds, ``need [G]`` bytes, in the order that is cut. A group
    that breaks a range, or is left over, has device -1.
    """
    count, finite = len(groups), np.isfinite(groups)
    memory_bytes = np.minimum(memory_bytes, need.sum())  # more would overflow when added
    # A row for each device: a search along a column would copy it first.
    elapsed = np.zeros((groups.shape[1], count + 1))
    np.cumsum(np.where(finite, groups, 0.0).T, axis=1, out=elapsed[:, 1:])
    held = np.append(0, need.cumsum())
    broken = np.zeros(elapsed.shape, int)
    np.cumsum(~finite.T, axis=1, out=broken[:, 1:])

    def cuts(limit_s: float) -> list[int]:
        """Where the range of each device of ``order`` ends."""
        at, ends = 0, []
        for d in order:
            time_end = np.searchsorted(elapsed[d], elapsed[d, at] + limit_s, "right")
            room_end = np.searchsorted(held, held[at] + memory_bytes[d], "right")
            able_end = np.searchsorted(broken[d], broken[d, at], "right")
            at = max(at, min(int(time_end), int(room_end), int(able_end)) - 1)
            ends.append(at)
        return ends

    low, high = 0.0, float(elapsed[:, -1].max()) * (1 + 1e-9)
    feasible = cuts(high)[-1] == count
    for _ in range(50 if feasible else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if cuts(middle)[-1] == count else (middle, high)
    ends = cuts(high)
    choice = np.full(count, -1, np.int32)
    for d, begin, end in zip(order, [0, *ends], ends, strict=False):
        choice[begin:end] = d
    return (high if feasible else np.inf), choice
