"""Ctrl-C and CP-SAT."""

import random
import signal
import threading

import pytest

from placement.tools.cpsat import solve

cp_model = pytest.importorskip("ortools.sat.python.cp_model")


def knapsack(num_items: int):
    """A market split: 4 equations of 0/1 variables, out of reach for branch and bound."""
    model = cp_model.CpModel()
    rng = random.Random(0)
    x = [model.new_bool_var(f"x{i}") for i in range(num_items)]
    miss = []
    for _ in range(4):
        row = [rng.randrange(100) for _ in x]
        over, under = model.new_int_var(0, 10**4, ""), model.new_int_var(0, 10**4, "")
        model.add(sum(a * b for a, b in zip(row, x, strict=True)) - over + under == sum(row) // 2)
        miss += [over, under]
    model.minimize(sum(miss))
    return model


def test_ctrl_c_ends_the_search_and_still_works_afterwards():
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = 60
    solver.parameters.num_workers = 1
    model = knapsack(40)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
        solve(solver, model)
    # Without Ctrl-C it ends at its limit.
    assert solver.wall_time < 30
    assert solve(cp_model.CpSolver(), knapsack(3)) == cp_model.OPTIMAL
    with pytest.raises(KeyboardInterrupt):  # Python's handler is still there
        signal.raise_signal(signal.SIGINT)
