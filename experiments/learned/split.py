"""Operators in pieces: by how much does a search beat rules there, and does a network beat either?

**Written down before the first training.** Of whole operators, a search finds little that rules do
not. Models whose operators are in ``WAYS`` pieces (``placement.pieces.split``) give a planner more
to decide: here is how much that is worth, and to whom.

**Graphs.** The workloads of ``NAMED`` at batch 1, and ``DRAWN`` families of the zoo in their larger
size, by a seed; each is captured, and cut where the pass says that it pays. A model of which it
cuts nothing is left out, and counted. Seconds of an operator are the least processor seconds of
``ROUNDS`` runs on one thread. Objective: the latency of one call. Machines:

* ``whole``: four alike cores, operators as they were captured;
* ``four``: four alike cores, operators in pieces;
* ``unlike``: in pieces, on a machine that ``Perturbation`` draws of these.

Links are those of the data set's cores. Five folds by family, drawn, each with one of ``NAMED``;
networks for a fold are trained on the other four, and the first ``TESTED`` of it are judged.

**Arms.** As those of ``experiments.learned.folds``, from which the code is: ``untrained``,
``message passing`` and ``perceptron``, trained on the pieces of the other four folds (half the time
on drawn machines), after the seven rules; beside them ``single_device``, ``rules``,
``contiguous_dp``, ``order_search`` and ``best_of``, with the whole of every budget. Budgets: 100 ms
and 1 s of processor time, and with seed 0 on ``whole`` and ``four`` 10 s of ``NAMED``. A whole
graph is asked of the untrained network, and of no trained one.

**Endpoint.** ``message passing`` at 1 s on ``four`` and ``unlike`` together against the best of all
rules, *and* against ``order_search`` at 1 s: reached where the upper ends of both 95 % intervals
are at or below -1 %. That training is the cause is said only where it is clear of 0 against
``untrained``, too. Means over seeds, then graphs; intervals resample families, then seeds.
Headroom, which no network is needed for: ``order_search`` and ``best_of`` at 1 s and 10 s against
the best of rules, in pieces and whole.

Seeds 0 and on, as many as there is time for: the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.perturbation import Perturbation
from experiments.learned import folds
from experiments.learned.folds import (
    BEST_RULE,
    FOLDS,
    FOUR,
    LONG_S,
    MESSAGES,
    ONE_DEVICE,
    PERCEPTRON,
    UNLIKE,
    UNTRAINED,
    Asked,
    Case,
    Machines,
    Row,
    Unit,
    over,
    percent,
)
from experiments.study import Option, Options, Study, say
from experiments.tables import DASH, Column, geometric, groups, table
from placement import importers, pieces, workloads
from placement.capturing import capture
from placement.cluster import Cluster
from placement.graph import OpGraph
from placement.pieces import Moves
from placement.problem import Problem
from placement.profile import Profile
from placement.program import run_program
from placement.workloads import zoo

WHOLE = "whole"
WAYS, DEVICES = 4, 4
NAMED = ("bert_base", "gpt2", "vit", "convnext", "resnet50")
DRAWN, TESTED = 45, 6
MOST = 1500  # operators of a graph that is trained on
ROUNDS = 5
SEED = 59  # of the models, the folds and the machines
LEARNED = (UNTRAINED, MESSAGES, PERCEPTRON)
OTHERS = ("contiguous_dp", "order_search", "best_of")
ARMS = (ONE_DEVICE, BEST_RULE, *LEARNED, *OTHERS)
BASES = ("order_search", UNTRAINED, PERCEPTRON)
OBJECTIVE = "latency"


@cache
def models() -> dict[str, dict[str, Any]]:
    """What ``workloads.load`` is given, by family."""
    rng = np.random.default_rng(SEED)
    known = {name: {"spec": name} for name in NAMED}
    shipped = {"bert", "gpt2", "vit", "convnext", "resnet"}
    others = [m for m in zoo.MODELS if m.name.lower() not in shipped]
    for k in sorted(rng.choice(len(others), DRAWN, replace=False).tolist()):
        batch, size = others[k].sizes[1]
        options = {"model": others[k].name, "batch": batch, "size": size}
        known[others[k].name] = {"spec": "placement.workloads.zoo:small", **options}
    return known


def seconds_of(graph: OpGraph) -> NDArray[np.float64]:
    """float64 ``[N]``: the least processor seconds of each operator, on this thread."""
    best = np.full(graph.num_ops, np.inf)
    inputs = graph.program.timing_inputs()
    for _ in range(ROUNDS):
        took, last = np.zeros(graph.num_ops), time.process_time()

        def watch(tensor: int, _: Any) -> None:
            nonlocal last
            now = time.process_time()
            took[graph.tensor_src[tensor]] += now - last  # noqa: B023
            last = now

        run_program(graph.program, inputs, watch)
        best = np.minimum(best, took)
    return best


def on_cores(graph: OpGraph) -> Problem:
    """The graph on alike cores, with the links of the data set's."""
    measured = folds.measured(folds.families()["bert"][0], OBJECTIVE)
    names = [f"cpu:{d}" for d in range(DEVICES)]
    one = next(d for d in measured.cluster.devices if d.kind == "cpu")
    devices = tuple(replace(one, name=n, cores=(d,), like=None) for d, n in enumerate(names))
    link = measured.profile.links[0]
    links = [replace(link, src=a, dst=b, channel=None) for a in names for b in names if a != b]
    compute_s = np.repeat(seconds_of(graph)[:, None], DEVICES, axis=1)
    profile = Profile(tuple(names), compute_s, np.zeros_like(compute_s), tuple(links))
    return Problem(graph, Cluster("four cores", devices), profile, OBJECTIVE, max_in_flight=1)


