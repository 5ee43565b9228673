"""What the code answers, to twelve digits: recorded, and compared after a change that keeps it.

    OMP_NUM_THREADS=1 python -m experiments.same_answers record --out before.json [--part NAME ...]
    python -m experiments.same_answers compare before.json after.json

Budgets are evaluations, seeds are fixed, there is one thread: a second recording is equal.
``compare`` lists rows that differ, are new or missing, and ends with exit code 1 if there are any.
It also reads every plan file that the old recording holds and writes it again. Floats are written
with twelve digits, as the last ones depend on the type of processor, arrays as a hash of shape and
values. Where a method cannot answer, the error is the row.

What is recorded is reached by name (planners, schedulers, exporters, files), so that
modules may move: all imports of internals are the few below. Left out, as their answers depend on
the clock or the machine: whatever measures or executes. A method is left out where a problem has
more operators than ``MOST`` says; the schedule search reads the clock, which counts its readers
here (``counted_clock``).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import placement
from placement import exporters, importers, planners, schedulers, workloads
from placement.__main__ import main as command
from placement.bounds import lower_bounds
from placement.objective import Objective
from placement.simulator import evaluate, score, simulate_reference
from placement.simulator.analytic import device_loads, piecewise_latency
from placement.workloads.synthetic import families, giph

Row = dict[str, Any]
Task = tuple[str, str, Callable[[], Row]]  # problem, method, its row
Chosen = Callable[[str], bool]  # whether rows of this problem are asked for

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
PROFILES = ROOT / "experiments/dataset/intel-r-xeon-r-processor-b65e2a3b"
EVALUATIONS = 200
# Methods by the most operators of the problems they run on; all others run on all problems.
MOST = (
    ({"cp_sat", "mip"}, 12),
    ({"best_of", "default start", "expert", "policy"}, 240),
    ({"antichain_dp", "brkga", "critical_path_greedy", "cross_entropy", "ideal_dp"}, 400),
    ({"local_search", "m_sct", "macro_search", "order_search", "random_search"}, 400),
    ({"replicated", "simulated_annealing"}, 400),
)
OPTIONS: dict[str, Row] = {  # without a clock, or with more of it than is ever used
    "cp_sat": {"seconds": 600.0},
    "ideal_dp": {"seconds": None, "max_steps": 10**6, "memory_bytes": 2**22},
    "m_sct": {"lp_seconds": 600.0},
    "mip": {"seconds": 600.0},
    "policy": {"baseline": "heft"},
}


def digest(*parts: Any) -> str:
    """A hash of texts and of arrays by shape and value, whatever the width of their numbers."""
    state = hashlib.sha256()
    for part in parts:
        if isinstance(part, str | bytes):
            state.update(part.encode() if isinstance(part, str) else part)
            continue
        array = np.asarray(part)
        wide = shortened(array) if array.dtype.kind == "f" else array.astype(np.int64)
        state.update(repr(wide.shape).encode() + wide.tobytes())
    return state.hexdigest()[:20]


def shortened(array: np.ndarray) -> np.ndarray:
    """float64, of forty binary digits; no minus before a zero."""
    share, exponent = np.frexp(array.astype(np.float64))
    return np.ldexp(np.round(np.ldexp(share, 40)), exponent - 40) + 0.0


def text_of(value: float | None) -> str | None:
    return None if value is None else f"{value:.12g}"


def of_schedule(schedule: Any) -> str | None:
    if schedule is None:
        return None
    return digest(str(schedule.num_microbatches), *(np.reshape(x, (-1, 2)) for x in schedule.order))


def of_solution(solution: Any) -> Row:
    return {
        "value": text_of(solution.value_s),
        "bound": text_of(solution.lower_bound_s),
        "placement": digest(solution.placement),
        "schedule": of_schedule(solution.schedule),
        "evaluations": solution.stats.get("evaluations"),
    }


@contextlib.contextmanager
def counted_clock(tick_s: float = 0.05) -> Iterator[None]:
    """Time passes by so much whenever it is read: a search that has seconds gives one answer."""
    ticks = count()
    with mock.patch("time.perf_counter", lambda: next(ticks) * tick_s):
        yield


# --- the problems --------------------------------------------------------------------------------


@cache
def files() -> dict[str, Any]:
    """Every problem with the objective of its file, by name."""
    load, loaders = (
        importers.load,
        {"branches": partial(importers.load, ROOT / "examples/branches.json")},
    )
    for path in sorted(PROFILES.glob("*-batch1.json.gz")):
        if not path.name.startswith("small-"):
            loaders[f"profile/{path.name.partition('-')[0]}"] = partial(load, path)
    for name in ("resnet_tiny", "bert_tiny", "gpt2_tiny", "t5_tiny"):
        loaders[f"gpus/{name}"] = partial(on_gpus, PROFILES / f"{name}-batch1.json.gz")
    for path in sorted(DATA.glob("dnn_partitioning/*/*/*.json")):
        objective = "piecewise_latency" if "latency" in path.parts else "max_load"
        name = f"{path.parts[-3]}/{path.parts[-2]}/{path.stem}"
        loaders[name] = partial(load, path, objective=objective)
    for path in sorted(DATA.glob("moirai/*.json")):
        loaders[f"moirai/{path.stem}"] = partial(load, path)
    machine: Row = {"devices": 4, "bandwidth": 12e9, "memory": 2**40}
    for path in sorted(DATA.glob("pipedream/*.txt")):
        for mode in ("training", "inference"):
            loaders[f"pipedream/{path.stem}/{mode}"] = partial(load, path, mode=mode, **machine)
    loaders |= {f"synthetic/{name}": partial(family, 0) for name, family in families().items()}
    return loaders | {f"giph/{seed}": partial(giph, seed) for seed in range(4)}


def from_text(text: str) -> placement.Problem:
    """The problem of a problem file with this content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "problem.json")
        path.write_text(text, encoding="utf-8")
        return importers.load(path)


