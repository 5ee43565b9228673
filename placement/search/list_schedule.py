"""A schedule that grows operator by operator: what the list-scheduling planners share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.problem import Problem, host_of
from placement.search import list_kernels
from placement.search.evaluation import Choice, Search

Floats = NDArray[np.float64]
T = TypeVar("T")


class ListSchedule:
    """Operators placed so far, and when they run.

    A colocation group is fixed to the device of its first operator. Operators must be placed
    after those they depend on.

    Attributes:
        choice: int32 ``[G]`` device of each group, -1 where none yet.
        finish_s: float64 ``[N]`` end of each placed operator.
    """

    def __init__(self, problem: Problem, activations: int = 0, busy: bool = False) -> None:
        """``activations``: how often a device must hold what its groups produce (see
        ``first_that_fits``).

        With ``busy`` transfers of ``place`` wait for their channel where the problem has
        contention; otherwise no transfer waits for another.
        """
        busy = busy and problem.contention
        self._tables = tables_of(problem, activations, busy)
        self._state = state_of(problem, busy)
        self.choice: Choice = self._state.choice
        self.finish_s: Floats = self._state.finish_s

    @property
    def makespan_s(self) -> float:
        """End of the last operator."""
        return float(self.finish_s.max())

    def place(
        self,
        order: ArrayLike,
        extra_s: Floats | None = None,
        device_of: NDArray[np.int32] | None = None,
    ) -> None:
        """Place operators ``order`` one by one, each in the earliest gap that is long enough.

        Each goes to the device where it ends first; the first of a colocation group to where
        the group would, if the others followed it.

        Args:
            extra_s: float64 ``[N, D]`` seconds to add to that end.
            device_of: int32 ``[N]`` the device of an operator if it may go there; -1 is none.
        """
        shape = self._tables.compute_s.shape
        extra_s = np.zeros(shape) if extra_s is None else extra_s
        no_device = np.full(len(self.finish_s), -1)
        to = no_device if device_of is None else device_of.astype(np.int64)
        ops = np.asarray(order, np.int64)
        list_kernels.place_in_order(self._tables, self._state, ops, extra_s, to)

    def place_first_to_start(self, rank_s: Floats, favourite: NDArray[np.int32]) -> None:
        """Place all operators, each time the one that can start first, on the device where it can.

        Nothing is placed in gaps. Of equal starts the operator of highest ``rank_s`` float64
        ``[N]`` wins, then the device where it (with its group) ends first. ``favourite`` is
        int32 ``[N]``: the consumer that each operator wants beside it, or -1. As long as that
        is not placed, another operator gets the device only once it is *urgent*: its inputs
        have arrived everywhere, so that no other device needs be waited for.
        """
        list_kernels.place_first_to_start(self._tables, self._state, rank_s, favourite)

    def balance(
        self, order: ArrayLike, level: NDArray[np.int32], team: NDArray[np.bool_] | None
    ) -> None:
        """Fill ``choice`` so that the seconds of each level are even over the devices.

        Each group goes to where the load *in this level* stays least, then the load of all.

        Args:
            order: all operators, level by level; the first of a group places it.
            level: int32 ``[N]``.
            team: bool ``[L, D]`` the devices of each level, all of them if None; a group that
                none of them can run goes to any that can.
        """
        if team is None:
            team = np.ones((int(level.max()) + 1, len(self._state.free_s)), bool)
        ops = np.asarray(order, np.int64)
        list_kernels.balance_levels(self._tables, self._state, ops, level, team)

    def able(self, group: int) -> NDArray[np.bool_]:
        """bool ``[D]``: devices that can run ``group``: those with room, or all if none has."""
        able = np.empty(len(self._state.free_s), np.bool_)
        list_kernels.fill_able(self._tables, self._state, np.int32(group), able)
        return able

    def hold(self, group: int, device: int) -> None:
        """``group`` is on ``device`` from now on, without times."""
        list_kernels.hold(self._tables, self._state, np.int32(group), device)


def state_of(problem: Problem, busy: bool) -> list_kernels.State:
    """Nothing is placed; with ``busy`` there is room for when tensors arrive."""
    n, d, g = problem.num_ops, problem.num_devices, problem.graph
    sizes = {"N": n, "D": d, "G": g.num_groups, "channels": problem.num_channels}
    sizes["P"] = len(g.param_bytes) if problem.memory_may_bind else 0
    return list_kernels.State.fresh(sizes | {"T": g.num_tensors if busy else 0})


def tables_of(problem: Problem, activations: int, busy: bool = False) -> list_kernels.Tables:
    g, matrix_s = problem.graph, problem.profile.transfer_s
    host, shares_host = host_of(problem)
    param_ptr, param = _group_params(problem)
    return list_kernels.Tables.of(
        g,
        problem,
        user_ptr=np.searchsorted(g.edges[:, 0], np.arange(g.num_ops + 1)),
        user=np.ascontiguousarray(g.edges[:, 1]),
        tensor_bytes=g.tensor_bytes.astype(np.float64),
        group_s=problem.group_compute_s,
        latency_s=problem.link_latency_s,
        s_per_byte=problem.link_s_per_byte,
        matrix_s=np.zeros((0, 0, 0)) if matrix_s is None else matrix_s,
        host=host,
        shares_host=shares_host,
        may_bind=problem.memory_may_bind,
        capacity=room_bytes(problem),
        param_ptr=param_ptr,
        param=param,
        produced=activations * produced_bytes(problem),
        channel=problem.link_channel,
        busy=busy,
    )


def room_bytes(problem: Problem) -> NDArray[np.int64]:
    """int64 ``[D]``: memory, less what libraries may keep, and buffers of a device that streams."""
    room: NDArray[np.int64] = problem.memory_bytes.copy()
    if problem.profile.library_bytes is not None:
        room -= problem.profile.library_bytes.max(axis=0)
    for d in problem.cluster.streaming:
        given = problem.cluster.devices[d].buffer_bytes
        room[problem.worker[d]] -= given or 2 * int(problem.copied_bytes.max())
    return room


def _group_params(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 ``[G + 1]`` and what it points into: the distinct parameters of each group."""
    g = problem.graph
    count = max(len(g.param_bytes), 1)
    pairs = np.unique(g.group[g.param_use_op] * np.int64(count) + g.param_use)
    return np.searchsorted(pairs // count, np.arange(g.num_groups + 1)), pairs % count


def produced_bytes(problem: Problem) -> NDArray[np.int64]:
    """int64 ``[G]``: the tensors that the operators of each group produce, views left out."""
    g = problem.graph
    total = np.zeros(g.num_groups, np.int64)
    own = np.flatnonzero((g.tensor_src >= 0) & (g.tensor_root == np.arange(g.num_tensors)))
    np.add.at(total, g.group[g.tensor_src[own]], g.tensor_bytes[own])
    return total


def held_bytes(problem: Problem, activations: int) -> NDArray[np.int64]:
    """int64 ``[G]``: parameters (a tied one at its first group) and what is produced, so often."""
    g = problem.graph
    need = activations * produced_bytes(problem)
    first = np.full(len(g.param_bytes), g.num_groups)
    np.minimum.at(first, g.param_use, g.group[g.param_use_op])
    used = first < g.num_groups
    np.add.at(need, first[used], g.param_bytes[used])
    return need


def memory_counts(problem: Problem) -> list[int]:
    """How often activations of a micro-batch are counted until it fits: never, once, or more."""
    flights = problem.max_in_flight if problem.objective.is_pipelined else 1
    return list(dict.fromkeys([0, 1, flights])) if problem.memory_may_bind else [0]


def first_that_fits(search: Search, plan: Callable[[int], tuple[Choice, T]]) -> T:
    """Score ``plan(activations)`` until one fits: activations are not counted, then once, ...

    Returns what the last plan had besides its choice, or choices.

    How long a tensor lives depends on the schedule, so a planner begins with parameters alone;
    where the simulator finds that too optimistic, it counts what is produced in one
    micro-batch, then in every micro-batch in flight.
    """
    for activations in memory_counts(search.problem):
        choice, facts = plan(activations)
        search.costs(choice)
        if search.best_s < np.inf:
            break
    return facts


def schedule_that_fits(search: Search, fill: Callable[[ListSchedule], None]) -> ListSchedule:
    """What ``fill`` makes of an empty schedule; made and scored again until it fits."""

    def plan(activations: int) -> tuple[Choice, ListSchedule]:
        schedule = ListSchedule(search.problem, activations)
        fill(schedule)
        return schedule.choice, schedule

    return first_that_fits(search, plan)
