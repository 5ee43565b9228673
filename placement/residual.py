"""``Residual``: what measurement says of a placement beyond the simulator, with uncertainty.

Bayesian linear regression with random effects, in its kernel form: the posterior is exact, and
its cost depends on the number of measurements, not of features (Rasmussen & Williams, "Gaussian
Processes for Machine Learning", MIT Press 2006, chapters 2 and 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.problem import Placement, Problem
from placement.trials import Samples

Floats = NDArray[np.float64]

SMALL_S = 50e-6  # an operator this short is mostly dispatch, for which workers share one lock
_HOT = 8  # power of a device's busy time by which its operators count for the period

# Standard deviations expected of each part of log(measured / simulated), and by how much
# (standard deviation of the logarithm of its variance) the measurements may correct that.
_PARTS = ("constant", "summary", "operators", "cuts", "own", "round", "noise")
_EXPECTED = np.array([0.3, 0.1, 0.1, 0.05, 0.02, 0.02, 0.03])
_VAGUE = 2.0
# Heavy tails: Student's t with so many degrees of freedom, by so many steps of expectation
# maximisation (Lange, Little, Taylor, "Robust statistical modeling using the t distribution",
# J. American Statistical Association 84, 1989).
_TAILS, _REWEIGHTED = 3.0, 3


@dataclass(frozen=True, eq=False)
class Features:
    """What is looked at in placements of a problem, in three blocks of comparable size.

    * *summary*: busy share of each device, waiting, transfers (their number, seconds and
      bytes), switches between devices in the order of priority, and operators, and small
      ones, that are not on the device with most of them;
    * *operators*: the share of the simulated time that each colocation group is expected to
      take on its device: an error in a profile shows in every placement that uses it. For
      ``period`` it counts less the further its device is from being the busiest;
    * *cuts*: the tensors that are sent.

    Attributes:
        problem: whose placements.
        mean, scale: float64 ``[F]`` of each block, from random placements.
    """

    problem: Problem
    mean: tuple[Floats, ...]
    scale: tuple[Floats, ...]

    @classmethod
    def of(cls, problem: Problem, simulated_s: float) -> Features:
        """Scaled so that random placements have features of mean square 1 in each block.

        ``simulated_s`` is a typical value of the objective.
        """
        placements = random_placements(problem, 64, np.random.default_rng(0))
        blocks = _blocks(problem, placements, np.full(len(placements), simulated_s))
        mean = tuple(x.mean(axis=0) for x in blocks)
        spread = [x.std(axis=0) for x in blocks]
        columns = np.where(spread[0] > 1e-9, spread[0], 1.0) * np.sqrt(len(spread[0]))
        whole = [np.full(len(s), max(float(np.linalg.norm(s)), 1e-12)) for s in spread[1:]]
        return cls(problem, mean, (columns, *whole))

    def __call__(self, placements: Placement, simulated_s: Floats) -> tuple[Floats, ...]:
        """Three blocks float64 ``[B, F]`` of placements int32 ``[B, N]`` and their values."""
        blocks = _blocks(self.problem, placements, simulated_s)
        return tuple((x - m) / s for x, m, s in zip(blocks, self.mean, self.scale, strict=True))


@dataclass(frozen=True, eq=False)
class Residual:
    """A posterior over ``log(measured / simulated)`` of every placement.

    The prior: ``log ratio = constant + summary @ v + operators @ u + cuts @ w + own``, all
    coefficients independent and normal; ``own`` belongs to the placement. A run adds what its
    round and what itself adds, the latter with heavy tails: others use the machine too. Variances
    are those that make the measurements most probable.

    Attributes:
        features: of the problem.
        placements: int32 ``[K, N]`` that were measured.
        log_variance: float64 ``[7]`` of the parts.
        scale: float64 ``[S]`` of each run: its own variance is so many times the usual one.
    """

    features: Features
    placements: Placement
    log_variance: Floats
    scale: Floats
    _known: tuple[Floats, ...]  # blocks of the measured placements
    _index: NDArray[np.int64]
    _inverse: Floats  # of the covariance of the runs [S, S]
    _weight: Floats  # inverse @ log ratios

    @property
    def std(self) -> dict[str, float]:
        """Standard deviation of each part; ``noise`` is that of one run."""
        return dict(zip(_PARTS, np.exp(0.5 * self.log_variance).tolist(), strict=True))

    def predict(self, placements: Placement, simulated_s: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation float64 ``[B]`` of the log ratios, as in a usual round.

        Args:
            placements: int32 ``[B, N]``.
            simulated_s: float64 ``[B]``, finite.
        """
        blocks, cross = self._cross(placements, simulated_s)
        constant, summary, operators, cuts, own = np.exp(self.log_variance[:5])
        prior = constant + own
        for variance, x in zip((summary, operators, cuts), blocks, strict=True):
            prior = prior + variance * (x * x).sum(axis=1)
        variance = prior - ((cross @ self._inverse) * cross).sum(axis=1)
        return cross @ self._weight, np.sqrt(np.maximum(variance, 0.0))

    def joint(self, placements: Placement, simulated_s: Floats) -> tuple[Floats, Floats]:
        """Mean float64 ``[B]`` and covariance ``[B, B]`` of the log ratios of distinct placements.

        Args: as ``predict``.
        """
        blocks, cross = self._cross(placements, simulated_s)
        prior = _prior(self.log_variance, blocks, blocks, np.eye(len(placements)))
        return cross @ self._weight, prior - cross @ self._inverse @ cross.T

    def _cross(
        self, placements: Placement, simulated_s: Floats
    ) -> tuple[tuple[Floats, ...], Floats]:
        blocks = self.features(placements, simulated_s)
        number = {p.tobytes(): k for k, p in enumerate(self.placements)}
        same = np.zeros((len(placements), len(self.placements)))
        for b, p in enumerate(placements):
            k = number.get(p.tobytes())
            if k is not None:
                same[b, k] = 1.0
        return blocks, _prior(self.log_variance, blocks, self._known, same)[:, self._index]


