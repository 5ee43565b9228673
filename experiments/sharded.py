"""DOPPLER's four graphs: operators that its authors sharded, beside ours cut by ``pieces``.

    python -m experiments.sharded compute_graph [--evaluations 500]

``compute_graph`` is the folder of that name in github.com/xinyuyao/Doppler (read at 04c66de0). Of
each graph the module whose products have the same work is captured at full size without values,
and cut into 4 or 8 pieces; how operators can be cut is found on a small module of the same
operators. Both are placed on four equal devices by the same planners, under the rules of DOPPLER's
simulator: a product of m x k and k x n costs m k n, whatever else its elements, a view nothing,
units of 1e-10 s. In the files a product's result is sent as if it had four bytes for each
operation (``as in the files``); under ``by size`` it has four for each element. Writes
``experiments/results/sharded.md`` and ``.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from experiments.study import Option, Options, Study, StudyError, run
from experiments.tables import Column, table
from placement import importers, planners
from placement.capturing import capture
from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.pieces import shares_of
from placement.pieces.decide import Moves, decide, options_of
from placement.pieces.decide import Options as Ways
from placement.pieces.split import cut_graph
from placement.problem import Problem
from placement.profile import Profile
from placement.program import fill

UNIT = 1e-10  # seconds; DOPPLER divides costs by it, and transfers too
PRODUCTS = ("mm", "matmul", "bmm", "linear", "addmm", "baddbmm")
PLANNERS = ("heft", "m_etf", "macro_search", "policy")
VIEWS = ("view", "slice", "transpose", "select", "expand", "t", "unsqueeze", "permute")
RULES = ("as in the files", "by size")


class Chain(nn.Module):
    """``A B + C (D E)``: 3 products of 16 blocks."""

    def __init__(self, n: int) -> None:
        super().__init__()
        shapes = {"a": (4, 2), "b": (2, 2), "c": (4, 2), "d": (2, 4), "e": (4, 2)}
        for name, (rows, columns) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(rows * n, columns * n)))

    def forward(self, one: Tensor) -> Tensor:
        return (self.a * one) @ self.b + self.c @ (self.d @ self.e)


class Ffnn(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, hidden), nn.Linear(hidden, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).softmax(-1)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Layer(nn.Module):
    """Of LLaMA 7B, with attention in single steps; ``head``: logits of the last token."""

    def __init__(self, width: int, inner: int, heads: int, vocabulary: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = Norm(width), Norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False) if vocabulary else None

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.norm(x)
        q, k, v = (
            f(y).view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        weights = (q @ k.transpose(2, 3) * 0.125).softmax(-1)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(b, t, c))
        y = self.norm2(x)
        x = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x if self.head is None else self.head(x[:, -1]).softmax(-1)


@dataclass(frozen=True)
class Case:
    """A file, and its module at full and at a small size: arguments, and shape of the input."""

    file: str
    kind: type[nn.Module]
    full: tuple[tuple[int, ...], tuple[int, ...]]
    small: tuple[tuple[int, ...], tuple[int, ...]]


CASES = (
    Case("chain_mm_112nodes", Chain, ((10_000,), (1,)), ((8,), (1,))),
    Case("ffnn_192nodes", Ffnn, ((2**18,), (2**17, 32)), ((64,), (16, 32))),
    Case("transformer_block_215nodes", Layer, ((4096, 11008, 32), (4, 4096, 4096)),
         ((64, 96, 8), (4, 16, 64))),
    Case("full_transformer_layer_261nodes", Layer, ((4096, 11008, 32, 32000), (4, 4096, 4096)),
         ((64, 96, 8, 48), (4, 16, 64))),
)  # fmt: skip


def captured(case: Case, small: bool) -> OpGraph:
    """Its graph; at full size on ``meta``."""
    arguments, shape = case.small if small else case.full
    with torch.device("cpu" if small else "meta"):
        torch.manual_seed(0)
        return capture(case.kind(*arguments).eval(), (torch.ones(shape),), name=case.file)


def costs(graph: OpGraph) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """``[N]`` of its operators, in DOPPLER's units, and which of them are products."""
    program = graph.program
    params = [x.to("meta") for x in program.params]
    inputs = [x.to("meta") for x in program.example_tensors]
    values = dict(zip(program.input_tensors, inputs, strict=True))
    units, products = [], []
    for step in program.steps:
        template = step.args, step.kwargs
        args, kwargs = fill(template, values, params)
        made = step.target(*args, **kwargs)
        values |= zip(step.outputs, made if step.multi else [made], strict=True)
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        kind, out = str(step.target).split(".")[1], step.outputs[0]
        products.append(kind in PRODUCTS)
        if products[-1]:
            units.append(made.numel() * read[0].shape[-1])
        elif graph.tensor_root[out] != out or kind in VIEWS:
            units.append(0)
        else:
            units.append(max(x.numel() for x in [*read, made]))
    return np.array(units, np.float64), np.array(products)


