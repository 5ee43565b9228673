"""The formulations: how an episode begins, observes, acts and is rewarded, and what reads it.

One table, by name: the names of ``training.formulation`` and of policies' files. A formulation of
yours is a ``Formulation`` in a module, named ``package.module:name``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gymnasium import spaces

from envs.graphs import KEYS
from envs.problem_set import EnvError, ProblemSet, find
from envs.rules import Rules


@dataclass(frozen=True)
class Formulation:
    """One way to see placement as a decision process. Modules are named, and imported when used.

    Attributes:
        name: what it is called; of yours ``package.module:name``.
        env: ``package.module:Class`` of the environment, a ``PlacementEnv``.
        sees: of each key that it observes besides the graph: dimensions, and features of the last.
        network: ``package.module:Class`` of the network: ``Class(config, name)`` with the methods
            ``encode`` and ``evaluate`` of ``agents.encoder.PlacementNet``.
        builds: whether an episode builds a placement, which is evaluated at the end; otherwise it
            improves the one that it begins with, and evaluates every step.
        steps: of an episode; None: about as many as there are groups.
        options: what the environment's rules are given besides.
    """

    name: str
    env: str
    sees: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    network: str = "agents.encoder:PlacementNet"
    builds: bool = True
    steps: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def rules_of(self) -> Callable[..., Rules]:
        """The rules: ``rules_of(problems, num_envs, **options)``."""
        rules: Callable[..., Rules] = find(self.env, "environment").rules_of
        return rules

    def rules(self, problems: ProblemSet, num_envs: int, **options: Any) -> Rules:
        """Rules of ``num_envs`` episodes."""
        return self.rules_of(problems, num_envs, **{**self.options, **options})

    def observed_in(self, space: spaces.Dict) -> bool:
        """Whether ``space`` is of this formulation's observations."""
        for key, (dimensions, features) in self.sees.items():
            shape = space[key].shape if key in space.spaces else None
            if shape is None or len(shape) != dimensions:
                return False
            if features is not None and shape[-1] != features:
                return False
        return True


_ALL = (
    Formulation(
        "sequential",
        "envs.sequential.env:SequentialDevicePlacementEnv",
        {"group": (1, 1), "devices": (2, None), "mask": (1, None)},
    ),
    Formulation(
        "dispatch",
        "envs.dispatch.env:DispatchEnv",
        {"pairs": (2, 42), "score": (1, None), "mask": (1, None), "whose": (2, 2)},
        network="agents.dispatch.network:DispatchNet",
    ),
    Formulation(
        "one_shot",
        "envs.one_shot:DevicePlacementEnv",
        network="agents.encoder:OneShotNet",
        steps=1,
    ),
)
FORMULATIONS: dict[str, Formulation] = {f.name: f for f in _ALL}


def formulation_of(name: str) -> Formulation:
    """The formulation ``name`` of the table, or ``package.module:name``, which is imported.

    Raises:
        EnvError: there is none of that name.
    """
    if name in FORMULATIONS:
        return FORMULATIONS[name]
    formulation = find(name, "formulation")
    if not isinstance(formulation, Formulation):
        raise EnvError(f"formulation {name!r} must be an envs.formulations.Formulation")
    return formulation


def formulation_in(space: spaces.Dict) -> Formulation:
    """The one whose observations are of this space; of two that see the same, the first.

    Raises:
        EnvError: it is of none of the table.
    """
    others = space.spaces.keys() - {"problem", *KEYS}
    for known in _ALL:
        if known.observed_in(space) and (known.sees or not others):
            return known
    raise EnvError(
        f"observations with {', '.join(sorted(others))} are of none of {', '.join(FORMULATIONS)}: "
        f"name yours, policy_kwargs={{'formulation': 'package.module:name'}}"
    )