def fit(
    features: Features,
    samples: Samples,
    simulated_s: Floats,
    before: Residual | None = None,
) -> Residual:
    """The posterior given all finite ``samples``.

    Args:
        simulated_s: float64 ``[K]`` of ``samples.placements``, finite.
        before: an earlier posterior of the same problem, whose variances are tried first.
    """
    from scipy.optimize import minimize

    good = np.isfinite(samples.seconds)
    index, where = samples.index[good], samples.round[good]
    target = np.log(samples.seconds[good] / simulated_s[index])
    known = features(samples.placements, simulated_s)
    gram = [np.ones((len(index), len(index)))]
    gram += [(x @ x.T)[np.ix_(index, index)] for x in known]
    gram += [(index[:, None] == index) * 1.0, (where[:, None] == where) * 1.0, np.eye(len(index))]
    expected = 2 * np.log(_EXPECTED)

    def loss(log_variance: Floats) -> tuple[float, Floats]:
        """Negative log posterior of the variances, and its gradient."""
        variance = np.exp(log_variance)
        covariance = sum(v * g for v, g in zip(variance, gram, strict=True))
        inverse = np.linalg.inv(covariance)
        weight = inverse @ target
        off = (log_variance - expected) / _VAGUE
        value = 0.5 * (target @ weight + np.linalg.slogdet(covariance)[1] + off @ off)
        slope = [
            0.5 * v * ((inverse * g).sum() - weight @ g @ weight)
            for v, g in zip(variance, gram, strict=True)
        ]
        return float(value), np.array(slope) + off / _VAGUE

    at = expected if before is None else before.log_variance
    bounds = [(-20.0, 4.0)] * len(_PARTS)
    heavier, scale = np.ones(len(index)), np.ones(len(index))
    for _ in range(_REWEIGHTED):
        scale, gram[-1] = heavier, np.diag(heavier)
        at = minimize(loss, at, jac=True, method="L-BFGS-B", bounds=bounds).x
        variance = np.exp(at)
        inverse = np.linalg.inv(sum(v * g for v, g in zip(variance, gram, strict=True)))
        weight = inverse @ target
        # What a run itself added, squared: of the mean, and the variance that is left of it.
        added = variance[-1] * scale
        square = (added * weight) ** 2 + added - added**2 * inverse.diagonal()
        heavier = (_TAILS + square / variance[-1]) / (_TAILS + 1)
    return Residual(features, samples.placements, at, scale, known, index, inverse, weight)


