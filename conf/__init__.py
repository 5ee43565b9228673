"""Hydra configuration, read as ``pkg://conf``: YAML files here, and what follows from the code.

The groups ``planner`` and ``workload`` have one entry per planner and shipped workload, with the
defaults of the dataclass, or of the function. They are registered when this package is imported.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from placement import planners, workloads

POLICY = "policy"  # its defaults are in planner/policy.yaml: to import the planner takes seconds


def _planner(name: str) -> dict[str, Any]:
    """The target and the default of every field."""
    kind = planners.find(name)
    defaults = {f.name: f.default for f in fields(kind) if f.init}
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in defaults.items()}
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **values}


def _workload(name: str, function: ast.FunctionDef) -> dict[str, Any]:
    """The target, the name and the default of every argument; the model's file is only read."""
    args = function.args
    arguments, defaults = [*args.args, *args.kwonlyargs], [*args.defaults, *args.kw_defaults]
    values = {
        argument.arg: ast.literal_eval(default)
        for argument, default in zip(arguments, defaults, strict=True)
        if default is not None
    }
    return {"_target_": "placement.workloads.load", "spec": name, **values}


def _store() -> None:
    store = ConfigStore.instance()

    def keep(group: str, name: str, node: dict[str, Any]) -> None:
        store.store(name=name, node=node, group=group, package=f"{group}.{name}", provider="code")

    for name in planners.names():
        keep("planner", name, _planner(name))
    for name, family in workloads.family_of().items():
        text = (Path(workloads.__file__).parent / f"{family}.py").read_text(encoding="utf-8")
        functions = {x.name: x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)}
        keep("workload", name, _workload(name, functions[name]))


def names(group: str) -> list[str]:
    """The entries of ``planner`` or ``workload``, sorted."""
    known = [x.removesuffix(".yaml") for x in ConfigStore.instance().list(group)]
    return sorted([*known, POLICY] if group == "planner" else known)


_store()
