"""Multi-parameter polynomial regression for every kind of operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Device
from placement.costs.features import Features
from placement.costs.predictors import Floats, Sample
from placement.costs.table import Fitted, Table, columns, kinds, tables


@dataclass(frozen=True)
class Polynomial:
    """Polynomial regression over an operator's parameters (Shang, thesis, 2023).

    For every kind of operator and kind of device, a polynomial of *degree 2* (all squares and
    products) in the logarithms of the *parameters* flops, bytes read, bytes written, matrices
    (batch), rows, inner and outer dimension, operations per byte, inputs, bytes of an element,
    threads, and the bytes touched since its parameters and its kind's code were used. It gives
    the logarithm of seconds over those of a device that is nothing special
    (``_table.guess``), so that relative errors count. Outside of what was measured the
    polynomial stays as it is at the border, so that times go on in proportion to work.
    *Regularisation*: ridge, ``ridge`` times the squares of the coefficients of standardised
    terms, shared over the kinds: a polynomial for each class of operators
    (``costs.features.CLASSES``) is fitted first, and that of a kind to what is left, so that
    a kind that was seldom or never measured is predicted like its class.

    Deviations: the thesis fits seconds themselves, states neither terms nor regularisation, and
    has no classes, no uncertainty.

    The spread is that of Bayesian linear regression: of the residuals, and larger for operators
    unlike those measured (Rasmussen & Williams 2006, chapter 2).

    Attributes:
        ridge: regularisation.
        weight: rows count with their seconds to this power: whole models depend on large ones.
    """

    ridge: float = 1.0
    weight: float = 0.3

    def fit(self, samples: Sequence[Sample]) -> Fitted:
        """Raises: LatencyError, no samples."""
        return Fitted(
            {kind: _fit(table, self.ridge, self.weight) for kind, table in tables(samples).items()}
        )


@dataclass(frozen=True, eq=False)
class _Regression:
    """Ridge regression on polynomial terms of ``x [N, F]``.

    Attributes:
        coefficients: ``[P]``; ``inverse``: of the normal matrix, ``[P, P]``.
        low, high: ``[F]`` range of ``x``; beyond, the value is that at its border.
        least, most: range of what was seen.
        noise: standard deviation of the residuals.
    """

    coefficients: Floats
    inverse: Floats
    low: Floats
    high: Floats
    least: float
    most: float
    noise: float

    @classmethod
    def of(cls, x: Floats, y: Floats, weight: Floats, ridge: float) -> _Regression:
        weight = weight / weight.mean()
        terms = _terms(x)
        penalty = np.full(terms.shape[1], ridge)
        normal = (terms * weight[:, None]).T @ terms + np.diag(penalty)
        inverse = np.asarray(np.linalg.inv(normal), np.float64)
        coefficients = inverse @ (terms.T @ (weight * y))
        # What the rows themselves pull towards them is no agreement.
        leverage = np.minimum(((terms @ inverse) * terms).sum(axis=1) * weight, 0.95)
        residual = (y - terms @ coefficients) / (1.0 - leverage)
        noise = float(np.sqrt((weight * residual**2).mean() + 0.02**2))
        border = x.min(axis=0), x.max(axis=0), float(y.min()), float(y.max())
        return cls(coefficients, inverse, *border, noise)

    def __call__(self, x: Floats) -> tuple[Floats, Floats]:
        """Values and standard deviations, float64 ``[N]``."""
        terms = _terms(x)
        unlike = ((terms @ self.inverse) * terms).sum(axis=1)
        # A square that was fitted inside of the range says nothing outside of it.
        value = _terms(np.clip(x, self.low, self.high)) @ self.coefficients
        spread = np.minimum(self.noise * np.sqrt(1.0 + unlike), 3.0)  # a factor of 20
        return np.clip(value, self.least, self.most), spread


@dataclass(frozen=True, eq=False)
class _Polynomials:
    centre: Floats
    scale: Floats
    classes: dict[int, _Regression]
    kinds: dict[str, _Regression]
    everything: _Regression

    def __call__(self, described: Features, device: Device) -> tuple[Floats, Floats]:
        x = (columns(described, device) - self.centre) / self.scale
        value, spread = self.everything(x)
        for number, regression in self.classes.items():
            at = described.op_class == number
            value[at], spread[at] = regression(x[at])
        kind = kinds(described)
        for name, regression in self.kinds.items():
            at = kind == name
            more, spread[at] = regression(x[at])
            value[at] += more
        return value, spread


def _fit(table: Table, ridge: float, weight: float) -> _Polynomials:
    centre, scale = table.x.mean(axis=0), table.x.std(axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    x = (table.x - centre) / scale
    counts = table.seconds**weight
    left = table.y - table.guess

    def regression(at: NDArray[np.bool_], y: Floats) -> _Regression:
        return _Regression.of(x[at], y[at], counts[at], ridge)

    everything = regression(np.ones(len(left), bool), left)
    classes = {int(c): regression(table.op_class == c, left) for c in np.unique(table.op_class)}
    for number, fitted in classes.items():
        at = table.op_class == number
        left[at] -= fitted(x[at])[0]
    own = {str(kind): regression(table.kind == kind, left) for kind in np.unique(table.kind)}
    return _Polynomials(centre, scale, classes, own, everything)


def _terms(x: Floats) -> Floats:
    """float64 ``[N, 1 + F + F (F + 1) / 2]``: one, the variables, squares and products."""
    i, j = np.triu_indices(x.shape[1])
    return np.concatenate([np.ones((len(x), 1)), x, x[:, i] * x[:, j]], axis=1)
