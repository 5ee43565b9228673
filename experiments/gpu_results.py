"""What came back from a GPU: committed as rows, a page and problems, and planned from without one.

    python -m experiments.gpu_results run FOLDER    # of: python -m experiments.gpu --out FOLDER
    python -m experiments.gpu_results plans         # planners on the problems of that run
    python -m experiments.gpu_results plans --home  # plans for the next run

The first renews ``results/gpu.json`` and ``.md``, and the problems of that card in ``dataset``: the
graph, the measured seconds of every operator on the CPU and on the GPU, and what they were measured
with. The others need nothing but these problems. With ``--home`` each has ``--seconds`` for a plan,
where a section on a lent machine has one; it goes to ``plans.json`` beside the problems, and runs
where the graph that is captured there is still the same.
"""

from __future__ import annotations

import fnmatch
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from experiments import baselines, gpu_goals
from experiments.gpu.bench import DATASET, HOME
from experiments.gpu.models import PROFILED
from experiments.gpu.predictions import commonest
from experiments.gpu_goals import kind_of
from experiments.grid import Cell
from experiments.study import RESULTS, Option, Options, Study, StudyError, run, say
from experiments.tables import Column, groups, table
from placement import importers, planners, workloads
from placement.importers import SUFFIX
from placement.planners.residence import refitted, with_buffers
from placement.problem import Problem
from placement.report.row import SINGLE
from placement.tools.files import write_atomic
from placement.workloads import dataset

FIELD = (  # rules, dynamic programs, searches, exact methods
    "heft,peft,m_etf,critical_path_greedy,llama_cpp_split,contiguous_dp,layer_dp,ideal_dp,local_search,"
    "macro_search,simulated_annealing,best_of,policy,cp_sat,mip"
)
Fact = Mapping[str, Any]

# --- a run ---------------------------------------------------------------------------------------


def rows(options: Options) -> list[dict[str, Any]]:
    """The lines of runs as they came; what is infinite is null. Renews the problems of their card.

    Sections of a later run replace those of earlier ones; ``run`` says when that of a row began.
    Of the same problem that of the first run is taken.

    Raises:
        StudyError: a folder is not that of a run, or a run measured no model or another card.
    """
    if not options.folders:
        raise StudyError("give the folder of a run: python -m experiments.gpu --out FOLDER")
    facts, measured = list[dict[str, Any]](), dict[str, Problem]()
    for text in options.folders:
        folder, _, some = text.partition(":")
        own, problems = read(Path(folder))
        there = {kind_of(r["section"]) for r in own}
        named = set(some.split(",")) if some else there
        if unknown := named - there:
            raise StudyError(f"{folder}: there is no section {', '.join(sorted(unknown))}")
        facts = [r for r in facts if kind_of(r["section"]) not in named - {"facts"}]
        facts += [r for r in own if kind_of(r["section"]) in named | {"facts"}]
        measured = problems | measured
    cards = {r["model"] for r in facts if (r["section"], r["item"]) == ("facts", "cuda:0")}
    if len(cards) > 1:
        raise StudyError(f"these runs are of {' and '.join(sorted(cards))}: give those of one card")
    options.about = about(facts, next(iter(measured.values())).profile.provenance)
    write_problems(measured, options.about, options.dataset)
    return facts


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Problem]]:
    """The lines of a run, and the problems that it measured."""
    path = folder / "gpu.jsonl"
    try:
        lines = path.read_text("utf-8").splitlines()
        with TemporaryDirectory() as to, zipfile.ZipFile(path.with_name("profiles.zip")) as file:
            names = [x for x in file.namelist() if re.fullmatch(rf"[\w.-]+{SUFFIX}", x)]
            measured = {
                name.removesuffix(SUFFIX): importers.load(file.extract(name, to))
                for name in sorted(names)
            }
    except (OSError, zipfile.BadZipFile) as error:
        raise StudyError(f"{folder}: not the folder of a run: {error}") from error
    if not measured:
        raise StudyError(f"{folder}: profiles.zip has no problem (*{SUFFIX})")
    facts = [json.loads(line, parse_constant=lambda name: None) for line in lines]
    began = next((r["began"] for r in facts if "began" in r), "unknown")
    return [r | {"run": began} for r in facts], measured