def on_gpus(path: Path) -> placement.Problem:
    """A profile of this processor's two devices as one of two GPUs."""
    text = gzip.decompress(path.read_bytes()).decode()
    for old, new in (("cpu-1-thread", "cuda:0"), ("cpu-2-threads", "cuda:1")):
        text = text.replace(f'"name": "{old}"', f'"kind": "cuda", "name": "{new}"')
        text = text.replace(f'"{old}"', f'"{new}"')
    return from_text(text)


def measured_like(problem: placement.Problem) -> placement.Problem:
    """As two measured devices are: slower beside others, senders are held up, a shared channel."""
    p = problem.profile
    links = tuple(
        replace(x, blocking=i % 3 == 0, channel="bus" if i % 2 else None, wake_s=1e-5, send_s=2e-5)
        for i, x in enumerate(p.links)
    )
    workspace = np.arange(problem.num_ops) % 7 * 1000
    slower = replace(p, links=links, loaded_s=1.25 * p.compute_s, batch_s=1e-4)
    return replace(problem, profile=replace(slower, workspace_bytes=workspace))


def with_power(problem: placement.Problem) -> placement.Problem:
    """The objective energy, on devices that draw unlike power."""
    devices = tuple(
        replace(d, busy_w=20.0 + 7 * i, idle_w=5.0 - i)
        for i, d in enumerate(problem.cluster.devices)
    )
    cluster = replace(problem.cluster, devices=devices)
    return replace(problem, cluster=cluster, objective="energy", second_j=2.0)


def problems(is_chosen: Chosen) -> Iterator[tuple[str, placement.Problem]]:
    """Every file under the objectives that mean something for it, and as measured devices are."""
    kinds: Any
    for name, load in files().items():
        kinds = {
            "branches": tuple(Objective),
            "profile": ("period", "latency", "energy", "measured period", "measured latency"),
            "gpus": ("period", "latency"),
            "moirai": ("period", "latency"),
            "throughput": ("max_load", "period"),
            "synthetic": ("period", "latency", "max_load", "measured period"),
            "pipedream": ("period",) if name.endswith("training") else ("latency",),
        }.get(name.partition("/")[0], ("",))
        for kind in kinds:
            full = f"{name} {kind}".rstrip()
            if not is_chosen(full):
                continue
            problem, objective = load(), kind.removeprefix("measured ")
            if kind.startswith("measured"):
                problem = measured_like(problem)
            if objective == "energy":
                problem = with_power(problem)
            elif objective:
                problem = problem.with_objective(objective)
            yield full, problem


def placements(problem: placement.Problem, number: int) -> Any:
    """Random ones that the devices support, int32 ``[number, N]``."""
    rng = np.random.default_rng(0)
    allowed = np.isfinite(problem.group_compute_s)
    drawn = np.where(allowed, rng.random((number, *allowed.shape)), -1.0).argmax(axis=2)
    return drawn[:, problem.graph.group].astype(np.int32)


