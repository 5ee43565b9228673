"""Hydra configuration, read as ``pkg://conf``: YAML files here, and what follows from the code.

The groups ``planner`` and ``workload`` have one entry per planner and shipped workload, with the
defaults of the dataclass, or of the function. They are registered when this package is imported.
Files of planners and models are read, not imported: numba and torch take seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore

from placement import planners, workloads

POLICY = "policy"  # its defaults are in planner/policy.yaml: to import the planner takes seconds


def _literals(names: Iterable[tuple[str, ast.expr | None]]) -> dict[str, Any]:
    return {name: ast.literal_eval(default) for name, default in names if default is not None}


def _defined(package: ModuleType, file: str, name: str) -> Any:
    """The class or function of this name in a file of a package, which is read, not imported."""
    (folder,) = package.__path__
    tree = ast.parse((Path(folder) / f"{file}.py").read_text(encoding="utf-8"))
    return next(x for x in tree.body if getattr(x, "name", None) == name)


def _planner(name: str) -> dict[str, Any]:
    """The target and the default of every field."""
    kind = name.title().replace("_", "")
    body = _defined(planners, name, kind).body
    fields = [(ast.unparse(x.target), x.value) for x in body if isinstance(x, ast.AnnAssign)]
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in _literals(fields).items()}
    return {"_target_": f"{planners.__name__}.{name}.{kind}", **values}


def _workload(name: str, family: str) -> dict[str, Any]:
    """The target, the name and the default of every argument."""
    args = _defined(workloads, family, name).args
    defaults = zip(
        [x.arg for x in (*args.args, *args.kwonlyargs)],
        [*args.defaults, *args.kw_defaults],
        strict=True,
    )
    return {"_target_": "placement.workloads.load", "spec": name, **_literals(defaults)}


def _store() -> None:
    store = ConfigStore.instance()
    # Hydra copies its list of sources, this store in each, for every group that a help page names:
    # 90 times, a second. The store is the process's only one, and gives out copies of its nodes.
    vars(store)["__deepcopy__"] = lambda memo: store

    def keep(group: str, name: str, node: dict[str, Any]) -> None:
        store.store(name=name, node=node, group=group, package=f"{group}.{name}", provider="code")

    for name in planners.names():
        keep("planner", name, _planner(name))
    for name, family in workloads.family_of().items():
        keep("workload", name, _workload(name, family))


def names(group: str) -> list[str]:
    """The entries of ``planner`` or ``workload``, sorted."""
    known = [x.removesuffix(".yaml") for x in ConfigStore.instance().list(group)]
    return sorted([*known, POLICY] if group == "planner" else known)


_store()