def about(rows: Sequence[Fact], measured: Fact) -> dict[str, Any]:
    """Machine, card, clocks and versions of a run; ``measured`` is of one of its profiles."""
    known: dict[str, Fact] = {r["item"]: r for r in rows if r["section"] == "facts"}
    versions = {
        k: v for k, v in known["versions"].items() if k not in ("section", "item", "at", "run")
    }
    names = ("when", "cpu", "cores", "load", "cores_stay_awake")
    return {
        **{k: measured[k] for k in names if k in measured},
        **versions,
        "card": known["cuda:0"]["model"],
        "cpu_device_cores": known["cpu:0"]["cores"],
        **gpu_goals.card_of(rows),
    }


def write_problems(measured: Mapping[str, Problem], about: Fact, folder: Path) -> None:
    """``<card>-<cores>-cores/<model>.json.gz`` and ``machine.json``; all that was there goes."""
    home = home_of(about, folder)
    for path in home.glob(f"*{SUFFIX}"):
        path.unlink()
    families = workloads.family_of()
    for key, problem in measured.items():
        spec, options = PROFILED.get(key, (key.partition("_")[0], {}))
        family = families.get(spec, spec)
        facts = {
            "dataset": dataset.VERSION,
            "kind": dataset.KINDS.get(family, "decoder" if family == "decoder" else "other"),
            "family": family,
            **({"spec": spec, "options": options} if key in PROFILED else {}),
            **{k: v for k, v in problem.profile.provenance.items() if k != "host"},
            **{k: v for k, v in about.items() if k not in ("when", "load")},
        }
        facts["measure_seconds"] = facts.pop("seconds", 0.0)
        profile = replace(problem.profile, provenance=facts)
        cluster = replace(problem.cluster, name=home.name)
        importers.save(replace(problem, cluster=cluster, profile=profile), home / f"{key}{SUFFIX}")
    devices = [asdict(d) for d in problem.cluster.workers.devices]
    text = json.dumps({"devices": devices, "provenance": dict(about)}, indent=1)
    write_atomic(home / "machine.json", text + "\n")


def home_of(about: Fact, folder: Path) -> Path:
    """Where the problems of a machine are."""
    card = re.sub(r"[^a-z0-9]+", "-", about["card"].lower()).strip("-")
    return folder / f"{card}-{about['cpu_device_cores']}-cores"


def of(rows: Iterable[Fact], section: str, has: str = "item") -> list[Fact]:
    """The rows of a section that have a fact."""
    return [r for r in rows if r["section"] == section and r.get(has) is not None]


def shown(rows: Sequence[Fact], *columns: Column) -> str:
    return table(rows, *columns) if rows else "Not run."


def fact(head: str, name: str, digits: int = 2, unit: str = " ms") -> Column:
    """A column of a fact that not all rows have."""
    return Column(head, lambda r: r.get(name), digits, 1, unit)


WAYS = (
    fact("eager PyTorch", "eager_ms"),
    fact("GPU alone", "gpu_ms"),
    fact("one CUDA graph", "graph_ms"),
    fact("GPU alone, CUDA graphs", "gpu_graphs_ms"),
    fact("CPU alone", "cpu_ms"),
    fact("plan", "plan_ms"),
    fact("over the best device", "plan_over_single", 3, "x"),
    fact("the planner's answer", "planned_ms"),
    fact("that one over the best device", "planned_over_single", 3, "x"),
)


def slower(rows: Sequence[Fact]) -> str:
    """A sentence: what is slower than eager PyTorch."""
    ways = {"gpu_ms": "operator by operator", "gpu_graphs_ms": "as CUDA graphs"}
    models = [
        f"{r['item']}, {called} ({r['eager_ms'] / r[way]:.2f}x)"
        for r in of(rows, "plans", "eager_ms")
        for way, called in ways.items()
        if r.get(way) and r[way] > r["eager_ms"]
    ]
    return f"Slower than eager PyTorch: {'; '.join(models) or 'nothing of this'}."


