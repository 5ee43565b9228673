"""Rows of a table that are added up, on a processor."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from placement.tools.jit import kernel


@kernel
def add_rows(table, wanted, ids, begins, mean, out):
    """Adds to ``out [bags, dim]`` those rows of each bag that are ``wanted [rows]``.

    ``begins [bags + 1]``: of the bags among ``ids``.
    """
    dim = table.shape[1]
    for bag in range(out.shape[0]):
        for i in range(begins[bag], begins[bag + 1]):
            row = ids[i]
            if wanted[row]:
                for d in range(dim):
                    out[bag, d] += table[row, d]
        if mean:
            count = max(1, begins[bag + 1] - begins[bag])
            for d in range(dim):
                out[bag, d] /= count