# --- the parts -----------------------------------------------------------------------------------


def planner_rows(is_chosen: Chosen) -> Iterator[Task]:
    for name, problem in problems(is_chosen):
        file, _, kind = name.partition(" ")
        extra = file.startswith(("profile", "synthetic")) and kind not in ("period", "latency")
        if extra and problem.num_ops > 150:
            continue  # what the other kinds add shows on smaller problems
        for method in (*planners.names(), "default start"):
            most = next((n for who, n in MOST if method in who), 10**6)
            if problem.num_ops <= most:
                yield name, method, partial(planned, method, problem)


def planned(method: str, problem: placement.Problem) -> Row:
    """The row of a planner with few evaluations, those that draw from the answer of ``heft``."""
    if method == "expert":
        names = problem.cluster.device_names
        split = dict(
            zip(problem.graph.op_name, (names[d] for d in placements(problem, 1)[0]), strict=True)
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "split.json")
            path.write_text(json.dumps(split), encoding="utf-8")
            return of_solution(planners.load("expert", file=str(path))(problem))
    if method == "default start":
        planner = planners.load("simulated_annealing", evaluations=EVALUATIONS, seed=1)
        return of_solution(planner(problem))
    own = {f.name for f in fields(planners.find(method))}
    options: Row = {"evaluations": EVALUATIONS, "seed": 1} if {"evaluations", "seed"} <= own else {}
    if "start" in own and options:
        options |= {"start": "heft"}
    return of_solution(planners.load(method, **options | OPTIONS.get(method, {}))(problem))


def scheduler_rows(is_chosen: Chosen) -> Iterator[Task]:
    """Every scheduler on the published cases and on splits of graphs; and the search of orders."""
    path = DATA / "schedules/cases.json"
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.is_file() else {}
    for key, case in cases.items():
        name = f"case {key}"
        if not is_chosen(name) or case["ndevs"] > 6:
            continue
        for memory in (None, 4):
            yield name, f"schedule {memory}", partial(searched, path, key, memory)
        if max(len(b["devices"]) for b in case["blocks"]) == 1:
            problem = of_case(key, case)
            place = problem.compute_s.argmin(axis=1).astype(np.int32)
            for method in schedulers.names():
                if method != "searched" or case["ndevs"] <= 4:
                    yield name, method, partial(scheduled, method, problem, place)
    for name, problem in problems(lambda x: "period" in x and is_chosen(x)):
        if problem.num_ops <= 400:
            place = planners.load("contiguous_dp")(problem).placement
            for method in schedulers.names():
                if method != "searched" or problem.num_ops <= 60:
                    yield name, method, partial(scheduled, method, problem, place)


def of_case(key: str, case: Row) -> placement.Problem:
    """A published case as a problem: a block is an operator that one device can run."""
    numbers, blocks = range(case["ndevs"]), case["blocks"]
    operators, tensors = [], []
    for b in blocks:
        seconds = [b["time"] if d in b["devices"] else "inf" for d in numbers]
        users = [x["name"] for x in blocks if b["id"] in x["deps"]]
        operators.append({"name": b["name"], "backward": b["kind"] == "B", "compute_s": seconds})
        tensors.append({"producer": b["name"], "bytes": 1, "consumers": users})
    cluster = {"name": "case", "devices": [{"name": f"d{i}"} for i in numbers]}
    record = {"problem_version": 1, "model": key, "cluster": cluster, "param_bytes": []}
    return from_text(json.dumps(record | {"operators": operators, "tensors": tensors}))


def scheduled(method: str, problem: placement.Problem, place: Any) -> Row:
    """The order of a scheduler, and what it is worth."""
    options = {"seconds": 20.0, "unroll": 1} if method == "searched" else {}
    with counted_clock() if method == "searched" else contextlib.nullcontext():
        schedule = schedulers.load(method, **options)(problem, place, 8)
    timeline = placement.simulate(problem, place, schedule)
    return {
        "makespan": text_of(timeline.makespan_s),
        "period": text_of(timeline.period_s),
        "peak": digest(timeline.peak_bytes),
        "schedule": of_schedule(schedule),
    }


