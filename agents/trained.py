"""A trained policy: place with it, save it, load it. Does not need stable-baselines3."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.encoder import LAYERS, NetworkConfig, PlacementNet, PolicyError, greedy, sample
from agents.store import GraphStore
from envs.formulations import FORMULATIONS, Formulation, formulation_of
from envs.problem_set import EnvError, Floats, ProblemSet, canonical, find
from envs.rules import Rules
from envs.sequential import SequentialRules
from placement.problem import Placement, Problem, Solution
from placement.tools.files import check_is_file, parse_json, short, write_atomic
from placement.tools.named import meant
from placement.tools.threads import torch_threads

RELEASED = Path(__file__).with_name("released")
FORMAT = 3
MOST_WEIGHT = 1e4
# Fields that files of earlier versions have for every network.
_BEFORE = {f.name for f in fields(NetworkConfig)} | {"scorer", "clusters", "embed"}
Net = Any  # a torch module with ``encode`` and ``evaluate``, as agents.encoder.PlacementNet


@dataclass(frozen=True, eq=False)
class TrainedPolicy:
    """A network, and where it comes from.

    Attributes:
        net: the network.
        card: how it was trained: config, problems, versions, figures. JSON values only.
        best: after training, the best placement ever evaluated of each training problem.
    """

    net: Net
    card: dict[str, Any] = field(default_factory=dict)
    best: tuple[Solution, ...] = ()

    @property
    def formulation(self) -> str:
        """The name of what it does: ``envs.formulations``."""
        name: str = self.net.formulation
        return name

    @property
    def kind(self) -> Formulation:
        """The formulation itself."""
        return formulation_of(self.formulation)

    @property
    def cold(self) -> bool:
        """Whether it was trained without warm starts."""
        return bool(self.card.get("config", {}).get("cold"))

    def place(
        self, problem: Problem, warm: Placement | None = None, num_samples: int = 0, seed: int = 0
    ) -> Placement:
        """int32 ``[1 + num_samples, N]``: the greedy placement, then sampled ones.

        ``warm`` int32 ``[N]`` is the placement to start from, which a policy that was trained
        ``cold`` does not see; what is returned has interchangeable devices in order of first use.
        Nothing is evaluated.

        Raises:
            PolicyError: it is a policy that improves placements, and does not make them.
        """
        self.check_makes_placements()
        if self.cold or "whose" in self.kind.sees:  # dispatch decodes, and learns, without a start
            warm = None
        chosen = ProblemSet((problem,), np.ones(1))
        store = GraphStore([problem], [None if warm is None else canonical(problem, warm)])
        ids = np.zeros(1 + num_samples, np.int64)
        generator = torch.Generator().manual_seed(seed)
        with torch_threads(1):
            choices = decode(self.net, chosen, store, ids, generator)
        return np.stack([canonical(problem, p) for p in chosen.placements(0, choices)])

    def check_makes_placements(self) -> None:
        """Raise ``PolicyError`` for a policy that improves placements, and does not make them."""
        if not self.kind.builds:
            raise PolicyError(
                f"a {self.formulation} policy improves placements and needs evaluations; "
                f"use PolicyPlanner(policy)"
            )

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically: the weights, and JSON text as its metadata.

        Raises:
            FileError: the file cannot be written.
        """
        head = {
            "format": FORMAT,
            "formulation": self.formulation,
            "network": asdict(self.net.config),
            "card": self.card,
        }
        write(path, "policy", head, self.net)

    @classmethod
    def load(cls, path: str | Path, allow: Collection[str] = ()) -> TrainedPolicy:
        """Read a file written by ``save``, or what ships by its name. Executes nothing in it.

        An encoder or a formulation of somebody's own is in the file as its name alone,
        ``package.module:name``. A name that you ``allow`` is imported, and so executed; any other
        is an error.

        Raises:
            PolicyError: missing, truncated, not a policy, of another version, or of a network
                whose weights are not those of the file, or not numbers.
        """
        path = file_of(path)
        try:
            head, weights = read(path, "policy")
            version, formulation = head["format"], head["formulation"]
        except Exception as error:  # safetensors, json and the file system each raise their own
            raise PolicyError(
                f"{path}: not a readable policy ({error}); train one: placement-train"
            ) from error
        if version != FORMAT:
            raise PolicyError(
                f"{path}: a policy of format {version}, this version reads {FORMAT}; "
                f"train again: placement-train"
            )
        named = isinstance(formulation, str)
        if not named or (formulation not in FORMULATIONS and ":" not in formulation):
            raise PolicyError(f"{path}: formulation {formulation!r} is unknown")
        try:
            network = dict(head["network"])
            _check_foreign(path, allow, formulation)
            kind = find(formulation_of(formulation).network, "network")
            for name in _BEFORE - {f.name for f in fields(network_config(kind, None))}:
                network.pop(name, None)
            config = network_config(kind, network)
            _check_foreign(path, allow, getattr(config, "encoder", "sage"))
            net = with_weights(lambda: kind(config, formulation), weights)
            card = dict(head["card"])
            if not isinstance(card.get("config", {}), dict):
                raise ValueError("the card's config is no object")
            return cls(net, card)
        except _ForeignError:
            raise
        except (RuntimeError, TypeError, KeyError, ValueError) as error:
            raise PolicyError(
                f"{path}: the weights do not fit this version's network ({error}); "
                f"train again: placement-train"
            ) from error


