"""Rows of a table that are added up, on a processor."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from placement.tools.jit import kernel


@kernel
def add_rows(table, at, ids, begins, mean, out):
    """Adds to ``out [bags, dim]`` the rows of each bag; the last row of the table is left out.

    ``at [rows]``: where each row is in the table. ``begins [bags + 1]``: of the bags among ``ids``.
    """
    none, dim = table.shape[0] - 1, table.shape[1]
    for bag in range(out.shape[0]):
        for i in range(begins[bag], begins[bag + 1]):
            row = at[ids[i]]
            if row != none:
                for d in range(dim):
                    out[bag, d] += table[row, d]
        if mean:
            count = max(1, begins[bag + 1] - begins[bag])
            for d in range(dim):
                out[bag, d] /= count