def searched(path: Path, key: str, memory: int | None) -> Row:
    """What ``placement schedule`` prints for a published case."""
    limit = [] if memory is None else ["--memory", str(memory)]
    printed, errors = io.StringIO(), io.StringIO()
    words = ["schedule", str(path), "--case", key, *limit, "--micro-batches", "8", "--json"]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors), counted_clock():
        code = command([*words, "--seconds", "20", "--unroll", "1"])
    if code:
        return {"code": code, "error": errors.getvalue().strip()}
    answer = json.loads(printed.getvalue())
    names = ("period", "period_lower_bound", "optimal", "unroll", "makespan")
    return {k: answer[k] for k in names} | {"starts": digest(np.array(answer["starts"]))}


def simulator_rows(is_chosen: Chosen) -> Iterator[Task]:
    """Random placements: in the kernel, in the reference, and by formula."""
    for name, problem in problems(is_chosen):
        methods = {
            "bounds": partial(bounds, problem),
            "batch": partial(batch, problem),
            "timeline": partial(timeline, problem, placement.simulate, None),
        }
        if problem.num_ops <= 100:
            methods |= {
                "reference": partial(timeline, problem, simulate_reference, 3),
                "kernel": partial(timeline, problem, placement.simulate, 3),
                "formulas": partial(formulas, problem),
            }
        for method, task in methods.items():
            yield name, method, task


def bounds(problem: placement.Problem) -> Row:
    return {k: text_of(v) for k, v in lower_bounds(problem).items()}


def batch(problem: placement.Problem) -> Row:
    """Values of many placements at once, under every objective."""
    drawn = placements(problem, 16 if problem.num_ops <= 1000 else 4)
    values = evaluate(problem, drawn)
    row: Row = {"latency": values.latency_s, "period": values.period_s}
    row |= {"energy": values.energy_j, "peak": values.peak_bytes}
    for objective in Objective:
        if objective != "energy" or values.energy_j is not None:
            row[f"score {objective}"] = score(problem.with_objective(objective), drawn)
    return {k: digest(v) for k, v in row.items() if v is not None}


def timeline(problem: placement.Problem, simulated: Any, number: int | None) -> Row:
    timelines = [simulated(problem, p, num_microbatches=number) for p in placements(problem, 2)]
    return {
        "latency": digest([t.latency_s for t in timelines]),
        "period": digest([t.period_s for t in timelines]),
        "busy": digest(*(t.busy_s for t in timelines)),
        "peak": digest(*(t.peak_bytes for t in timelines)),
        "times": digest(*(x for t in timelines for x in (t.start_s, t.end_s))),
        "transfers": digest(*(np.sort(t.transfer_start_s) for t in timelines)),
    }


def formulas(problem: placement.Problem) -> Row:
    """The plain definitions of the objectives that are formulas."""
    drawn = placements(problem, 4)
    pieces = digest([piecewise_latency(problem, p) for p in drawn])
    return {"loads": digest(*(device_loads(problem, p) for p in drawn)), "pieces": pieces}


def file_rows(is_chosen: Chosen) -> Iterator[Task]:
    """Every problem as a problem file, which is read and written again."""
    for name, load in files().items():
        if is_chosen(name):
            yield name, "problem file", partial(written, load)


def written(load: Callable[[], placement.Problem]) -> Row:
    """The file, and what comes of reading it."""
    with tempfile.TemporaryDirectory() as folder:
        first, again = Path(folder, "first.json"), Path(folder, "again.json")
        importers.save(load(), first)
        importers.save(importers.load(first), again)
        texts = [x.read_text(encoding="utf-8") for x in (first, again)]
    return {"file": digest(texts[0]), "again": digest(texts[1])}


def plan_rows(is_chosen: Chosen) -> Iterator[Task]:
    """Plan files of several planners, and what every exporter makes of them."""
    chosen = ("branches", "gpus/", "pipedream/vgg16", "throughput/layer/bert24", "giph/0")
    for name, problem in problems(lambda x: x.startswith(chosen) and is_chosen(x)):
        if name.startswith("gpus/"):  # the model itself: modules and parameters have names
            module, inputs = workloads.load(name.partition("/")[2].partition(" ")[0])
            graph = placement.capture(module, inputs, name=problem.graph.name)
            problem = replace(problem, graph=graph)
        for method in ("heft", "contiguous_dp", "order_search", "one_f_one_b"):
            if method == "order_search" and problem.objective != "latency":
                continue
            plan = cache(partial(plan_of, method, problem))
            yield name, method, partial(of_plan, plan)
            for exporter in exporters.names():
                yield name, f"{method} {exporter}", partial(exported, exporter, plan, problem)


