"""A small graph neural network over the whole operator graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from placement.cluster import Device
from placement.features import CLASSES, features
from placement.graph import OpGraph
from placement.latency import Floats, Sample
from placement.latency._table import SMALLEST_S, check_kind, columns, guess, kinds, tables


@dataclass(frozen=True)
class Gnn:
    """Message passing between operators (GraphSAGE: Hamilton et al., NIPS 2017; PyTorch Geometric).

    An operator sees its own parameters, as ``Polynomial`` does, its kind, and after ``layers``
    rounds of messages what runs up to so many operators before and after it: what they leave in
    the caches. The answer is the logarithm of seconds over those of a device that is nothing
    special. Latency prediction by message passing over the whole graph is that of nn-Meter's
    successors (e.g. NNLP, ICPP 2022), which predict one number per model; here it is one per
    operator. Spread: where ``members`` networks from other seeds differ, and their residuals.

    Attributes:
        width: of the hidden layers.
        layers: rounds of messages in each direction.
        epochs: passes over all samples, with Adam.
        members: networks that are averaged.
        weight: operators count with their seconds to this power.
        seed: of the first member.
    """

    width: int = 48
    layers: int = 2
    epochs: int = 150
    members: int = 2
    weight: float = 0.2
    learning_rate: float = 0.01
    seed: int = 0

    def fit(self, samples: Sequence[Sample]) -> FittedGnn:
        """Raises: LatencyError, no samples."""
        import torch

        fitted = {}
        with torch.random.fork_rng(devices=[]):
            for kind, table in tables(samples).items():
                scale = table.x.std(axis=0)
                names = {str(k): i + 1 for i, k in enumerate(np.unique(table.kind))}
                form = _Form(names, table.x.mean(axis=0), np.where(scale > 1e-9, scale, 1.0))
                chosen = [s for s in samples if s.device.kind == kind]
                fitted[kind] = self._fit(form, chosen)
        return FittedGnn(fitted)

    def _fit(self, form: _Form, samples: Sequence[Sample]) -> _Fitted:
        import torch

        graphs = [form.tensors(s.graph, s.device) for s in samples]
        start = np.cumsum([0, *(s.graph.num_ops for s in samples)])
        number = torch.cat([number for number, _, _ in graphs])
        x = torch.cat([x for _, x, _ in graphs])
        edges = torch.cat([e + int(at) for (_, _, e), at in zip(graphs, start, strict=False)], 1)
        seconds = np.concatenate([np.maximum(s.compute_s, SMALLEST_S) for s in samples])
        base = np.concatenate([guess(features(s.graph), s.device) for s in samples])
        y = torch.tensor(np.log(seconds) - base, dtype=torch.float32)
        weight = torch.tensor(seconds**self.weight, dtype=torch.float32)
        weight = weight / weight.mean()
        models, answers = [], []
        for member in range(self.members):
            torch.manual_seed(self.seed + member)
            model = _network(len(form.names) + 1, x.shape[1], self.width, self.layers)
            optimizer = torch.optim.Adam(model.parameters(), self.learning_rate, weight_decay=1e-4)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, self.learning_rate, total_steps=self.epochs
            )
            for _ in range(self.epochs):
                # Some kinds are hidden, so that one that was never measured is known by the rest.
                hidden = torch.where(torch.rand(len(number)) < 0.1, 0, number)
                loss = (weight * torch.nn.functional.huber_loss(
                    model(hidden, x, edges), y, reduction="none", delta=0.5
                )).mean()  # fmt: skip
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            model.eval()
            models.append(model)
            with torch.no_grad():
                answers.append(model(number, x, edges).numpy())
        missed = y.numpy() - np.mean(answers, axis=0)
        classes = np.concatenate([features(s.graph).op_class for s in samples])
        noise = np.full(len(CLASSES), float(missed.std()))
        for c in np.unique(classes):
            noise[c] = np.sqrt((missed[classes == c] ** 2).mean())
        return _Fitted(form, tuple(models), noise)


@dataclass(frozen=True, eq=False)
class _Form:
    """How a graph becomes tensors: numbers of the kinds (0: never seen), and the scale of ``x``."""

    names: dict[str, int]
    centre: Floats
    scale: Floats

    def tensors(self, graph: OpGraph, device: Device) -> tuple[Any, Any, Any]:
        """Kind numbers ``[N]``, inputs ``[N, F]`` and edges ``[2, E]``."""
        import torch

        found = features(graph)
        depth = np.maximum(found.level.max(), 1.0)
        context = (
            np.log1p(found.fan_in), np.log1p(found.fan_out), np.log1p(found.level),
            found.level / depth,
        )  # fmt: skip
        own = (columns(found, device) - self.centre) / self.scale
        one_hot = np.eye(len(CLASSES))[found.op_class]
        x = np.column_stack([own, *context, one_hot])
        number = np.array([self.names.get(str(k), 0) for k in kinds(found)])
        return (
            torch.tensor(number),
            torch.tensor(x, dtype=torch.float32),
            torch.tensor(graph.edges.T.astype(np.int64)),
        )


@dataclass(frozen=True, eq=False)
class _Fitted:
    form: _Form
    models: tuple[Any, ...]
    noise: Floats  # [len(CLASSES)]


@dataclass(frozen=True, eq=False)
class FittedGnn:
    """A ``Predictor``: by kind of device."""

    fitted: dict[str, _Fitted]

    def predict(self, graph: OpGraph, device: Device) -> tuple[Floats, Floats]:
        """See ``placement.latency.Predictor``."""
        import torch

        check_kind(device, self.fitted)
        fitted, found = self.fitted[device.kind], features(graph)
        tensors = fitted.form.tensors(graph, device)
        with torch.no_grad():
            answers = np.stack([model(*tensors).numpy() for model in fitted.models])
        answers = answers.astype(np.float64)
        seconds = np.exp(answers.mean(axis=0) + guess(found, device))
        return seconds, seconds * np.hypot(answers.std(axis=0), fitted.noise[found.op_class])


def _network(num_kinds: int, num_inputs: int, width: int, layers: int) -> Any:
    import torch
    from torch import Tensor, nn
    from torch_geometric.nn import SAGEConv

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind = nn.Embedding(num_kinds, 16)
            self.enter = nn.Linear(16 + num_inputs, width)
            self.down = nn.ModuleList(SAGEConv(width, width) for _ in range(layers))
            self.up = nn.ModuleList(SAGEConv(width, width) for _ in range(layers))
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
            self.leave = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 1))
            nn.init.normal_(self.kind.weight, std=0.1)

        def forward(self, kind: Tensor, x: Tensor, edges: Tensor) -> Tensor:
            own = h = nn.functional.silu(self.enter(torch.cat([self.kind(kind), x], 1)))
            for down, up, norm in zip(self.down, self.up, self.norms, strict=True):
                h = norm(h + nn.functional.silu(down(h, edges) + up(h, edges.flip(0))))
            answer: Tensor = self.leave(torch.cat([own, h], 1)).squeeze(1)
            return answer

    return Network()