def released() -> list[str]:
    """Names of the policies that ship: ``TrainedPolicy.load`` takes them, and ``policy=``."""
    from safetensors import safe_open

    names = []
    for path in sorted(RELEASED.glob("*.safetensors")):
        with safe_open(path, "pt") as file:  # networks of another kind ship too
            if "policy" in (file.metadata() or {}):
                names.append(path.stem)
    return names


def file_of(policy: str | Path) -> Path:
    """The file of a policy: itself, or one that ships, by its name.

    Raises:
        PolicyError: neither a file of that name is here, nor does such a policy ship.
    """
    path, name = Path(policy), str(policy)
    if path.exists() or path.name != name:
        return path
    names = released()
    if path.suffix == ".safetensors" and path.stem not in names:
        return path  # whoever reads it says that it is not there
    name = name.removesuffix(".safetensors")
    if name not in names:
        raise PolicyError(
            f"policy {name!r} is no file, and none that ships{meant(name, names)}; those are "
            f"{', '.join(names)}; or train one: placement-train"
        )
    return RELEASED / f"{name}.safetensors"


def write(path: str | Path, what: str, head: Mapping[str, Any], net: Net) -> None:
    """One safetensors file, atomically: the weights, and ``head`` as its metadata ``what``."""
    from safetensors.torch import save

    weights = {k: v.detach().cpu().contiguous() for k, v in net.state_dict().items()}
    write_atomic(path, save(weights, {what: json.dumps(head)}))


def read(path: str | Path, what: str) -> tuple[Any, dict[str, Tensor]]:
    """JSON of the metadata ``what``, and the weights, of a safetensors file. Executes nothing."""
    from safetensors import safe_open

    check_is_file(path)
    with safe_open(path, "pt") as file:
        head = parse_json((file.metadata() or {})[what], infinite=True)
        return head, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class _ForeignError(PolicyError):
    """The file names code that nobody allowed, or that is not here."""


def _check_foreign(path: str | Path, allow: Collection[str], *names: str | None) -> None:
    for name in names:
        if name is None or name in FORMULATIONS or name in LAYERS:
            continue
        if name not in allow:
            raise _ForeignError(
                f"{path}: this policy needs {name}, which is not ours, and to import it is to run "
                f"it; if you trust it: allow={name} (TrainedPolicy.load(path, allow=[{name!r}]))"
            )
        try:
            find(name, "code")
        except EnvError as error:
            raise _ForeignError(f"{path}: {error}; run it where Python finds it") from error


def with_weights(make: Callable[[], Net], weights: Mapping[str, Tensor]) -> Net:
    """The network that ``make`` returns, with the weights of a file: no others are allocated.

    Raises:
        ValueError: names, shapes or dtypes differ, or a weight is not a number.
    """
    with torch.device("meta"):
        net = make()
    expected = net.state_dict()
    if expected.keys() != weights.keys():
        raise ValueError(f"other layers: {sorted(expected.keys() ^ weights.keys())[:4]}")
    for name, tensor in weights.items():
        like = expected[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, not {like.dtype} "
                f"{list(like.shape)}"
            )
        # Trained ones are of the size of 1; far larger ones overflow in the network.
        if not (tensor.abs() <= MOST_WEIGHT).all():
            raise ValueError(f"{name} has a weight that is no number, or above {MOST_WEIGHT:g}")
    net.load_state_dict(weights, assign=True)
    return net


