"""Recurrent models: the layers x time grid cut into sub-graphs of equal time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.planners import check_least
from placement.problem import Problem, Solution
from placement.search.evaluation import Search, single_devices
from placement.search.grid import Grid, NoGrid, recognise
from placement.search.stages import score_splits


@dataclass(frozen=True)
class TimeSlices:
    """Time-slice partition (Shang, thesis, 2023; models that are correlated in time).

    The grid of the unrolled model is recognised (``placement.search.grid``), its cells are timed by
    the profile, and the grid is cut along the time slices into one sub-graph per device, of
    equal time; many sequences flow through them as a pipeline.

    Where to cut: cells are put in order, and the order is cut where the slowest sub-graph is
    fastest (the dynamic program of ``contiguous_dp``, for unlike devices, with transfers and
    memory). Orders, for two layers (down) and four steps::

        time, 0     diagonal, 1/2   layers, 1
        0 2 4 6     0 1 2 4         0 1 2 3
        1 3 5 7     3 5 6 7         4 5 6 7

    Deviations: the thesis cuts along the time slices only; here cuts along the layers and
    diagonal ones are tried too, cuts may fall between the cells of one slice, and the least
    predicted objective decides. The best single device is always a candidate; it is the answer
    for a graph that is no grid (``stats["no_grid"]`` says why).

    Attributes:
        num_directions: orders to try, from along time slices to along layers; 1 is time alone.
        evaluations: budget; None is no limit.
    """

    num_directions: int = 5
    evaluations: int | None = None

    def __post_init__(self) -> None:
        check_least(self, 1, "num_directions")

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, evaluations=self.evaluations)
        search.costs(single_devices(problem))
        try:
            grid = recognise(problem.graph)
        except NoGrid as error:
            return search.solution(no_grid=str(error), cut="none")
        cut = "none"
        weights = np.linspace(0.0, 1.0, self.num_directions).tolist()
        for weight in sorted(weights, key=lambda w: 0.0 < w < 1.0):  # diagonals must be better
            before = search.best_cost
            score_splits(search, [blocks(problem, grid, weight)])
            if search.best_cost < before:
                cut = {0.0: "time", 1.0: "layers"}.get(weight, f"diagonal {weight:.2f}")
        return search.solution(num_layers=grid.num_layers, num_steps=grid.num_steps, cut=cut)


def blocks(problem: Problem, grid: Grid, weight: float, most: int = 400) -> NDArray[np.int32]:
    """int32 ``[G]``: the block of each colocation group, at most ``most``: else neighbours are one.

    Blocks are the cells by rising ``weight * layer / L + (1 - weight) * step / T``, which never
    falls along an edge; of equal ones those of lower layers come first, and with ``weight`` 1
    those of earlier steps. A group is in the first of its cells.
    """
    layers, steps = grid.num_layers, grid.num_steps
    layer, step = np.divmod(np.arange(layers * steps), steps)
    height = np.round(weight * layer / layers + (1.0 - weight) * step / steps, 9)
    order = np.lexsort((step, layer, height))
    rank = np.argsort(order)
    position = rank[grid.layer * steps + grid.step]
    position = problem.graph.per_group(position, np.minimum, layers * steps)
    if layers * steps > most:
        position = position * most // (layers * steps)
    return np.unique(position, return_inverse=True)[1].astype(np.int32)
