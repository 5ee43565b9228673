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

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from experiments.runs import Floats, in_turns
from experiments.study import Option, Options, Study, run, say
from experiments.tables import Column, groups, table
from placement import planners
from placement.capturing import capture
from placement.cluster import Cluster
from placement.costs.calibration import at_speed
from placement.costs.measure import measure
from placement.executor import Executor
from placement.problem import Placement, Problem
from placement.profile import Profile
from placement.report.table import mape, spearman
from placement.simulator import simulate
from placement.workloads import load

WORKLOADS = (
    "dlrm", "bert_tiny_hidden128", "lstm", "resnet50", "inception", "t5", "convnext", "bert_base",
    "gpt2", "vit",
)  # fmt: skip
# Micro-batches: alone, in a pipeline, and of the whole model on each device beside every placement:
# so many, or as many as fill the seconds.
LATENCY_RUNS, LATENCY_S = (3, 40), 0.2
PERIOD_RUNS, PERIOD_S = (10, 64), 0.4
SPEED_RUNS, SPEED_S = (1, 30), 0.1


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


def _no_waking(profile: Profile) -> Profile:
    return replace(profile, links=tuple(replace(x, wake_s=0.0) for x in profile.links))


def _fastest(profile: Profile) -> Profile:
    """Every operator as fast as on its fastest device: what one profile for all would say."""
    fastest = np.broadcast_to(profile.compute_s.min(axis=1, keepdims=True), profile.compute_s.shape)
    return replace(profile, compute_s=fastest.copy())


# What the simulator takes into account, and the profile without it.
CORRECTIONS: Mapping[str, Callable[[Profile], Profile]] = {
    "slowing down of busy neighbours": lambda profile: replace(profile, loaded_s=None),
    "letting micro-batches in and out": lambda profile: replace(profile, batch_s=0.0),
    "waking the receiver": _no_waking,
    "transfers and waking": lambda profile: replace(profile, links=()),
    "the neighbours and the transfers": lambda p: replace(p, loaded_s=None, links=()),
    "differences between the devices": _fastest,
}


def candidates(problem: Problem, count: int) -> dict[str, Placement]:
    """Planned placements first, then random ones (a share of the groups on each device)."""
    names = problem.cluster.device_names
    placements = {name: np.full(problem.num_ops, d, np.int32) for d, name in enumerate(names)}
    for name in ("round_robin", "heft", "contiguous_dp"):
        for objective in ("period", "latency"):
            answer = planners.load(name)(problem.with_objective(objective))
            placements[f"{name}/{objective}"] = answer.placement
    rng = np.random.default_rng(0)
    for i in range(count - len(placements)):
        # Every third is a random cut in operator order, the others scatter the operators.
        share = rng.dirichlet(np.ones(problem.num_devices))
        devices = rng.choice(problem.num_devices, problem.graph.num_groups, p=share)
        devices = devices if i % 3 else np.sort(devices)
        placements[f"random {i}"] = devices[problem.graph.group].astype(np.int32)
    return placements


def rows(options: Options) -> Iterator[Row]:
    """All placements of every workload; those of a workload are kept together."""
    import torch

    torch.set_num_threads(1)
    for workload in options.workloads:
        what = [workload, options.placements, options.rounds, options.repeats]
        make = partial(rows_of, workload, options)
        workload_rows = options.finished.row(dict, what, make, workload)
        yield from (Row(**row) for row in workload_rows["rows"])


class Bench:
    """One workload on this machine: how long it runs, and what is measured of a placement."""

    def __init__(self, workload: str, repeats: int) -> None:
        module, inputs = load(workload)
        self.graph, self.cluster = capture(module, inputs, name=workload), Cluster.detect()
        say(f"{workload}: {self.graph.num_ops} operators; measuring")
        self.repeats, self.profiles = repeats, list[Profile]()
        self.profile_again()
        one_s = float(self.profiles[0].compute_s.sum(axis=0).mean())
        limits = (LATENCY_S, LATENCY_RUNS), (PERIOD_S, PERIOD_RUNS), (SPEED_S, SPEED_RUNS)
        self.alone, period, self.speed = (int(np.clip(s / one_s, *runs)) for s, runs in limits)
        self.problem = Problem(self.graph, self.cluster, self.profiles[0], num_microbatches=period)
        self.executor = Executor(self.problem)
        self.singles = [np.full(self.graph.num_ops, d, np.int32)
                        for d in range(self.cluster.num_devices)]  # fmt: skip
        self.before: Floats = np.zeros(0)

    def profile_again(self) -> None:
        self.profiles.append(measure(self.graph, self.cluster, repeats=self.repeats))

    def span_s(self, placement: Placement, count: int) -> float:
        """Median of micro-batches alone."""
        run = self.executor.run(placement, num_microbatches=count, max_in_flight=1)
        return float(np.median(run.span_s))

    def speeds(self) -> Floats:
        return np.array([self.span_s(p, self.speed) for p in self.singles])

    def once(self, placement: Placement) -> Floats:
        """Latency, period, peak bytes, and the speed of every device before and after."""
        latency = self.span_s(placement, self.alone)
        pipelined = self.executor.run(placement)
        assert pipelined.peak_bytes is not None, "an executor knows its memory"
        before, self.before = self.before, self.speeds()
        measured = [latency, pipelined.period_s, int(pipelined.peak_bytes.max())]
        return np.array([*measured, *((before + self.before) / 2)])


