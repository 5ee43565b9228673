"""Recurrent models: the layers x time grid of an unrolled graph, found from its structure.

Nothing is known about names. What shows recurrence is a parameter that is read again and again
by operators of one kind, each of which depends on the one before::

    x0   x1   x2   x3           a column is a *step*: the k-th use of a parameter by operators
    |    |    |    |            that form such a chain
    W0   W0   W0   W0
    U0 > U0 > U0 > U0           a row is a *layer*: parameters whose operators depend on each
    |    |    |    |            other both ways (U0 on U0 of the step before), with those that
    W1   W1   W1   W1           only lead there (W0)
    U1 > U1 > U1 > U1
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.graph import OpGraph

Ints = NDArray[np.int32]

LEAST_STEPS = 3  # two uses of the same parameters are tied weights rather than time


class NoGrid(ValueError):
    """The graph is no layers x time grid; the message says which rule it breaks, and where."""


@dataclass(frozen=True, eq=False)
class Grid:
    """The cell of every operator. Along every edge neither coordinate falls.

    Operators before the first cell that needs them (the split of the sequence) and behind the
    last (its concatenation, a classifier) belong to the cells they lead to, or come from.

    Attributes:
        layer: int32 ``[N]``, 0..num_layers-1.
        step: int32 ``[N]``, 0..num_steps-1.
    """

    layer: Ints
    step: Ints

    @property
    def num_layers(self) -> int:
        """``L``."""
        return int(self.layer.max()) + 1

    @property
    def num_steps(self) -> int:
        """``T``."""
        return int(self.step.max()) + 1


def recognise(graph: OpGraph) -> Grid:
    """The grid of an unrolled recurrent model: LSTM, GRU or plain cells, of any sizes.

    1. A *class* is all operators of one kind that read one parameter (or a view of it, or
       whatever else is computed of parameters alone). It is recurrent if each of its operators
       depends on the one before. The number of steps is how many operators most recurrent
       classes have; other classes say nothing about time.
    2. The step of an operator is the highest number that an operator of these classes has which
       it depends on (or is). Where it depends on none, it is the earliest step it leads to.
    3. Classes that depend on each other both ways are a layer; a class without recurrence
       belongs to the first layer it leads to, or else to the last it depends on. Operators get
       the highest layer they depend on, or the lowest they lead to.
    4. Checked: what has a number of its own depends on none that is higher (it would in a second
       bidirectional layer, or in a decoder that waits for its encoder), and between first and
       last step all cells of a layer consist of operators of the same kinds, where they lead to
       a recurrence; what is made of the states afterwards may differ.

    Raises:
        NoGrid: no recurrence over at least three steps, or a check fails.
    """
    classes = list(_classes(graph).values())
    reached, before = _reached(graph, classes)
    steps = [before[ops, k] for k, ops in enumerate(classes)]
    # Whether each operator of a class depends on the one before it.
    chain = [bool((x[1:] == np.arange(len(x) - 1)).all()) for x in steps]
    lengths = Counter(len(ops) for ops, is_chain in zip(classes, chain, strict=True) if is_chain)
    num_steps = max(lengths, key=lambda n: (lengths[n], n), default=0)
    if num_steps < LEAST_STEPS:
        raise NoGrid(
            f"graph {graph.name!r} is no layers x time grid: no parameter is read by a chain of "
            f"at least {LEAST_STEPS} operators of one kind; unroll the cells over the sequence"
        )
    full = [k for k, ops in enumerate(classes) if len(ops) == num_steps]
    recurrent = np.array([chain[k] for k in full])
    ops = np.array([classes[k] for k in full])  # [K', T]
    row = _layers(reached[ops[:, -1]][:, full] >= 0, recurrent, ops[:, 0])
    anchor = np.full(graph.num_ops, -1, np.int32)
    anchor[ops[recurrent]] = np.arange(num_steps)
    step = _spread(graph, anchor, "step")
    anchor = np.full(graph.num_ops, -1, np.int32)
    anchor[ops] = row[:, None]
    grid = Grid(_spread(graph, anchor, "layer"), step)
    _check_alike(graph, grid, ops[recurrent])
    return grid


def _classes(graph: OpGraph) -> dict[tuple[int, ...], list[int]]:
    """The operators of each class in order, by the parameters that have the same operators."""
    weights = list(map(set, graph.op_params))
    only_weights = [bool(w) for w in weights]
    for op in range(graph.num_ops):
        inputs = graph.tensor_src[graph.in_tensor[graph.in_ptr[op] : graph.in_ptr[op + 1]]]
        of_weights = [s for s in inputs.tolist() if s >= 0 and only_weights[s]]
        for s in of_weights:
            weights[op] |= weights[s]
        only_weights[op] = bool(weights[op]) and len(of_weights) == len(inputs)
    by_use: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for op, read in enumerate(weights):
        for param in read:
            by_use[param, graph.op_kind[op]].append(op)
    return {tuple(ops): ops for ops in by_use.values() if len(ops) >= LEAST_STEPS}


def _reached(graph: OpGraph, classes: list[list[int]]) -> tuple[Ints, Ints]:
    """int32 ``[N, K]``: the last operator of class k, by position, that n depends on or is; and
    that n depends on."""
    last = np.full((graph.num_ops, len(classes)), -1, np.int32)
    before = last.copy()
    for k, ops in enumerate(classes):
        last[ops, k] = np.arange(len(ops))
    for src, dst in _by_consumer(graph):
        np.maximum(before[dst], last[src], out=before[dst])
        np.maximum(last[dst], last[src], out=last[dst])
    return last, before


def _by_consumer(graph: OpGraph) -> Ints:
    """The edges ``[E', 2]`` in an order in which every producer is complete before its uses."""
    return graph.edges[np.argsort(graph.edges[:, 1], kind="stable")]


def _layers(depends: NDArray[np.bool_], recurrent: NDArray[np.bool_], first: Ints) -> Ints:
    """int32 ``[K]`` row of each class; ``depends[a, b]``: class a on class b at some step."""
    for k in range(len(depends)):  # transitive
        depends |= depends[:, k : k + 1] & depends[k]
    mutual = depends & depends.T & recurrent & recurrent[:, None]
    # Of a layer every class depends on the same ones, and on more than the layers before do.
    rank = np.lexsort((first, depends[:, recurrent].sum(axis=1)))
    row = np.full(len(depends), -1, np.int32)
    count = 0
    for k in rank.tolist():
        if recurrent[k] and row[k] < 0:
            row[mutual[k]] = count
            count += 1
    for k in np.flatnonzero(~recurrent).tolist():
        leads_to, from_layers = row[depends[:, k] & recurrent], row[depends[k] & recurrent]
        row[k] = leads_to.min() if len(leads_to) else from_layers.max(initial=0)
    return row


def _spread(graph: OpGraph, anchor: Ints, what: str) -> Ints:
    """int32 ``[N]`` coordinate of every operator, of those that have one (-1: none) themselves."""
    value = anchor.copy()
    for src, dst in _by_consumer(graph):
        if anchor[dst] >= 0 and value[src] > anchor[dst]:
            raise NoGrid(
                f"graph {graph.name!r} is no layers x time grid: operator "
                f"{graph.op_name[dst]!r} of {what} {anchor[dst]} depends on {what} {value[src]} "
                f"through {graph.op_name[src]!r}"
            )
        value[dst] = max(value[dst], value[src])
    late = np.where(value < 0, value.max(), value)  # what leads nowhere comes last
    free = value < 0
    for src, dst in graph.edges[::-1]:  # by producer, the last one first
        if free[src]:
            late[src] = min(late[src], late[dst])
    return late.astype(np.int32)


def _check_alike(graph: OpGraph, grid: Grid, recurrent: Ints) -> None:
    """Raise unless inner cells of a layer are alike, as far as they lead to ``recurrent``."""
    leads = np.zeros(graph.num_ops, bool)
    leads[recurrent] = True
    for src, dst in graph.edges[::-1]:  # by producer, the last one first
        leads[src] |= leads[dst]
    cells: defaultdict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for op in np.flatnonzero(leads):
        cells[int(grid.layer[op]), int(grid.step[op])][graph.op_kind[op]] += 1
    for layer in range(grid.num_layers):
        for t in range(2, grid.num_steps - 1):
            a, b = cells[layer, 1], cells[layer, t]
            if a != b:
                raise NoGrid(
                    f"graph {graph.name!r} is no layers x time grid: cells (layer {layer}, step 1)"
                    f" and (layer {layer}, step {t}) differ in {dict((a - b) + (b - a))}"
                )
    # With three steps there is nothing to compare: parameters of the middle must recur.
    uses = Counter(graph.param_use.tolist())
    for op, param in zip(graph.param_use_op, graph.param_use, strict=True):
        if 0 < grid.step[op] < grid.num_steps - 1 and uses[int(param)] < grid.num_steps - 1:
            raise NoGrid(
                f"graph {graph.name!r} is no layers x time grid: operator {graph.op_name[op]!r} "
                f"of step {grid.step[op]} reads a parameter that other steps do not"
            )
