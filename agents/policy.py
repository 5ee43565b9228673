"""The network as policies for stock stable-baselines3 PPO.

``log_prob`` and ``entropy`` of a whole placement are the *mean* over its groups, not the sum.
PPO's ratio then is the geometric mean of the groups' ratios: with the sum, one update moves
the ratio of a 300-group placement by ``exp(300 x)``, every sample is clipped and nothing is
learned. It only scales the gradient by 1 / groups, so stock PPO needs no change.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict
from inspect import signature
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor

from agents.encoder import Observations, PolicyError, greedy, sample
from agents.store import Graphs, GraphStore, ObservedGraphs
from agents.trained import Net, TrainedPolicy, make_net
from envs.formulations import formulation_in, formulation_of
from placement.tools.files import short


class _Remembered(NamedTuple):
    """Graphs that one state of the network has encoded."""

    version: int
    graphs: Graphs
    encoded: Any


class PlacementPolicy(BasePolicy):
    """The policy of every formulation: ``PPO(PlacementPolicy, env)``.

    What is observed and decided is the network's business: ``net.evaluate``. The graphs are those
    of the observation (``observe="graph"``), or, without, those of ``store``.

    Args:
        observation_space, action_space, lr_schedule: as stable-baselines3 gives them.
        formulation: its name, or ``package.module:name``; None: the one that observes this space.
        network: kind and size of a new network: its configuration, or fields of that.
        net: a network instead; it is trained in place.
        store: the graphs that ``problem`` in the observations counts.
        optimizer_class, optimizer_kwargs: as of stable-baselines3's policies.
        others: the other arguments of stable-baselines3's policies, at their defaults.

    Raises:
        PolicyError: no environment of ``envs``, or not of this formulation; neither graphs in the
            observation nor a store; an argument for networks of another kind (``net_arch``, ...);
            or, later, an algorithm that needs another policy, or a network that answers nan.
    """

    net: Net

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        lr_schedule: Schedule,
        *,
        formulation: str | None = None,
        network: Any = None,
        net: Net | None = None,
        store: GraphStore | None = None,
        optimizer_class: Any = torch.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        _check_others(others)
        shown = getattr(observation_space, "spaces", {})
        if "problem" not in shown:
            raise PolicyError(
                "PlacementPolicy is for the environments of envs (docs/environments.md); for "
                "others use the policies of stable-baselines3"
            )
        if store is None and "nodes" not in shown:
            raise PolicyError(
                "the environment shows no graph: make it with observe='graph', or give the policy "
                "the graphs: policy_kwargs={'store': GraphStore(problems)}"
            )
        if optimizer_kwargs is None:
            optimizer_kwargs = {"eps": 1e-5} if optimizer_class is torch.optim.Adam else {}
        super().__init__(
            observation_space,
            action_space,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
        )
        if net is None:
            net = make_net(network, formulation or formulation_in(observation_space).name)
        elif not isinstance(net, torch.nn.Module):
            raise PolicyError(f"net = {short(net)} is no network: TrainedPolicy.load(FILE).net is")
        if not formulation_of(str(net.formulation)).observed_in(observation_space):
            raise PolicyError(
                f"a {net.formulation} network does not read what this environment shows "
                f"({', '.join(shown)}): leave formulation out, or train another one"
            )
        self.net = net
        self.store = store
        choices = getattr(action_space, "nvec", None)  # without: one choice, Discrete
        self._choices = (int(action_space.n),) if choices is None else (len(choices), choices[0])  # type: ignore[attr-defined]
        self.optimizer = optimizer_class(net.parameters(), lr=lr_schedule(1), **optimizer_kwargs)
        self._weights = tuple(net.parameters())  # walking the modules takes longer than a step
        self._last: _Remembered | None = None

    def trained(self, **card: Any) -> TrainedPolicy:
        """What plans: ``agent.policy.trained().save("policy.safetensors")``.

        ``card``: how it was trained, JSON values. Graphs in observations have no warm starts, so
        the planner will show it none.
        """
        config = {"cold": self.store is None or not bool(self.store.warm.any())}
        return TrainedPolicy(deepcopy(self.net).cpu(), {"config": config, **card})

    def __getattr__(self, name: str) -> Any:
        if name in ("q_net", "quantile_net", "get_distribution"):  # DQN, QRDQN, TRPO
            raise PolicyError(
                f"this algorithm needs a policy with {name}, which PlacementPolicy does not have: "
                f"it is for PPO and A2C; for others use MultiInputPolicy"
            )
        return super().__getattr__(name)

    def forward(self, obs: Observations, deterministic: bool = False) -> Any:
        """Actions, values float32 ``[B]`` and log-probabilities float32 ``[B]``."""
        logits, values, real = self._evaluate(obs)
        actions = greedy(logits) if deterministic else sample(logits)
        return actions, values, _mean_log_prob(logits, actions, real)

    def evaluate_actions(self, obs: Observations, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values, log-probabilities and entropies, each float32 ``[B]``."""
        logits, values, real = self._evaluate(obs)
        log = torch.log_softmax(logits, dim=-1)
        entropy = -(log.exp() * log).sum(dim=-1)
        return values, _mean_log_prob(logits, actions.long(), real), _mean(entropy, real)

    def predict_values(self, obs: Observations) -> Tensor:
        """float32 ``[B]``."""
        return self._evaluate(obs)[1]

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        logits = self._evaluate(observation)[0]
        return greedy(logits) if deterministic else sample(logits)

    def _evaluate(self, obs: Observations) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[B, ..., A]``, values ``[B]``, and which groups are real (None: all)."""
        number = obs["sizes"] if self.store is None else obs["problem"]
        if not torch.equal(number, number.long().to(number.dtype)):
            raise PolicyError(
                "a wrapper changes observations, which need no normalising: "
                "VecNormalize(env, norm_obs=False)"
            )
        if self.store is not None and number.max() >= len(self.store):
            raise PolicyError(
                f"the environment has a problem {int(number.max())}, and the store "
                f"{len(self.store)} graphs: give it those of the environment, GraphStore(problems)"
            )
        graphs, ids, encoded, row = self._encode(obs)
        answer: Any = self.net.evaluate(graphs, ids, encoded, row, obs)  # type: ignore[arg-type]
        if answer[0].shape[1:] != self._choices:
            raise PolicyError(
                f"{type(self.net).__name__}.evaluate gives logits {list(answer[0].shape)} in "
                f"{self.action_space}: they must be [B, {', '.join(map(str, self._choices))}]"
            )
        if not torch.isfinite(answer[0].sum() + answer[1].sum()):  # argmax would take device 0
            raise PolicyError(
                "the network's answers are no finite numbers: the learning rate is too high "
                "(training.learning_rate), or an encoder of yours divides by 0"
            )
        return answer

    def _encode(self, obs: Observations) -> tuple[Graphs, Tensor, Any, Tensor]:
        """Each distinct graph encoded once: their numbers ``[U]``, and ``[B]`` rows among them.

        While collecting (no gradients) graphs are encoded once per state of the network.
        """
        if self.store is None:
            graphs: Graphs = ObservedGraphs(obs)
            row: Tensor = graphs.row  # type: ignore[attr-defined]
        else:
            graphs = self.store = self.store.to(self._weights[0].device)
            row = obs["problem"].long().squeeze(1)
        if torch.is_grad_enabled():
            ids, row = torch.unique(row, return_inverse=True)
            return graphs, ids, self.net.encode(graphs, ids), row
        ids = torch.arange(len(graphs), device=row.device)
        version, last = sum(p._version for p in self._weights), self._last  # grows with updates
        if last is None or last.version != version or not last.graphs.same(graphs):
            self._last = last = _Remembered(version, graphs, self.net.encode(graphs, ids))
        return graphs, ids, last.encoded, row

    def _get_constructor_parameters(self) -> dict[str, Any]:
        """What ``policy.save`` writes beside the weights."""
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,
            "formulation": self.net.formulation,
            "network": asdict(self.net.config),
            "store": self.store,
            "optimizer_class": self.optimizer_class,
            "optimizer_kwargs": self.optimizer_kwargs,
        }


def _check_others(others: dict[str, Any]) -> None:
    """Raises: PolicyError, an argument that says something to stable-baselines3's networks."""
    known = signature(ActorCriticPolicy.__init__).parameters
    for name, value in others.items():
        if name not in known or value != known[name].default:
            raise PolicyError(
                f"{name} = {value!r} is not for PlacementPolicy; its network is configured by "
                f"policy_kwargs={{'network': {{'encoder': 'sage', 'hidden': 64, 'layers': 3}}}}"
            )


def _mean_log_prob(logits: Tensor, actions: Tensor, real: Tensor | None) -> Tensor:
    log = torch.log_softmax(logits, dim=-1)
    return _mean(log.gather(-1, actions.unsqueeze(-1)).squeeze(-1), real)


def _mean(x: Tensor, real: Tensor | None) -> Tensor:
    return x if real is None else (x * real).sum(dim=-1) / real.sum(dim=-1)