def sent(graph: OpGraph, units: NDArray[np.float64], products: NDArray[np.bool_], rule: str) -> Any:
    """int64 ``[T]`` bytes: by size, or of a product, and of views of it, four an operation."""
    size = graph.tensor_bytes.copy()
    if rule == RULES[0]:
        for t, root in enumerate(graph.tensor_root.tolist()):
            src = int(graph.tensor_src[root])
            if src >= 0 and products[src]:
                share = graph.tensor_bytes[t] / graph.tensor_bytes[root]
                size[t] = int(4 * units[src] * share)
    return size


def ours(case: Case, ways: int, rule: str) -> Problem:
    """Our module in so many pieces (1: whole), on four devices."""
    full, shares = captured(case, small=False), (shares_of(ways) if ways > 1 else ())
    units, products = costs(full)
    if shares:
        small = captured(case, small=True)
        assert small.op_name == full.op_name
        options = [
            Ways(unit * UNIT, o.rules, tuple(unit * UNIT / ways for _ in o.rules))
            for unit, o in zip(units, options_of(small, shares), strict=True)
        ]
        moves = Moves(hop_s=0.0, bytes_per_s=1 / UNIT, copied_per_s=4 / UNIT)
        told = replace(full, tensor_bytes=sent(full, units, products, rule))
        full = cut_graph(full, decide(told, shares, options, moves))
        units, products = costs(full)
    graph = replace(full, tensor_bytes=sent(full, units, products, rule))
    names = tuple(f"gpu:{i}" for i in range(4))
    cluster = Cluster(case.file, tuple(Device(name, "gpu") for name in names),
                      (Link("*", "*", 0.0, 1 / UNIT),))  # fmt: skip
    seconds = np.repeat(units[:, None] * UNIT, 4, axis=1)
    profile = Profile(names, seconds, 0 * seconds, links=cluster.links)
    return Problem(graph, cluster, profile, "latency", num_microbatches=1, max_in_flight=1,
                   contention=False, ready_order="arrival")  # type: ignore[arg-type]  # fmt: skip


def theirs(path: Path, rule: str) -> Problem:
    """A file; ``by size`` a product's result has the elements of the operator that reads it."""
    problem = importers.load(path, devices=4)
    if rule == RULES[0]:
        return problem
    graph, units = problem.graph, problem.compute_s[:, 0] / UNIT
    size = graph.tensor_bytes.copy()
    for t, src in enumerate(graph.tensor_src.tolist()):
        readers = units[graph.use_dst[graph.use_ptr[t] : graph.use_ptr[t + 1]]]
        smaller = readers[readers < units[src]]
        if src >= 0 and len(smaller) and units[src] > 16 * smaller.max():
            size[t] = int(4 * smaller.max())
    return replace(problem, graph=replace(graph, tensor_bytes=size))


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """One of each graph, rule and way to cut it."""
    folder = Path(options.folder)
    for case in CASES:
        path = folder / f"{case.file}.txt"
        if not path.is_file():
            raise StudyError(f"{path} is not there: get github.com/xinyuyao/Doppler")
        for rule in RULES:
            what = (case.file, rule, options.evaluations)
            name = f"{case.file}-{RULES.index(rule)}"
            yield options.finished.row(
                dict, what, partial(row, case, path, rule, options), name=name
            )


def row(case: Case, path: Path, rule: str, options: Options) -> dict[str, Any]:
    """Seconds of all ways to cut a graph."""
    problems = {"theirs": theirs(path, rule)}
    problems |= {f"ours, {k}": ours(case, k, rule) for k in (1, 4, 8)}
    return {
        "case": f"{case.file}, {rule}",
        **{f"{of} ops": p.num_ops for of, p in problems.items()},
        **{f"{of} work": float(p.compute_s[:, 0].sum()) for of, p in problems.items()},
        **{of: best(p, options.evaluations) for of, p in problems.items()},
    }


def best(problem: Problem, evaluations: int) -> float:
    """Seconds of the shortest of four planners' answers."""
    budget = {"evaluations": evaluations, "seed": 0}
    values = []
    for name in PLANNERS:
        more = budget if name in ("macro_search", "policy") else {}
        values.append(float(planners.solve(planners.load(name, **more), problem).value_s))
    return min(values)


WAYS = ("theirs", "ours, 1", "ours, 4", "ours, 8")
COLUMNS = (
    Column("graph", "case"),
    *(Column(f"{way}: work", f"{way} work", 1, unit=" s") for way in ("theirs", "ours, 1")),
    *(Column(f"{way}: ops", f"{way} ops") for way in WAYS),
    *(Column(way, way, 1, unit=" s") for way in WAYS),
)
STUDY = Study(
    name="sharded",
    rows=rows,
    options={
        "folder": Option("compute_graph", word=True),
        "evaluations": Option(500, "of each search"),
    },
    parts=lambda rows, options: {"table": table(rows, *COLUMNS), "planners": ", ".join(PLANNERS)},
    facts=lambda options: {"files": "github.com/xinyuyao/Doppler at 04c66de0"},
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
