"""HDP (Mirhoseini et al., ICLR 2018): a grouper assigns every operator to a cluster.

A placer with attention over the clusters gives each a device. How it differs from the paper:
docs/published_methods.md

    python examples/published/run.py hdp
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from agents.encoder import ILLEGAL, Attention, Encoded, NetworkConfig, Observations, PlacementNet
from agents.store import Graphs
from agents.training import TrainConfig
from envs.base import PlacementEnv
from envs.features import traffic_of
from envs.formulations import Formulation
from envs.problem_set import MAX_ID, ProblemSet, group_order
from envs.rules import BuildingRules, Numbers, Observation, Rng, id_space
from placement.problem import Problem

CLUSTERS = 32


class ClusterRules(BuildingRules):
    """``B`` episodes of two steps; see ``ClusterEnv``."""

    def __init__(self, problems: ProblemSet, num_envs: int, clusters: int = CLUSTERS) -> None:
        super().__init__(problems, num_envs)
        groups, devices = problems.max_groups, problems.max_devices
        self._labels = min(clusters, groups) or 2  # choices of a group in the first step
        self._joins = clusters == 0
        self._order = [group_order(p) for p in problems.problems]
        producers = [heaviest_producer(p) for p in problems.problems]
        self._producer = np.full((len(producers), groups), -1, np.int64)
        for i, row in enumerate(producers):
            self._producer[i, : len(row)] = row
        self._cluster = np.full((num_envs, groups), -1, np.int64)
        self._width = max(self._labels, devices)
        self.observation_space = spaces.Dict(
            {
                "problem": id_space(MAX_ID),
                "cluster": spaces.Box(-1, MAX_ID, (groups,), np.int64),
                "producer": spaces.Box(-1, MAX_ID, (groups,), np.int64),
                "mask": spaces.Box(0, 1, (groups, self._width), np.int8),
            }
        )
        self.action_space = spaces.MultiDiscrete([self._width] * groups)

    def start(self, rows: Numbers, ids: Numbers, rng: Rng | None = None) -> None:
        self.ids[rows] = ids
        self._cluster[rows] = self.choices[rows] = -1

    def observe(self) -> Observation:
        return {
            "problem": self.ids[:, None].copy(),
            "cluster": self._cluster.copy(),
            "producer": self._producer[self.ids],
            "mask": self.masks().reshape(*self.choices.shape, -1).astype(np.int8),
        }

    def masks(self) -> NDArray[np.bool_]:
        mask = np.zeros((*self.choices.shape, self._width), bool)
        for b, p in enumerate(self.ids.tolist()):
            groups = int(self.problems.num_groups[p])
            legal = self.problems.legal[p, :groups]
            if self._cluster[b, 0] >= 0:
                np.logical_or.at(mask[b, :, : legal.shape[1]], self._cluster[b, :groups], legal)
            elif self._joins:
                mask[b, :groups, 1] = self._producer[p, :groups] >= 0
                mask[b, :groups, 0] = True
            else:
                mask[b, :groups, : self._labels] = True
        mask[~mask.any(axis=2), 0] = True  # nothing to decide
        return mask.reshape(len(self.ids), -1)

    def decide(self, actions: NDArray[Any]) -> NDArray[np.bool_]:
        taken = np.clip(actions.astype(np.int64), 0, self._width - 1)
        done = self._cluster[:, 0] >= 0
        for b, p in enumerate(self.ids.tolist()):
            order = self._order[p]
            groups = len(order)
            if not done[b]:
                self._cluster[b] = 0
                self._cluster[b, :groups] = np.minimum(taken[b, :groups], self._labels - 1)
                if self._joins:
                    self._cluster[b, :groups] = np.arange(groups)
                    for g in order[taken[b, order] == 1].tolist():
                        if self._producer[p, g] >= 0:
                            self._cluster[b, g] = self._cluster[b, self._producer[p, g]]
                continue
            choice = np.minimum(taken[b, self._cluster[b, :groups]], self.problems.max_devices - 1)
            able = self.problems.legal[p, np.arange(groups), choice]
            seconds = self.problems.problems[p].group_compute_s
            self.choices[b, :groups] = np.where(able, choice, seconds.argmin(axis=1))
        return done


def heaviest_producer(problem: Problem) -> NDArray[np.int64]:
    """int64 ``[G]``: of the groups before it by priority that feed a group, the one that sends
    most (mean transfer seconds); -1 = none does.
    """
    groups, traffic = problem.graph.num_groups, traffic_of(problem)
    position = np.empty(groups, np.int64)
    position[group_order(problem)] = np.arange(groups)
    seconds = np.bincount(traffic.which, traffic.move_s, len(traffic.edges))
    a, b = traffic.edges[np.argsort(seconds, kind="stable")].T
    before = position[a] < position[b]
    producer = np.full(groups, -1, np.int64)
    producer[b[before]] = a[before]  # the last that is written is the heaviest
    return producer


class ClusterEnv(PlacementEnv):
    """Form clusters of colocation groups, then give each cluster a device.

    With ``clusters`` every group is assigned to one of so many clusters; with 0, every group joins
    the cluster of the producer that sends it most, or begins one of its own, so that clusters are
    connected and their number follows (``hsdag``).

    **Observation** ``Dict``, padded to ``G`` groups; ``A`` is the larger of the devices and the
    choices of the first step (``clusters``, or 2):

    * ``problem`` int64 ``[1]``: which of ``problems`` this is.
    * ``cluster`` int64 ``[G]``: the cluster of each group, 0..G-1; before the first step -1.
    * ``producer`` int64 ``[G]``: ``heaviest_producer``.
    * ``mask`` int8 ``[G, A]``: 1 = legal in this step; where there is nothing to decide, 0 alone.

    **Action** ``MultiDiscrete([A] * G)``. First step: of each group its cluster, or 1 = join the
    producer's and 0 = begin one (numbered as the group). Second step: of each *cluster* its
    device, legal if any of its groups can run there; a group that cannot runs where it is fastest.

    **Reward** float: 0, then ``log(reference_s / value_s)``, at least -4; -5 where the placement
    cannot run.

    **Termination**: after two steps. Never truncated. Discount with gamma = 1.

    ``info`` of the last step has ``problem`` (int), ``value_s`` (float, inf if it cannot run) and
    ``placement`` (``N`` numbers).

    Arguments are those of ``PlacementEnv``, and ``clusters``: 32.
    """

    rules_of = ClusterRules


class ClusterNet(PlacementNet):
    """A score of clusters, too, and attention between them."""

    clusters = CLUSTERS

    def more_heads(self) -> Sequence[nn.Sequential]:
        """The score of a group's cluster."""
        h, choices = self.config.hidden, self.clusters or 1
        self.group = nn.Sequential(nn.Linear(2 * h, h), nn.ReLU(), nn.Linear(h, choices))
        self.from_size = nn.Linear(1, h, bias=False)
        self.attention = nn.ModuleList([Attention(h)] if self.clusters else [])
        return (self.group,)

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: Encoded, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[B, G, A]`` of the cluster of each group, or, once there are clusters, of the
        device of each.
        """
        legal, cluster = obs["mask"].bool(), obs["cluster"].long()
        groups, real = encoded.groups[row], store.real[ids][row]
        if self.clusters:
            other = encoded.graph[row][:, None].expand_as(groups)
        else:
            producer = obs["producer"].long().clamp(min=0)
            other = groups.gather(1, producer[:, :, None].expand_as(groups))
        first = self.group(torch.cat([groups, other], dim=2))
        if not self.clusters:
            first = torch.cat([torch.zeros_like(first), first], dim=2)  # begin one, or join

        label = cluster.clamp(min=0)
        count = torch.zeros_like(label, dtype=torch.float32).scatter_add(1, label, real.float())
        share = (real / count.gather(1, label).clamp(min=1))[:, :, None]  # of a cluster's mean
        mean = torch.zeros_like(groups)
        mean = mean.scatter_add(1, label[:, :, None].expand_as(groups), groups * share)
        for layer in self.attention:
            mean = layer(mean, count > 0)
        pair = store.pair[ids][row].flatten(2)
        pairs = torch.zeros_like(pair)
        pairs = pairs.scatter_add(1, label[:, :, None].expand_as(pair), pair * share)
        x = (
            self.from_group(mean)[:, :, None]
            + self.from_size(torch.log1p(count)[:, :, None])[:, :, None]
            + self.from_graph(encoded.graph)[row][:, None, None]
            + self.from_device(encoded.devices)[row][:, None]
            + self.from_pair(pairs.unflatten(2, store.pair.shape[2:]))
        )
        second = self.score(x).squeeze(-1)
        width = legal.shape[2]
        first, second = (
            nn.functional.pad(y[:, :, :width], (0, max(0, width - y.shape[2])))
            for y in (first, second)
        )
        logits = torch.where((cluster < 0)[:, :1, None], first, second)
        decides = legal.sum(dim=2) > 1
        decides |= ~decides.any(dim=1, keepdim=True)
        values = self.values(encoded, row, None, store.legal)
        return logits.masked_fill(~legal, ILLEGAL), values, decides


formulation = Formulation(
    "hdp:formulation",
    env="hdp:ClusterEnv",
    sees={"cluster": (1, None), "producer": (1, None), "mask": (2, None)},
    network="hdp:ClusterNet",
    steps=2,
)
CONFIG = TrainConfig(
    formulation=formulation.name,
    cold=True,
    gae_lambda=1.0,
    epochs=1,  # one step per rollout: REINFORCE with a learned baseline
    minibatches=1,
    learning_rate=1e-3,
    last_learning_rate=1e-4,
    network=NetworkConfig(layers=0, hidden=64),  # the grouper passes no messages
)
