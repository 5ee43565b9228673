"""The dispatcher beside ReSched's released networks, on the same files of flexible job shops.

Xiao et al., "ReSched: Rethinking Flexible Job Shop Scheduling from a Transformer-based Architecture
with Simplified States", ICLR 2026, with the weights and the 130 files that their repository holds:
``git clone https://github.com/XiangjieXiao/ReSched``. Their network and their environment run
unchanged, from that checkout; every network decodes each shop once, greedily, on one thread.
"""

from __future__ import annotations

import csv
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.dispatch import answer
from agents.planner import RELEASED
from agents.trained import TrainedPolicy, untrained_net
from experiments.study import Option, Options, Study, StudyError
from experiments.tables import Column, geometric, groups, table
from placement import importers
from placement.planners import load
from placement.problem import Problem
from placement.simulator import value_of

NAME = "learned_resched"
SHOPS = ("Brandimarte", "Hurink_edata", "Hurink_rdata", "Hurink_vdata")
NETWORKS = ("SD1-10x05", "SD1-20x05", "SD1-15x10", "SD1-20x10")  # by the shops they learned on
PUBLISHED = f"ReSched {NETWORKS[0]}"  # the network of the paper's table
SIZES = {"embedding_dim": 128, "block_num": 2, "head_num": 8, "qkv_dim": 16, "ff_hidden_dim": 512}
TRAINED, UNTRAINED, HEFT = "dispatcher, trained", "dispatcher, untrained", "heft (hand-written)"


@dataclass(frozen=True)
class Row:
    """One decode: the end of the schedule and the best known one in the file's unit of time."""

    kind: str
    problem: str
    who: str
    known: float
    value: float
    seconds: float  # of one processor


def shops(checkout: Path) -> Iterator[tuple[str, str, Problem, float]]:
    """Kind, name, problem and best known value of every file."""
    folder = checkout / "data" / "FJSP" / "TNNLS" / "BenchData"
    bounds = folder / "BenchDataSolution.csv"
    if not bounds.is_file():
        raise StudyError(
            f"no {bounds}: git clone https://github.com/XiangjieXiao/ReSched and name its folder "
            "with --checkout FOLDER"
        )
    with bounds.open(encoding="utf-8-sig") as text:
        known = {row["filename"].lower(): float(row["ub"]) for row in csv.DictReader(text)}
    for kind in SHOPS:
        for path in sorted((folder / kind).glob("*.fjs"), key=_number):
            problem = importers.load(path)
            yield kind, path.stem, problem, known[path.stem.lower()]


def _number(path: Path) -> int:
    return int(re.findall(r"\d+", path.stem)[-1])


def their_arrays(problem: Problem) -> list[np.ndarray[Any, Any]]:
    """Job, position, time, direct and later successors of each operation: a batch of one."""
    before = {int(op): int(first) for first, op in problem.graph.edges}
    jobs: list[list[int]] = []
    job_of: dict[int, int] = {}
    for op in range(problem.num_ops):
        if op not in before:
            job_of[op] = len(jobs)
            jobs.append([])
        else:
            job_of[op] = job_of[before[op]]
        jobs[job_of[op]].append(op)
    job = np.concatenate([np.full(len(ops), j) for j, ops in enumerate(jobs)])
    position = np.concatenate([np.arange(len(ops)) for ops in jobs])
    times = problem.profile.compute_s[np.concatenate(jobs)]
    same = job[:, None] == job
    direct = same & (position[:, None] + 1 == position)
    later = same & (position[:, None] < position)
    duration = np.where(np.isfinite(times), times, 0).round().astype(int)
    return [x[None] for x in (job, position, duration, direct, later)]


def theirs(checkout: Path, network: str) -> Callable[[Problem], float]:
    """Decodes with their network in their environment."""
    sys.path.insert(0, str(checkout / "PPO"))
    from SchedulingEnvironment import FJSPEnv  # type: ignore[import-not-found]
    from SchedulingModel import Model, build_model_input  # type: ignore[import-not-found]

    model = Model(action_space=2, **SIZES)
    file = checkout / "ckpt" / "PPO" / f"{network}.pth"
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    model.eval()
    model.set_decode_type("greedy")
    environment = FJSPEnv(None)

    @torch.no_grad()
    def decode(problem: Problem) -> float:
        environment.load_data(1, *their_arrays(problem))
        state, done = environment.reset_state(), False
        while not done:
            state, _ = build_model_input(state, environment)
            action, *_ = model(state)
            state, _, done = environment.step(action)
        return float(state.finish_time.max())

    return decode


def rows(options: Options) -> Iterator[Row]:
    torch.set_num_threads(1)
    checkout = Path(options.checkout).resolve()
    ours = TrainedPolicy.load(RELEASED).net
    untrained = untrained_net(None, "dispatch")
    heft = load("heft")
    deciders: dict[str, Callable[[Problem], float]] = {
        TRAINED: lambda problem: answer(ours, problem)[1],
        f"{TRAINED}, from the end": lambda problem: answer(ours, problem, backward=True)[1],
        UNTRAINED: lambda problem: answer(untrained, problem)[1],
        f"{UNTRAINED}, from the end": lambda problem: answer(untrained, problem, backward=True)[1],
        HEFT: lambda problem: value_of(problem, heft(problem)),
    }
    deciders |= {f"ReSched {network}": theirs(checkout, network) for network in NETWORKS}
    warm: set[str] = set()
    for kind, name, problem, known in shops(checkout):
        for who, decode in deciders.items():
            make = partial(timed, decode, problem, who, warm)
            result = options.finished.row(dict, [name, who], make, f"{name}-{who}")
            yield Row(kind, name, who, known=known, **result)


def timed(
    decode: Callable[[Problem], float], problem: Problem, who: str, warm: set[str]
) -> dict[str, float]:
    """The value, and processor seconds; who is not ``warm`` yet decodes once before."""
    if who not in warm:  # kernels are loaded outside of what is timed
        decode(problem)
        warm.add(who)
    began = time.process_time()
    value = decode(problem)
    return {"value": value, "seconds": time.process_time() - began}


def parts(rows: Sequence[Row], options: Options) -> dict[str, str]:
    lines = []
    for who, mine in groups(rows, "who").items():
        line: dict[str, Any] = {"who": who, "ms": 1e3 * np.median([r.seconds for r in mine])}
        for kind, rows_of_kind in groups(mine, "kind").items():
            ratios = {r.problem: [r.value / r.known] for r in rows_of_kind}
            line[kind] = geometric(ratios).percent()
        lines.append(line)
    columns = [
        Column("who decides", "who"),
        *(Column(f"{k}, over the best known", k) for k in SHOPS),
    ]
    theirs = {r.problem: r.value for r in rows if r.who == PUBLISHED}

    def beside(who: str, kind: str) -> str:
        mine = [r for r in rows if (r.who, r.kind) == (who, kind)]
        return geometric({r.problem: [r.value / theirs[r.problem]] for r in mine}).percent()

    return {
        "table": table(lines, *columns, Column("median decode, processor ms", "ms", 0)),
        "beside": table(
            (TRAINED, UNTRAINED, HEFT),
            Column("who decides", str),
            *(Column(kind, partial(beside, kind=kind)) for kind in SHOPS),
        ),
    }


STUDY = Study(
    name=NAME,
    word="resched",
    module="experiments.learned",
    rows=rows,
    row=Row,
    parts=parts,
    options={"checkout": Option("ReSched", "folder of their repository", metavar="FOLDER")},
)
