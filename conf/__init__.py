"""Hydra configuration, read as ``pkg://conf``: YAML files here, and what follows from the code.

The groups ``planner`` and ``workload`` have one entry per planner and shipped workload, with the
defaults of the dataclass, or of the function; ``training`` has those of ``TrainConfig``. They are
registered when this package is imported. Files are read, not imported: numba and torch take
seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from placement import planners, workloads

_ROOT = Path(__file__).parents[1]


def _literals(names: Iterable[tuple[str, ast.expr | None]]) -> dict[str, Any]:
    return {name: ast.literal_eval(default) for name, default in names if default is not None}


def _defined(module: str, name: str) -> Any:
    """The class or function of this name in a module, whose file is read."""
    tree = ast.parse((_ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    return next(x for x in tree.body if getattr(x, "name", None) == name)


def _dataclass(module: str, name: str) -> dict[str, Any]:
    """The target and the default of every field that is written as a literal."""
    fields = [x for x in _defined(module, name).body if isinstance(x, ast.AnnAssign)]
    literals = {ast.unparse(x.target): x.value for x in fields if not isinstance(x.value, ast.Call)}
    values = _literals(literals.items())
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return {"_target_": f"{module}.{name}", **values}


def _training() -> dict[str, Any]:
    """The fields of a training; those of all networks are None, which is the default of each."""
    networks = ("agents.encoder", "NetworkConfig"), ("agents.dispatch.network", "DispatchConfig")
    names = [name for where in networks for name in _dataclass(*where)]
    network = dict.fromkeys(name for name in names if name != "_target_")
    own = {"seed": "${seed}", "algorithm_options": {}, "network": network}
    return _dataclass("agents.training.config", "TrainConfig") | own


def _workload(name: str, family: str) -> dict[str, Any]:
    """The target, the name and the default of every argument."""
    args = _defined(f"{workloads.__name__}.{family}", name).args
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
    for name in planners.names():
        keep("planner", name, _dataclass(*planners.where(name).split(":")))
    store.store(name="default", node=_training(), group="training", package="training")
    for name, family in workloads.family_of().items():
        keep("workload", name, _workload(name, family))


def keep(group: str, name: str, node: dict[str, Any], option: str | None = None) -> None:
    """An entry of a group, whose node is called ``name``; ``option``: what the entry is called."""
    ConfigStore.instance().store(
        name=option or name, node=node, group=group, package=f"{group}.{name}", provider="code"
    )


def names(group: str) -> list[str]:
    """The entries of ``planner`` or ``workload``, sorted; without those of the user."""
    entries = (x.removesuffix(".yaml") for x in ConfigStore.instance().list(group))
    return sorted(x for x in entries if ":" not in x)


_store()
