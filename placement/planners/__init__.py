"""Planners: one file per method, ``planner(problem) -> Solution``.

A planner is a frozen dataclass whose fields are its hyper-parameters; ``heft`` lives in
``heft.py`` as the class ``Heft``. ``load`` finds it by the name of the file, or finds yours
by ``package.module:Class``; nothing is registered anywhere. The learned ``policy`` is found by
name too.
"""

from __future__ import annotations

from placement.search.planner import (
    Among as Among,
)
from placement.search.planner import (
    PlannerError as PlannerError,
)
from placement.search.planner import (
    check_least as check_least,
)
from placement.search.planner import (
    check_shares as check_shares,
)
from placement.search.planner import (
    find as find,
)
from placement.search.planner import (
    load as load,
)
from placement.search.planner import (
    names as names,
)
from placement.search.planner import (
    solve as solve,
)
from placement.search.planner import (
    where as where,
)
