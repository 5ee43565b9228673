"""CP-SAT as a good citizen of a Python program."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any


def solve(solver: Any, model: Any) -> Any:
    """``solver.solve(model)``, ended by Ctrl-C at once.

    OR-Tools would catch the signal itself, and leave the process without Python's handler: the
    next Ctrl-C would kill it on the spot, outputs and clean-up included.

    Raises:
        KeyboardInterrupt: when the search has stopped.
    """
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(solver.solve, model)
        try:
            while not future.done():  # whichever thread the signal comes to
                wait([future], timeout=0.2)
        except KeyboardInterrupt:
            while not future.done():  # a search that is just beginning does not hear it
                solver.stop_search()
                wait([future], timeout=0.1)
            raise
        return future.result()
