"""Problems made of nothing: 20 families of graphs with drawn costs, for comparing planners.

Unlike the other files of this folder these are not models: ``families()[name](seed)`` is a
``Problem`` right away, and so is ``giph(seed)``, of a published test set. The same name and seed
give the same problem everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Concatenate, ParamSpec

import numpy as np

from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.objective import Objective
from placement.problem import Problem
from placement.profile import Profile

Edges = list[tuple[int, int]]
Drawn = tuple[int, Edges]  # N, and edges of operators that are numbered topologically
Shape = Callable[[np.random.Generator], Drawn]

_BANDWIDTH = 1e9  # bytes/s


@dataclass(frozen=True)
class Family:
    """A shape of graphs, and how their costs are drawn.

    Attributes:
        shape: ``rng -> (N, edges)``.
        num_devices: ``D``.
        ccr: mean transfer seconds of a tensor over mean seconds of an operator.
        heterogeneity: an operator takes a device ``1 +- heterogeneity / 2`` times its mean
            (HEFT's model of unrelated devices), 0..2.
        speeds: every device is this many times as fast; repeated over the devices.
        memory: each device holds this share of all parameters and activations; None: all.
        training: backward operators follow, mirrored, each colocated with its forward one.
    """

    shape: Shape
    num_devices: int = 4
    ccr: float = 0.5
    heterogeneity: float = 0.0
    speeds: tuple[float, ...] = (1.0,)
    memory: float | None = None
    training: bool = False

    def __call__(self, seed: int) -> Problem:
        """The problem of ``seed``, with objective ``period``."""
        rng = np.random.default_rng(seed)
        num_ops, edges = self.shape(rng)
        group = np.arange(num_ops)
        if self.training:
            # f0 .. f(n-1), then b(n-1) .. b0: every edge is mirrored, and b needs its f.
            last = 2 * num_ops - 1
            edges = [*edges, *((last - b, last - a) for a, b in edges)]
            edges += [(f, last - f) for f in group.tolist()]
            group = np.append(group, group[::-1])
            num_ops *= 2
        seconds = 1e-4 * rng.gamma(2.0, 0.5, num_ops)  # of one operator, 0.1 ms on average
        seconds[rng.random(num_ops) < 0.05] *= 10  # the compute-dense few
        size = rng.gamma(1.0, 1.0, num_ops)
        size *= self.ccr * seconds.mean() * _BANDWIDTH / size.mean()
        weights = np.where(rng.random(num_ops) < 0.5, rng.gamma(1.0, 4e5, num_ops), 0).astype(int)

        speed = np.resize(self.speeds, self.num_devices)
        spread = self.heterogeneity * (rng.random((num_ops, self.num_devices)) - 0.5)
        compute_s = seconds[:, None] * (1.0 + spread) / speed
        inputs = np.setdiff1d(np.arange(num_ops), [b for _, b in edges])
        outputs = np.setdiff1d(np.arange(num_ops), [a for a, _ in edges])
        graph = OpGraph.build(
            "synthetic",
            [f"op{n}" for n in range(num_ops)],
            tensor_src=[*range(num_ops), -1],
            tensor_bytes=[*size.astype(int), 1000],
            uses=[*edges, *((num_ops, n) for n in inputs)],
            param_bytes=weights,
            param_uses=[(n, n) for n in range(num_ops)],
            group=group,
            is_backward=np.arange(num_ops) >= (num_ops // 2 if self.training else num_ops),
            output_tensor=outputs,
        )
        capacity = 2**40
        if self.memory is not None:
            capacity = int(self.memory * (weights.sum() + 4 * graph.tensor_bytes.sum()))
        names = [f"acc:{d}" for d in range(self.num_devices)]
        cluster = Cluster(
            f"synthetic-{self.num_devices}",
            tuple(Device(x, kind="accelerator", memory_bytes=capacity) for x in names),
        )
        links = tuple(Link(a, b, 1e-6, _BANDWIDTH) for a, b in permutations(names, 2))
        profile = Profile(cluster.device_names, compute_s, np.zeros_like(compute_s), links)
        return Problem(graph, cluster, profile)


def families() -> dict[str, Family]:
    """The 20 families by name; ``families()[name](seed)`` is a problem of 100-2,000 operators."""
    unlike = (1.0, 2.0, 4.0)
    return {
        "layered": Family(layered(10, 10, 0.3)),
        "layered_wide": Family(layered(20, 50, 0.05), 8, ccr=0.1, heterogeneity=1.0),
        "series_parallel": Family(series_parallel(200), ccr=1.0),
        "series_parallel_large": Family(series_parallel(1500), 8, speeds=unlike),
        "lstm_grid": Family(grid(4, 50), ccr=0.2),
        "lstm_grid_large": Family(grid(8, 250), 8, ccr=0.1, heterogeneity=0.5),
        "inception": Family(inception(12), ccr=0.5),
        "inception_unlike": Family(inception(30), 3, ccr=1.0, speeds=unlike),
        "random": Family(random_graph(300, 30, 2), heterogeneity=0.5),
        "random_dense": Family(random_graph(600, 60, 8), 8, ccr=2.0),
        "chain_with_skips": Family(chain(200, 0.2), ccr=0.3),
        "deep_chain": Family(chain(2000, 0.02), 8, ccr=0.1, speeds=unlike),
        "fork_join": Family(fork_join(10, 8, 4), ccr=0.5),
        "reduction_tree": Family(reduction(256), ccr=0.5, heterogeneity=1.0),
        "transformer": Family(transformer(24, 4), memory=0.6),
        "transformer_training": Family(transformer(6, 2), training=True, memory=0.6),
        "u_net": Family(u_net(5, 12), ccr=0.8),
        "towers": Family(towers(26, 5), 8, ccr=1.0, speeds=unlike),
        "mixture_of_experts": Family(experts(12, 8), 8, ccr=0.4),
        "butterfly": Family(butterfly(5), ccr=1.0, heterogeneity=1.0),
    }


Sizes = ParamSpec("Sizes")


def drawn(
    draw: Callable[Concatenate[np.random.Generator, Sizes], Drawn],
) -> Callable[Sizes, Shape]:
    """``draw(rng, *sizes)`` as a function of the sizes alone, which gives a ``Shape``."""

    def of_sizes(*args: Sizes.args, **kwargs: Sizes.kwargs) -> Shape:
        return lambda rng: draw(rng, *args, **kwargs)

    of_sizes.__doc__ = draw.__doc__
    return of_sizes


def giph(seed: int) -> Problem:
    """A problem of the default test distribution of GiPH (Hu et al., MLSys 2023).

    Layers of few operators between one source and one sink, 15 to 24 devices that each support
    some of five kinds of operators, work over speed for seconds (heterogeneity of rank 1), and a
    delay and a bandwidth of each pair of devices. The parameters are those of the released
    ``parameters/multiple_networks_diff.txt`` (github.com/uidmice/placement-rl), the draws are
    our own. There, ``v`` of 10 or 15 is nominal: graphs have 11 to 46 operators.

    One of its units of time is a millisecond here, one of its bytes a megabyte. Links are
    without contention and operators run in the order of arrival, as in its simulator. The
    objective is ``latency``.
    """
    rng = np.random.default_rng(seed)
    num_kinds = 5
    num_ops, edges = _giph_graph(rng)
    work = rng.uniform(80.0, 120.0, num_ops)
    kind = rng.integers(num_kinds, size=num_ops)
    size = 1e6 * rng.uniform(80.0, 120.0, len(edges))

    d = int(rng.integers(15, 25))
    delay = np.triu(rng.uniform(0.0, 20.0, (d, d)), 1)  # ms
    per_byte = np.triu(rng.uniform(0.6e-2, 1.4e-2, (d, d)), 1) * 1e-6  # ms
    delay, per_byte = delay + delay.T, per_byte + per_byte.T
    speed = rng.uniform(3.0, 7.0, d)
    supports = rng.random((d, num_kinds)) < 0.2
    for device in np.flatnonzero(~supports.any(axis=1)):
        supports[device, rng.integers(num_kinds)] = True
    for missing in np.flatnonzero(~supports.any(axis=0)):
        supports[rng.choice(d, int(0.2 * d), replace=False), missing] = True

    compute_s = 1e-3 * np.where(supports[:, kind].T, work[:, None] / speed, np.inf)
    names = [f"dev:{i}" for i in range(d)]
    links = tuple(
        Link(names[a], names[b], 1e-3 * delay[a, b], 1e3 / per_byte[a, b])
        for a, b in permutations(range(d), 2)
    )
    graph = OpGraph.build(
        f"giph-{seed}",
        [f"op{n}" for n in range(num_ops)],
        tensor_src=[a for a, _ in edges],
        tensor_bytes=size.astype(int),
        uses=[(t, b) for t, (_, b) in enumerate(edges)],
        op_kind=[f"kind{k}" for k in kind],
    )
    cluster = Cluster("giph", tuple(Device(x, kind="accelerator") for x in names), links)
    profile = Profile(cluster.device_names, compute_s, np.zeros_like(compute_s), links)
    return Problem(
        graph, cluster, profile, Objective.LATENCY, contention=False, ready_order="arrival"
    )


def _giph_graph(rng: np.random.Generator) -> Drawn:
    """Layers between a source and a sink; edges may skip layers."""
    nominal = int(rng.choice([10, 15]))
    shape, density = float(rng.choice([0.1, 0.2, 0.3])), float(rng.choice([0.1, 0.2]))
    depth = int(np.ceil(rng.uniform(0.8, 1.2) * np.sqrt(nominal) / shape))
    widths = np.ceil(rng.uniform(0.0, 2.0 * shape * np.sqrt(nominal), depth)).astype(int)
    ends = np.cumsum([1, *np.maximum(widths, 1), 1])
    first = np.append(0, ends[:-1])  # of each layer; ends: one past its last operator
    num_ops = int(ends[-1])
    edges: set[tuple[int, int]] = set()
    for begin, end in zip(first[1:-1].tolist(), ends[1:-1].tolist(), strict=True):
        drawn = rng.random((begin, end - begin)) < density
        edges |= {(a, begin + b) for a, b in np.argwhere(drawn).tolist()}
    path = [int(rng.integers(a, b)) for a, b in zip(first, ends, strict=True)]
    edges |= set(pairwise(path))
    for begin, end in zip(first[1:-1].tolist(), ends[1:-1].tolist(), strict=True):
        for n in range(begin, end):
            if not any(a == n for a, _ in edges):
                edges.add((n, int(rng.integers(end, num_ops))))
            if not any(b == n for _, b in edges):
                edges.add((int(rng.integers(begin)), n))
    return num_ops, sorted(edges)


@drawn
def layered(rng: np.random.Generator, depth: int, width: int, density: float) -> Drawn:
    """Layers of equal width; every operator has a producer in the layer before."""
    edges = set()
    for layer in range(1, depth):
        for n in range(layer * width, (layer + 1) * width):
            before = (layer - 1) * width
            edges.add((before + int(rng.integers(width)), n))
            edges |= {(before + int(k), n) for k in np.flatnonzero(rng.random(width) < density)}
    return depth * width, sorted(edges)


@drawn
def series_parallel(rng: np.random.Generator, num_ops: int) -> Drawn:
    """A random edge is replaced by two in a row, or by two side by side, again and again."""
    links = [(0, 1)]
    for n in range(2, num_ops):
        k = int(rng.integers(len(links)))
        a, b = links[k]
        if rng.random() < 0.5:
            links[k] = (a, n)
        else:
            links.append((a, n))
        links.append((n, b))
    return num_ops, _numbered(num_ops, links)


@drawn
def grid(rng: np.random.Generator, layers: int, steps: int) -> Drawn:
    """An unrolled recurrent network: a cell needs the layer below and the step before."""
    cells = [(t * layers + k, k, t) for t in range(steps) for k in range(layers)]
    below = [(n - 1, n) for n, k, _ in cells if k > 0]
    return layers * steps, below + [(n - layers, n) for n, _, t in cells if t > 0]


@drawn
def inception(rng: np.random.Generator, blocks: int) -> Drawn:
    """Blocks of four branches, one to four operators long, between a split and a join."""
    edges, join = [], 0
    n = 1
    for _ in range(blocks):
        ends = []
        for _ in range(4):
            at = join
            for _ in range(int(rng.integers(1, 5))):
                edges.append((at, n))
                at, n = n, n + 1
            ends.append(at)
        join, n = n, n + 1
        edges += [(end, join) for end in ends]
    return n, edges


@drawn
def random_graph(rng: np.random.Generator, num_ops: int, window: int, mean_inputs: float) -> Drawn:
    """Each operator uses a few of the last ``window`` ones."""
    edges = set()
    for n in range(1, num_ops):
        first = max(0, n - window)
        for _ in range(1 + int(rng.poisson(mean_inputs - 1))):
            edges.add((int(rng.integers(first, n)), n))
    return num_ops, sorted(edges)


@drawn
def chain(rng: np.random.Generator, num_ops: int, skips: float) -> Drawn:
    """A chain; some operators are also used 2 to 20 operators later."""
    edges = {(n - 1, n) for n in range(1, num_ops)}
    for n in np.flatnonzero(rng.random(num_ops) < skips).tolist():
        if n < num_ops - 1:
            edges.add((n, min(num_ops - 1, n + int(rng.integers(2, 21)))))
    return num_ops, sorted(edges)


@drawn
def fork_join(rng: np.random.Generator, times: int, width: int, length: int) -> Drawn:
    """``times`` in a row: a fork, ``width`` chains of ``length``, a join that is the next fork."""
    edges, fork = [], 0
    for _ in range(times):
        join = fork + width * length + 1
        for k in range(width):
            first = fork + 1 + k * length
            edges.append((fork, first))
            edges += [(n, n + 1) for n in range(first, first + length - 1)]
            edges.append((first + length - 1, join))
        fork = join
    return fork + 1, edges


@drawn
def reduction(rng: np.random.Generator, leaves: int) -> Drawn:
    """A binary tree from the leaves to the root."""
    # Operator ``leaves + k`` joins operators ``2 k`` and ``2 k + 1``.
    edges = [(2 * k + i, leaves + k) for k in range(leaves - 1) for i in (0, 1)]
    return 2 * leaves - 1, edges


@drawn
def transformer(rng: np.random.Generator, layers: int, heads: int) -> Drawn:
    """Blocks of normalisation, per head q k v scores and mix, projection, sum, feed-forward."""
    edges: Edges = []
    n = 1

    def op(*inputs: int) -> int:
        nonlocal n
        edges.extend((a, n) for a in inputs)
        n += 1
        return n - 1

    stream = 0
    for _ in range(layers):
        norm = op(stream)
        mixed = []
        for _ in range(heads):
            q, k, v = op(norm), op(norm), op(norm)
            mixed.append(op(op(op(q, k)), v))
        stream = op(stream, op(*mixed))
        stream = op(stream, op(op(op(op(stream)))))
    return n, edges


@drawn
def u_net(rng: np.random.Generator, depth: int, length: int) -> Drawn:
    """Chains down, a bottom, and chains up that also need the output of their level."""
    stages = 2 * depth + 1
    edges = [(n - 1, n) for n in range(1, stages * length)]
    for level in range(depth):
        end, up = (level + 1) * length - 1, (stages - 1 - level) * length
        edges.append((end, up))
    return stages * length, edges


@drawn
def towers(rng: np.random.Generator, towers: int, length: int) -> Drawn:
    """Independent chains (embeddings), pairwise interactions of neighbours, one top chain."""
    edges = [(k * length + i, k * length + i + 1) for k in range(towers) for i in range(length - 1)]
    n = towers * length
    mixed = []
    for k in range(towers):
        edges += [((k + i) % towers * length + length - 1, n) for i in (0, 1)]
        mixed.append(n)
        n += 1
    edges += [(m, n) for m in mixed]
    edges += [(i - 1, i) for i in range(n + 1, n + 8)]
    return n + 8, edges


@drawn
def experts(rng: np.random.Generator, layers: int, experts: int) -> Drawn:
    """Blocks of a router, experts of three operators behind it, and their sum with a skip."""
    edges, stream = [], 0
    for _ in range(layers):
        router = stream + 1
        total = router + 3 * experts + 1
        edges += [(stream, router), (stream, total)]
        for k in range(experts):
            first = router + 1 + 3 * k
            edges += [(stream, first), (router, first), (first, first + 1)]
            edges += [(first + 1, first + 2), (first + 2, total)]
        stream = total
    return stream + 1, edges


@drawn
def butterfly(rng: np.random.Generator, stages: int) -> Drawn:
    """The exchanges of a fast Fourier transform of ``2 ** stages`` points."""
    width = 2**stages
    edges = []
    for s in range(stages):
        for i in range(width):
            n = (s + 1) * width + i
            edges += [(s * width + i, n), (s * width + (i ^ 1 << s), n)]
    return (stages + 1) * width, edges


def _numbered(num_ops: int, links: Edges) -> Edges:
    """The same acyclic graph with its vertices renumbered topologically."""
    users: list[list[int]] = [[] for _ in range(num_ops)]
    missing = [0] * num_ops
    for a, b in set(links):
        users[a].append(b)
        missing[b] += 1
    number: dict[int, int] = {}
    ready = [n for n in range(num_ops) if missing[n] == 0]
    while ready:
        a = ready.pop()
        number[a] = len(number)
        for b in sorted(users[a]):
            missing[b] -= 1
            if missing[b] == 0:
                ready.append(b)
    return sorted({(number[a], number[b]) for a, b in links})