def make_net(config: Any, formulation: str) -> Net:
    """A new network for a formulation.

    ``config``: its class's ``Config``, or fields of that; None: the defaults.

    Raises:
        PolicyError: the network cannot be imported, or has no such field.
    """
    try:
        kind = find(formulation_of(formulation).network, "network")
    except EnvError as error:
        raise PolicyError(str(error)) from error
    return kind(network_config(kind, config), formulation)


def network_config(kind: Any, config: Any) -> Any:
    """``config`` as the ``Config`` of a class of network; None: its defaults.

    Raises:
        PolicyError: it is the configuration of another network, or has a field that this one lacks.
    """
    of_kind: Any = getattr(kind, "Config", NetworkConfig)
    if isinstance(config, of_kind):
        return config
    if config is not None and not isinstance(config, Mapping):
        raise PolicyError(
            f"network = {short(config)}: {kind.__name__} is configured by {of_kind.__name__}"
        )
    asked = dict(config or {})
    known = [f.name for f in fields(of_kind)]
    for name in asked:
        if name not in known:
            raise PolicyError(
                f"network = {short(asked)}: {kind.__name__} has no {name!r}{meant(name, known)}; "
                f"must be fields of {of_kind.__name__}: {', '.join(known)}"
            )
    return of_kind(**asked)


def untrained_net(config: Any, formulation: str, seed: int = 0) -> Net:
    """A new network whose weights the seed alone decides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_net(config, formulation)


def decode(
    net: Net,
    problems: ProblemSet,
    store: GraphStore,
    ids: NDArray[np.int64],
    generator: torch.Generator | None = None,
) -> NDArray[np.int32]:
    """Choices int32 ``[B, G]`` for problems ``ids [B]``: the first of each is greedy.

    Of a formulation that builds placements; nothing is evaluated. One that places group after
    group runs in one kernel, as passing every group through torch would take most of the time.
    """
    first = np.zeros(len(ids), bool)
    first[np.unique(ids, return_index=True)[1]] = True
    kind = formulation_of(net.formulation)
    rules: Any = kind.rules(problems, len(ids))
    rules.start(np.arange(len(ids)), ids)
    if (
        type(rules) is SequentialRules  # of a subclass what is legal may differ
        and isinstance(net, PlacementNet)
        and _scores_as_ours(net)
    ):
        seed = 0 if generator is None else generator.initial_seed()
        pair, warm = store.pair.numpy(), store.warm.numpy()
        rules.construct(net.weights(store), pair, warm, first, np.random.default_rng(seed))
        return rules.choices
    done = np.zeros(len(ids), bool)
    for taken in actions(net, store, rules, torch.from_numpy(first), generator):
        done = rules.decide(taken)
        if done.all():
            break
    return rules.choices


def _scores_as_ours(net: PlacementNet) -> bool:
    """Whether the kernel computes what this network does: one of another class may differ."""
    kind = type(net)
    same = kind.evaluate is PlacementNet.evaluate
    return same and kind.step_logits is PlacementNet.step_logits


def walk(
    net: Net,
    store: GraphStore,
    rules: Rules,
    generator: torch.Generator,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[NDArray[np.int32], Floats]:
    """One episode of each problem: the answers int32 ``[P, G]`` and their seconds ``[P]``.

    For rules that evaluate as they go; actions are sampled. It ends early where ``go_on()``, asked
    after every step, says so.
    """
    ids = np.arange(len(rules.problems.problems))
    rules.start(ids, ids)
    choices, value_s = rules.choices.copy(), rules.value_s.copy()
    left = np.ones(len(ids), bool)
    for taken in actions(net, store, rules, torch.tensor(False), generator):
        done = rules.act(taken)[1] & left
        choices[done], value_s[done] = rules.choices[done], rules.value_s[done]
        left &= ~done
        if not (left.any() and go_on()):
            break
    return choices, value_s


def actions(
    net: Net,
    store: GraphStore,
    rules: Rules,
    best: Tensor,
    generator: torch.Generator | None,
) -> Iterator[NDArray[np.int64]]:
    """What the policy does next, again and again: greedily where ``best``, otherwise sampled."""
    with torch.no_grad():
        every, row = torch.arange(len(store)), torch.from_numpy(rules.ids)
        encoded: Any = net.encode(store, every)
        while True:
            obs = {k: torch.from_numpy(v) for k, v in rules.observe().items()}
            logits = net.evaluate(store, every, encoded, row, obs)[0]
            which = best.reshape(-1, *[1] * (logits.dim() - 2))
            yield torch.where(which, greedy(logits), sample(logits, generator)).numpy()
