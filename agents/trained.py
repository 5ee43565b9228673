"""A trained policy: place with it, save it, load it. Does not need stable-baselines3."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from agents.encoder import NetworkConfig, PlacementNet, greedy, sample
from agents.store import GraphStore
from envs.base import Rules
from envs.placement import OneShotRules
from envs.problems import ProblemSet, canonical
from envs.sequential import SequentialRules
from placement.files import write_atomic
from placement.problem import Placement, Problem, Solution

Formulation = Literal["one_shot", "sequential"]
FORMAT = 1


class PolicyError(ValueError):
    """A policy file cannot be read, or is of another version; the message says what to do."""


@dataclass(frozen=True, eq=False)
class TrainedPolicy:
    """A network with the decoding it was trained for.

    Attributes:
        net: the network.
        formulation: ``sequential`` (one group per step, sees finish times) or ``one_shot``.
        card: how it was trained: config, problems, versions, figures. JSON values only.
        best: after training, the best placement ever evaluated of each training problem.
    """

    net: PlacementNet
    formulation: Formulation = "sequential"
    card: dict[str, Any] = field(default_factory=dict)
    best: tuple[Solution, ...] = ()

    def place(
        self, problem: Problem, warm: Placement | None = None, num_samples: int = 0, seed: int = 0
    ) -> Placement:
        """int32 ``[1 + num_samples, N]``: the greedy placement, then sampled ones.

        ``warm`` int32 ``[N]`` is the placement to start from; what is returned has
        interchangeable devices in order of first use. Nothing is evaluated.
        """
        chosen = ProblemSet((problem,), np.ones(1))
        store = GraphStore([problem], [None if warm is None else canonical(problem, warm)])
        ids = np.zeros(1 + num_samples, np.int64)
        generator = torch.Generator().manual_seed(seed)
        with one_thread():
            choices = decode(self.net, self.formulation, chosen, store, ids, generator)
        return chosen.placements(0, choices)

    def save(self, path: str | Path) -> None:
        """Write one ``.npz`` file, atomically: the weights, and JSON text. No pickle.

        Raises:
            FileError: the file cannot be written.
        """
        head = {
            "format": FORMAT,
            "formulation": self.formulation,
            "network": asdict(self.net.config),
            "card": self.card,
        }
        weights = {k: v.detach().cpu().numpy() for k, v in self.net.state_dict().items()}
        file = io.BytesIO()
        np.savez_compressed(file, head=np.array(json.dumps(head)), **weights)
        write_atomic(path, file.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> TrainedPolicy:
        """Read a file written by ``save``. Executes nothing that is in it.

        Raises:
            PolicyError: missing, truncated, not a policy, or of another version.
        """
        try:
            with np.load(path, allow_pickle=False) as data:
                head = json.loads(str(data["head"]))
                weights = {k: torch.from_numpy(data[k]) for k in data.files if k != "head"}
            version = head["format"]
        except Exception as error:  # zip, json and numpy each raise their own kinds
            raise PolicyError(
                f"{path}: not a readable policy ({error}); train one: placement-train"
            ) from error
        if version != FORMAT:
            raise PolicyError(
                f"{path}: a policy of format {version}, this version reads {FORMAT}; "
                f"train again: placement-train"
            )
        if head.get("formulation") not in get_args(Formulation):
            raise PolicyError(f"{path}: formulation {head.get('formulation')!r} is unknown")
        try:
            net = PlacementNet(NetworkConfig(**head["network"]))
            net.load_state_dict(weights)
            return cls(net, head["formulation"], head["card"])
        except (RuntimeError, TypeError, KeyError) as error:
            raise PolicyError(
                f"{path}: the weights do not fit this version's network ({error}); "
                f"train again: placement-train"
            ) from error


def make_rules(formulation: Formulation, problems: ProblemSet, num_envs: int) -> Rules:
    """The rules of the environment that a formulation acts in."""
    if formulation == "one_shot":
        return OneShotRules(problems, num_envs)
    if formulation == "sequential":
        return SequentialRules(problems, num_envs)
    raise PolicyError(f"formulation {formulation!r} is unknown; use 'sequential' or 'one_shot'")


def decode(
    net: PlacementNet,
    formulation: Formulation,
    problems: ProblemSet,
    store: GraphStore,
    ids: NDArray[np.int64],
    generator: torch.Generator | None = None,
) -> NDArray[np.int32]:
    """Choices int32 ``[B, G]`` for problems ``ids [B]``: the first of each is greedy."""
    first = np.zeros(len(ids), bool)
    first[np.unique(ids, return_index=True)[1]] = True
    best = torch.from_numpy(first)
    with torch.no_grad():
        every = torch.arange(len(store))
        encoded = net.encode(store, every)
        row = torch.from_numpy(ids)
        if formulation == "one_shot":
            logits = net.all_logits(store, every, encoded)[row]
            chosen = torch.where(best[:, None], greedy(logits), sample(logits, generator))
            return chosen.numpy().astype(np.int32)
        rules = SequentialRules(problems, len(ids))
        rules.start(np.arange(len(ids)), ids)
        done = np.zeros(len(ids), bool)
        while not done.all():
            obs = {k: torch.from_numpy(v) for k, v in rules.observe().items()}
            group, legal = obs["group"].squeeze(1), obs["mask"].bool()
            logits = net.step_logits(store, every, encoded, row, group, obs["devices"], legal)
            actions = torch.where(best, greedy(logits), sample(logits, generator))
            done = rules.decide(actions.numpy())
    return rules.choices


@contextmanager
def one_thread() -> Iterator[None]:
    """These networks are small: more threads only wait for each other, and change rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
