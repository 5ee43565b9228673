"""Which of many ids are wanted, on a processor."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from placement.tools.jit import kernel


@kernel
def keep(wanted, ids, begins, kept, kept_begins):
    """``kept``: those of the ids that are ``wanted [rows]``, in their order.

    ``begins``, ``kept_begins [bags + 1]``: of the bags among the ids, and among those kept.
    """
    count = 0
    for bag in range(len(begins) - 1):
        kept_begins[bag] = count
        for i in range(begins[bag], begins[bag + 1]):
            kept[count] = ids[i]
            count += wanted[ids[i]]
    kept_begins[len(begins) - 1] = count
