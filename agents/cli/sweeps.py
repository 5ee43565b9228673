"""Sweeps: a finished job is not run again, and many jobs become one table.

A job of a sweep leaves ``result.json`` in its folder: what it was asked (a digest of its
configuration and of the files that it names), how it ended, and its metric. The same command
with the same folder therefore goes on where it stopped, with any launcher; a sampler that
suggests with a fixed seed is told the same metrics again and suggests the same trials.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from agents.cli.entries import Entry
from placement import cli
from placement.objective import Objective
from placement.report import table
from placement.report.row import SINGLE, Row
from placement.report.table import Comparison, on_one_device
from placement.runs.compare import describe
from placement.tools.files import csv_text, parse_json, parse_yaml, write_atomic

RESULT = "result.json"
STATUSES = ("finished", "failed", "unfinished")
_NOT_OF_THE_RESULT = ("tracker", "launcher", "resume", "parallel", "json")
_ENTRIES = ("planner", "workload")
_NUM_NAMED = 20


class SweepError(ValueError):
    """A folder that cannot be used for this, or read as a sweep; the message says what to do."""


def once(cfg: DictConfig, work: Callable[[DictConfig], float]) -> float:
    """``work(cfg)``, or the metric of a job of this sweep that has finished before.

    Raises:
        SweepError: the job's folder holds the result of another configuration.
        FileError: the folder cannot be written.
    """
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return work(cfg)
    folder, overrides = Path(hydra.runtime.output_dir), list(hydra.overrides.task)
    config_digest, before = _digest(cfg), _read_json(folder / RESULT)
    if before.get("status") == "finished":
        if before.get("asked") != config_digest:
            raise SweepError(
                f"{folder} holds the result of another configuration, or of code that was edited "
                f"since ({' '.join(before.get('overrides', []))}); give this sweep a folder of its "
                "own: hydra.sweep.dir=FOLDER"
            )
        cli.say(f"job {folder.name} has finished before: {' '.join(overrides)}")
        return float("inf") if before["metric_s"] is None else float(before["metric_s"])

    def ended(status: str, **more: Any) -> None:
        head = {"status": status, "asked": config_digest, "overrides": overrides}
        write_atomic(folder / RESULT, json.dumps(head | more, indent=1))

    ended("unfinished")
    try:
        metric_s = work(cfg)
    except Exception as error:
        ended("failed", error=f"{type(error).__name__}: {error}")
        raise
    ended("finished", metric_s=metric_s if np.isfinite(metric_s) else None)
    return metric_s


def is_best_of_sweep(folder: Path, best: Row) -> bool:
    """Whether no other job of the sweep has found a better answer for the workload of ``best``.

    True for a run that belongs to no sweep. Measured answers are compared with measured ones.
    """
    others = [] if HydraConfig.get().mode != RunMode.MULTIRUN else folder.parent.glob("*/" + RESULT)
    for path in others:
        if path.parent != folder and _read_json(path).get("status") == "finished":
            rows = _read_job(path.parent).rows
            same = [r for r in rows if _asked(r) == _asked(best) and r.feasible]
            if any(r.reached_s < best.reached_s for r in same):
                return False
    return True


def _asked(row: Row) -> tuple[str, str, int]:
    """What rows have alike whose values can be compared."""
    return row.workload, row.objective, row.num_rounds


def _digest(cfg: DictConfig) -> str:
    """SHA-256 (hex) of the configuration, with the content of every file and code that it names."""
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    parts = {k: v for k, v in config.items() if k not in _NOT_OF_THE_RESULT}
    for name in ("planner", "workload", "baseline", "expert"):  # with the files that these name
        written = parts.get(name) or []
        listed = [Entry.of(name, x) for x in (written if isinstance(written, list) else [written])]
        parts[name] = [[entry.name, *map(list, entry.options.items())] for entry in listed]
    cli.search_here("package.module:name")
    return hashlib.sha256(json.dumps(describe(parts), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep.

    Attributes:
        name: its folder's, a number unless ``hydra.sweep.subdir`` says otherwise.
        overrides: what it was asked, by key.
        status: one of ``STATUSES``. error: of a failed one.
        rows: its ``compare.csv``, if it has finished.
    """

    name: str
    overrides: Mapping[str, str]
    status: str
    metric_s: float | None = None
    error: str = ""
    rows: tuple[Row, ...] = ()