def files(family: str, options: Options) -> tuple[Path, Path]:
    """Problem files of a model: whole, and in pieces; equal ones where nothing was cut."""
    whole, cut = (options.work / "graphs" / f"{family}-{x}.json.gz" for x in (WHOLE, "pieces"))
    if not cut.is_file():
        say(f"{family}: cut")
        cut.parent.mkdir(parents=True, exist_ok=True)
        module, inputs = workloads.load(**models()[family])
        graph = capture(module, inputs, name=family)
        problem = on_cores(graph)
        importers.save(problem, whole)
        try:
            parts = pieces.split(graph, WAYS, moves=Moves.of(problem.profile.links))
        except pieces.PiecesError as error:
            say(f"{family}: {error}")
            parts = graph
        importers.save(on_cores(parts) if parts is not graph else problem, cut)
    return whole, cut


@cache
def problems(family: str, work: Path) -> tuple[Problem, Problem] | None:
    """A model whole and in pieces; None where nothing was cut."""
    whole, cut = (importers.load(p) for p in files(family, Options(work=work)))
    return (whole, cut) if whole.num_ops < cut.num_ops else None


@cache
def split_folds(work: Path) -> tuple[tuple[str, ...], ...]:
    """Families of each fold, one of ``NAMED`` first, among those of which something was cut."""
    names = [name for name in models() if name not in NAMED and problems(name, work) is not None]
    drawn = np.random.default_rng(SEED).permutation(names).tolist()
    return tuple((NAMED[k], *drawn[k::FOLDS]) for k in range(FOLDS))


@cache
def cases(work: Path) -> tuple[Case, ...]:
    """All that arms are judged by."""
    made: list[Case] = []
    for fold, names in enumerate(split_folds(work)):
        for number, family in enumerate(names[:TESTED]):
            both = problems(family, work)
            assert both is not None
            whole, cut = both
            drawn = Perturbation().draw(cut, np.random.default_rng([SEED, fold, number]))
            seconds = (1.0, LONG_S) if family in NAMED else (1.0,)
            made.append(Case(WHOLE, family, family, fold, whole, seconds))
            made.append(Case(FOUR, family, family, fold, cut, seconds))
            made.append(Case(UNLIKE, family, family, fold, drawn, (1.0,)))
    return tuple(made)


def asked(unit: Unit, options: Options) -> Asked:
    """The planner of an arm; trained now if it is not."""
    if unit.arm not in (MESSAGES, PERCEPTRON):
        return folds.asked(unit, options)
    others = [name for k, names in enumerate(split_folds(options.work)) if k != unit.fold
              for name in names]  # fmt: skip
    cut = ([both[1]] for name in others if (both := problems(name, options.work)))
    name = f"{unit.arm}-pieces-{unit.fold}"
    path, cost = folds.by_groups(unit.arm, name, unit.seed or 0, Machines(cut, MOST), options)
    return Asked(folds.RulesThenDecodes(str(path)), cost["seconds"])


def units(options: Options) -> Iterator[Unit]:
    """Rules and searches, then networks, a seed after another."""
    for arm in (ONE_DEVICE, BEST_RULE, *OTHERS):
        yield from (Unit(arm, OBJECTIVE, fold, None) for fold in range(FOLDS))
    for seed in range(options.seeds):
        for arm in LEARNED:
            yield from (Unit(arm, OBJECTIVE, fold, seed) for fold in range(FOLDS))


