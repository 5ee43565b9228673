"""The networks that score (group, device) pairs otherwise than one group at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from agents.encoder import ILLEGAL, Attention, Encoded, Observations, PlacementNet
from agents.store import Graphs
from envs.refine import PAIR_FEATURES, SEARCH_FEATURES


class OneShotNet(PlacementNet):
    """Of ``one_shot``: all groups at once."""

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: Encoded, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See ``PlacementNet.evaluate``."""
        logits = self.all_logits(store, ids, encoded)[row]
        return logits, self.values(encoded, row, None, store.legal), store.real[ids][row]

    def all_logits(self, store: Graphs, ids: Tensor, encoded: Encoded) -> Tensor:
        """Masked logits float32 ``[U, G, D]`` of every group at once."""
        x = (
            self.from_group(encoded.groups)[:, :, None]
            + self.from_graph(encoded.graph)[:, None, None]
            + self.from_device(encoded.devices)[:, None]
            + self.from_pair(store.pair[ids])
        )
        logits = self.score(x).squeeze(-1)
        logits = logits + self._bonus(store.legal[ids], store.warm[ids], store.num_groups[ids])
        return logits.masked_fill(~store.legal[ids], ILLEGAL)


class SelectPlaceNet(PlacementNet):
    """Of ``select_place``: a score of the ready groups, too."""

    def more_heads(self) -> Sequence[nn.Sequential]:
        """The score of a ready group."""
        h = self.config.hidden
        self.select = nn.Sequential(
            nn.Linear(2 * h + self.num_state, h), nn.ReLU(), nn.Linear(h, 1)
        )
        return (self.select,)

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: Encoded, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities ``[B, K * D]`` of a ready group, times those of its device.

        An untrained network selects the first group, which has the highest priority.
        """
        state, legal = obs["devices"].float(), obs["mask"].bool()
        group = obs["group"].long()
        count, ready, devices, features = state.shape
        many = row[:, None].expand(-1, ready).reshape(-1)
        some = legal.any(dim=2)
        flat = legal.reshape(-1, devices).clone()
        flat[:, 0] |= ~some.reshape(-1)  # a row that is only padding: some device, never selected
        device = self.step_logits(
            store, ids, encoded, many, group.reshape(-1), state.reshape(-1, devices, features), flat
        )
        device = torch.log_softmax(device, dim=-1).reshape(count, ready, devices)
        least = state.masked_fill(~legal[:, :, :, None], -ILLEGAL).amin(dim=2)
        least = least.masked_fill(~some[:, :, None], 0.0)
        seen = [
            encoded.groups[row[:, None], group],
            encoded.graph[row][:, None].expand(-1, ready, -1),
            least,
        ]
        wanted = self.select(torch.cat(seen, dim=2)).squeeze(-1)
        wanted = wanted - torch.arange(ready, device=wanted.device) * 1.0  # as list schedulers do
        select = torch.log_softmax(wanted.masked_fill(~some, ILLEGAL), dim=-1)
        both = (select[:, :, None] + device).masked_fill(~legal, ILLEGAL)
        return both.reshape(count, -1), self.values(encoded, row, state, legal), None


class GroupPlaceNet(PlacementNet):
    """Of ``group_place``: a score of clusters, too; attention is between clusters."""

    groups_attend = False

    def more_heads(self) -> Sequence[nn.Sequential]:
        """The score of a group's cluster."""
        h, choices = self.config.hidden, self.config.clusters or 1
        self.group = nn.Sequential(nn.Linear(2 * h, h), nn.ReLU(), nn.Linear(h, choices))
        self.from_size = nn.Linear(1, h, bias=False)
        self.attention = nn.ModuleList(Attention(h) for _ in range(self.config.attention))
        return (self.group,)

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: Encoded, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[B, G, A]`` of the cluster of each group, or, once there are clusters, of the
        device of each.
        """
        legal, cluster = obs["mask"].bool(), obs["cluster"].long()
        groups, real = encoded.groups[row], store.real[ids][row]
        if self.config.clusters:
            other = encoded.graph[row][:, None].expand_as(groups)
        else:
            producer = obs["producer"].long().clamp(min=0)
            other = groups.gather(1, producer[:, :, None].expand_as(groups))
        first = self.group(torch.cat([groups, other], dim=2))
        if not self.config.clusters:
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


class MovingNet(PlacementNet):
    """Of ``refine`` and ``sweep``: what is observed of the current placement."""

    num_state, num_search = len(PAIR_FEATURES), len(SEARCH_FEATURES)

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: Encoded, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[B, G * D]`` of moving each group to each device."""
        pairs, search, legal = obs["pairs"].float(), obs["search"].float(), obs["mask"].bool()
        x = (
            self.from_group(encoded.groups)[row][:, :, None]
            + self.from_graph(encoded.graph)[row][:, None, None]
            + self.from_device(encoded.devices)[row][:, None]
            + self.from_pair(store.pair[ids[row]])
            + self.from_state(pairs)
        )
        logits = self.score(x).squeeze(-1).masked_fill(~legal, ILLEGAL).flatten(1)
        return logits, self.values(encoded, row, pairs, legal, search), None
