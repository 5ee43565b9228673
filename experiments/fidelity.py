"""How well predicted time and memory agree with what is measured on the devices of this machine.

    python -m experiments.fidelity [WORKLOAD ...] [--placements 50] [--rounds 2] [--minutes 4]

For every workload, single-device, planned and random placements run for real: latency with one
micro-batch at a time, period and peak memory in a pipeline. Profiles are taken before and after
every round, and merged.

A virtual machine changes its speed by 20 % and more within a minute, which is no fault of a
model. So the whole model also runs on each device alone, before and after every placement, and
the prediction is for devices of the speed that they had beside it. The plain prediction, from the
profile as it was measured minutes before or after, is compared as well.

Small models are measured in more rounds: one measurement of a placement is 14 % from the next.
The medians of the rounds are compared with the simulator, and with the simulator without each
thing that it takes into account. What is finished lies in ``runs/fidelity``: the same command
continues. Writes
``experiments/results/fidelity.csv`` and ``fidelity.md``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from experiments._study import RESULTS, ROOT, command_line, provenance, say, to_csv, to_table
from placement import planners
from placement.cluster import Cluster
from placement.compare import mape, spearman
from placement.executor import Executor
from placement.files import write_atomic
from placement.measure import at_speed, measure
from placement.problem import Placement, Problem
from placement.profile import Profile
from placement.program import capture
from placement.simulator import simulate
from placement.workloads import load

WORKLOADS = (
    "dlrm",
    "bert_tiny_hidden128",
    "lstm",
    "resnet50",
    "inception",
    "t5",
    "convnext",
    "bert_base",
    "gpt2",
    "vit",
)
# Micro-batches: alone, in a pipeline, and of the whole model on each device beside every placement:
# so many, or as many as fill the seconds.
LATENCY_RUNS, LATENCY_S = (3, 40), 0.2
PERIOD_RUNS, PERIOD_S = (10, 64), 0.4
SPEED_RUNS, SPEED_S = (1, 30), 0.1
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One placement: seconds and bytes (of the device with most), predicted and measured.

    ``plain_...``: predicted for the speed of the profile, not that beside the placement.
    ``..._without``: the prediction without each of ``CORRECTIONS``, by name.
    ``..._between_rounds``: mean relative difference of measuring the same placement again.
    """

    workload: str
    placement: str
    rounds: int
    predicted_latency_s: float
    measured_latency_s: float
    predicted_period_s: float
    measured_period_s: float
    predicted_peak_bytes: int
    measured_peak_bytes: int
    plain_latency_s: float
    plain_period_s: float
    latency_without: dict[str, float]
    period_without: dict[str, float]
    latency_between_rounds: float
    period_between_rounds: float


def _alone(profile: Profile) -> Profile:
    return replace(profile, loaded_s=None)


def _free_links(profile: Profile) -> Profile:
    return replace(profile, links=())


def _no_waking(profile: Profile) -> Profile:
    return replace(profile, links=tuple(replace(x, wake_s=0.0) for x in profile.links))


def _fastest(profile: Profile) -> Profile:
    """Every operator as fast as on its fastest device: what one profile for all would say."""
    fastest = np.broadcast_to(profile.compute_s.min(axis=1, keepdims=True), profile.compute_s.shape)
    return replace(profile, compute_s=fastest.copy())


def _free_batches(profile: Profile) -> Profile:
    return replace(profile, batch_s=0.0)


# What the simulator takes into account, and the profile without it.
CORRECTIONS: Mapping[str, Callable[[Profile], Profile]] = {
    "slowing down of busy neighbours": _alone,
    "letting micro-batches in and out": _free_batches,
    "waking the receiver": _no_waking,
    "transfers and waking": _free_links,
    "the neighbours and the transfers": lambda profile: _alone(_free_links(profile)),
    "differences between the devices": _fastest,
}


def candidates(problem: Problem, count: int) -> dict[str, Placement]:
    """Planned placements first, then random ones (a share of the groups on each device)."""
    found: dict[str, Placement] = {}
    for d, name in enumerate(problem.cluster.device_names):
        found[name] = np.full(problem.num_ops, d, np.int32)
    for name in ("round_robin", "heft", "contiguous_dp"):
        for objective in ("period", "latency"):
            answer = planners.load(name)(problem.with_objective(objective))
            found[f"{name}/{objective}"] = answer.placement
    rng = np.random.default_rng(0)
    for i in range(count - len(found)):
        # Every third is a random cut in operator order, the others scatter the operators.
        share = rng.dirichlet(np.ones(problem.num_devices))
        groups = rng.choice(problem.num_devices, problem.graph.num_groups, p=share)
        if i % 3 == 0:
            groups = np.sort(groups)
        found[f"random {i}"] = groups[problem.graph.group].astype(np.int32)
    return found


