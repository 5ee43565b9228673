"""Profiles of PipeDream (Narayanan et al., SOSP 2019), github.com/msr-fiddle/pipedream."""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

from placement.importers._read import (
    FormatError,
    decimal,
    equal_devices,
    graph_of,
    number,
    problem_of,
    stem,
    topological,
    whole,
)
from placement.problem import Problem
from placement.tools.limits import MOST

# "node7 -- Conv2d(3, 64) -- forward_compute_time=1.0, ... -- stage_id=2"; descriptions may
# hold anything, so the fields are what follows the last " -- ", but for a stage.
_NODE = re.compile(r"(\S+) -- (.*) -- ((?!stage_id)\w+=(?:(?! -- ).)*)(?: -- stage_id=\S*)?$")
_EDGE = re.compile(r"(\S+) -- (\S+)$")
FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def looks_like(text: str) -> bool:
    """Whether the first line that is not blank, nor a comment, is a node or an edge."""
    lines = (x.strip() for x in text.splitlines())
    return " -- " in next((x for x in lines if x and x[0] != "#"), "")


def read(
    text: str,
    path: str,
    *,
    objective: str | None = None,
    devices: int = 4,
    bandwidth: float = 12e9,
    memory: int = 16 * 2**30,
    mode: str = "training",
) -> Problem:
    """The problem of a ``graph.txt`` on ``devices`` equal accelerators ``acc:0..``.

    The files give milliseconds of one GPU and bytes, but no devices: the defaults are four of
    16 GiB, every pair joined both ways by ``bandwidth`` bytes per second (PCIe 3.0 x16).
    ``mode`` ``inference`` has the forward operators; ``training`` also a backward operator
    ``<node>.backward`` of each, on its forward operator's device: it takes what the forward
    operator made (which therefore stays in memory) and the gradients from the backward
    operators of that one's consumers, each as large as the activation it belongs to.

    Raises:
        FormatError: naming the file, the line or node and the field.
    """
    if mode not in ("inference", "training"):
        raise FormatError(f"{path}: mode = {mode!r} must be 'inference' or 'training'")
    cluster = equal_devices(path, "pipedream", "acc", devices, bandwidth, memory)
    names, described, table, pairs, order = _nodes_and_edges(text, path)
    kind = [words.split("(")[0].strip() or "op" for words in described]
    n = len(names)
    size, params = table[:, 2].astype(np.int64), table[:, 3].astype(np.int64)
    stored = np.flatnonzero(params)
    seconds = table[:, 0] / 1e3
    uses, backward = list(pairs), np.zeros(n, bool)
    tensor_src, group = np.arange(n), np.arange(n)
    param_uses = [(int(op), k) for k, op in enumerate(stored)]
    if mode == "training":
        # Backward operators follow in reverse order: that of operator v is number 2n-1-v, and
        # its tensor, the gradient of v's *inputs*, one per operator that made an input.
        back = 2 * n - 1 - np.arange(n)
        names += [f"{names[v]}.backward" for v in range(n - 1, -1, -1)]
        kind += [f"{kind[v]}.backward" for v in range(n - 1, -1, -1)]
        described += [f"{described[v]} backward" for v in range(n - 1, -1, -1)]
        uses += [(v, int(back[v])) for v in range(n)]
        uses += [(n + k, int(back[u])) for k, (u, _) in enumerate(pairs)]
        tensor_src = np.append(tensor_src, [back[v] for _, v in pairs])
        size = np.append(size, [size[u] for u, _ in pairs])
        seconds = np.append(seconds, table[::-1, 1] / 1e3)
        group = np.append(group, group[::-1])
        order = [*order, *(2 * n - 1 - v for v in order[::-1])]  # theirs follow those of the file
        backward = np.append(backward, np.ones(n, bool))
        param_uses += [(int(back[op]), k) for k, op in enumerate(stored)]
    graph = graph_of(
        path,
        stem(path),
        names,
        tensor_src.astype(np.int32),
        size.astype(np.int64),
        np.array(uses, np.int32).reshape(-1, 2),
        op_kind=kind,
        op_signature=described,
        param_bytes=params[stored],
        param_uses=np.array(param_uses, np.int32).reshape(-1, 2),
        group=group,
        is_backward=backward,
        output_tensor=sorted(set(range(n)) - {u for u, _ in pairs}),
    )
    compute_s = np.repeat(seconds[:, None], devices, axis=1)
    goal, facts = objective or "period", {"mode": mode}
    return problem_of(path, "pipedream", graph, cluster, compute_s, goal, order=order, facts=facts)


def _nodes_and_edges(
    text: str, path: str
) -> tuple[list[str], list[str], NDArray[np.float64], list[tuple[int, int]], list[int]]:
    """In topological order: names, descriptions, float64 ``[N, 4]`` ``FIELDS``, edges, and place.

    The place is that in the file.
    """
    at: dict[str, int] = {}
    described: list[str] = []
    values: list[list[float]] = []
    links: list[tuple[int, str, str]] = []
    for i, line in enumerate(text.splitlines(), start=1):
        node, edge = _NODE.match(line.strip()), _EDGE.match(line.strip())
        if node:
            name = node[1]
            if name in at:
                raise FormatError(f"{path}, line {i}: node {name} is described twice")
            at[name] = len(at)
            described.append(node[2].strip())
            values.append(_fields(node[3], f"{path}, line {i}: node {name}"))
        elif edge:
            links.append((i, edge[1], edge[2]))
        elif line.strip() and line.strip()[0] != "#":
            raise FormatError(
                f"{path}, line {i}: neither 'node -- description -- {FIELDS[0]}=..., ...' nor "
                f"'node -- node': {line.strip()[:60]!r}"
            )
    if not at:
        raise FormatError(f"{path}: there are edges but no nodes")
    for i, *ends in links:
        for end in ends:
            if end not in at:
                raise FormatError(f"{path}, line {i}: edge {ends[0]} -- {ends[1]}: no node {end}")
    names, pairs = list(at), sorted({(at[a], at[b]) for _, a, b in links})
    order, position = topological(names, pairs, path)
    return (
        [names[v] for v in order],
        [described[v] for v in order],
        np.array(values)[order],
        sorted((position[a], position[b]) for a, b in pairs),
        order,
    )


def _fields(text: str, where: str) -> list[float]:
    """The four numbers of a node; a list ``[a; b]`` of several activations is added up."""
    by_name = dict(re.findall(r"(\w+)=(\[[^]]*\]|[^,]*)", text))
    values = []
    for name in FIELDS:
        if name not in by_name:
            raise FormatError(f"{where}: field {name!r} is missing; it has {sorted(by_name)}")
        words = re.split("[;,]", by_name[name].strip().strip("[]"))
        total = sum(decimal(word, f"{where}: {name}") for word in words)
        if name.endswith("_size"):
            total = whole(
                math.ceil(number(total, where)), f"{where}: {name}", most=MOST.graph_bytes
            )
        values.append(number(total, f"{where}: {name}"))
    return values
