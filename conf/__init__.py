"""Hydra configuration, read as ``pkg://conf``: YAML files here, and the fields of a training.

The group ``training`` has the fields of ``agents.training.TrainConfig`` with their defaults. They
are registered when this package is imported; the file is read, not imported: torch takes seconds.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

_ROOT = Path(__file__).parents[1]


def _fields(module: str, name: str) -> dict[str, Any]:
    """The default of every field of a dataclass that is written as a literal."""
    tree = ast.parse((_ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    body = next(x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == name).body
    written = ((ast.unparse(x.target), x.value) for x in body if isinstance(x, ast.AnnAssign))
    return {n: ast.literal_eval(v) for n, v in written if v and not isinstance(v, ast.Call)}


def _training() -> dict[str, Any]:
    """The fields of a training; those of all networks are None, which is the default of each."""
    networks = ("agents.encoder", "NetworkConfig"), ("agents.dispatch.network", "DispatchConfig")
    network = dict.fromkeys(name for where in networks for name in _fields(*where))
    own = {"seed": "${seed}", "algorithm_options": {}, "network": network}
    target = {"_target_": "agents.training.TrainConfig"}
    return target | _fields("agents.training.config", "TrainConfig") | own


ConfigStore.instance().store(name="default", node=_training(), group="training", package="training")
