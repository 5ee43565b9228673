"""One call on two unlike processors: one of them, pieces of equal sizes, or pieces by speed?

    python -m experiments.unlike [WORKLOAD ...] [--rounds 7] [--seconds 10] [--repeats 5]

The process of the second core computes with the vector instructions of 2008 (SSE 4.1): how much
slower depends on the operator. Each process measures its own device, first whole operators, whose
seconds give the shares of pieces by speed: the nearest quarters, eighths and twelfths of a whole,
as heads and channels can be cut so; the one that is predicted to be the fastest runs. Both
processes are ranks of one plan, as with ``placement run --distributed``; calls of all plans take
turns, medians of the rounds. ``busy`` is what the rank that computes longer needs of its
processor, which other programs do not lengthen. What is cut, and rows that are finished, lie in
``runs/unlike``: the same command continues. Writes ``experiments/results/unlike.md`` and
``.json``.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.runs import in_turns, two_cores
from experiments.study import Option, Options, Study, run
from experiments.tables import Column
from placement import pieces, planners
from placement.capturing import capture
from placement.cluster import Cluster, cpu_model
from placement.costs.measure import measure
from placement.executor.distributed import DistributedRunner, pin
from placement.executor.distributed_world import World
from placement.graph import OpGraph
from placement.pieces.rules import rule_of
from placement.pieces.split import cut_graph
from placement.problem import Problem
from placement.profile import Profile
from placement.program import split_inputs
from placement.workloads import load

OLD = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
       "MKL_CBWR": "COMPATIBLE"}  # fmt: skip
PARTS = (4, 8, 12)  # of a whole: shares by speed are the nearest of these
WAYS = ("one device", "equal pieces", "pieces by speed")
PATIENCE_S = 1800.0
Floats = NDArray[np.float64]
Cuts = Mapping[str, pieces.Pieces | None]  # of each way; None: operators stay whole


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """One of each workload."""
    for name in options.workloads:
        what = name, options.rounds, options.seconds, options.repeats
        yield options.finished.row(dict, what, partial(row, name, options), name=name)


def row(name: str, options: Options) -> dict[str, Any]:
    """Seconds of a call of each way."""
    module, inputs = load(name)
    graph = capture(module, inputs, name=name)
    torch.set_num_threads(1)  # as a device has
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cluster = linked(folder)
        told = {"workload": name, "repeats": options.repeats, "rounds": options.rounds}
        cuts: dict[str, pieces.Pieces | None] = {WAYS[0]: None}
        (whole,) = measured(folder, cluster, told, cuts).values()
        slower = float(whole[:, 1].sum() / whole[:, 0].sum())
        by_speed = {round(n * slower / (1 + slower)) / n for n in PARTS} - {1.0}
        moves = pieces.Moves.of(cluster.links)
        for share in (0.5, *sorted(by_speed)):
            cuts[f"{share:.2f}"] = cut(graph, share, moves, options)
        seconds = measured(folder, cluster, told, cuts)
        placed = {}
        for way, own in cuts.items():
            problem = problem_of(in_pieces(graph, own), cluster, seconds[way])
            answer = planners.load("best_of", seconds=options.seconds)(problem)
            placed[way] = answer.placement.tolist(), problem.priority.tolist(), answer.value_s
        best = min((f"{share:.2f}" for share in by_speed), key=lambda way: placed[way][2])
        named = dict(zip(WAYS, (WAYS[0], "0.50", best), strict=True))
        cuts, placed = ({way: x[own] for way, own in named.items()} for x in (cuts, placed))
        ranks(folder, cluster, told | {"placed": placed}, cuts)
        took = {r: json.loads((folder / f"{r}.json").read_text(encoding="utf-8")) for r in range(2)}
    busy = {way: np.max([np.median(took[r][way], axis=0)[1] for r in took]) for way in WAYS}
    own = {way: np.array(took[0][way])[:, 0] for way in WAYS}
    return {
        "case": name,
        "machine": cpu_model(),
        "slower": slower,
        "share": float(best),
        **{way: float(np.median(own[way])) for way in WAYS},
        **{f"{way}, busy": float(busy[way]) for way in WAYS},
        **{f"{way}, predicted": float(placed[way][2]) for way in WAYS},
        "over equal": float(np.median(own[WAYS[1]] / own[WAYS[2]])),
        "over one device": float(np.median(own[WAYS[0]] / own[WAYS[2]])),
    }


def cut(graph: OpGraph, share: float, moves: pieces.Moves, options: Options) -> pieces.Pieces:
    """What is cut where the first piece has this share; the same as the last time."""
    shares = (share, 1 - share)

    def chosen() -> dict[str, Any]:
        found = pieces.split(graph, shares, moves=moves).program.pieces
        return {} if found is None else {op: astuple(rule) for op, rule in found.rules.items()}

    name = f"{graph.name}, {share:.4f}"
    rules = options.finished.row(dict, name, chosen, name=name)
    return pieces.Pieces(shares, {op: rule_of(*row) for op, row in rules.items()})


def in_pieces(graph: OpGraph, cut: pieces.Pieces | None) -> OpGraph:
    """The graph, cut so."""
    return graph if cut is None else cut_graph(graph, cut)


def problem_of(graph: OpGraph, cluster: Cluster, seconds: Floats) -> Problem:
    """Of a call: ``seconds`` float64 ``[N, 2]``."""
    profile = Profile(cluster.device_names, seconds, np.zeros_like(seconds), cluster.links)
    return Problem(graph, cluster, profile, "latency", max_in_flight=1)  # type: ignore[arg-type]


def linked(folder: Path) -> Cluster:
    """Two cores, each of a process, and the links that these measure."""
    devices, there = folder / "devices.yaml", folder / "linked.yaml"
    two_cores("unlike").to_yaml(devices)
    command = [sys.executable, "-m", "placement", "profile", "--distributed", "2"]
    subprocess.run(
        [*command, "--cluster", devices, "--cluster-out", there],
        check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S,
    )  # fmt: skip
    return Cluster.from_yaml(there)


def measured(
    folder: Path, cluster: Cluster, told: Mapping[str, Any], cuts: Cuts
) -> dict[str, Floats]:
    """Of each way float64 ``[N, 2]``: each process has measured its own device."""
    ranks(folder, cluster, told, cuts)
    columns = [np.load(folder / f"{r}.npz") for r in range(2)]
    return {way: np.stack([x[way] for x in columns], axis=1) for way in cuts}


def ranks(folder: Path, cluster: Cluster, told: Mapping[str, Any], cuts: Cuts) -> None:
    """Two processes, of which the second is an old one, do what they are told.

    Raises:
        RuntimeError: one of them ended badly; with its last words.
    """
    cluster.to_yaml(folder / "cluster.yaml")
    (folder / "job.pickle").write_bytes(pickle.dumps((dict(told), dict(cuts))))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    alike = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                          "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, "-m", "experiments.unlike", "rank", str(folder)]
    both = []
    for r, more in enumerate(({}, OLD)):
        with (folder / f"{r}.err").open("w") as err:
            both.append(subprocess.Popen(command, env=alike | more | {"RANK": str(r)}, stderr=err))
    try:
        codes = [process.wait(PATIENCE_S) for process in both]
    finally:
        for process in both:
            process.kill()
    for r, code in enumerate(codes):
        if code:
            words = (folder / f"{r}.err").read_text(encoding="utf-8")
            raise RuntimeError(f"process {r} ended with {code}: {words[-2000:]}")


def rank(folder: Path) -> None:
    """Measure the device of this rank; or run the plans: seconds of a call, and processor's."""
    told, cuts = pickle.loads((folder / "job.pickle").read_bytes())
    cluster, me = Cluster.from_yaml(folder / "cluster.yaml"), int(os.environ["RANK"])
    torch.set_num_threads(1)
    module, inputs = load(told["workload"])
    graph = capture(module, inputs, name=told["workload"])
    pin(cluster)
    graphs = {way: in_pieces(graph, cut) for way, cut in cuts.items()}
    if "placed" not in told:
        own = Cluster("own", (cluster.devices[me],))
        columns = {
            way: measure(g, own, repeats=told["repeats"]).compute_s[:, 0]
            for way, g in graphs.items()
        }
        np.savez(folder / f"{me}.npz", **columns)
        return
    args, kwargs = split_inputs(inputs)
    with World.join(120.0) as world:

        def once(way: str) -> tuple[float, float]:
            placement, priority, _ = told["placed"][way]
            runner = DistributedRunner(
                graphs[way], cluster, np.array(placement, np.int32), world=world,
                max_in_flight=1, priority=priority,
            )  # fmt: skip
            busy = time.process_time()
            if me:
                runner.serve()
                return 0.0, (time.process_time() - busy) / CALLS
            with runner:
                took = []
                for _ in range(CALLS):
                    began = time.perf_counter()
                    runner(*args, **kwargs)
                    took.append(time.perf_counter() - began)
            return float(np.median(took)), (time.process_time() - busy) / CALLS

        took = in_turns({way: partial(once, way) for way in cuts}, told["rounds"])
    text = json.dumps({way: seconds.tolist() for way, seconds in took.items()})
    (folder / f"{me}.json").write_text(text, encoding="utf-8")


CALLS = 5  # of a way in each of its turns
STUDY = Study(
    name="unlike",
    rows=rows,
    options={
        "workloads": Option(("bert_base", "resnet50"), word=True, metavar="WORKLOAD"),
        "rounds": 7,
        "seconds": Option(10.0, "of a plan"),
        "repeats": Option(5, "of measuring operators"),
    },
    columns=(
        Column("case", "case"),
        Column("the second core is slower", "slower", 1, unit="x"),
        Column("share of the first by speed", "share", 0, 100, " %"),
        *(Column(way, way, 1, 1e3, " ms") for way in WAYS),
        *(Column(f"{way}, busy", f"{way}, busy", 1, 1e3, " ms") for way in WAYS),
        Column("by speed over equal", "over equal", 2, unit="x"),
        Column("by speed over one device", "over one device", 2, unit="x"),
    ),
    facts=lambda options: {"rounds": options.rounds, "seconds": options.seconds},
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(Path(sys.argv[2]))
    else:
        raise SystemExit(run(STUDY))