def random_placements(problem: Problem, count: int, rng: np.random.Generator) -> Placement:
    """int32 ``[count, N]``: every second scattered, the others cut in operator order.

    Both draw a share of the colocation groups for each device from a flat Dirichlet
    distribution. Groups that cannot run where they were put go to the first device that can.
    """
    allowed = np.isfinite(problem.group_compute_s)
    groups, devices = allowed.shape
    choices = np.empty((count, groups), np.int32)
    for i in range(count):
        choice = rng.choice(devices, groups, p=rng.dirichlet(np.ones(devices)))
        if i % 2:
            choice = rng.permutation(devices)[np.sort(choice)]
        legal = allowed[np.arange(groups), choice]
        choices[i] = np.where(legal, choice, allowed.argmax(axis=1))
    return choices[:, problem.graph.group]


def _prior(
    log_variance: Floats, a: tuple[Floats, ...], b: tuple[Floats, ...], same: Floats
) -> Floats:
    """Covariance ``[A, B]`` of log ratios; ``same`` float64 ``[A, B]`` where placements are."""
    constant, *linear, own = np.exp(log_variance[:5])
    covariance = constant + own * same
    for variance, x, y in zip(linear, a, b, strict=True):
        covariance = covariance + variance * (x @ y.T)
    return covariance


def _blocks(problem: Problem, placements: Placement, simulated_s: Floats) -> tuple[Floats, ...]:
    g, devices = problem.graph, problem.num_devices
    p, value = np.asarray(placements), np.asarray(simulated_s)[:, None]
    on = np.stack([p == d for d in range(devices)], axis=2)  # [B, N, D]
    seconds = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0)
    taken = on * seconds / value[:, :, None]
    busy = taken.sum(axis=1)
    sent = _sent(problem, p)
    order = np.argsort(problem.priority)
    switches = (np.diff(p[:, order], axis=1) != 0).mean(axis=1) if g.num_ops > 1 else busy[:, 0]
    small = on & (seconds < SMALL_S)

    def elsewhere(chosen: NDArray[np.bool_]) -> Floats:
        each = chosen.sum(axis=1) / g.num_ops
        return each.sum(axis=1) - each.max(axis=1)

    size = g.tensor_bytes / max(float(g.tensor_bytes.sum()), 1.0)
    summary = [
        busy.mean(axis=1),
        sent.sum(axis=1) / g.num_ops,
        sent @ problem.mean_transfer_s / value[:, 0],
        sent @ size,
        switches,
        elsewhere(on),
        elsewhere(small),
    ]
    first = np.unique(g.group, return_index=True)[1]
    group_s = np.where(np.isfinite(problem.group_compute_s), problem.group_compute_s, 0.0)
    operators = on[:, first] * group_s / value[:, :, None]
    if problem.objective == "period":  # what slows an idle device down does not matter
        most = np.maximum(busy.max(axis=1, keepdims=True), 1e-300)
        operators = operators * ((busy / most) ** _HOT)[:, None]
    operators = operators.reshape(len(p), -1)
    weight = problem.mean_transfer_s if problem.mean_transfer_s.any() else size
    return np.column_stack([busy, *summary]), operators, sent * weight / value


def _sent(problem: Problem, placements: Placement) -> Floats:
    """float64 ``[B, T]``: to how many devices each produced tensor is sent."""
    g = problem.graph
    count = np.zeros((len(placements), g.num_tensors))
    used = np.flatnonzero((np.diff(g.use_ptr) > 0) & (g.tensor_src >= 0))
    if not len(g.use_dst):
        return count
    home = placements[:, g.tensor_src[used]]
    for d in range(problem.num_devices):
        there = np.maximum.reduceat(placements[:, g.use_dst] == d, _starts(g.use_ptr), axis=1)
        count[:, used] += there[:, _rows(g.use_ptr, used)] & (home != d)
    return count


def _starts(ptr: NDArray[np.int32]) -> NDArray[np.intp]:
    """Where the uses of every tensor that has some begin."""
    return ptr[:-1][np.diff(ptr) > 0].astype(np.intp)


def _rows(ptr: NDArray[np.int32], used: NDArray[np.intp]) -> NDArray[np.intp]:
    """Which of those tensors the ``used`` ones are."""
    return np.searchsorted(np.flatnonzero(np.diff(ptr) > 0), used)
