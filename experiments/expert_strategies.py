"""KTransformers' strategies for experts on the GPU: predicted seconds beside measured ones.

A part of ``experiments.language_models``. The table ``kt_expert_placement_strategies.csv`` is of
one model (Qwen3-Next 80B in FP8) on one machine (four RTX 4090 and a Xeon Gold 6454S): tokens per
second of five strategies at eleven shares of experts on the GPUs. A token takes what the GPUs take
with all experts; in each layer in which it reads an expert elsewhere, waiting for the processor;
and these experts' bytes at the processor's rate. Which experts are read elsewhere is what
strategies differ in:

* ``uniform`` and ``random``: so many of each layer, whichever;
* ``front_loading``: all of the first layers, which never wait;
* ``frequency``: those that are asked most. Counts were not published: shares follow a power law;
* ``dynamic``: those that the prompt asked for. A part of the answer's reads is of these, and they
  are few; the others are spread evenly.

One cell, ``uniform`` with all experts on the GPUs, calibrates; the constants below were fitted to
the whole table by least squares, and with one share left out at a time (``left_out``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from experiments.public_models import Lacking, Row, accuracy, understood
from placement.importers.decoder import Part

TABLE = "kt_expert_placement_strategies"
STRATEGIES = ("random", "uniform", "front_loading", "frequency", "dynamic")
COLUMNS = {TABLE: ("gpu_expert_ratio_pct", *(f"{name}_tok_s" for name in STRATEGIES))}
Floats = NDArray[np.float64]
LAYERS, EXPERTS, CHOSEN = 48, 512, 10  # config.json of Qwen/Qwen3-Next-80B-A3B-Instruct
EXPERT_BYTES = 3 * 2048 * 512  # in FP8
INTERVAL = 0.05  # nine of ten left-out cells are within
NOISE = 0.03  # with no expert on the GPU the strategies are one, and measured up to 2.8 % apart


@dataclass(frozen=True)
class Constants:
    """What was fitted.

    Attributes:
        wait_s: a layer waits for the processor.
        bytes_per_s: at which the processor reads experts; its memory has 307e9.
        skew: the share of reads that the hottest ``x`` of all experts take is ``1 - (1 - x)^skew``.
        cached: share of an answer's reads that are of the experts its prompt asked for.
    """

    wait_s: float = 50.7e-6
    bytes_per_s: float = 211.8e9
    skew: float = 1.93
    cached: float = 0.615

    def token_s(self, strategy: str, share: float, gpu_s: float) -> float:
        """Seconds of a token with this share of the experts on the GPU.

        Args:
            gpu_s: with all of them there.
        """
        left = EXPERTS - round(share * EXPERTS)
        if not left:
            return gpu_s
        if strategy == "front_loading":
            cold = _part([CHOSEN / EXPERTS] * EXPERTS)
            return gpu_s + (1.0 - share) * LAYERS * self._layer_s(cold)
        shares = np.full(EXPERTS, CHOSEN / EXPERTS)
        if strategy == "frequency":
            shares = power_law(self.skew)
        if strategy == "dynamic" and share:
            shares *= 1.0 - self.cached
        return gpu_s + LAYERS * self._layer_s(_part(shares[-left:].tolist()))

    def _layer_s(self, cold: Part) -> float:
        is_read = 1.0 - float(np.prod(1.0 - np.array(cold.shares)))
        return self.wait_s * is_read + cold.weight_bytes * cold.read(1) / self.bytes_per_s


def _part(shares: Sequence[float]) -> Part:
    """Experts of a layer."""
    used, count = float(np.mean(shares)), len(shares)
    weights = {"experts": count * EXPERT_BYTES}
    return Part(
        "experts", "experts", "", 0, weights, 0.0, used, num_experts=count, shares=tuple(shares)
    )


def power_law(skew: float) -> Floats:
    """float64 ``[EXPERTS]``, descending: how likely a token reads each; no more than surely."""
    at = (np.arange(EXPERTS) + 0.5) / EXPERTS
    shares = (1.0 - at) ** (skew - 1.0)
    for _ in range(50):
        shares = np.minimum(shares * CHOSEN / shares.sum(), 1.0)
    return shares


def read(row: Row) -> tuple[float, list[float]]:
    """The share of experts on the GPU, and measured seconds of a token by strategy.

    Raises:
        Lacking, ValueError: not such numbers.
    """
    share, *speeds = (float(row.get(name) or "") for name in COLUMNS[TABLE])
    if not (0 <= share <= 100 and all(0 < x < np.inf for x in speeds)):
        raise Lacking(f"a share of {share:g} %, or {speeds} tokens/s, cannot be")
    return share / 100, [1 / x for x in speeds]


def predicted(shares: Floats, measured_s: Floats, constants: Constants) -> Floats:
    """``[R, 5]``, calibrated by the cell ``uniform`` of the largest share."""
    most = int(shares.argmax())
    rest_s = constants.token_s("uniform", float(shares[most]), 0.0)
    gpu_s = float(measured_s[most, STRATEGIES.index("uniform")]) - rest_s
    return np.array([[constants.token_s(n, x, gpu_s) for n in STRATEGIES] for x in shares.tolist()])


def fitted(shares: Floats, measured_s: Floats, rows: Sequence[int]) -> Constants:
    """Constants of these rows, by least squares of relative errors."""
    start = Constants()
    scale = np.array([start.wait_s, start.bytes_per_s, start.skew, start.cached])

    def errors(x: Floats) -> Floats:
        told = predicted(shares, measured_s, Constants(*(x * scale).tolist()))
        return (told / measured_s - 1)[list(rows)].ravel()

    return Constants(*(least_squares(errors, np.ones(4)).x * scale).tolist())


def figures(path: Path) -> dict[str, Any]:
    """Errors of all cells, and pairs of strategies, measured more than ``NOISE`` apart.

    ``pairs_wrong`` are predicted in the other order, ``pairs_alike`` (random and uniform) as equal.
    """
    found, facts = understood(path, read)
    if not found:
        return accuracy((), (), INTERVAL) | facts
    shares, measured_s = (np.array(x) for x in zip(*found, strict=True))
    told_s = predicted(shares, measured_s, Constants())
    error = np.abs(told_s / measured_s - 1)
    apart = wrong = alike = 0
    for a, b in combinations(range(len(STRATEGIES)), 2):
        ratio, told = measured_s[:, a] / measured_s[:, b], told_s[:, a] / told_s[:, b]
        clear = np.abs(np.log(ratio)) > NOISE
        apart += int(clear.sum())
        wrong += int((clear & ((ratio - 1) * (told - 1) < 0)).sum())
        alike += int((clear & (told == 1)).sum())
    return {
        "rows": int(error.size),
        "median_error": float(np.median(error)),
        "worst_decile": float(np.quantile(error, 0.9)),
        "coverage": float(np.mean(error <= INTERVAL)),
        "worst": float(error.max()),
        "pairs": apart,
        "pairs_wrong": wrong,
        "pairs_alike": alike,
        "left_out": left_out(shares, measured_s),
        **facts,
    }


def left_out(shares: Floats, measured_s: Floats) -> dict[str, float] | None:
    """Errors of each row by constants that were fitted to the others; None: there are none."""
    if len(shares) < 2:
        return None
    error = []
    for i in range(len(shares)):
        others = [j for j in range(len(shares)) if j != i]
        told_s = predicted(shares, measured_s, fitted(shares, measured_s, others))
        error.append(np.abs(told_s[i] / measured_s[i] - 1))
    return {"median_error": float(np.median(error)), "worst": float(np.max(error))}