def plan_of(method: str, problem: placement.Problem) -> placement.Plan:
    """The plan of a planner, or of a scheduler behind one."""
    ordered = method in schedulers.names()
    options = {"evaluations": EVALUATIONS} if method == "order_search" else {}
    solution = planners.load("contiguous_dp" if ordered else method, **options)(problem)
    schedule = schedulers.load(method)(problem, solution.placement, 4) if ordered else None
    return placement.make_plan(problem, solution, planner=method, schedule=schedule)


def of_plan(plan: Callable[[], placement.Plan]) -> Row:
    """The plan file as it is, and a hash of what does not depend on the day and the version."""
    data = json.loads(plan().model_dump_json(), parse_float=lambda text: f"{float(text):.12g}")
    for key in ("version", "git_commit", "created"):
        data["provenance"].pop(key)
    return {"plan": digest(json.dumps(data)), "text": plan().model_dump_json(indent=1) + "\n"}


def exported(name: str, plan: Callable[[], placement.Plan], problem: placement.Problem) -> Row:
    """What an exporter writes; of a plan that it cannot express, the nearest that it can."""
    write, original, row = exporters.load(name), plan(), Row()
    try:
        output = write(original, problem)
    except exporters.Inexpressible as error:
        row = {"error": str(error), "nearest": digest(json.dumps(error.nearest))}
        output = write(exporters.moved(original, error.nearest), problem)
    return row | {suffix or "file": digest(text) for suffix, text in output.files.items()}


PARTS: dict[str, Callable[[Chosen], Iterator[Task]]] = {
    "planners": planner_rows,
    "schedulers": scheduler_rows,
    "simulator": simulator_rows,
    "files": file_rows,
    "plans": plan_rows,
}


# --- record and compare --------------------------------------------------------------------------


def record(parts: Sequence[str], keys: set[str] | None = None) -> Iterator[dict[str, Row]]:
    """The rows of each part, or of some ``keys`` alone."""
    names = None if keys is None else {tuple(key.split(" | ")[:2]) for key in keys}
    for part in parts:
        rows: dict[str, Row] = {}

        def is_chosen(problem: str, part: str = part) -> bool:
            return names is None or (part, problem) in names

        for problem, method, task in PARTS[part](is_chosen):
            key = f"{part} | {problem} | {method}"
            if keys is None or key in keys:
                rows[key] = attempt(task)
        yield rows


def attempt(task: Callable[[], Row]) -> Row:
    """The row, or the error instead."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return task()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def differences(old: dict[str, Row], new: dict[str, Row]) -> list[str]:
    """A line for every row that differs, is missing or new, or whose plan file is not kept."""
    lines = [f"missing: {key}" for key in old if key not in new]
    lines += [f"new: {key}" for key in new if key not in old]
    for key in old.keys() & new.keys():
        for field in old[key].keys() | new[key].keys():
            was, now = old[key].get(field), new[key].get(field)
            if field != "text" and was != now:
                lines.append(f"{key}: {field} was {was}, is {now}")
    for key, row in old.items():
        if "text" in row and (now := attempt(partial(rewritten, row["text"]))) != {"plan": True}:
            lines.append(f"{key}: the old plan file is not read and written as it was: {now}")
    return sorted(lines)


def rewritten(text: str) -> Row:
    """Whether a plan file is written as it was read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        path.write_text(text, encoding="utf-8")
        placement.load_plan(path).save(path)
        return {"plan": path.read_text(encoding="utf-8") == text}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("record", help="write the answers of this checkout")
    make.add_argument("--out", type=Path, required=True)
    make.add_argument("--rows-of", type=Path, help="only the rows that this recording has")
    make.add_argument("--part", nargs="+", choices=[*PARTS], default=[*PARTS], metavar="NAME")
    check = verbs.add_parser("compare", help="list what differs; 1 if anything does")
    check.add_argument("old", type=Path)
    check.add_argument("new", type=Path)
    options = parser.parse_args(argv)
    if options.verb == "record":
        keys = options.rows_of and set(json.loads(options.rows_of.read_text(encoding="utf-8")))
        rows: dict[str, Row] = {}
        for part in record(options.part, keys):  # what is interrupted keeps the parts before
            rows |= part
            lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(rows.items()))
            options.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            print(f"{len(rows)} rows, {time.process_time():.0f} processor seconds", flush=True)
        return 0
    old, new = (json.loads(x.read_text(encoding="utf-8")) for x in (options.old, options.new))
    differing = differences(old, new)
    print(*differing, f"{len(differing)} differences in {len(old)} rows", sep="\n")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
