"""Gradient-boosted regression trees over an operator's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from placement.cluster import Device
from placement.costs.features import CLASSES, Features
from placement.costs.predictors import Floats, LatencyError, Sample
from placement.costs.table import Fitted, Table, columns, guess, kinds, tables
from placement.tools.ownership import needing


@dataclass(frozen=True)
class Trees:
    """Gradient boosting over histograms (Ke et al., LightGBM, NIPS 2017; scikit-learn's).

    The trees see the kind and class of an operator, the parameters that ``Polynomial`` sees, and
    the time on a device that is nothing special; what they add up to is the logarithm of seconds
    over that time. Several models, each without some of the graphs, are averaged; where
    they differ, and how much the graphs left out were missed, is the spread. Needs the package
    scikit-learn: ``pip install "device-placement-rl[latency]"``.

    Attributes:
        members: models that are averaged.
        iterations: trees of each.
        learning_rate, min_leaf: of the boosting; rows that a leaf needs at least.
        weight: rows count with their seconds to this power.
        seed: which graphs each model leaves out.
    """

    members: int = 4
    iterations: int = 200
    learning_rate: float = 0.08
    min_leaf: int = 6
    weight: float = 0.1
    seed: int = 0

    def fit(self, samples: Sequence[Sample]) -> Fitted:
        """Raises: LatencyError, no samples, or scikit-learn is not installed."""
        with needing("latency", "the predictor trees needs scikit-learn", LatencyError):
            from sklearn.ensemble import HistGradientBoostingRegressor

        def fit(table: Table) -> _Trees:
            every_kind, count = np.unique(table.kind, return_counts=True)
            # The trees tell 254 apart; the others are as if never measured.
            often = np.argsort(-count, kind="stable")[:254]
            names = {str(kind): i for i, kind in enumerate(every_kind[often])}
            x = _inputs(table.kind, table.op_class, table.x, table.guess, names)
            y = table.y - table.guess
            weight = table.seconds**self.weight
            rng = np.random.default_rng(self.seed)
            sources = rng.permutation(np.unique(table.source))
            models, missed = [], np.full(len(y), np.nan)
            for m in range(self.members):
                out = np.isin(table.source, sources[m :: self.members])
                if len(sources) < self.members or out.all():
                    out[:] = False
                model = HistGradientBoostingRegressor(
                    max_iter=self.iterations,
                    learning_rate=self.learning_rate,
                    min_samples_leaf=self.min_leaf,
                    l2_regularization=1.0,
                    categorical_features=[0],
                    random_state=self.seed + m,
                )
                model.fit(x[~out], y[~out], weight[~out])
                if out.any():
                    missed[out] = y[out] - model.predict(x[out])
                models.append(model)
            seen = np.isfinite(missed)
            noise = np.full(len(CLASSES), 0.5)  # of too few graphs to leave one out
            if seen.any():
                noise[:] = np.sqrt((missed[seen] ** 2).mean())
            for c in range(len(CLASSES)):
                at = seen & (table.op_class == c)
                if at.any():
                    noise[c] = np.sqrt(np.average(missed[at] ** 2, weights=weight[at]))
            return _Trees(names, tuple(models), noise)

        return Fitted({kind: fit(table) for kind, table in tables(samples).items()})


@dataclass(frozen=True, eq=False)
class _Trees:
    names: dict[str, int]
    models: tuple[Any, ...]
    noise: Floats  # [len(CLASSES)]

    def __call__(self, described: Features, device: Device) -> tuple[Floats, Floats]:
        base, op_class = guess(described, device), described.op_class
        x = _inputs(kinds(described), op_class, columns(described, device), base, self.names)
        answers = np.stack([m.predict(x) for m in self.models])
        return answers.mean(axis=0), np.hypot(answers.std(axis=0), self.noise[op_class])


def _inputs(kind: Any, op_class: Any, x: Floats, base: Floats, names: dict[str, int]) -> Floats:
    """float64 ``[N, F + 3]``; the kind is a number, nan if it was never measured."""
    number = np.array([names.get(str(k), np.nan) for k in kind], np.float64)
    return np.column_stack([number, op_class, x, base])