def rows_of(workload: str, options: Options) -> dict[str, Any]:
    """Predicted and measured times and memory of the placements of one workload.

    At least ``rounds`` times, and again until ``minutes`` have passed.
    """
    began, bench = time.monotonic(), Bench(workload, options.repeats)
    placements = candidates(bench.problem, options.placements)
    ways = {name: partial(bench.once, placement) for name, placement in placements.items()}
    rounds: list[dict[str, Floats]] = []
    while len(rounds) < options.rounds or time.monotonic() - began < 60 * options.minutes:
        say(f"{workload}: round {len(rounds) + 1}, {len(placements)} placements")
        bench.before = bench.speeds()
        rounds.append(in_turns(ways, 1, warm_up=0))
        bench.profile_again()
    profile = merged(bench.profiles)
    return {
        "rows": [
            vars(_row(bench.problem, profile, name, p, np.concatenate([r[name] for r in rounds])))
            for name, p in placements.items()
        ]
    }


def _row(
    problem: Problem, profile: Profile, name: str, placement: Placement, measured: Floats
) -> Row:
    latency, period, peak = measured[:, :3].T
    here = as_slow_as(profile, np.median(measured[:, 3:], axis=0))
    ours, plain = (predicted(problem, p, placement) for p in (here, profile))
    without = {
        what: predicted(problem, change(here), placement) for what, change in CORRECTIONS.items()
    }
    figures: dict[str, Any] = {"predicted_peak_bytes": ours[2]}
    figures["measured_peak_bytes"] = int(np.median(peak))
    for i, (kind, seconds) in enumerate((("latency", latency), ("period", period))):
        figures |= {f"predicted_{kind}_s": ours[i], f"plain_{kind}_s": plain[i]}
        figures[f"measured_{kind}_s"] = float(np.median(seconds))
        figures[f"{kind}_without"] = {what: w[i] for what, w in without.items()}
        figures[f"{kind}_between_rounds"] = between_rounds(seconds)
    return Row(problem.graph.name, name, len(measured), **figures)


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
    figures = ("latency_s", "bandwidth_bytes_per_s", "wake_s", "send_s", "receive_s")
    links = tuple(
        replace(same[0], **{f: float(np.median([getattr(x, f) for x in same])) for f in figures})
        for same in zip(*(p.links for p in profiles), strict=True)
    )
    loaded = [p.loaded_s for p in profiles if p.loaded_s is not None]
    loaded_s = np.median(loaded, axis=0) if loaded else None
    batch_s = float(np.median([p.batch_s for p in profiles]))
    return replace(profiles[0], compute_s=compute, links=links, batch_s=batch_s, loaded_s=loaded_s)


def values(rows: Sequence[Row], name: str) -> list[float]:
    return [getattr(r, name) for r in rows]


def parts(rows: Sequence[Row], options: Options) -> dict[str, str]:
    """Error and rank correlation per workload and over all, then the corrections.

    Errors are over a device's speed beside the placement; those in brackets are plain.
    """
    by = {**groups(rows, "workload"), "all": list(rows)}

    def rounds(name: str) -> str:
        each = values(by[name], "rounds")
        return "–".join(map(str, sorted({min(each), max(each)})))

    def error(what: str, name: str) -> str:
        measured = values(by[name], f"measured_{what}")
        text = f"{100 * mape(values(by[name], f'predicted_{what}'), measured):.1f}"
        if what == "peak_bytes":
            return text
        return f"{text} ({100 * mape(values(by[name], f'plain_{what}'), measured):.1f})"

    def rank(what: str, name: str) -> float:
        return spearman(values(by[name], f"predicted_{what}"), values(by[name], f"measured_{what}"))

    def again(what: str, name: str) -> float:
        return float(np.mean(values(by[name], f"{what}_between_rounds")))

    kinds = [
        column
        for what in ("latency", "period")
        for column in (
            Column(f"{what} MAPE %", partial(error, f"{what}_s")),
            Column("Spearman", partial(rank, f"{what}_s")),
            Column("again %", partial(again, what), 1, 100),
        )
    ]
    summary = table(
        by,
        Column("workload", str),
        Column("placements", lambda name: len(by[name])),
        Column("rounds", rounds),
        *kinds,
        Column("peak memory MAPE %", partial(error, "peak_bytes")),
        Column("Spearman", partial(rank, "peak_bytes")),
    )
    return {"table": summary, "corrections": corrections(rows)}


def corrections(rows: Sequence[Row]) -> str:
    """The errors over all placements without each thing taken into account."""

    def compared(by: Callable[..., float], kind: str, what: str) -> float:
        predicted = values(rows, f"predicted_{kind}_s")
        if what:
            predicted = [x[what] for x in values(rows, f"{kind}_without")]
        return by(predicted, values(rows, f"measured_{kind}_s"))

    kinds = [
        column
        for kind in ("latency", "period")
        for column in (
            Column(f"{kind} MAPE %", partial(compared, mape, kind), 1, 100),
            Column("Spearman", partial(compared, spearman, kind)),
        )
    ]
    first = Column("", lambda w: f"without {w}" if w else "everything taken into account")
    return table(["", *CORRECTIONS], first, *kinds)


STUDY = Study(
    name="fidelity",
    rows=rows,
    row=Row,
    parts=parts,
    options={
        "workloads": Option(WORKLOADS, word=True, metavar="WORKLOAD"),
        "placements": 50,
        "rounds": Option(2, "at least"),
        "minutes": Option(4.0, "more rounds until then"),
        "repeats": Option(6, "of a profile"),
    },
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