def half(rows: Sequence[Fact]) -> str:
    """Models with memory for some of them."""
    return table(
        of(rows, "memory", "model_mib") + of(rows, "streaming", "model_mib"),
        Column("model", "item"),
        fact("parameters", "model_mib", 0, " MiB"),
        fact("at least", "bound_ms", 1),
        fact("predicted", "predicted_ms", 1),
        fact("plan", "plan_ms", 1),
        fact("all streamed", "stream_ms", 1),
        fact("best cut", "cut_ms", 1),
        fact("streamed by hand", "streamed_ms", 1),
        fact("whole layers", "layers_ms", 1),
        fact("accelerate", "accelerate_ms", 1),
        fact("CPU alone", "cpu_ms", 1),
        fact("plan over accelerate", "plan_over_accelerate", 2, "x"),
        fact("plan over by hand", "plan_over_streamed", 2, "x"),
        fact("plan over the best of the others", "plan_over_others", 2, "x"),
    )


def compiled(rows: Sequence[Fact]) -> str:
    """What is compiled, by model and objective."""
    return shown(
        of(rows, "compiled", "eager_ms"),
        Column("model", "item"),
        fact("eager PyTorch", "eager_ms"),
        fact("one CUDA graph", "graph_ms"),
        fact("reduce-overhead", "reduce_overhead_ms"),
        fact("max-autotune", "max_autotune_ms"),
        fact("here, CUDA graphs", "gpu_graphs_ms"),
        fact("here, compiled", "gpu_compiled_ms"),
        Column("kept", lambda r: r["kept"].replace("_", ", ")),
        fact("that over reduce-overhead", "kept_over_torch", 2, "x"),
    )


def predicted(rows: Sequence[Fact]) -> str:
    """Errors and rank correlations of placements that ran."""
    return table(
        of(rows, "fidelity", "placements"),
        Column("model", "item"),
        Column("placements", "placements"),
        *(
            fact(f"{what}, {head}", f"{what}_{name}", 3, "")
            for what in ("latency", "period")
            for head, name in (
                ("median error", "error"),
                ("run again", "floor"),
                ("rank correlation", "rank"),
                ("run again", "rank_again"),
            )
        ),
    )


def ended(rows: Sequence[Fact]) -> str:
    """What failed, or was stopped, and why."""
    wrong = [r for r in rows if "failed" in r or r.get("status", "done") != "done"]
    return table(
        wrong,
        Column("section", "section"),
        Column("item", "item"),
        Column("what", lambda r: str(r.get("failed") or r["status"])[:120]),
    )


def run_parts(rows: Sequence[Fact], options: Options) -> dict[str, str]:
    return {
        "goals": gpu_goals.goals(rows),
        "speeds": table(of(rows, "plans", "gpu_ms"), Column("model", "item"), *WAYS),
        "slower": slower(rows),
        "half": half(rows),
        "compiled": compiled(rows),
        "pieces": shown(
            of(rows, "pieces", "plan_ms"),
            Column("memory, and pieces", "item"),
            fact("plan", "plan_ms"),
            fact("predicted", "predicted_ms"),
            Column("shares of pieces", "shares"),
            Column("on CPU, GPU, copied there", "bytes_on"),
        ),
        "learning": shown(
            of(rows, "learning", "gain"),
            Column("way", "item"),
            Column("runs", "ran"),
            fact("predicted", "predicted_ms"),
            fact("measured", "measured_ms"),
            fact("over the better device", "gain", 2, "x"),
        ),
        "predicted": predicted(rows),
        "ended": ended(rows),
    }


RUN = Study(
    name="gpu",
    module="experiments.gpu_results",
    word="run",
    rows=rows,
    parts=run_parts,
    options={
        "folders": Option(
            (),
            "of runs of experiments.gpu on one card; FOLDER:SECTION,SECTION: "
            "of that run only these",
            kind=str,
            word=True,
        ),
        "dataset": Option(DATASET, "folder of measured problems", kind=Path),
    },
    facts=lambda options: dict.fromkeys(("host", "scipy", "ortools"), "not noted") | options.about,
)

# --- plans, made at home -------------------------------------------------------------------------


def last_home() -> Path:
    """Where the problems of the last run are."""
    text = (RESULTS / f"{RUN.name}.json").read_text("utf-8")
    return home_of(json.loads(text)["provenance"], DATASET)


def problems(patterns: Sequence[str] = ()) -> dict[str, Problem]:
    """``latency/<model>`` and ``period/<model>`` of the machine of the last run.

    Raises:
        StudyError: no name matches.
    """
    chosen, home = {}, last_home()
    for path in sorted(home.glob(f"*{SUFFIX}")):
        problem = importers.load(path)
        for objective in ("latency",) if problem.cluster.streaming else ("latency", "period"):
            name = f"{objective}/{path.name.removesuffix(SUFFIX)}"
            if not patterns or any(fnmatch.fnmatch(name, p) for p in patterns):
                chosen[name] = replace(problem, objective=objective)
    if not chosen:
        raise StudyError(f"no problem of {home} matches {', '.join(patterns) or '*'}")
    return chosen


