"""Operators cut into pieces, which planners place like any others.

``rules``: how an operator can be cut; ``decide``: which to cut, by measured times (``frozen``: of
compiled ones); ``choose``: the search for the best of all combinations; ``split``: the graph that
comes of it; ``rows``: hot rows of embeddings apart from the others.
"""

from __future__ import annotations

from torch.utils import _pytree as pytree

from placement.capturing.numerics import difference
from placement.graph import OpGraph
from placement.pieces.decide import Moves, decide, options_of
from placement.pieces.rows import hot_rows, row_counts
from placement.pieces.rules import Rule, Shares, Window
from placement.pieces.split import Pieces, PiecesError, check_can_be_cut, cut_graph
from placement.program import run_program

__all__ = ["Moves", "Pieces", "PiecesError", "Rule", "Shares", "Window", "hot_rows",
           "row_counts", "shares_of", "split"]  # fmt: skip

MOST_PIECES = 64


def split(
    graph: OpGraph,
    ways: int | tuple[float, ...] | Pieces = 2,
    *,
    sums: bool = True,
    moves: Moves | None = None,
    compiled: bool = False,
) -> OpGraph:
    """The captured graph with operators cut into pieces where that makes a call on several devices
    shorter.

    An ordinary graph: planners place each piece, and what puts pieces together, like any operator.
    Pieces of parameters are views of the module's own. How each operator can be cut is found by
    running it on parts of its inputs, and the result is compared with the whole graph's.

    Args:
        graph: of an inference, with its program.
        ways: how many equal pieces, or the share of each (which add up to 1), or what an earlier
            split decided (``graph.program.pieces``).
        sums: whether pieces may make summands of a result, which differs then in its last digits.
        moves: what moving tensors between devices costs, as ``Moves.of(profile.links)``; if not
            given, what it does between two cores.
        compiled: whether what follows is to run compiled, where other cuts are the best.

    Returns:
        OpGraph: of which ``program.pieces`` says what was cut; ``graph`` itself where nothing pays.

    Raises:
        PiecesError: a training step, ways out of range, nothing that can be cut so, or other
            results.
    """
    check_can_be_cut(graph)
    pieces = ways
    if not isinstance(pieces, Pieces):
        shares = shares_of(pieces)
        _check_sizes(graph, shares)
        options = options_of(graph, shares, sums, compiled)
        pieces = decide(graph, shares, options, moves or Moves())
        if not pieces.rules:
            return graph
    cut = cut_graph(graph, pieces)
    _check_results(graph, cut)
    return cut


def shares_of(ways: int | tuple[float, ...]) -> tuple[float, ...]:
    """``[k]``, which add up to 1.

    Raises:
        PiecesError: fewer than two pieces, more than 64, or shares that are no whole.
    """
    shares = (1 / ways,) * ways if isinstance(ways, int) and 0 < ways <= MOST_PIECES else ways
    if isinstance(shares, int) or not 2 <= len(shares) <= MOST_PIECES:
        count = shares if isinstance(shares, int) else len(shares)
        raise PiecesError(f"{count} pieces: give a number from 2 to {MOST_PIECES}")
    if not (min(shares) > 0 and abs(sum(shares) - 1) <= 1e-6):
        raise PiecesError(
            f"shares {list(shares)} add up to {sum(shares):g}: each must be positive, and together "
            "they must be 1, as in 0.25,0.75"
        )
    return tuple(float(x) for x in shares)


def _check_sizes(graph: OpGraph, shares: tuple[float, ...]) -> None:
    params = graph.program.params
    largest = max((max(x.shape, default=0) for x in params), default=MOST_PIECES)
    if len(shares) > largest:
        raise PiecesError(
            f"{len(shares)} pieces of {graph.name!r}: its largest dimension has {largest} elements"
        )


def _check_results(graph: OpGraph, cut: OpGraph) -> None:
    """Raises: PiecesError, what was cut computes other numbers for the example inputs."""
    program = graph.program
    tensors = (*program.params, *program.example_tensors)
    if program.is_random or any(x.is_meta for x in tensors):
        return
    outputs = [run_program(x.program, x.program.timing_inputs()) for x in (cut, graph)]
    wrong = difference(*(pytree.tree_leaves(x) for x in outputs))
    if wrong:
        names = ", ".join(list(cut.program.pieces.rules)[:3])
        raise PiecesError(f"{graph.name!r} gives other results in pieces ({names}, ...): {wrong}")