def study(workload: str, count: int, rounds: int, repeats: int, minutes: float) -> list[Row]:
    """Predicted and measured times and memory of ``count`` placements of one workload.

    At least ``rounds`` times, and again until ``minutes`` have passed.
    """
    began = time.monotonic()
    module, inputs = load(workload)
    graph = capture(module, inputs, name=workload)
    cluster = Cluster.detect()
    say(f"{workload}: {graph.num_ops} operators; measuring")
    profiles = [measure(graph, cluster, repeats=repeats)]
    one_s = float(profiles[0].compute_s.sum(axis=0).mean())
    num_latency, num_period, num_speed = (
        int(np.clip(seconds / one_s, *runs))
        for seconds, runs in (
            (LATENCY_S, LATENCY_RUNS),
            (PERIOD_S, PERIOD_RUNS),
            (SPEED_S, SPEED_RUNS),
        )
    )
    problem = Problem(graph, cluster, profiles[0], num_microbatches=num_period)
    placements = candidates(problem, count)
    executor = Executor(problem)
    singles = [np.full(graph.num_ops, d, np.int32) for d in range(cluster.num_devices)]

    def speed() -> list[float]:
        """Seconds of the whole model on each device, now."""
        runs = [executor.run(p, num_microbatches=num_speed, max_in_flight=1) for p in singles]
        return [float(np.median(run.span_s)) for run in runs]

    latency: dict[str, list[float]] = {name: [] for name in placements}
    period: dict[str, list[float]] = {name: [] for name in placements}
    peak: dict[str, list[int]] = {name: [] for name in placements}
    beside: dict[str, list[list[float]]] = {name: [] for name in placements}
    r = 0
    while r < rounds or time.monotonic() - began < 60 * minutes:
        before = speed()
        for i, (name, placement) in enumerate(placements.items(), 1):
            say(f"{workload}: round {r + 1}, placement {i} of {len(placements)}")
            alone = executor.run(placement, num_microbatches=num_latency, max_in_flight=1)
            latency[name].append(float(np.median(alone.span_s)))
            pipelined = executor.run(placement)
            assert pipelined.peak_bytes is not None, "an executor knows its memory"
            period[name].append(pipelined.period_s)
            peak[name].append(int(pipelined.peak_bytes.max()))
            after = speed()
            beside[name].append([(x + y) / 2 for x, y in zip(before, after, strict=True)])
            before = after
        profiles.append(measure(graph, cluster, repeats=repeats))
        r += 1
    profile = merged(profiles)
    rows = []
    for name, placement in placements.items():
        here = as_slow_as(profile, np.median(beside[name], axis=0))
        many = predicted(problem, here, placement)
        plain = predicted(problem, profile, placement)
        without = {
            what: predicted(problem, change(here), placement)
            for what, change in CORRECTIONS.items()
        }
        rows.append(
            Row(
                workload,
                name,
                r,
                many[0],
                float(np.median(latency[name])),
                many[1],
                float(np.median(period[name])),
                many[2],
                int(np.median(peak[name])),
                plain[0],
                plain[1],
                {what: w[0] for what, w in without.items()},
                {what: w[1] for what, w in without.items()},
                between_rounds(latency[name]),
                between_rounds(period[name]),
            )
        )
    return rows


def between_rounds(seconds: Sequence[float]) -> float:
    """Mean relative distance of a round from the median of the others: what cannot be predicted.

    0 where there was only one round.
    """
    if len(seconds) < 2:
        return 0.0
    others = [np.median(np.delete(seconds, i)) for i in range(len(seconds))]
    return float(np.mean(np.abs(np.array(seconds) / others - 1.0)))


def as_slow_as(profile: Profile, seconds: Floats) -> Profile:
    """The profile with every device as slow as one that runs the whole model in ``seconds [D]``."""
    times = seconds / profile.compute_s.sum(axis=0)
    return replace(at_speed(profile, times), batch_s=profile.batch_s * float(times.mean()))


def predicted(problem: Problem, profile: Profile, placement: Placement) -> tuple[float, float, int]:
    """Latency, period, and the peak memory of the device with most."""
    problem = replace(problem, profile=profile)
    many = simulate(problem, placement)
    assert many.peak_bytes is not None, "a prediction knows its memory"
    one = simulate(problem, placement, num_microbatches=1)
    return one.latency_s, many.period_s, int(many.peak_bytes.max())


