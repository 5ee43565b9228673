"""Planners: one file per method, ``planner(problem) -> Solution``.

A planner is a frozen dataclass whose fields are its hyper-parameters; ``heft`` lives in
``heft.py`` as the class ``Heft``. ``load`` finds it by the name of the file, or finds yours
by ``package.module:Class``; nothing is registered anywhere. The learned ``policy`` is found by
name too.
"""

from __future__ import annotations

# ruff: noqa: F401
from placement.search.planner import (
    Among,
    PlannerError,
    check_least,
    check_shares,
    find,
    load,
    names,
    solve,
    where,
)