def read_sweep(folder: str | Path) -> tuple[SweepJob, ...]:
    """Every job of a sweep that has begun.

    Raises:
        SweepError: there are no jobs in the folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise SweepError(f"{folder}: no such folder; name the folder of a sweep, hydra.sweep.dir")
    folders = {p.parent.parent for p in folder.glob("*/.hydra/overrides.yaml")}
    if not folders:
        raise SweepError(
            f"{folder}: no jobs of a sweep; they are made by: placement-compare sweep=planners"
        )
    return tuple(map(_read_job, sorted(folders, key=lambda path: (len(path.name), path.name))))


def _read_job(folder: Path) -> SweepJob:
    saved = _read_json(folder / RESULT)
    overrides = saved.get("overrides")
    if overrides is None:
        path = folder / ".hydra" / "overrides.yaml"
        try:
            overrides = [str(text) for text in parse_yaml(path.read_text(encoding="utf-8"))]
        except (TypeError, ValueError) as error:
            raise SweepError(f"{path}: cannot be read: {error}") from error
    job = SweepJob(
        folder.name,
        dict(_split(text) for text in overrides),
        saved.get("status", "unfinished"),
        saved.get("metric_s"),
        saved.get("error", ""),
    )
    if job.status != "finished":
        return job
    try:
        rows = table.from_csv((folder / "compare.csv").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return SweepJob(job.name, job.overrides, "failed", error=f"compare.csv: {error}")
    return SweepJob(job.name, job.overrides, "finished", job.metric_s, rows=rows)


def num_asked(folder: Path) -> int:
    """How many jobs the latest command asked for in this folder; 0: nothing there says it.

    A glob is known to the sweep alone, and trials to the configuration of each of them.
    """
    trials = _hydra(next(folder.glob("*/.hydra/hydra.yaml"), folder)).get("sweeper", {})
    if "n_trials" in trials:
        return int(trials["n_trials"])
    hydra, counts = _hydra(folder / "multirun.yaml"), dict[str, int]()
    try:
        words = [f"{k}={v}" for k, v in (hydra["sweeper"]["params"] or {}).items()]
        words += hydra["overrides"]["task"]
        for override in OverridesParser.create().parse_overrides(words):
            values = override.sweep_string_iterator() if override.is_sweep_override() else [""]
            counts[override.get_key_element()] = len(list(values))
    except (KeyError, TypeError, AttributeError, HydraException):
        return 0
    return int(np.prod(list(counts.values())))


def _hydra(path: Path) -> dict[str, Any]:
    try:
        return dict(parse_yaml(path.read_text(encoding="utf-8"))["hydra"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _split(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key.lstrip("+"), value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"), infinite=True)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True)
class Aggregate:
    """A planner on one workload over the seeds, or over all workloads (``workload`` None).

    ``value_s`` (the objective, predicted) and ``speedup`` over the best single device are
    geometric means; ``low`` and ``high`` of each are a Student-t interval of the mean logarithm
    over the seeds, None for a single seed. Workloads are fixed: their differences are no error.

    Attributes:
        setting: what else was swept, e.g. ``patience=3``.
        speedup: over the best single device; nan where none holds the workload, and over workloads
            of those that one holds.
        num_unanswered: seeds x workloads without an answer; the best single device stands in.
    """

    planner: str
    setting: str
    workload: str | None
    num_seeds: int
    value_s: float
    value_low_s: float | None
    value_high_s: float | None
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    num_unanswered: int

    @property
    def label(self) -> str:
        """The planner and its setting."""
        return f"{self.planner} {self.setting}".strip()


@dataclass(frozen=True)
class Report:
    """A sweep in figures: ``aggregates``, fastest first, and the jobs that have not finished.

    ``num_jobs`` were asked for, of which ``jobs`` have begun. ``unit``: of the values, ``s``, ``J``
    or, of several objectives, ``J or s``.
    """

    jobs: tuple[SweepJob, ...]
    aggregates: tuple[Aggregate, ...]
    is_measured: bool
    num_jobs: int
    unit: str

    def named(self, status: str) -> list[SweepJob]:
        """The jobs that are so."""
        return [job for job in self.jobs if job.status == status]


def aggregate(jobs: Sequence[SweepJob], num_jobs: int = 0) -> Report:
    """Means and intervals over seeds, per planner, setting and workload, and over workloads.

    ``num_jobs``: how many there are to be, if that is known to be more.

    Equal cells of several jobs (a planner without seeds is one) are their median. Speed-ups are
    measured ones if every finished job was executed.
    """
    rows = [(job, row) for job in jobs for row in job.rows]
    answered = [r for _, r in rows if r.feasible]
    is_measured = bool(answered) and all(r.num_rounds for r in answered)
    varied = _varied(jobs)
    samples: dict[_Cell, dict[str, list[_Sample]]] = {}
    for job, row in rows:
        if row.planner.startswith(SINGLE):
            continue
        settings = [k for k in varied if k in job.overrides]
        setting = " ".join(_setting(k, job.overrides[k]) for k in settings)
        seed = job.overrides.get("seed", "") if row.seed is None else str(row.seed)
        speedup = row.measured_speedup if is_measured else row.speedup
        if speedup is None:
            speedup = 1.0 if row.workload in on_one_device(job.rows) else np.nan
        value_s = row.value_s
        if not np.isfinite(value_s):
            _, value_s = Comparison(job.rows, {}).reference(row.workload)
        seeds = samples.setdefault((setting, row.planner, row.workload), {})
        seeds.setdefault(seed, []).append(_Sample(value_s, speedup, not np.isfinite(row.value_s)))
    cells = {key: {s: _middle(v) for s, v in seeds.items()} for key, seeds in samples.items()}
    workloads = list(dict.fromkeys(w for _, _, w in cells))
    means = [_mean(key, list(seeds.values())) for key, seeds in cells.items()]
    if len(workloads) > 1:
        for setting, planner in dict.fromkeys(key[:2] for key in cells):
            each = [cells.get((setting, planner, w), {}) for w in workloads]
            whole = [s for s in each[0] if all(s in seeds for seeds in each)]
            if whole:
                over = [_over_workloads([seeds[s] for seeds in each]) for s in whole]
                means.append(_mean((setting, planner, None), over))
    order = {w: i for i, w in enumerate((*workloads, None))}
    means.sort(key=lambda a: (order[a.workload], -np.nan_to_num(a.speedup), a.value_s, a.label))
    units = {Objective(row.objective).unit for _, row in rows}
    return Report(
        tuple(jobs),
        tuple(means),
        is_measured,
        max(len(jobs), num_jobs),
        " or ".join(sorted(units)) or "s",
    )


_Cell = tuple[str, str, str | None]  # setting, planner, workload


class _Sample(NamedTuple):
    value_s: float
    speedup: float
    num_unanswered: int


def _varied(jobs: Sequence[SweepJob]) -> list[str]:
    """Keys that not all jobs have alike, but for columns and what does not change a result.

    A planner and a workload are columns, unless one name stands in several of their texts.
    """
    begun = [job.overrides for job in jobs if job.overrides]
    keys = dict.fromkeys(k for overrides in begun for k in overrides if k != "seed")
    counted = [k for k in keys if k.split(".")[0] not in _NOT_OF_THE_RESULT]
    texts = {k: {overrides.get(k) for overrides in begun} for k in counted}
    return [k for k in counted if len(texts[k]) > 1 and (k not in _ENTRIES or _again(texts[k]))]


def _again(texts: Iterable[str | None]) -> bool:
    """Whether one name stands in several: with other options, or beside others."""
    names = Counter(name for text in texts for name in {x[0] for x in _listed(text)})
    return max(names.values(), default=0) > 1


def _setting(key: str, text: str) -> str:
    """Of a planner that has a column its options, else ``key=value``."""
    listed = _listed(text)
    if key in _ENTRIES and len(listed) == 1:
        return " ".join(listed[0][1:])
    return f"{key.split('.')[-1]}={text}"


def _listed(text: str | None) -> list[list[str]]:
    """The words of each entry of an override."""
    try:
        value = parse_yaml(text or "[]")
    except ValueError:  # a pattern, such as *_tiny
        value = text
    return [str(entry).split() for entry in (value if isinstance(value, list) else [value])]


def _middle(samples: Sequence[_Sample]) -> _Sample:
    value_s, speedup, unanswered = np.median(np.array(samples, float), axis=0)
    return _Sample(float(value_s), float(speedup), int(np.ceil(unanswered)))


def _over_workloads(samples: Sequence[_Sample]) -> _Sample:
    value_s = np.exp(np.mean([np.log(s.value_s) for s in samples]))
    logs = [np.log(s.speedup) for s in samples if not np.isnan(s.speedup)]
    speedup = np.exp(np.mean(logs)) if logs else np.nan
    return _Sample(float(value_s), float(speedup), sum(s.num_unanswered for s in samples))


def _mean(cell: _Cell, samples: Sequence[_Sample]) -> Aggregate:
    setting, planner, workload = cell
    value_s = geometric_mean([s.value_s for s in samples])
    speedup = geometric_mean([s.speedup for s in samples])
    unanswered = sum(s.num_unanswered for s in samples)
    return Aggregate(planner, setting, workload, len(samples), *value_s, *speedup, unanswered)


def geometric_mean(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Of positive values, with the Student-t 95 % interval of the mean logarithm.

    The interval is None for a single value. Student's t, and not the bootstrap: a sweep has three
    or five seeds, from which resampling makes intervals that are far too short.
    """
    from scipy.stats import t

    logs = np.log(values)
    mean, number = float(logs.mean()), len(logs)
    if number < 2:
        return float(np.exp(mean)), None, None
    half = float(t.ppf(0.975, number - 1) * logs.std(ddof=1) / np.sqrt(number))
    return tuple(float(x) for x in np.exp([mean, mean - half, mean + half]))  # type: ignore[return-value]