def plan_rows(options: Options) -> Iterator[Cell] | None:
    """Every planner on these problems; with ``--home`` plans for the next run, and None."""
    if not options.home:
        return baselines.rows(options, lambda _, patterns: problems(patterns))
    path = last_home() / HOME
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name, problem in problems(options.patterns).items():
        posed = with_buffers(problem)
        _, solution = refitted(posed, planners.load("best_of", seconds=options.seconds)(posed))
        known[name] = {
            "graph": problem.graph.fingerprint,
            "predicted_s": solution.value_s,
            "placement": solution.placement.tolist(),
        }
        say(f"{name}: {solution.value_s * 1e3:.3g} ms")
    write_atomic(path, json.dumps(known, separators=(",", ":")) + "\n")
    return None


def least_s(runs: Sequence[Cell], planner: str = "") -> float:
    """The best value of planners whose names begin so."""
    values = (r.value_s for r in runs if r.planner.startswith(planner))
    return min((v for v in values if v is not None), default=np.nan)


def change(runs: Sequence[Cell]) -> float:
    """How much longer the best plan takes than the better device: below 0 it is shorter."""
    return least_s(runs) / least_s(runs, SINGLE) - 1


def gains(rows: Sequence[Cell]) -> str:
    """The best plan beside the best device, with its sign."""
    runs = groups(rows, "problem")

    def finders(problem: str) -> str:
        names = [r.planner for r in baselines.winners(runs[problem])]
        return ", ".join(names) if len(names) <= 3 else f"{len(names)} planners"

    return table(
        runs,
        Column("problem", str),
        *(
            Column(head, lambda p, name=name: least_s(runs[p], SINGLE + name), 3, 1e3, " ms")
            for head, name in (
                ("CPU alone", "cpu:0"),
                ("GPU alone", "cuda:0"),
                ("all streamed", "streamed/cuda:0"),
            )
        ),
        Column("best plan", lambda p: least_s(runs[p]), 3, 1e3, " ms"),
        Column("found by", finders),
        Column("against the best device", lambda p: f"{100 * change(runs[p]):+.1f} %"),
        Column("at least (proved)", lambda p: baselines.proved_s(runs[p]) or np.nan, 3, 1e3, " ms"),
    )


def where(measured: Mapping[str, Problem]) -> str:
    """Which operators the CPU does faster, what that is worth, and what a trip there costs."""

    def both(name: str) -> tuple[np.ndarray, np.ndarray]:
        cpu_s, gpu_s = measured[name].compute_s.T
        return cpu_s, gpu_s

    def kinds(name: str) -> str:
        cpu_s, gpu_s = both(name)
        return commonest(np.array(measured[name].graph.op_kind)[cpu_s < gpu_s])

    def saved(name: str) -> float:
        cpu_s, gpu_s = both(name)
        return float(np.minimum(cpu_s, gpu_s).sum() / gpu_s.sum() - 1)

    def trip_s(name: str) -> float:
        return sum(
            x.latency_s + x.wake_s + x.send_s + x.receive_s for x in measured[name].profile.links
        )

    return table(
        measured,
        Column("model", lambda n: n.partition("/")[2]),
        Column("operators", lambda n: measured[n].num_ops),
        Column("faster on the CPU", lambda n: float(np.mean(np.less(*both(n)))), 1, 100, " %"),
        Column("which", kinds),
        Column("all on the CPU", lambda n: both(n)[0].sum(), 2, 1e3, " ms"),
        Column("all on the GPU", lambda n: both(n)[1].sum(), 2, 1e3, " ms"),
        Column("each where it is faster", lambda n: f"{100 * saved(n):+.1f} %"),
        Column("to the CPU and back", trip_s, 0, 1e6, " µs"),
    )


def plan_parts(rows: Sequence[Cell], options: Options) -> dict[str, str]:
    measured = {
        name: p
        for name, p in problems(("latency/*",)).items()
        if not p.cluster.streaming and np.isfinite(p.compute_s).all()
    }
    return {
        "gains": gains(rows),
        "where": where(measured),
        **baselines.parts(rows, options),
    }