def cases_of(unit: Unit, options: Options) -> list[Case]:
    """Whole graphs are of no network that was trained on pieces."""
    whole_too = unit.arm not in (MESSAGES, PERCEPTRON) and not unit.seed
    return [c for c in cases(options.work) if whole_too or c.machine != WHOLE]


def rows(options: Options) -> Iterator[Row]:
    """Those that are there, and those that there is time for."""
    import torch

    torch.set_num_threads(1)
    return folds.judge(STUDY, units(options), partial(cases_of, options=options), asked, options)


# --- the page ------------------------------------------------------------------------------------


def parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    by_machine = groups(rows, "machine")
    in_pieces = folds.decides(rows)
    where = {WHOLE: by_machine.get(WHOLE, []), FOUR: by_machine.get(FOUR, []),
             UNLIKE: by_machine.get(UNLIKE, [])}  # fmt: skip
    arms = [a for a in ARMS if any(r.arm == a for r in rows)]

    def against(arm: str, machine: str, seconds: float) -> str:
        mine = {r.problem for r in where[machine] if r.arm == arm}
        mean = over(where[machine], arm, seconds, BEST_RULE, True)
        return percent(mean, len(mine) if seconds <= 1 else None)

    def end(arm: str, base: str) -> str:
        same = arm == base
        return DASH if same else percent(over(in_pieces, arm, 1.0, base, base == BEST_RULE))

    seeds = len({r.seed for r in rows if r.arm == MESSAGES})
    return {
        "endpoint": table(
            [a for a in arms if a not in (ONE_DEVICE, BEST_RULE)],
            Column("arm", lambda a: a),
            Column("against the best of all rules", partial(end, base=BEST_RULE)),
            *(Column(f"against {base}", partial(end, base=base)) for base in BASES if base in arms),
        ),
        "reached": "reached" if reached(rows) else "not reached",
        "budgets": table(
            [a for a in arms if a != BEST_RULE],
            Column("arm", lambda a: a),
            *(
                Column(f"{machine}, {s:g} s", partial(against, machine=machine, seconds=s))
                for machine in where
                for s in (0.1, 1.0, LONG_S)
                if (machine, s) != (UNLIKE, LONG_S)
            ),
        ),
        "gains": table(
            list(of_pieces(rows)),
            Column("model", lambda x: x[0]),
            Column("operators, whole", lambda x: x[1]),
            Column("in pieces", lambda x: x[2]),
            Column("best of rules, whole", lambda x: x[3], 2, 1, "x"),
            Column("best known, whole", lambda x: x[4], 2, 1, "x"),
            Column("best of rules, in pieces", lambda x: x[5], 2, 1, "x"),
            Column("best known, in pieces", lambda x: x[6], 2, 1, "x"),
        ),
        "count": len({r.problem for r in rows}),
        "seeds_done": seeds,
    }  # fmt: skip


def reached(rows: Sequence[Row]) -> bool:
    """The endpoint."""
    mine = folds.decides(rows)
    both = (over(mine, MESSAGES, 1.0, BEST_RULE, True), over(mine, MESSAGES, 1.0, "order_search"))
    return all(x.count and x.high <= 1 + folds.GOAL for x in both)


def of_pieces(rows: Sequence[Row]) -> Iterator[tuple[Any, ...]]:
    """How many times as fast as one device, by model on four alike cores; then all together."""
    lines = []
    for family, mine in groups(rows, "family").items():
        on = {m: [r for r in mine if r.machine == m] for m in (WHOLE, FOUR)}
        one_s = min((r.end for r in on[WHOLE] if r.arm == ONE_DEVICE and r.end), default=np.nan)
        rule_s, best_s = (
            [min((r.end for r in on[m] if r.end and (r.arm in some or not some)), default=np.nan)
             for m in on]
            for some in ((BEST_RULE,), ())
        )  # fmt: skip
        sizes = [max(r.operators for r in on[m]) for m in on]
        ratios = [one_s / x for pair in zip(rule_s, best_s, strict=True) for x in pair]
        lines.append((family, *sizes, *ratios))
    yield from (x for x in lines if x[0] in NAMED)
    means = [geometric({x[0]: [x[k]] for x in lines}, 1).value for k in range(3, 7)]
    yield (f"all {len(lines)}", "", "", *means)


STUDY = Study(
    name="learned_split",
    word="split",
    module="experiments.learned",
    rows=rows,
    row=Row,
    parts=parts,
    options={
        "seeds": Option(3, "of every network, 0 and on"),
        "steps": Option(folds.STEPS, "of a training"),
        "arms": Option((), "these alone; any number of processes may share the work"),
        "minutes": Option(1e9, "of processor time, after which no further arm is begun; 0: none"),
    },
)
