"""What the importers share: checked fields, and operators put in topological order.

All of them raise ``FormatError`` for what cannot be; the message names the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster, Device, Link
from placement.graph import GraphError, OpGraph, topological_order
from placement.problem import Problem, ProblemError
from placement.profile import Profile, ProfileError
from placement.tools.files import short
from placement.tools.limits import MOST

# A time in a text: with more digits, or a larger exponent, it is no time.
DECIMAL = re.compile(r"\d{1,18}(\.\d*)?([eE][+-]?\d{1,2})?")


class FormatError(ValueError):
    """The file is not what its format allows; the message names file, field and node."""


def field(record: Any, name: str, where: str) -> Any:
    """``record[name]``."""
    if not isinstance(record, dict):
        raise FormatError(f"{where}: expected an object, found {short(record)}")
    if name not in record:
        raise FormatError(f"{where}: field {name!r} is missing; it has {short(sorted(record))}")
    return record[name]


def id_of(record: Any, name: str, where: str) -> str:
    """A field that is an id, as text: 7, 7.0 and "7" are one."""
    key = field(record, name, where)
    key = int(key) if isinstance(key, float) and key.is_integer() else key
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise FormatError(f"{where}: {name} = {short(key)} must be a whole number or a text")
    return str(key)


def nodes_and_edges(data: Any, path: str) -> tuple[dict[str, Any], list[Any]]:
    """The ``nodes`` of a file by their ``id``, in its order, and the list of its ``edges``."""
    nodes, edges = field(data, "nodes", path), field(data, "edges", path)
    if not isinstance(nodes, list) or not isinstance(edges, list) or not nodes:
        raise FormatError(f"{path}: 'nodes' must be a non-empty list and 'edges' a list")
    by_id: dict[str, Any] = {}
    for i, node in enumerate(nodes):
        key = id_of(node, "id", f"{path}: nodes[{i}]")
        if by_id.setdefault(key, node) is not node:
            raise FormatError(f"{path}: node {key[:60]}: the id is used twice (nodes[{i}])")
    return by_id, edges


def ends_of(edge: Any, names: tuple[str, str], at: Mapping[str, int], where: str) -> list[int]:
    """Positions of the two nodes of an edge, whose ids are in the fields ``names``."""
    keys = [id_of(edge, name, where) for name in names]
    for name, key in zip(names, keys, strict=True):
        if key not in at:
            raise FormatError(f"{where}: {name} = {key[:60]} is not the id of a node")
    return [at[key] for key in keys]


def number(value: Any, what: str, low: float = 0.0) -> float:
    """``value`` as a finite float of at least ``low``; ``what`` names file, node and field."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FormatError(f"{what} = {short(value)} is not a number")
    parsed = float(value)
    if not (math.isfinite(parsed) and parsed >= low):
        raise FormatError(f"{what} = {short(value)} must be finite and at least {low:g}")
    return parsed


def decimal(word: str, what: str) -> float:
    """A word as a finite float of at least 0."""
    try:
        parsed = float(word)
    except ValueError:
        raise FormatError(f"{what} = {word[:60]!r} is not a number") from None
    return number(parsed, what)


def whole(value: Any, what: str, low: int = 0, most: int = 2**63 - 1) -> int:
    """``value`` as an int from ``low`` to ``most``."""
    parsed = number(value, what, low)
    if parsed != int(parsed):
        raise FormatError(f"{what} = {value} must be a whole number")
    if int(value) > most:  # as a float, a large one would be another
        raise FormatError(f"{what} = {short(value)} is too large: at most {most} is possible")
    return int(value)


def number_of(record: Any, name: str, where: str) -> float:
    """A field that is a number; ``where`` names file and node."""
    return number(field(record, name, where), f"{where}: {name}")


def whole_of(record: Any, name: str, where: str, low: int = 0, most: int = 2**63 - 1) -> int:
    """A field that is a whole number."""
    return whole(field(record, name, where), f"{where}: {name}", low, most)


def stem(path: str) -> str:
    """The name of a file, or of a part of it (``: PART``), without its ending, also compressed."""
    return Path(re.sub(r"\.gz(?=$|: )", "", Path(path).name)).stem


def numbered(text: str) -> Iterator[tuple[int, list[str]]]:
    """Lines that have words, by their numbers; what follows a ``#`` is a comment."""
    for i, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if words:
            yield i, words


def check_table(path: str, num_tensors: int, num_devices: int) -> None:
    """Raise where a time for each tensor and pair of devices would fill memory.

    To be asked before anything as large as the number of devices, which may be only a word of a
    file, is made.
    """
    entries = num_tensors * num_devices**2
    if num_devices > MOST.devices or entries > MOST.times:
        raise FormatError(
            f"{path}: {num_devices} devices and {num_tensors} tensors: at most {MOST.devices} "
            f"devices are possible, and {MOST.times} times of a tensor between two of them"
        )


def equal_devices(
    path: str, name: str, kind: str, devices: int, bandwidth: float, memory: int = 2**63 - 1
) -> Cluster:
    """``devices`` alike, ``KIND:0..``, every pair joined both ways by ``bandwidth`` bytes per s."""
    if not 1 <= devices <= MOST.joined or not bandwidth > 0 or memory < 1:
        raise FormatError(
            f"{path}: devices = {devices} must be from 1 to {MOST.joined}, bandwidth = "
            f"{bandwidth} bytes per second and memory = {memory} bytes must be positive"
        )
    parts = [Device(f"{kind}:{i}", kind, memory_bytes=int(memory)) for i in range(devices)]
    return all_joined(name, parts, float(bandwidth))


