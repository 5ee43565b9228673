"""Problems: by hand (``small_problem``), seeded (``random_problem``), drawn (``problems``)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.objective import Objective
from placement.problem import Placement, Problem
from placement.profile import Profile


def chain(n: int) -> list[tuple[int, int]]:
    """The edges of ``n`` operators in a row."""
    return list(pairwise(range(n)))


def written(path: Path, content: Any) -> Path:
    """A file with bytes, with a text, or with a value as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def every_link(names: Sequence[str], *costs: Any) -> tuple[Link, ...]:
    """A link with these fields, in their order, from every device to every other."""
    return tuple(Link(a, b, *costs) for a, b in permutations(names, 2))


def problem_on(
    graph: OpGraph,
    seconds: ArrayLike,
    *,
    cluster: Cluster | None = None,
    devices: Sequence[str] | str = "d{}",
    device: Mapping[str, Any] | None = None,
    memory_bytes: ArrayLike = 2**40,
    links: tuple[Link, ...] = (),
    link: Sequence[Any] | None = None,
    profile: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Problem:
    """A graph whose operators take ``seconds [N, D]``, on a ``cluster`` or on ``devices``.

    ``device``: further fields of the devices, a value or a list with one per device. ``link``:
    costs of a link between any two devices. ``profile`` has further facts, ``settings`` are the
    problem's.
    """
    table = np.array(seconds, np.float64)
    d = table.shape[1]
    if cluster is None:
        names = [devices.format(i) for i in range(d)] if isinstance(devices, str) else devices
        memory = np.broadcast_to(memory_bytes, d).tolist()
        each = {k: v if isinstance(v, list) else [v] * d for k, v in (device or {}).items()}
        facts = [{k: v[i] for k, v in each.items()} for i in range(d)]
        fields = zip(names, memory, facts, strict=True)
        cluster = Cluster("small", tuple(Device(x, memory_bytes=m, **f) for x, m, f in fields))
    links = links if link is None else every_link(cluster.device_names, *link)
    costs = Profile(cluster.device_names, table, np.zeros_like(table), links, **(profile or {}))
    return Problem(graph, cluster, costs, **settings)


DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3)]


def graph_of(n: int, uses: Any, tensor_bytes: ArrayLike = 0, **facts: Any) -> OpGraph:
    """Operators ``op0``, ``op1``, ... with a tensor each (or ``tensor_src``), and further facts.

    ``param_bytes`` without ``param_uses``: of a parameter that each operator has for itself.
    """
    if "param_bytes" in facts and "param_uses" not in facts:
        facts |= {"param_bytes": np.broadcast_to(facts["param_bytes"], n)}
        facts |= {"param_uses": [(i, i) for i in range(n)]}
    name, names = facts.pop("name", "small"), facts.pop("op_name", [f"op{i}" for i in range(n)])
    src = facts.pop("tensor_src", range(n))
    return OpGraph.build(name, names, src, np.broadcast_to(tensor_bytes, len(src)), uses, **facts)