def to_table(report: Report) -> table.Table:
    """One line per aggregate, and what is missing as notes."""
    kind = "measured" if report.is_measured else "predicted"
    numbers = {a.num_seeds for a in report.aggregates}
    alike = len(numbers) == 1
    unit, scale = ("ms", 1e3) if report.unit == "s" else (report.unit, 1.0)
    lines = tuple(
        (
            a.label,
            a.workload or "all",
            *([] if alike else [str(a.num_seeds)]),
            _figure(scale * a.value_s),
            _interval(scale, a.value_low_s, a.value_high_s),
            _figure(a.speedup),
            _interval(1, a.speedup_low, a.speedup_high),
        )
        for a in report.aggregates
    )
    title = f"{len(report.named('finished'))} of {report.num_jobs} jobs have finished"
    if lines:
        over = cli.count(numbers.pop(), "seed") if alike else "n seeds"
        title += (
            f": geometric means over {over} with 95 % Student-t intervals; "
            f"speed-up over the best single device, {kind}"
        )
    head = ("planner", "workload", *([] if alike else ["n"]))
    head += (f"value {unit}", "95 %", "speed-up", "95 %")
    return table.Table(title, head, lines, tuple(_notes(report)))


def _notes(report: Report) -> list[str]:
    notes = [
        f"{a.label}, {a.workload or 'all'}: {a.num_unanswered} without an answer, "
        "for which the best single device stands"
        for a in report.aggregates
        if a.num_unanswered and a.workload
    ]
    for status in STATUSES[1:]:
        jobs = report.named(status)
        for job in jobs[:_NUM_NAMED]:
            words = " ".join(f"{k}={v}" for k, v in job.overrides.items())
            notes.append(f"{status}: job {job.name} {words}" + f": {job.error}" * bool(job.error))
        if len(jobs) > _NUM_NAMED:
            notes.append(f"{status}: and {len(jobs) - _NUM_NAMED} more jobs")
    later = report.num_jobs - len(report.jobs)
    if later:
        notes.append(f"not begun: {cli.count(later, 'job')}")
    if later or report.named("unfinished"):
        notes.append("to go on: the same command again, with the same hydra.sweep.dir")
    return notes


def _figure(value: float) -> str:
    if np.isnan(value):
        return "–"
    return f"{value:#.3g}".rstrip(".") if 1e-3 <= value < 999.5 else f"{value:.3g}"


def _interval(scale: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "–"
    return f"{_figure(scale * low)}–{_figure(scale * high)}"


def to_csv(report: Report) -> str:
    """One line per ``Aggregate``, full precision; empty where not known."""
    return csv_text([f.name for f in fields(Aggregate)], map(astuple, report.aggregates))


def to_json(report: Report) -> dict[str, Any]:
    """The aggregates, and every job with its status; infinities are null."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not np.isfinite(value) else value

    shown = ("name", "status", "overrides", "metric_s", "error")
    return {
        "speedup": "measured" if report.is_measured else "predicted",
        "interval": "Student t of the mean logarithm over seeds, 95 %",
        "aggregates": [{k: plain(v) for k, v in asdict(a).items()} for a in report.aggregates],
        "num_jobs": report.num_jobs,
        "jobs": [{name: plain(getattr(job, name)) for name in shown} for job in report.jobs],
    }