PLANS = Study(
    name="gpu_plans",
    module="experiments.gpu_results",
    word="plans",
    rows=plan_rows,
    row=Cell,
    parts=plan_parts,
    options=baselines.OPTIONS
    | {
        "seeds": Option(1, "of planners that draw"),
        "planners": Option(FIELD, "names, with commas"),
        "home": Option(False, "best_of's plans alone, for the next run"),
    },
    facts=baselines.facts,
)

# --- what the README and docs/results.md say -----------------------------------------------------


def headlines(results: Path = RESULTS, most: int | None = None) -> str:
    """The machine, calls and streams of so many models, and what placement adds to the GPU."""
    text = (results / f"{RUN.name}.json").read_text("utf-8")
    facts, rows = (json.loads(text)[k] for k in ("provenance", "rows"))
    by_model: dict[str, dict[str, Fact]] = {}
    compiled = of(rows, "compiled", "gpu_compiled_ms")
    for row in [*of(rows, "plans", "gpu_ms"), *compiled]:
        model, _, objective = row["item"].partition(", ")
        known = by_model.setdefault(model, {})
        known[objective] = {**row, **known.get(objective, {})}

    def value(name: str, objective: str, model: str) -> float | None:
        return by_model[model].get(objective, {}).get(name)

    ways = {
        "eager PyTorch": "eager_ms",
        "one CUDA graph": "graph_ms",
        "here": "gpu_graphs_ms",
        **({"reduce-overhead": "reduce_overhead_ms"} if compiled else {}),
        **({"here, compiled": "gpu_compiled_ms"} if compiled else {}),
    }
    columns = [
        Column(f"{what}: {way}", partial(value, name, objective), 2, 1, " ms")
        for what, objective in (("call", "latency"), ("stream", "period"))
        for way, name in ways.items()
    ]
    columns += [Column("call: CPU alone", partial(value, "cpu_ms", "latency"), 1, 1, " ms")]
    changes: dict[str, list[float]] = {}
    for problem, runs in groups(PLANS.read(results), "problem").items():
        kind = "calls" if problem.startswith("latency/") else "streams"
        if np.isnan(least_s(runs, f"{SINGLE}cuda")):
            kind = "where the GPU alone cannot hold or run the model"
        changes.setdefault(kind, []).append(100 * change(runs))
    ratios = sorted(f"{r['plan_over_single']:.2f}" for r in of(rows, "plans", "plan_over_single"))
    lines = [
        "{card}, driver {driver}, beside {cpu_device_cores} cores of an {cpu}; PyTorch {torch}, "
        "{when:.10}.".format_map(facts),
        "",
        table(list(by_model)[:most], Column("model", str), *columns),
        f"* Speed of what `optimize` keeps over eager PyTorch: {span(rows, 'kept_over_eager')}.",
        "* Speed of its plan over the better device alone: "
        + " to ".join(f"{x}x" for x in dict.fromkeys((ratios[0], ratios[-1]))) + ", over all rows.",
        "* Over the better device alone, the best plan of any planner is predicted to have up to "
        + " and ".join(f"{-min(changes[k]):.1f} % shorter {k}" for k in ("calls", "streams"))
        + f". Answers of `best_of`, run, had of its speed: {span(rows, 'planned_over_single')}.",
        "",
        table(
            of(rows, "memory", "plan_ms")
            + [r for r in of(rows, "streaming", "plan_ms") if r["budget"] == 1 / 2],
            Column("a call with memory for half of the model", "item"),
            fact("plan", "plan_ms", 1),
            fact("streamed by hand", "streamed_ms", 1),
            fact("accelerate", "accelerate_ms", 1),
            fact("CPU alone", "cpu_ms", 1),
        ).rstrip(),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def span(rows: Sequence[Fact], name: str) -> str:
    """The least and the most of a ratio, of calls and of streams."""
    ratios: dict[str, list[float]] = {}
    for row in of(rows, "plans", name):
        kind = "calls" if row["item"].endswith(", latency") else "streams"
        ratios.setdefault(kind, []).append(row[name])
    return ", ".join(f"{k} {min(v):.2f} to {max(v):.2f}x" for k, v in ratios.items()) or "none ran"


STUDIES = (RUN, PLANS)
main = partial(run, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