def all_joined(name: str, devices: Sequence[Device], bandwidth: float) -> Cluster:
    """Devices whose every pair is joined both ways by ``bandwidth`` bytes per second."""
    pairs = permutations([x.name for x in devices], 2)
    links = tuple(Link(a, b, bandwidth_bytes_per_s=bandwidth) for a, b in pairs)
    return Cluster(name, tuple(devices), links)


def named_devices(path: str, name: str, kind: str, devices: int, operators: int) -> Cluster:
    """``devices`` called ``KIND:0..`` between which nothing takes time."""
    if not 1 <= devices <= MOST.devices or devices * operators > MOST.times:
        raise FormatError(
            f"{path}: devices = {devices} must be from 1 to {MOST.devices}, and with {operators} "
            f"operators at most {MOST.times} times can be"
        )
    return Cluster(name, tuple(Device(f"{kind}:{i}", kind) for i in range(devices)))


@dataclass(frozen=True)
class Tasks:
    """What a file says of tasks: in the file's order, not yet in a topological one.

    ``seconds`` is float64 ``[N, D]``; ``pairs`` are (before, after). A tensor is its producer,
    bytes, and its users; a pair that no tensor joins has one of no bytes.
    """

    form: str
    name: str
    names: Sequence[str]
    seconds: NDArray[np.float64]
    pairs: Sequence[tuple[int, int]]
    kinds: Sequence[str] | None = None
    tensors: Sequence[tuple[int, int, Sequence[int]]] = ()


def task_problem(
    path: str,
    tasks: Tasks,
    cluster: Cluster,
    objective: str | None,
    costs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Problem:
    """The problem of ``tasks``, by default for ``latency``; ``costs``, ``settings``: see below."""
    order, position = topological(tasks.names, sorted(set(tasks.pairs)), path)
    joined = {(u, v) for u, _, users in tasks.tensors for v in users}
    bare: dict[int, list[int]] = {}
    for u, v in sorted(set(tasks.pairs) - joined):
        bare.setdefault(u, []).append(v)
    tensors = [*tasks.tensors, *((u, 0, users) for u, users in bare.items())]
    uses = [(t, position[v]) for t, (_, _, users) in enumerate(tensors) for v in users]
    graph = graph_of(
        path,
        tasks.name,
        [tasks.names[v] for v in order],
        np.array([position[u] for u, _, _ in tensors], np.int32),
        np.array([size for _, size, _ in tensors], np.int64),
        np.array(uses, np.int32).reshape(-1, 2),
        op_kind=None if tasks.kinds is None else [tasks.kinds[v] for v in order],
    )
    goal, seconds = objective or "latency", tasks.seconds[order]
    return problem_of(
        path, tasks.form, graph, cluster, seconds, goal, order=order, costs=costs, **settings
    )


def graph_of(path: str, *args: Any, **facts: Any) -> OpGraph:
    """``OpGraph.build`` of what a file says."""
    try:
        return OpGraph.build(*args, **facts)
    except GraphError as error:
        raise FormatError(f"{path}: {error}") from error


def problem_of(
    path: str,
    form: str,
    graph: OpGraph,
    cluster: Cluster,
    compute_s: NDArray[np.float64],
    objective: str,
    *,
    order: Sequence[int] = (),
    facts: Mapping[str, Any] | None = None,
    costs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Problem:
    """The problem of a file of the format ``form``, with the links that the cluster declares.

    ``order`` is the position in the file of each operator: where it is not that of the graph, the
    profile's provenance has it as ``file_order``.
    ``facts`` are more of the profile's provenance, ``costs`` more of its fields; ``settings`` are
    the problem's.
    """
    moved = {} if list(order) == sorted(order) else {"file_order": list(order)}
    provenance = {"format": form, "file": Path(path).name, **moved, **(facts or {})}
    names, spread_s = cluster.device_names, np.zeros_like(compute_s)
    try:
        profile = Profile(
            names, compute_s, spread_s, cluster.links, provenance=provenance, **(costs or {})
        )
        return Problem(graph, cluster, profile, objective, **settings)  # type: ignore[arg-type]
    except (ProfileError, ProblemError) as error:
        raise FormatError(f"{path}: {error}") from error


def labels(groups: Sequence[Any]) -> list[int]:
    """A number for each group; what has none (None) is one of its own."""
    seen: dict[Any, int] = {}
    keys = (("own", n) if g is None else g for n, g in enumerate(groups))
    return [seen.setdefault(key, len(seen)) for key in keys]


def topological(
    names: Sequence[str], edges: Sequence[tuple[int, int]], path: str
) -> tuple[list[int], list[int]]:
    """Nodes in topological order (first in the file first), and the position of each node."""
    n, array = len(names), np.array(sorted(edges), np.int64).reshape(-1, 2)
    order = topological_order(array, n)
    if len(order) < n:
        cycle = [names[v] for v in _cycle(array, set(range(n)) - set(order))]
        shown = cycle if len(cycle) <= 8 else [*cycle[:7], "..."]
        words = [name[:60] for name in (*shown, cycle[0])]
        raise FormatError(f"{path}: edges form a cycle: {' -> '.join(words)}")
    position = [0] * n
    for i, v in enumerate(order):
        position[v] = i
    return order, position


def _cycle(edges: NDArray[np.int64], stuck: set[int]) -> list[int]:
    """Walk backwards among the nodes that never became ready until one repeats."""
    before = {v: u for u, v in edges.tolist() if u in stuck}
    v = min(stuck)
    seen: dict[int, int] = {}
    walk: list[int] = []
    while v not in seen:
        seen[v] = len(walk)
        walk.append(v)
        v = before[v]
    return walk[seen[v] :][::-1]