def merged(profiles: list[Profile]) -> Profile:
    """Medians over several profiles of the same graph and cluster."""
    compute = np.median([p.compute_s for p in profiles], axis=0)
    links = tuple(
        replace(
            links[0],
            latency_s=float(np.median([x.latency_s for x in links])),
            bandwidth_bytes_per_s=float(np.median([x.bandwidth_bytes_per_s for x in links])),
            wake_s=float(np.median([x.wake_s for x in links])),
        )
        for links in zip(*(p.links for p in profiles), strict=True)
    )
    loaded = [p.loaded_s for p in profiles if p.loaded_s is not None]
    batch_s = float(np.median([p.batch_s for p in profiles]))
    return replace(
        profiles[0],
        compute_s=compute,
        links=links,
        batch_s=batch_s,
        loaded_s=np.median(loaded, axis=0) if loaded else None,
    )


def summary(rows: Sequence[Row]) -> str:
    """Markdown: error and rank correlation per workload and over all, then the corrections.

    Errors are over a device's speed beside the placement; those in brackets are plain.
    """
    lines = []
    for workload in [*dict.fromkeys(r.workload for r in rows), "all"]:
        chosen = [r for r in rows if workload in (r.workload, "all")]
        rounds = [r.rounds for r in chosen]
        fewest_and_most = "–".join(map(str, sorted({min(rounds), max(rounds)})))
        cells = [workload, str(len(chosen)), fewest_and_most]
        for what in ("latency_s", "period_s", "peak_bytes"):
            said = [getattr(r, f"predicted_{what}") for r in chosen]
            found = [getattr(r, f"measured_{what}") for r in chosen]
            error = f"{100 * mape(said, found):.1f}"
            if what != "peak_bytes":
                plain = [getattr(r, f"plain_{what}") for r in chosen]
                error += f" ({100 * mape(plain, found):.1f})"
            cells += [error, f"{spearman(said, found):.3f}"]
            if what != "peak_bytes":
                again = [getattr(r, f"{what[:-2]}_between_rounds") for r in chosen]
                cells.append(f"{100 * np.mean(again):.1f}")
        lines.append(cells)
    header = ["workload", "placements", "rounds"]
    header += ["latency MAPE %", "Spearman", "again %", "period MAPE %", "Spearman", "again %"]
    header += ["peak memory MAPE %", "Spearman"]
    note = (
        "In brackets: predicted for the speed of the profile, not that beside the placement. "
        "Again: how far one measurement of a placement is from others of the same placement."
    )
    return f"{to_table(header, lines)}\n{note}\n\n{corrections(rows)}"


def corrections(rows: Sequence[Row]) -> str:
    """Markdown: the errors over all placements without each thing taken into account."""
    errors = []
    for what in ("", *CORRECTIONS):
        cells = [f"without {what}" if what else "everything taken into account"]
        for kind in ("latency", "period"):
            found = [getattr(r, f"measured_{kind}_s") for r in rows]
            said = [
                getattr(r, f"{kind}_without")[what] if what else getattr(r, f"predicted_{kind}_s")
                for r in rows
            ]
            cells += [f"{100 * mape(said, found):.1f}", f"{spearman(said, found):.3f}"]
        errors.append(cells)
    return to_table(["", "latency MAPE %", "Spearman", "period MAPE %", "Spearman"], errors)


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", default=WORKLOADS)
    parser.add_argument("--placements", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2, help="at least")
    parser.add_argument("--minutes", type=float, default=4.0, help="more rounds until then")
    parser.add_argument("--repeats", type=int, default=6, help="of a profile")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "fidelity")
    parser.add_argument("--fresh", action="store_true", help="forget what is finished")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for workload in options.workloads or WORKLOADS:
        how = f"{workload}-{options.placements}-{options.rounds}-{options.repeats}.json"
        path = options.work / how
        if path.exists() and not options.fresh:
            mine = [Row(**row) for row in json.loads(path.read_text())]
        else:
            mine = study(
                workload, options.placements, options.rounds, options.repeats, options.minutes
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps([asdict(row) for row in mine]))
        rows += mine
        # Written after every workload: an interrupted study keeps what it has.
        write_atomic(options.out / "fidelity.csv", to_csv(rows))
        command = command_line("experiments.fidelity", argv)
        text = f"# Predicted against measured\n\n`{command}`\n\n{summary(rows)}\n{provenance()}"
        write_atomic(options.out / "fidelity.md", text)
    print(summary(rows))


if __name__ == "__main__":
    main()
