"""Heterogeneous earliest finish time: list scheduling with insertion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.planners import Among, check_least
from placement.planners.peft import optimistic_cost
from placement.problem import Problem, Solution
from placement.search.evaluation import Choice, Search, supported_choice
from placement.search.list_schedule import ListSchedule

_AT_ONCE = 256  # operators placed between two looks at the clock


@dataclass(frozen=True)
class Heft:
    """HEFT (Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002).

    Operators are taken by falling upward rank; each goes to the device where it finishes
    first, in the earliest gap that is long enough. As in the paper, transfers do not wait
    for each other. ``stats["makespan_s"]`` is the length of HEFT's own schedule; the value
    is the simulator's, which lets channels be busy.

    Deviations: a colocation group is fixed to the device of its first operator, chosen by the
    finish of that operator plus the seconds of the rest of the group there; a device that
    cannot hold the group's parameters beside those it has is passed over while another can;
    HEFT minimises latency, whatever the problem's objective is.

    Attributes:
        look_ahead: weight of the optimistic cost table of ``peft``, added to the finish by which
            devices are compared; 0 is HEFT.
        busy: transfers wait for their channel, as they do in the simulator; False is HEFT.
        seconds: budget; what is not placed when it ends is dealt out in runs of about equal
            seconds, ``stats["message"]`` says how many operators. None is no limit. Ranks, one
            pass over the graph, and the evaluation of the answer are made in any case.
    """

    among = Among(quick=True, calls=0)

    look_ahead: float = 0.0
    busy: bool = False
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_least(self, 0, "look_ahead")

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, self.seconds)
        schedule = ListSchedule(problem, busy=self.busy)
        extra_s = self.look_ahead * optimistic_cost(problem) if self.look_ahead else None
        order = np.argsort(problem.rank_position)
        for placed in range(0, len(order), _AT_ONCE):
            if not search.seconds_left:
                left = len(order) - placed
                choice = _dealt_out(problem, schedule.choice)
                search.costs(choice)
                return search.solution(
                    message=f"seconds = {self.seconds} ended before {left} operators were placed"
                )
            schedule.place(order[placed : placed + _AT_ONCE], extra_s)
        search.costs(schedule.choice)
        return search.solution(makespan_s=schedule.makespan_s)


def _dealt_out(problem: Problem, choice: Choice) -> Choice:
    """``choice`` where a group without a device has one: a run of them for each device."""
    left = choice < 0
    if not left.any():
        return choice
    seconds = problem.group_compute_s[left].min(axis=1) + 1e-30  # not 0 in all
    part = (np.cumsum(seconds) - seconds / 2) / seconds.sum()
    # A last group of next to no time has a part that rounds to 1.
    device = np.minimum((part * problem.num_devices).astype(np.int32), problem.num_devices - 1)
    done = choice.copy()
    done[left] = device
    return supported_choice(problem, done)
