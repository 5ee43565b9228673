"""The problems of the studies: six families, graphs that no training saw, twice the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments import baselines, study
from experiments.runs import two_cores
from experiments.study import say
from placement import importers
from placement.cluster import Cluster, Link
from placement.objective import Objective
from placement.problem import Problem
from placement.workloads import synthetic

Problems = dict[str, Problem]
HELD_OUT = 900  # first seed of synthetic graphs that nothing is trained on
CAPTURED = ("resnet50", "inception", "bert_base", "lstm", "vit", "gpt2", "convnext", "dlrm", "t5")
MICROBATCHES, IN_FLIGHT = 32, 4  # of captured models in a pipeline
DRAWN, REAL = "drawn", "real"
MACHINE = "intel-r-xeon-r-processor-b65e2a3b"  # of the data set
MEASURED = ("lstm-batch1", "t5-batch1", "bert_base-batch1", "small-Jamba-batch2-size32",
            "small-Mamba-batch2-size32", "small-MobileViT-batch2-size160")  # fmt: skip
FAMILIES = ("operator graphs", "layer graphs", "pipedream", "moirai", "captured", "synthetic")


def family(name: str, data: Path, graphs: int = 1, repeats: int = 10) -> Problems:
    """All problems of one of ``FAMILIES``, every objective that it is made for.

    Raises:
        StudyError: the public files are absent.
    """
    if name == "captured":
        return captured(CAPTURED, repeats)
    if name == "synthetic":
        return synthetic_problems(graphs)
    if name in ("operator graphs", "layer graphs"):
        kind = name.split()[0]
        return _files(data, f"dnn_partitioning/throughput/{kind}/*.json", "max_load") | _files(
            data, f"dnn_partitioning/latency/{kind}/*.json", "piecewise_latency"
        )
    if name == "moirai":
        return _files(data, "moirai/*.json", "latency") | _files(data, "moirai/*.json", "period")
    return pipedream(data)


def _files(data: Path, pattern: str, objective: Objective) -> Problems:
    return {
        f"{path.rpartition('.')[0].removeprefix('dnn_partitioning/')} {objective}": importers.load(
            file, objective=objective
        )
        for path, file in study.public(data, pattern).items()
    }


def pipedream(data: Path) -> Problems:
    """Training pipelines on four devices, and the latency of inference on them."""
    machine = {"devices": 4, "bandwidth": baselines.BANDWIDTH, "memory": baselines.MEMORY_BYTES}
    problems: Problems = {}
    for path, file in study.public(data, "pipedream/*.txt").items():
        name = path.rpartition(".")[0]
        problems[f"{name} period"] = baselines.pipedream(file)
        problems[f"{name} latency"] = importers.load(
            file, mode="inference", objective="latency", **machine
        )
    return problems


def captured(names: Sequence[str], repeats: int) -> Problems:
    """Models captured here, measured on this machine's first two cores (once), both objectives."""
    from placement import workloads
    from placement.capturing import capture
    from placement.costs.measure import load_or_measure

    problems: Problems = {}
    cluster = two_cores("two cores")
    pipeline = {"num_microbatches": MICROBATCHES, "max_in_flight": IN_FLIGHT}
    for name in names:
        say(f"captured: {name}")
        module, inputs = workloads.load(name)
        graph = capture(module, inputs, name=name)
        profile = load_or_measure(graph, cluster, repeats=repeats)
        problem = Problem(graph, cluster, profile, "period", **pipeline)
        problems |= _both(f"captured/{name}", problem)
    return problems


def _both(name: str, problem: Problem) -> Problems:
    return {f"{name} period": problem, f"{name} latency": problem.with_objective("latency")}


def synthetic_problems(graphs: int) -> Problems:
    """Both objectives of every family, seeds ``HELD_OUT``.."""
    problems: Problems = {}
    for name, draw in synthetic.families().items():
        for seed in range(HELD_OUT, HELD_OUT + graphs):
            problems |= _both(f"synthetic/{name}-{seed}", draw(seed))
    return problems


def unseen(data: Path) -> dict[str, Problems]:
    """Latency graphs of 300 to 1,600 operators that ``envs.generators:Latency`` never draws.

    Seeds of its held-out families; and public files and measured models, these on twice the two
    devices that they were measured on.
    """
    unlike = (1.0, 2.0, 4.0)
    shapes = {
        "layered": synthetic.Family(synthetic.layered(20, 30, 0.1)),
        "layered_wide": synthetic.families()["layered_wide"],
        "lstm_grid": synthetic.Family(synthetic.grid(6, 120), 8, ccr=0.2, heterogeneity=0.5),
        "u_net": synthetic.Family(synthetic.u_net(8, 25), ccr=0.8),
        "towers": synthetic.Family(synthetic.towers(60, 10), 8, ccr=1.0, speeds=unlike),
        "mixture_of_experts": synthetic.Family(synthetic.experts(30, 12), 8, ccr=0.4),
        "butterfly": synthetic.Family(synthetic.butterfly(6), ccr=1.0, heterogeneity=1.0),
    }
    drawn = {
        f"{name}-{seed}": family(seed).with_objective("latency")
        for name, family in shapes.items()
        for seed in (HELD_OUT, HELD_OUT + 1)
    }
    public_ones = pipedream(data) | family("moirai", data)
    real = {
        name: problem
        for name, problem in public_ones.items()
        if problem.objective is Objective.LATENCY and 300 <= problem.num_ops <= 1600
    }
    for name in MEASURED:
        file = study.ROOT / "experiments/dataset" / MACHINE / f"{name}.json.gz"
        real[name] = twice_the_devices(importers.load(file, objective="latency"))
    return {DRAWN: drawn, REAL: real}


def twice_the_devices(problem: Problem) -> Problem:
    """Every device twice, links and all; a device reaches its copy as it reaches the others."""
    cluster, profile = problem.cluster, problem.profile
    count = problem.num_devices
    both = np.tile(np.arange(count), 2)
    names = [*cluster.device_names, *(f"{n}'" for n in cluster.device_names)]
    devices = tuple(
        replace(cluster.devices[d], name=n, like=None) for d, n in zip(both, names, strict=True)
    )
    links = {(x.src, x.dst): x for x in profile.links}
    ordered = cluster.device_names
    joined: list[Link] = []
    for a, name_a in enumerate(names):
        for b, name_b in enumerate(names):
            at, to = ordered[both[a]], ordered[both[b]]
            # Between a device and its copy: the link to the next device.
            to = to if at != to else ordered[(both[b] + 1) % count]
            if a != b and (at, to) in links:
                joined.append(replace(links[at, to], src=name_a, dst=name_b, channel=None))

    def pairs(seconds: np.ndarray) -> np.ndarray:
        wide = seconds[:, both][:, :, both].copy()
        for a in range(2 * count):
            twin = (a + count) % (2 * count)
            wide[:, a, twin] = seconds[:, both[a], (both[a] + 1) % count]
        return wide

    wider = profile.take(both, names, joined)
    transfer_s = None if profile.transfer_s is None else pairs(profile.transfer_s)
    return replace(
        problem,
        cluster=Cluster(f"twice {cluster.name}", devices),
        profile=replace(wider, transfer_s=transfer_s),
    )