def small_problem(
    seconds: ArrayLike,
    edges: Sequence[tuple[int, int]] = (),
    *,
    tensor_bytes: ArrayLike = 0,
    tensors: Sequence[tuple[int, int, Sequence[int]]] | None = None,
    param_bytes: ArrayLike | None = None,
    graph: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Problem:
    """Operators ``op0``, ``op1``, ... that take ``seconds [N, D]``, with a tensor each.

    ``tensors``: (producer, bytes, consumers) instead of those. ``param_bytes``: of a parameter
    that each operator has for itself. ``graph``: further facts, as is ``group``; ``settings`` are
    those of ``problem_on``.
    """
    n = len(np.array(seconds))
    facts: dict[str, Any] = {"group": settings.pop("group", None), **(graph or {})}
    if param_bytes is not None:
        facts |= {"param_bytes": param_bytes}
    if tensors is not None:
        edges = [(t, user) for t, (_, _, users) in enumerate(tensors) for user in users]
        tensor_bytes = [size for _, size, _ in tensors]
        facts |= {"tensor_src": [src for src, _, _ in tensors]}
    return problem_on(graph_of(n, edges, tensor_bytes, **facts), seconds, **settings)


def random_graph(rng: np.random.Generator, num_ops: int, views: bool = True) -> OpGraph:
    """A graph with model inputs, fan-out, multi-output operators, views and tied parameters."""
    src: list[int] = [-1] * int(rng.integers(0, 3))
    root: list[int] = list(range(len(src)))
    uses: list[tuple[int, int]] = []
    for op in range(num_ops):
        mine = [t for t in range(len(src)) if rng.random() < min(0.9, 3 / len(src))]
        uses += [(t, op) for t in mine]
        for _ in range(rng.integers(0 if rng.random() < 0.2 else 1, 3)):
            is_view = views and mine and rng.random() < 0.2
            root.append(root[int(rng.choice(mine))] if is_view else len(src))
            src.append(op)
    num_tensors, num_params = len(src), int(rng.integers(0, 5))
    param_uses = rng.integers(0, [num_ops, max(num_params, 1)], (2 * num_params, 2))
    names, sizes = [f"op{i}" for i in range(num_ops)], rng.integers(0, 1000, num_tensors)
    facts = {"param_bytes": rng.integers(1, 100, num_params), "param_uses": param_uses}
    outputs = np.flatnonzero(rng.random(num_tensors) < 0.2)
    facts |= {"tensor_root": root, "output_tensor": outputs}
    return OpGraph.build("random", names, src, sizes, uses, **facts)


def random_problem(
    seed: int,
    num_ops: int | None = None,
    num_devices: int | None = None,
    *,
    grouped: bool = False,
    unsupported: bool = False,
    objective: Objective = "period",
) -> Problem:
    """A small random problem of everything the simulator models; the same for the same seed.

    Integer and float seconds (ties matter), shared channels, blocking links, seconds of
    waking, host and other devices, loaded seconds, workspace, libraries, tight and loose memory.
    ``grouped``: some operators share a colocation group; ``unsupported``: some cannot run
    everywhere.
    """
    rng = np.random.default_rng(seed)
    n = num_ops or int(rng.integers(1, 16))
    d = num_devices or int(rng.integers(1, 5))
    graph = random_graph(rng, n)
    if grouped:
        labels = np.where(rng.random(n) < 0.5, rng.integers(0, max(n // 3, 1), n), n + np.arange(n))
        uses = np.stack([graph.use_tensor, graph.use_dst], axis=1)
        reads = np.stack([graph.param_use_op, graph.param_use], axis=1)
        same = ("op_name", "tensor_src", "tensor_bytes", "tensor_root", "param_bytes")
        facts = {k: getattr(graph, k) for k in (*same, "output_tensor")}
        graph = graph_of(n, uses, **facts, param_uses=reads, group=labels)
    names = [f"d{i}" for i in range(d)]
    memory = 10 ** int(rng.integers(3, 7))
    watts = np.random.default_rng(seed + 1)  # leaves everything else as it was

    def power() -> dict[str, float]:
        return {"busy_w": float(watts.integers(1, 9)), "idle_w": float(watts.integers(0, 4))}

    kinds = ["cpu" if rng.random() < 0.5 else "other" for _ in names]
    pairs = zip(names, kinds, strict=True)
    cluster = Cluster("random", tuple(Device(*x, memory_bytes=memory, **power()) for x in pairs))
    compute = rng.integers(0, 5, (n, d)) * 1.0 if rng.random() < 0.5 else rng.random((n, d))
    if unsupported:
        # Device 0 runs everything, so that every colocation group has a device.
        compute[:, 1:][rng.random((n, d - 1)) < 0.2] = np.inf
    wakes, receives, libraries = (np.random.default_rng(seed + i) for i in (2, 3, 4))  # likewise
    links = tuple(
        Link(
            a,
            b,
            float(rng.integers(0, 3)),
            float(rng.integers(100, 2000)),
            blocking=bool(rng.random() < 0.3),
            channel="shared" if rng.random() < 0.3 else None,
            wake_s=float(wakes.integers(0, 3)) if wakes.random() < 0.3 else 0.0,
            send_s=float(wakes.integers(0, 3)) if wakes.random() < 0.2 else 0.0,
            send_s_per_byte=float(wakes.integers(0, 3)) / 64 if wakes.random() < 0.2 else 0.0,
            receive_s=float(receives.integers(0, 3)) if receives.random() < 0.2 else 0.0,
        )
        for a in names
        for b in names
        if a != b and rng.random() < 0.9
    )
    matrix = rng.integers(0, 3, (graph.num_tensors, d, d)) * 1.0 if rng.random() < 0.2 else None
    profile = Profile(
        tuple(names),
        compute,
        np.zeros((n, d)),
        links,
        loaded_s=compute * 1.3 if rng.random() < 0.5 else None,
        transfer_s=matrix,
        workspace_bytes=rng.integers(0, 50, n) if rng.random() < 0.5 else None,
        library_bytes=libraries.integers(0, 50, (n, d)) if libraries.random() < 0.3 else None,
    )
    runs = {"num_microbatches": int(rng.integers(1, 9)), "max_in_flight": int(rng.integers(1, 5))}
    return Problem(graph, cluster, profile, objective=objective, **runs)


def with_twins(seed: int, *size: int) -> Problem:
    """A random problem, in which one or two devices with own memory have one that streams.

    Some copies share the link of other transfers, and some buffers are a size of their own.
    """
    problem, rng = random_problem(seed, *size), np.random.default_rng(seed)
    kinds = ["cpu", *["gpu"] * (problem.num_devices - 1)]
    devices = [replace(d, kind=k) for d, k in zip(problem.cluster.devices, kinds, strict=True)]
    cards = [d for d in devices[1:] if rng.random() < 0.7]
    twins = [Device(f"s/{d.name}", d.kind, streams=d.name, busy_w=0.0, idle_w=0.0) for d in cards]
    links = [Link(devices[0].name, t.name, 0.5, 7.0) for t in twins if rng.random() < 0.5]
    links = [replace(x, channel="slow" if rng.random() < 0.2 else None) for x in links]
    most = max(int(problem.graph.op_param_bytes.max()), 1)
    rooms = [None, most, most * 3 // 2, most * 4]
    twins = [replace(t, buffer_bytes=rooms[rng.integers(len(rooms))]) for t in twins]
    cluster = Cluster("twins", (*devices, *twins), (*problem.cluster.links, *links))
    profile = problem.profile.for_cluster(cluster)
    return replace(problem, cluster=cluster, profile=profile, objective=Objective.PERIOD)


def plain(problem: Problem) -> Problem:
    """The problem without what makes times depend on what else happens."""
    cluster = Cluster("plain", tuple(Device(d.name, d.kind) for d in problem.cluster.devices))
    known = problem.profile.links
    links = tuple(Link(x.src, x.dst, x.latency_s, x.bandwidth_bytes_per_s) for x in known)
    profile = replace(problem.profile, links=links, loaded_s=None)
    return replace(problem, cluster=cluster, profile=profile, objective="latency")


def altered(problem: Problem, devices: Any = None, links: Any = None, **profile: Any) -> Problem:
    """With these fields of each device, of each link of the profile, and of the profile.

    A function as a value is asked for each.
    """

    def each(parts: Sequence[Any], fields: Mapping[str, Any] | None) -> tuple[Any, ...]:
        pairs = (fields or {}).items()
        return tuple(replace(x, **{k: v(x) if callable(v) else v for k, v in pairs}) for x in parts)

    profile = {"links": each(problem.profile.links, links)} | profile
    cluster = replace(problem.cluster, devices=each(problem.cluster.devices, devices))
    return replace(problem, cluster=cluster, profile=replace(problem.profile, **profile))


def every_placement(problem: Problem) -> np.ndarray:
    """int32 ``[B, N]``: all placements that obey support and colocation."""
    devices = [np.flatnonzero(row) for row in np.isfinite(problem.group_compute_s)]
    choices = np.array(list(product(*devices)), np.int32)
    return choices[:, problem.graph.group]


def random_placement(problem: Problem, seed: int) -> Placement:
    """int32 ``[N]``: supported devices only, whole colocation groups."""
    rng = np.random.default_rng(seed)
    device = [int(rng.choice(np.flatnonzero(np.isfinite(row)))) for row in problem.group_compute_s]
    return np.array(device, np.int32)[problem.graph.group]


@st.composite
def problems(draw: st.DrawFn, max_ops=15, grouped=False, unsupported=False) -> Problem:
    """Hypothesis strategy of ``random_problem``; shrinks to few operators and devices."""
    some = {"grouped": grouped, "unsupported": unsupported}
    seed, num_ops = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, max_ops))
    return random_problem(seed, num_ops, draw(st.integers(1, 4)), **some)
