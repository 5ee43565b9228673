"""Operators cut into pieces, which planners place like any others."""
from placement.pieces.split import Pieces, PiecesError, cut_graph
