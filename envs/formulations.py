"""The formulations: how an episode begins, observes, acts and is rewarded, and what reads it.

One table, by name: the names of ``training.formulation`` and of policies' files. A formulation of
yours is a ``Formulation`` in a module, named ``package.module:name``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from gymnasium import spaces

from envs.graphs import KEYS
from envs.lookup import find
from envs.problems import EnvError, ProblemSet
from envs.rules import Rules

Mode = Literal["best_of_k", "refine", "guided_search"]

# What a move is worth shows soon: discounted, and with less chance than where a placement is built.
# With gamma = 1 and an entropy of 0.02 nothing was learned.
_MOVING = {
    "gamma": 0.97,
    "gae_lambda": 0.95,
    "learning_rate": 1e-3,
    "last_learning_rate": 5e-5,
    "entropy": 0.002,
    "last_entropy": 0.0,
}


@dataclass(frozen=True)
class Formulation:
    """One way to see placement as a decision process. Modules are named, and imported when used.

    Attributes:
        name: what it is called; of yours ``package.module:name``.
        env: ``package.module:Class`` of the environment, a ``PlacementEnv``.
        sees: of each key that it observes besides the graph: dimensions, and features of the last.
        network: ``package.module:Class`` of the network: ``Class(config, name)`` with the methods
            ``encode`` and ``evaluate`` of ``agents.encoder.PlacementNet``.
        mode: in which a ``PolicyPlanner`` gets most of a policy: ``best_of_k`` where episodes build
            a placement and evaluate it once, at the end.
        steps: of an episode; None: about as many as there are groups.
        options: what the environment's rules are given besides.
        shared: fields of the network's configuration that they are given, too.
        training: those of ``agents.config.DEFAULTS`` that are others here.

    Raises:
        EnvError: an unknown ``mode``.
    """

    name: str
    env: str
    sees: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    network: str = "agents.encoder:PlacementNet"
    mode: Mode = "best_of_k"
    steps: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            modes = ", ".join(get_args(Mode))
            raise EnvError(
                f"formulation {self.name!r}: mode = {self.mode!r} must be one of {modes}"
            )

    @property
    def builds(self) -> bool:
        """Whether it makes a placement, and evaluates it once it is made."""
        return self.mode == "best_of_k"

    @cached_property
    def rules_of(self) -> Callable[..., Rules]:
        """The rules: ``rules_of(problems, num_envs, **options)``."""
        rules: Callable[..., Rules] = find(self.env, "environment").rules_of
        return rules

    def options_of(self, network: Any) -> dict[str, Any]:
        """What rules are given beside a network that is configured so."""
        return {**self.options, **{name: getattr(network, name) for name in self.shared}}

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


_REFINE = Formulation(
    "refine",
    "envs.refine:RefineDevicePlacementEnv",
    {"pairs": (3, None), "search": (1, None), "mask": (2, None)},
    network="agents.heads:MovingNet",
    mode="refine",
    training=_MOVING,
)
_ALL = (
    Formulation(
        "sequential",
        "envs.sequential:SequentialDevicePlacementEnv",
        {"group": (1, 1), "devices": (2, None), "mask": (1, None)},
    ),
    Formulation(
        "select_place",
        "envs.select_place:SelectPlaceDevicePlacementEnv",
        {"group": (1, None), "devices": (3, None), "mask": (2, None)},
        network="agents.heads:SelectPlaceNet",
    ),
    Formulation(
        "dispatch",
        "envs.dispatch:DispatchEnv",
        {"pairs": (2, 42), "score": (1, None), "mask": (1, None)},
        network="agents.dispatch:DispatchNet",
    ),
    Formulation(
        "group_place",
        "envs.group_place:GroupPlaceDevicePlacementEnv",
        {"cluster": (1, None), "producer": (1, None), "mask": (2, None)},
        network="agents.heads:GroupPlaceNet",
        steps=2,
        shared=("clusters",),
    ),
    _REFINE,
    replace(_REFINE, name="sweep", options={"sweep": True}),
    Formulation(
        "guided_search",
        "envs.guided:GuidedSearchEnv",
        {"moves": (2, 26), "search": (1, 12), "mask": (1, None)},
        network="agents.guided:GuidedNet",
        mode="guided_search",
        training=_MOVING,
    ),
    Formulation(
        "order_search",
        "envs.order_search:OrderSearchEnv",
        {"moves": (2, 20), "search": (1, 10), "mask": (1, None)},
        network="agents.guided:GuidedNet",
        mode="guided_search",
        training=_MOVING,
    ),
    Formulation(
        "one_shot",
        "envs.placement:DevicePlacementEnv",
        network="agents.heads:OneShotNet",
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
