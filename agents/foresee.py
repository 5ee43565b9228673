"""The network that foresees how long the micro-batches of a pipeline wait for each other.

    python -m agents.foresee --seed 0 --out waits-period.safetensors

It learns from what the simulator says of the placements that its own walks lead to, on fresh
problems: no labels of anybody else, and nothing that is not evaluated again in the next round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents.encoder import PolicyError
from agents.trained import read, with_weights, write
from envs.generators import Pipelines
from placement.problem import Problem
from placement.search.evaluation import Choice
from placement.search.pipeline import (
    MOST,
    NUM_FEATURES,
    SQUARINGS,
    WAITED,
    WAITS,
    Net,
    Pipeline,
    cheapest,
    net_of,
)
from placement.simulator import score
from placement.tools.threads import torch_threads

FORMAT = 1
RELEASED = Path(__file__).with_name("released") / "waits-period.safetensors"
_PLACEMENTS = 40  # of a problem
_BATCH, _EPOCHS, _RATE = 256, 30, 3e-3
_HUBER = 0.05  # of the logarithm: beyond it errors count linearly
_HAND_WAITS = (0.0, 0.1, 0.2, 0.4, 0.6, 1.0)  # of walks by hand, shares of the bound
_CUT = 6  # orders
_OWN = 0.6  # of the walks follow the network
Floats = NDArray[np.float64]
Rows = tuple[Floats, Floats]  # features [B, F], and logarithms of the period over the bound [B]


class WaitsNet(nn.Module):
    """Two hidden layers over standardised features, at first 0, and what is foreseen by hand."""

    mean: Tensor
    spread: Tensor

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))
        self.register_buffer("spread", torch.ones(NUM_FEATURES))
        self.first = nn.Linear(NUM_FEATURES, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, features: Tensor) -> Tensor:
        """float32 ``[B]`` logarithms of features float32 ``[B, F]``; below 0 is as good as 0."""
        x = torch.relu(self.first((features - self.mean) / self.spread))
        by_hand = torch.log(features[:, WAITED].clamp(min=1.0))
        logarithm: Tensor = by_hand + self.out(torch.relu(self.second(x))).squeeze(1)
        return logarithm

    def net(self) -> Net:
        """For ``placement.search.pipeline``, which computes the same."""
        parts = (self.mean, self.spread, self.first.weight, self.first.bias, self.second.weight,
                 self.second.bias, self.out.weight, self.out.bias)  # fmt: skip
        mean, spread, into, bias, hidden, hidden_bias, out, last = (
            x.detach().double().numpy() for x in parts
        )
        scaled = into / spread
        return net_of(scaled.T, bias - scaled @ mean, hidden.T, hidden_bias, out[0], last[0])

    def save(self, path: str | Path, card: Mapping[str, Any]) -> None:
        """One safetensors file: the weights, and ``card`` as JSON text in its metadata."""
        head = {"format": FORMAT, "hidden": len(self.first.bias), "card": dict(card)}
        write(path, "waits", head, self)


def load_waits(path: str | Path) -> tuple[WaitsNet, dict[str, Any]]:
    """The network of a file that ``save`` wrote, and its card. Executes nothing that is in it.

    Raises:
        PolicyError: it is missing, truncated, of another format, or its weights are no numbers.
    """
    try:
        head, weights = read(path, "waits")
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']}, this version reads {FORMAT}")
        net = with_weights(lambda: WaitsNet(int(head["hidden"])), weights)
        return net, dict(head["card"])
    except Exception as error:  # safetensors, torch, json and the file system raise their own
        raise PolicyError(
            f"{path}: no network that foresees waits ({error}); "
            f"train one: python -m agents.foresee --out FILE"
        ) from error


def placements(
    problem: Problem, net: Net | None, rng: np.random.Generator, count: int = _PLACEMENTS
) -> list[Choice]:
    """About ``count`` choices int32 ``[G]``: splits, and where walks from them lead.

    Without ``net`` all walks are by hand.
    """
    seed = int(rng.integers(2**31))
    by_hand, own = Pipeline(problem, seed), Pipeline(problem, seed, net)
    starts = [split.choice for split in cheapest(problem, _CUT)[:10]]
    placement_of = {choice.tobytes(): choice for choice in starts}
    for _ in range(2 * count if starts else 0):
        if len(placement_of) >= count:
            break
        pool = starts[:6] if rng.random() < 0.7 else list(placement_of.values())
        begin = pool[int(rng.integers(len(pool)))]
        bound_s, squarings = by_hand.bound(begin), int(rng.choice(SQUARINGS))
        most = int(2 ** rng.integers(np.log2(MOST) + 1))
        if net is not None and rng.random() < _OWN:
            choice = own.walk(begin, WAITS * bound_s, squarings, most)
        else:
            choice = by_hand.walk(begin, float(rng.choice(_HAND_WAITS)) * bound_s, squarings, most)
        placement_of[choice.tobytes()] = choice
    return list(placement_of.values())


def labelled(problem: Problem, choices: Sequence[Choice], pipeline: Pipeline) -> Rows:
    """Each of them evaluated; what does not run is left out."""
    values = score(problem, np.array([c[problem.graph.group] for c in choices]))
    rows = [pipeline.describe(c) for c in choices]
    bounds = np.array([b for b, _ in rows])
    able = np.isfinite(values)
    logs = np.log(np.maximum(values[able] / bounds[able], 1.0))
    return np.array([f for _, f in rows])[able], logs


def fit(rows: Sequence[Rows], seed: int, hidden: int = 32) -> WaitsNet:
    """A new network of the least error on ``rows``."""
    torch.manual_seed(seed)
    parts = [np.concatenate(x) for x in zip(*rows, strict=True)]
    features, target = (torch.from_numpy(x).float() for x in parts)
    net = WaitsNet(hidden)
    net.mean, net.spread = features.mean(dim=0), features.std(dim=0) + 1e-3
    optimizer = torch.optim.Adam(net.parameters(), _RATE)
    steps = _EPOCHS * -(-len(target) // _BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-2, steps)
    for _ in range(_EPOCHS):
        for part in torch.randperm(len(target)).split(_BATCH):
            expected = target[part]
            predicted = net(features[part])
            predicted = torch.where(expected > 0, predicted, torch.relu(predicted))
            loss = nn.functional.huber_loss(predicted, expected, delta=_HUBER)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return net


def train(
    seed: int,
    rounds: int = 4,
    problems: int = 250,
    hidden: int = 32,
) -> tuple[WaitsNet, dict[str, Any]]:
    """A network, and its card: rounds of fresh problems; after the first it walks itself."""
    begun, rng = time.process_time(), np.random.default_rng(seed)
    draw, rows, net = Pipelines(), list[Rows](), None
    with torch_threads(1):
        for number in range(rounds):
            own = None if net is None else net.net()
            fresh: list[Rows] = []
            for _ in range(problems):
                problem = draw(rng)
                choices = placements(problem, own, rng)
                if choices:  # a problem may have no split at all
                    describing = Pipeline(problem, 0, own or WaitsNet(1).net())
                    fresh.append(labelled(problem, choices, describing))
            error = np.nan if net is None else _error(net, fresh)
            rows += fresh
            net = fit(rows, seed, hidden)
            count = sum(len(x[1]) for x in rows)
            print(f"round {number + 1}: {count} placements, error on new ones before {error:.4f}")
    assert net is not None
    return net, {
        "seed": seed,
        "rounds": rounds,
        "problems": rounds * problems,
        "placements": count,
        "error": error,
        "processor_seconds": time.process_time() - begun,
    }


def _error(net: WaitsNet, rows: Sequence[Rows]) -> float:
    """Mean absolute error of the logarithm."""
    features, target = (np.concatenate(x) for x in zip(*rows, strict=True))
    with torch.no_grad():
        predicted = net(torch.from_numpy(features).float()).clamp(min=0).numpy()
    return float(np.abs(predicted - target).mean())


def main(words: Sequence[str] | None = None) -> None:
    """Train one, and write it."""
    parser = argparse.ArgumentParser("python -m agents.foresee", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--problems", type=int, default=250, help="of each round")
    parser.add_argument("--out", required=True, metavar="FILE")
    args = parser.parse_args(words)
    net, card = train(args.seed, args.rounds, args.problems)
    net.save(args.out, card)


if __name__ == "__main__":
    main()
