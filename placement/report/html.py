"""A run folder as one HTML page that needs nothing else: no network, no other file.

All data is JSON in an element that browsers do not execute, read by the scripts in ``page/`` and
shown as text only, so that names from files are never markup. The page allows itself no other
script and no connection (a content security policy with hashes).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from placement.problem import Placement, Problem, Solution
from placement.profile import error_in
from placement.report import curves, still, table, usage
from placement.report.row import SINGLE, Row, groups
from placement.report.run_folder import RunFolder, Workload, read_run
from placement.report.saved import placement_id
from placement.report.table import Comparison
from placement.simulator.memory import largest, memory_steps
from placement.timeline import Timeline
from placement.tools.files import parse_json, parse_yaml, write_atomic
from placement.tools.ownership import version
from placement.tools.progress import Progress
from placement.tools.shown import hydra_word

if TYPE_CHECKING:
    from placement.plan import Plan

SCRIPTS = ("base.js", "charts.js", "timeline.js", "graph.js", "main.js")
MAX_BARS = 2_000_000  # operators x micro-batches of all timelines: about 10 MB of page

_UNSAFE = re.compile("[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Written:
    """The page that was written, and what is in it."""

    path: Path
    num_bytes: int
    num_workloads: int
    num_planners: int
    num_predicted: int
    num_measured: int
    unread: tuple[str, ...]


def write_report(
    folder: str | Path, out: str | Path | None = None, progress: Progress | None = None
) -> Written:
    """Write the page of a run folder, whole or not at all; default: ``report.html`` in it.

    ``progress`` is told what is being done, and which share of all is done.

    Raises:
        RunFolderError: there is nothing to report on.
        FileError: it cannot be written there.
    """
    run = read_run(folder)
    data = page_data(run, progress)
    path = write_atomic(out or run.path / "report.html", page(data))
    decisions = [d for w in data["workloads"] for d in w["decisions"]]
    return Written(
        path=path,
        num_bytes=path.stat().st_size,
        num_workloads=len(data["workloads"]),
        num_planners=len({p["name"] for w in data["workloads"] for p in w["planners"]}),
        num_predicted=sum(d["predicted"] is not None for d in decisions),
        num_measured=sum(d["measured"] is not None for d in decisions),
        unread=run.unread,
    )


def page(data: dict[str, Any]) -> str:
    """The page that shows ``data``, the value of ``page_data``."""
    files = resources.files("placement.report") / "page"
    style = (files / "page.css").read_text(encoding="utf-8")
    script = "".join((files / name).read_text(encoding="utf-8") for name in SCRIPTS)
    stills = "".join(map(still.page, data["workloads"]))
    shown = [{k: v for k, v in w.items() if k != "picture"} for w in data["workloads"]]
    policy = f"default-src 'none'; script-src {_sha256(script)}; style-src {_sha256(style)}"
    return Template((files / "page.html").read_text(encoding="utf-8")).substitute(
        policy=policy,
        style=style,
        script=script,
        title=escape(data["title"]),
        stills=stills,
        data=_inert(data | {"workloads": shown}),
    )


def _sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(data: Any) -> str:
    """JSON without any character that ends, or begins, something in HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def page_data(run: RunFolder, progress: Progress | None = None) -> dict[str, Any]:
    """Everything that the page shows, as JSON values: seconds, bytes, and null for unknown."""
    comparison = run.comparison
    decided = []
    for i, workload in enumerate(run.workloads):
        if progress is not None:
            progress(f"{workload.name}: timelines", i / len(run.workloads))
        decided.append(_decisions(workload, comparison))
    num_ops = [w.problem.num_ops if w.problem else 0 for w in run.workloads]
    bars = sum(n * len(ds) * 2 for n, ds in zip(num_ops, decided, strict=True))
    batches = max(1, MAX_BARS // max(bars, 1))
    from placement.plan import now

    return _plain(
        {
            "title": run.path.resolve().name,
            "made": now(),
            "version": version(),
            "workloads": [
                _workload(w, ds, comparison, batches)
                for w, ds in zip(run.workloads, decided, strict=True)
            ],
            "overall": None if comparison is None else _overall(comparison),
            "scatter": [] if comparison is None else _scatter(comparison),
            "training": run.metrics,
            "provenance": _provenance(run),
            "commands": _commands(run),
            "unread": list(run.unread),
        }
    )


@dataclass(frozen=True, eq=False)
class _Decision:
    """One placement, and the planners that gave it (their best seed)."""

    planners: list[str]
    placement: Placement
    predicted: Timeline | None
    measured: Timeline | None
    window: int  # micro-batches in flight


def _decisions(workload: Workload, comparison: Comparison | None) -> list[_Decision]:
    decisions: dict[str, _Decision] = {}
    plan, problem = workload.plan, workload.problem
    plan_id = None
    if plan is not None:
        devices = [d.name for d in plan.cluster.devices]
        phases = [[devices.index(d) for d in on.values()] for on in plan.assignments]
        on = np.array(phases if plan.phases else phases[0], np.int32)
        plan_id = placement_id(on)
    rows = [] if comparison is None else _representatives(comparison, workload.name)
    for row in rows:
        solution = None
        if comparison is not None:
            solution = comparison.solutions.get((workload.name, row.planner, row.seed))
        if solution is None or row.placement_id is None:
            continue
        if row.placement_id in decisions:
            decisions[row.placement_id].planners.append(row.planner)
            continue
        traces = workload.traces if row.placement_id == plan_id else {}
        window = problem.max_in_flight if problem else 1
        decisions[row.placement_id] = _Decision(
            [row.planner],
            solution.placement,
            _simulated(problem, solution) or traces.get("predicted"),
            workload.measured.get(row.placement_id) or traces.get("measured"),
            window,
        )
    if plan is not None and plan_id is not None and plan_id not in decisions and not rows:
        predicted, window = workload.traces.get("predicted"), plan.max_in_flight
        if problem is not None:
            predicted = plan.timeline(problem)
            window = plan.num_microbatches if plan.order else window
        measured = workload.traces.get("measured")
        decisions[plan_id] = _Decision([plan.planner.name], on, predicted, measured, window)
    return list(decisions.values())


def _representatives(comparison: Comparison, workload: str) -> list[Row]:
    """The best seed of every planner."""
    best: dict[str, Row] = {}
    for row in comparison.rows:
        if row.workload == workload and row.placement_id is not None:
            now = best.setdefault(row.planner, row)
            if row.value_s < now.value_s:
                best[row.planner] = row
    return list(best.values())


def _simulated(problem: Problem | None, solution: Solution) -> Timeline | None:
    from placement.simulator import simulate

    if problem is None or solution.placement.shape[-1] != problem.num_ops:
        return None
    try:
        return simulate(problem, solution.placement, solution.schedule)
    except ValueError:  # an operator that its device cannot run
        return None


def _workload(
    workload: Workload, decisions: list[_Decision], comparison: Comparison | None, batches: int
) -> dict[str, Any]:
    problem, plan = workload.problem, workload.plan
    rows = () if comparison is None else comparison.rows
    rows = tuple(r for r in rows if r.workload == workload.name)
    if not rows and plan is not None:
        rows = (_planned(plan, workload.name),)
    index = {name: i for i, d in enumerate(decisions) for name in d.planners}
    about = ("objective", "num_ops", "num_devices", "bound_s", "calibration_error")
    return {
        "name": workload.name,
        **{name: getattr(rows[0], name) if rows else None for name in about},
        "num_microbatches": getattr(problem or plan, "num_microbatches", None),
        "max_in_flight": getattr(problem or plan, "max_in_flight", None),
        "devices": _devices(workload, decisions),
        "best": _best(comparison, workload.name),
        "planners": [_planner(name, mine, index) for name, mine in groups(rows, "planner").items()],
        "decisions": [_decision(problem, d, batches) for d in decisions],
        "picture": _picture(decisions, _best(comparison, workload.name)),
        "graph": _graph(workload),
        "curves": [] if comparison is None else _curves(rows, comparison),
    }


def _picture(decisions: Sequence[_Decision], best: str | None) -> str | None:
    """The timelines of the best decision, or of the first, for those without scripts."""
    drawn = [d for d in decisions if d.predicted or d.measured]
    drawn.sort(key=lambda d: best not in d.planners)
    for decision in drawn[:1]:
        both = [t for t in (decision.predicted, decision.measured) if t is not None]
        name = best if best in decision.planners else decision.planners[0]
        return still.picture(both, _plain(name))
    return None


def _best(comparison: Comparison | None, workload: str) -> str | None:
    if comparison is None:
        return None
    try:
        return comparison.best(workload).planner
    except ValueError:
        return None


_MEDIANS = (
    "value_s", "latency_s", "period_s", "energy_j", "measured_latency_s", "measured_latency_iqr_s",
    "measured_period_s", "measured_period_iqr_s", "latency_error", "period_error", "speedup",
    "measured_speedup", "gap", "plan_s", "evaluations",
)  # fmt: skip


def _planner(name: str, rows: Sequence[Row], index: dict[str, int]) -> dict[str, Any]:
    """A line of the table: medians over the seeds, as in ``compare.md``."""
    return {
        "name": name,
        "single": name.startswith(SINGLE),
        "seeds": len(rows),
        "note": next((row.note for row in rows if row.note), ""),
        "rounds": max(row.num_rounds for row in rows),
        "pareto": any(row.pareto for row in rows),
        "decision": index.get(name),
        **{column: table.median(rows, column) for column in _MEDIANS},
    }


def _planned(plan: Plan, workload: str) -> Row:
    """A plan without a comparison as the row that it would be there."""
    predicted, bound = plan.predicted, plan.lower_bound_s.get(plan.objective)
    what = "latency" if "latency" in plan.objective else "period"
    facts: dict[str, Any] = {}
    if plan.fallback is not None:
        alone, mine = getattr(plan.fallback, f"{what}_s"), getattr(predicted, f"{what}_s")
        facts["speedup"] = alone / mine if mine else None
    for name in ("latency", "period"):
        spread: Any = getattr(plan.measured, f"{name}_s", None)
        if spread is not None:
            predicted_s, measured_s = getattr(predicted, f"{name}_s"), spread.median_s
            facts |= {f"measured_{name}_s": measured_s, f"measured_{name}_iqr_s": spread.iqr_s}
            facts[f"{name}_error"] = predicted_s / measured_s - 1 if measured_s else None
    return Row(
        workload,
        plan.planner.name,
        None,
        plan.goal,
        plan.graph.num_ops,
        len(plan.cluster.devices),
        None,
        feasible=True,
        **{
            name: getattr(predicted, name)
            for name in ("value_s", "latency_s", "period_s", "energy_j")
        },
        bound_s=bound,
        gap=predicted.value_s / bound - 1 if bound else None,
        plan_s=np.nan,  # not in the file
        calibration_error=error_in(plan.provenance.profile) or None,
        num_rounds=0 if plan.measured is None else plan.measured.n,
        **facts,
    )


def _devices(workload: Workload, decisions: list[_Decision]) -> list[dict[str, Any]]:
    if workload.problem is not None:
        devices: Sequence[Any] = workload.problem.cluster.devices
    elif workload.plan is not None:
        devices = workload.plan.cluster.devices
    else:
        timelines = [t for d in decisions for t in (d.predicted, d.measured) if t is not None]
        names = timelines[0].device_names if timelines else ()
        return [{"name": n, "kind": "", "model": "", "memory_bytes": None} for n in names]
    names = ("name", "kind", "model", "threads", "memory_bytes", "busy_w", "idle_w", "power_source")
    shown = [{name: getattr(d, name) for name in names} for d in devices]
    for device in shown:
        if device["memory_bytes"] >= 2**62:
            device["memory_bytes"] = None
        if device["busy_w"] is None:
            device["power_source"] = None
    return shown


def _decision(problem: Problem | None, decision: _Decision, batches: int) -> dict[str, Any]:
    predicted, measured = decision.predicted, decision.measured
    return {
        "planners": decision.planners,
        "placement": _encoded(decision.placement.astype("<u2").tobytes()),
        "predicted": _timeline(problem, predicted, decision.window, batches) if predicted else None,
        "measured": _timeline(problem, measured, decision.window, batches) if measured else None,
    }


def _timeline(
    problem: Problem | None, timeline: Timeline, window: int, batches: int
) -> dict[str, Any]:
    """A timeline: its figures, its bars in ticks, and what devices do in equal slices.

    ``bars``: uint32 little-endian ``start[K, N]``, ``took[K, N]``, ``transfers[X, 4]``,
    ``sent[X]``, ``took[X]``, deflated; times are ticks from the begin of the run. Starts are
    differences to the micro-batch before, which a steady pipeline makes equal.
    """
    shown = min(batches, timeline.num_microbatches)
    tick_s = max(1e-9, timeline.makespan_s / (2**32 - 2))
    begin = timeline.begin_s
    mine = timeline.transfers[:, 1] < shown

    def ticks(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.rint(seconds / tick_s).astype(np.int64)

    start, end = ticks(timeline.start_s[:shown] - begin), ticks(timeline.end_s[:shown] - begin)
    sent = ticks(timeline.transfer_start_s[mine] - begin)
    until = ticks(timeline.transfer_end_s[mine] - begin)
    bars = (
        np.diff(start, axis=0, prepend=0),
        end - start,
        timeline.transfers[mine],
        sent,
        until - sent,
    )
    bins = 400  # of utilisation and memory over time
    edges = begin + np.linspace(0.0, timeline.makespan_s, bins + 1)
    memory = None
    # Timelines do not say which operators of a device have parameters in host memory.
    if problem is not None and not problem.cluster.streaming:
        steps = memory_steps(problem, timeline.placement, timeline, window)
        memory = [largest(s, edges).tolist() for s in steps]
    busy = usage.busy_share(timeline, bins)
    return {
        "bars": _packed(*(b.astype("<i8").astype("<u4") for b in bars)),
        "tick_s": tick_s,
        "num_shown": shown,
        "num_microbatches": timeline.num_microbatches,
        "num_ops": timeline.start_s.shape[1],
        "num_transfers": int(mine.sum()),
        "makespan_s": timeline.makespan_s,
        "period_s": timeline.period_s,
        "utilisation": timeline.utilisation.tolist(),
        "peak_bytes": None if timeline.peak_bytes is None else timeline.peak_bytes.tolist(),
        "busy": [[round(float(x), 3) for x in row] for row in busy],
        "memory": memory,
    }


def _packed(*arrays: NDArray[Any]) -> str:
    raw = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
    return _encoded(zlib.compress(raw, 9))


def _encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _graph(workload: Workload) -> dict[str, Any] | None:
    """Operators and, where the problem is known, edges ``[E, 3]`` (from, to, bytes)."""
    problem, plan = workload.problem, workload.plan
    if problem is not None:
        g = problem.graph
        size = dict.fromkeys(map(tuple, g.edges.tolist()), 0)
        src = g.tensor_src[g.use_tensor]
        for a, b, t in zip(src.tolist(), g.use_dst.tolist(), g.use_tensor.tolist(), strict=True):
            if a >= 0:
                size[a, b] += int(g.tensor_bytes[t])
        modules, module = _numbered(g.op_module)
        kinds, kind = _numbered(g.op_kind)
        return {
            "ops": list(g.op_name),
            "modules": modules,
            "module": module,
            "kinds": kinds,
            "kind": kind,
            "param_bytes": g.op_param_bytes.tolist(),
            "compute_s": [[_short(x) for x in row] for row in problem.compute_s.tolist()],
            "edges": [x for (a, b), n in size.items() for x in (a, b, n)],
            "tensor_bytes": g.tensor_bytes.tolist(),
            "tensor_src": g.tensor_src.tolist(),
        }
    if plan is None:
        return None
    modules, module = _numbered(plan.graph.modules or ("",) * plan.graph.num_ops)
    unknown = ("kind", "param_bytes", "compute_s", "edges", "tensor_bytes", "tensor_src")
    return dict.fromkeys(unknown) | {
        "ops": list(plan.assignment),
        "modules": modules,
        "module": module,
        "kinds": [],
    }


def _numbered(names: Sequence[str]) -> tuple[list[str], list[int]]:
    """The different names, and the number of each."""
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return list(number), [number[name] for name in names]


def _short(seconds: float) -> float | None:
    return float(f"{seconds:.4g}") if np.isfinite(seconds) else None


def _curves(rows: Sequence[Row], comparison: Comparison) -> list[dict[str, Any]]:
    """Best value so far of every planner and seed: points (seconds of planning, value)."""
    shown = []
    for row in rows:
        if row.planner.startswith(SINGLE):
            continue
        when, value = curves.steps(row, comparison.solutions)
        if len(when):
            best = np.minimum.accumulate(value)
            drops = np.flatnonzero(np.append(True, best[1:] < best[:-1]))
            if len(drops) > 200:
                drops = drops[np.linspace(0, len(drops) - 1, 200).astype(int)]
            points = [[_short(float(when[k])), float(best[k])] for k in drops]
            end = max(row.plan_s, float(when[-1]))
            shown.append({"planner": row.planner, "seed": row.seed, "points": points, "end_s": end})
    return shown


def _overall(comparison: Comparison) -> dict[str, Any]:
    fidelity = comparison.fidelity()
    return {
        "measured": comparison.is_measured,
        "gains": [asdict(gain) for gain in comparison.gains()],
        "fidelity": None if fidelity is None else asdict(fidelity),
    }


def _scatter(comparison: Comparison) -> list[dict[str, Any]]:
    """A point per measured placement: those that ``Comparison.fidelity`` is about."""
    points: dict[tuple[str, str | None], dict[str, Any]] = {}
    for row in comparison.rows:
        if row.num_rounds:
            new: dict[str, Any] = {"workload": row.workload, "planners": []}
            new |= {"latency": [row.latency_s, row.measured_latency_s]}
            new |= {"period": [row.period_s, row.measured_period_s]}
            point = points.setdefault((row.workload, row.placement_id), new)
            if row.planner not in point["planners"]:
                point["planners"].append(row.planner)
    return list(points.values())


def _provenance(run: RunFolder) -> list[dict[str, Any]]:
    """Groups of (what, value), in the order in which they are shown."""
    groups: list[dict[str, Any]] = []
    if "versions.json" in run.texts:
        try:
            versions = parse_json(run.texts["versions.json"], infinite=True)
        except ValueError:
            versions = {}
        if isinstance(versions, dict):
            groups.append({"title": "Versions of the run", "facts": list(versions.items())})
    for workload in run.workloads:
        facts: list[tuple[str, Any]] = []
        problem, plan = workload.problem, workload.plan
        about: Any = problem or plan
        if about is not None:
            profile = problem.profile.provenance if problem else about.provenance.profile
            facts += [
                ("graph", f"{about.graph.name}, {about.graph.fingerprint}"),
                ("cluster", f"{about.cluster.name}, {about.cluster.fingerprint}"),
                *((f"profile: {k}", _said(v)) for k, v in profile.items()),
            ]
        if plan is not None:
            facts += [
                ("plan", str(workload.plan_path)),
                ("planner", f"{plan.planner.name} {_said(plan.planner.parameters)}"),
                ("plan made", f"{plan.provenance.created}, version {plan.provenance.version}"),
                ("commit", plan.provenance.git_commit or "unknown"),
            ]
            if plan.measured is not None:
                facts.append(("measured", f"{plan.measured.when} on {plan.measured.machine}"))
        if facts:
            groups.append({"title": workload.name, "facts": facts})
    for name in (".hydra/overrides.yaml", ".hydra/config.yaml"):
        if name in run.texts:
            groups.append({"title": name, "text": run.texts[name]})
    return groups


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _commands(run: RunFolder) -> list[dict[str, str]]:
    """What to type to make the run again, to carry its plans out, and to make this page again."""
    commands = []
    hydra = _hydra_command(run)
    if hydra is not None:
        commands.append({"what": "the run again, in another folder", "command": hydra})
        here = f"{hydra} {hydra_word('hydra.run.dir', str(run.path))}"
        if hydra.startswith("placement-train ") and " resume=true" not in hydra:
            here += " resume=true"
        commands.append({"what": "continue it where it stopped", "command": here})
    for workload in run.workloads:
        plan, path = workload.plan, shlex.quote(str(workload.plan_path))
        if plan is None:
            continue
        name = workload.name
        if plan.graph.workload is not None:
            again = _plan_command(plan, plan.graph.workload)
            if again is not None:
                commands.append({"what": f"{name}: plan again", "command": again})
            model = [] if ":" not in plan.graph.workload else ["--model", plan.graph.workload]
            run_it = f"placement run {path} --against-single-device {shlex.join(model)}".strip()
            commands.append({"what": f"{name}: run, compare with PyTorch", "command": run_it})
        commands.append(
            {"what": f"{name}: check the plan", "command": f"placement validate {path}"}
        )
    page = f"placement report {shlex.quote(str(run.path))}"
    return [*commands, {"what": "this page again", "command": page}]


def _plan_command(plan: Plan, workload: str) -> str | None:
    """What makes a plan like it; None if its planner has a name that only its run knows."""
    from placement import planners

    planner, parameters = plan.planner.name, plan.planner.parameters
    if planner.startswith(SINGLE):
        planner, parameters = "single_device", {}
    if planner not in planners.names() and ":" not in planner:
        return None
    words = ["placement", "plan", workload, "--planner", planner, "--objective", plan.objective]
    words += ["--microbatches", str(plan.num_microbatches)]
    words += ["--in-flight", str(plan.max_in_flight), "--out", "plan.json"]
    words += ["--second-j", f"{plan.second_j:g}"] if plan.second_j else []
    words += ["--max-phases", str(len(plan.assignments))] if plan.phases else []
    if plan.pieces is not None:
        shares = plan.pieces.shares
        equal = shares == (1 / len(shares),) * len(shares)
        words += ["--pieces", str(len(shares)) if equal else ",".join(map(str, shares))]
    if plan.graph.mode == "training":
        words += ["--mode", "training"]
        words += ["--optimizer", plan.graph.optimizer] if plan.graph.optimizer else []
    words += [
        f"{key}={_said(value)}"
        for key, value in parameters.items()
        if isinstance(value, bool | int | float | str)
    ]
    return shlex.join(words)


def _hydra_command(run: RunFolder) -> str | None:
    """The command of a run that Hydra made: its job, with its overrides."""
    try:
        overrides = parse_yaml(run.texts[".hydra/overrides.yaml"]) or []
        job = parse_yaml(run.texts[".hydra/hydra.yaml"])["hydra"]["job"]["name"]
    except (KeyError, TypeError, ValueError):
        return None
    words: list[Any] = [job, *overrides] if isinstance(overrides, list) else [None]
    return shlex.join(words) if all(isinstance(word, str) for word in words) else None


def _plain(value: Any) -> Any:
    """As JSON: no infinities, and text without control and direction-changing characters."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, str):
        return _UNSAFE.sub(lambda m: m[0] if m[0] in "\n\t" else "\ufffd", value)
    return value
