"""A human's split, read from a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from placement.planners import PlannerError
from placement.problem import Placement, Problem, Solution
from placement.search.evaluation import Search
from placement.tools.files import parse_json, read_text


@dataclass(frozen=True)
class Expert:
    """The placement of ``file``: a JSON object from operator to device name.

    An operator is given by its name, or by its number where no operator has that name. Every
    operator must be there.

    Attributes:
        file: path of the JSON file.
    """

    file: str = ""

    def __call__(self, problem: Problem) -> Solution:
        """Raises:
        PlannerError: unreadable file, unknown operator or device, operator left out.
        ProblemError: a device that cannot run its operator, or a colocation group split.
        """
        search = Search(problem)
        search.costs(search.choice(_read(self.file, problem)))
        return search.solution()


def _read(file: str, problem: Problem) -> Placement:
    if not file:
        raise PlannerError(
            "planner 'expert' needs a file: file=split.json with "
            '{"operator": "device", ...} for every operator'
        )
    try:
        split: Any = parse_json(read_text(file))
    except (OSError, ValueError) as error:
        raise PlannerError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(split, dict):
        raise PlannerError(f"{file}: expected an object {{operator: device}}, got {split!r:.60}")
    number = {str(n): n for n in range(problem.num_ops)}
    number |= {name: n for n, name in enumerate(problem.graph.op_name)}
    devices = {name: d for d, name in enumerate(problem.cluster.device_names)}
    placement = np.full(problem.num_ops, -1, np.int32)
    for key, device in split.items():
        if key not in number:
            raise PlannerError(
                f"{file}: graph {problem.graph.name!r} has no operator {key!r}; it has "
                f"{problem.num_ops}, the first is {problem.graph.op_name[0]!r}"
            )
        if not isinstance(device, str) or device not in devices:
            raise PlannerError(
                f"{file}: operator {key!r}: no device {device!r}; devices are {list(devices)}"
            )
        if placement[number[key]] >= 0:
            raise PlannerError(f"{file}: operator {key!r} is given twice, by name and by number")
        placement[number[key]] = devices[device]
    left = np.flatnonzero(placement < 0)
    if len(left):
        names = [problem.graph.op_name[n] for n in left[:4]]
        raise PlannerError(f"{file}: {len(left)} operators have no device, e.g. {names}")
    return placement
