"""A recommendation model after DLRM (Naumov et al., arXiv:1906.00091, 2019).

Large embedding tables that do almost no arithmetic, two small multilayer perceptrons, and the
pairwise products of all feature vectors.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from placement.workloads import seeded

_NUM_DENSE = 13  # as in the Criteo data sets


def dlrm(
    batch: int = 1, tables: int = 8, rows: int = 100_000, dim: int = 64, lookups: int = 16
) -> tuple[Any, Any]:
    """Eight tables of 100 000 x 64: 52 M parameters, nearly all of them embeddings."""
    with seeded():
        module = DLRM(tables, rows, dim, bottom=(512, 256), top=(512, 256)).eval()
        dense = torch.randn(batch, _NUM_DENSE)
        return module, (dense, torch.randint(rows, (tables, batch, lookups)))


def dlrm_tiny(batch: int = 1) -> tuple[Any, Any]:
    """Three tables of 20 x 8."""
    with seeded():
        module = DLRM(3, 20, 8, bottom=(16,), top=(16,)).eval()
        return module, (torch.randn(batch, _NUM_DENSE), torch.randint(20, (3, batch, 2)))


class DLRM(nn.Module):
    def __init__(
        self, tables: int, rows: int, dim: int, bottom: tuple[int, ...], top: tuple[int, ...]
    ):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = _mlp(_NUM_DENSE, *bottom, dim)
        num_pairs = (tables + 1) * tables // 2
        self.top = _mlp(dim + num_pairs, *top, 1)
        pairs = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1])

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """``dense [batch, 13]``, ``sparse [tables, batch, lookups]`` to ``[batch, 1]``."""
        x = self.bottom(dense)
        rows = [table(ids) for table, ids in zip(self.tables, sparse.unbind(0), strict=True)]
        features = torch.stack([x, *rows], 1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        chosen = products.index_select(1, self.get_buffer("pairs"))
        score: Tensor = self.top(torch.cat([x, chosen], 1)).sigmoid()
        return score


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
