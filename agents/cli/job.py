"""What the two Hydra commands share: command line and exit codes, problems, run folders."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import numpy as np
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import conf  # noqa: F401 (its settings from code)
from agents.cli.sweeps import is_best_of_sweep
from placement import cli, workloads
from placement.tools.named import meant
from placement.tools.ownership import DISTRIBUTION, PACKAGES, version
from placement.tools.shown import hydra_word

if TYPE_CHECKING:
    from agents.cli.entries import Workload
    from placement.problem import Planner, Problem
    from placement.report.row import Row
    from placement.report.table import Comparison
    from placement.runs.tracking import Mirror, Tracker

_MANY = ("-m", "--multirun")
_PLUGINS = (
    f"joblib, submitit and optuna: pip install '{DISTRIBUTION}[sweep]'; "
    f"ray: pip install '{DISTRIBUTION}[ray]' in an environment of its own (docs/distributed.md)"
)
_VERSIONS_OF = ("torch", "numpy", "numba", "stable-baselines3", "torch-geometric", "hydra-core")


class AppError(ValueError):
    """The configuration asks for something impossible; the message says what to change."""


def launch(
    task: Callable[[DictConfig], float], config: str, words: Sequence[str] | None = None
) -> int:
    """The exit code of a Hydra command: ``task`` of ``conf/<config>.yaml`` and these words.

    The environment variable ``HYDRA_FULL_ERROR=1`` shows where an error comes from. Without any
    word the help is shown as an error: the defaults would measure a model for minutes.
    """
    typed = sys.argv[1:] if words is None else words
    if not typed:
        with cli.says_nothing_in_answers():
            launch(task, config, ["--help"])
        return cli.BAD_INPUT
    debug = bool(os.environ.get("HYDRA_FULL_ERROR"))
    failed: list[Exception] = []

    def alone(cfg: DictConfig) -> float:
        """The task; before an error of a single job Hydra would print words that nobody typed."""
        try:
            return task(cfg)
        except Exception as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise
            failed.append(error)
            return float("nan")

    def run() -> int:
        os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints errors itself, exits with 1
        # Workers bring their own threads; spinning ones of this process would only disturb them.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for word in typed:
            if path := re.match(r"\+*(planner|workload)\.(\w+)\.(.+)", word):
                text = f"{path[1]}=['{path[2]} {path[3]}']"
                raise AppError(f'{word}: options are written behind their name: "{text}"')
        # Anywhere in the line, and of a sweep by name anyway.
        many = any(word in _MANY or re.match("sweep=(?!null$)", word) for word in typed)
        others = ["json=true" if w == "--json" else w for w in typed if w not in _MANY]
        work = task if many else alone  # launchers send it to other processes
        before, sys.argv = sys.argv, [sys.argv[0], *_MANY[1:] * many, *others]
        try:
            hydra.main(version_base="1.3", config_path="pkg://conf", config_name=config)(work)()
        except SystemExit as error:  # of Hydra, for what it is asked and cannot do
            return cli.BAD_INPUT if error.code else cli.OK
        finally:
            sys.argv = before
        if failed:
            raise failed[0]
        return cli.OK

    return cli.guarded(run, partial(explain, config=config), debug=debug)


def explain(error: Exception, config: str = "compare") -> str | None:
    """What to tell the user; None if the error is a mistake of ours."""
    if isinstance(error, InstantiationException):
        cause = error.__cause__
        if cause is not None and type(cause).__module__.partition(".")[0] in PACKAGES:
            return str(cause)
        return f"{error}\n(to see all options and values, add: --cfg job)"
    if isinstance(error, HydraException | OmegaConfBaseException):
        if unknown := _unknown(str(error), config):
            return unknown
        if re.match("token recog|LexerNoViable", str(error)) and not str(error).isascii():
            return (
                f"{str(error).splitlines()[0]}: Hydra wants such a word in quotes of its own, "
                """inside the shell's: 'workload=["é/my.json"]' 'hydra.run.dir="é/run"'"""
            )
        because = f"\n{error.__cause__}" if str(error.__cause__ or "None") != "None" else ""
        if re.search(r"hydra/(launcher|sweeper)", str(error)):
            return f"{error}{because}\n{_PLUGINS}"
        return f"{error}{because}\n(to see all options and values, add: --cfg job)"
    by_hydra = _raised_by(error) == "hydra"
    if not by_hydra and (yours := cli.raised_in_yours(error, "HYDRA_FULL_ERROR=1")):
        return yours
    if isinstance(error, OSError) and (error.filename or by_hydra):
        place = os.path.abspath(error.filename) if error.filename else "the run folder"
        return (
            f"cannot use {place}: {error.strerror}; "
            "another run folder: hydra.run.dir=FOLDER (or hydra.sweep.dir=FOLDER)"
        )
    if by_hydra:  # plain exceptions, for flags that exclude each other
        return f"{error}\n(flags that can be given: --help, --hydra-help)"
    return cli.explain(error)


def _unknown(message: str, config: str) -> str:
    """What Hydra says of a setting that it does not know, with what may be meant; or nothing."""
    setting = re.match(r"Could not override '([\w.]+)'", message)
    if setting is None:
        return ""
    parent, _, name = setting[1].rpartition(".")
    with initialize_config_module("conf", version_base="1.3"):
        every: Any = compose(config, return_hydra_config=True)
    groups = every.hydra.runtime.choices
    tops = [parent] if not parent or OmegaConf.select(every, parent) else list(every)
    inside: Any = {top: OmegaConf.select(every, top) for top in tops if top}
    keys = [f"{k}.{x!s}" for k, v in inside.items() if isinstance(v, DictConfig) for x in v]
    near = meant(setting[1], keys if parent else map(str, [*every, *groups]))
    if not parent and name in every.get("training", {}):
        near = f"; did you mean 'training.{name}'?"
    return f"there is no setting {setting[1]!r}{near} (all of them: --cfg job)"


def _raised_by(error: BaseException) -> str:
    """The package of the function that raised ``error``."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")).partition(".")[0] if frames else ""


@dataclass
class _Settings:
    """Types of the values that are not components of their own."""

    objective: str = "period"
    num_microbatches: int = 1
    max_in_flight: int = 1
    repeats: int | None = None
    rounds: int = 1
    seconds: float | None = None
    evaluations: int | None = None
    execute: bool = False
    json: bool = False
    contention: bool | None = None
    ready_order: str | None = None
    second_j: float | None = None
    max_phases: int | None = None
    evaluator: str = ""
    measurements: int | None = None
    limit_s: float | None = None
    variants: int = 0
    held_out: float = 0.0
    warm_start: str = ""
    resume: bool = False


def seeds_of(value: Any, name: str = "seed") -> list[int]:
    """Of a setting that is a number or a list of them, a list.

    Raises:
        AppError: it is something else.
    """
    seeds = list(value) if isinstance(value, ListConfig) else [value]
    if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise AppError(f"{name} = {value}: must be a whole number, or a list: {name}=[0,1]")
    return seeds


def _check(cfg: DictConfig) -> None:
    from placement.objective import Objective
    from placement.search.planner import Budget

    names = [f.name for f in fields(_Settings) if f.name in cfg]
    OmegaConf.merge(OmegaConf.structured(_Settings), {name: cfg[name] for name in names})
    least = {"variants": 0, "repeats": 1, "rounds": 1, "num_microbatches": 1, "max_in_flight": 1}
    for name in least:
        if cfg.get(name) is not None and cfg[name] < least[name]:
            raise AppError(f"{name} = {cfg[name]} must be at least {least[name]}")
    if cfg.objective not in list(Objective):  # as problems say, but before they are measured
        raise AppError(f"objective {cfg.objective!r} is unknown; use one of {', '.join(Objective)}")
    Budget(cfg.seconds, cfg.evaluations)  # or it says which is not positive


@dataclass(frozen=True)
class Job:
    """One run: its configuration, its folder, and who is told what."""

    cfg: DictConfig
    folder: Path
    report: cli.Progress
    begin: Callable[[], Mirror]

    @cached_property
    def mirror(self) -> Mirror:
        """The tracker's run begins here, so that what is refused before leaves no empty one."""
        return self.begin()


@contextmanager
def job(cfg: DictConfig, job_type: str) -> Iterator[Job]:
    """The run that Hydra made a folder for, tracked and reported until the block ends.

    Raises:
        AppError, omegaconf's ValidationError: a value of the wrong type, or out of range.
        FileError: the folder cannot be written.
    """
    from placement.tools.files import write_atomic

    _check(cfg)
    of_hydra = HydraConfig.get()
    folder = Path(of_hydra.runtime.output_dir)
    is_sweep = of_hydra.mode == RunMode.MULTIRUN
    if "resume" in cfg:
        from agents.training.callbacks import CHECKPOINT

        begun = (folder / CHECKPOINT).is_file()
        if begun and not cfg.resume and not is_sweep:
            raise AppError(
                f"{folder} holds a training, which this one would replace: resume=true goes on "
                f"with it; for another, hydra.run.dir=OTHER, or delete {CHECKPOINT}"
            )
        # No error: a run that was interrupted early has no checkpoint yet.
        if cfg.resume and not begun:
            cli.say(f"nothing to resume in {folder}: there is no {CHECKPOINT}; it begins anew")
    tracker = _tracker(cfg)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    group = Path(of_hydra.sweep.dir).name if is_sweep else None
    try:
        with (
            _only_one(folder),
            ExitStack() as tracked,
            cli.progress() as report,
            cli.says_when_compiling(),
        ):
            versions = {"python": platform.python_version(), "platform": platform.platform()}
            versions |= {name: version(name) for name in (DISTRIBUTION, *_VERSIONS_OF)}
            write_atomic(folder / "versions.json", json.dumps(versions, indent=1))
            run = partial(tracker.run, folder, config | {"versions": versions}, job_type, group)
            if "resume" in cfg and not (cfg.resume and begun):  # a run of its own
                for name in ("wandb_run_id", "tracked.csv"):
                    (folder / name).unlink(missing_ok=True)
            yield Job(cfg, folder, report, lambda: tracked.enter_context(run()))
    except KeyboardInterrupt:
        key, place = ("sweep", str(of_hydra.sweep.dir)) if is_sweep else ("run", str(folder))
        again = hydra_word(f"hydra.{key}.dir", place)
        if job_type == "train":
            again += " resume=true"
        cli.say(f"what is finished is in {folder}; to continue, the same command with {again}")
        raise


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Raises: AppError, another process runs in this folder: each would overwrite the other's."""
    import fcntl

    place = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AppError(
                    f"another command runs in {folder}: wait for it, or hydra.run.dir=OTHER"
                ) from None
        yield
    finally:
        os.close(place)


def _tracker(cfg: DictConfig) -> Tracker:
    """That of the configuration; W&B instead of the default where ``WANDB_MODE`` asks for it."""
    from placement.runs.tracking import LocalTracker, WandbTracker

    if cfg.get("tracker") is None:
        raise AppError(
            "the tracker is missing: tracker=none is without one, tracker=local the default"
        )
    tracker: Tracker = instantiate(cfg.tracker, _convert_="all")
    from_shell = os.environ.get("WANDB_MODE") in ("online", "offline", "shared")
    chosen = any(x.startswith("tracker") for x in HydraConfig.get().overrides.task)
    return WandbTracker() if from_shell and not chosen and tracker == LocalTracker() else tracker


def make_problems(job: Job, chosen: Sequence[Workload]) -> dict[str, Problem]:
    """Every workload, captured and measured (once: profiles are reused), or read from its file.

    Problem files have devices and times of their own, and cannot be run.
    ``<folder>/<workload>/profile.npz`` is a copy of what was used.

    Raises:
        AppError: no workload, or a cluster that must run and cannot.
        CaptureError, ClusterError, ProfileError, ProblemError, FormatError: see the message.
    """
    # First, because these are read in a moment: what is wrong is told before anything is measured.
    files = {w.name: _imported(job.cfg, w) for w in chosen if w.is_file}
    synthetic = _synthetic_problems(job.cfg)
    problems = _measured_problems(job, [w for w in chosen if not w.is_file])
    for name, problem in files.items():
        problem.profile.save(job.folder / name / "profile.npz")
    problems |= files | synthetic
    changes: Any = {key: job.cfg[key] for key in OF_PROBLEMS[1:] if job.cfg.get(key) is not None}
    problems = {name: replace(problem, **changes) for name, problem in problems.items()}
    if not problems:
        raise AppError("no workload: add e.g. workload=resnet50 or 'workload=[problem.json]'")
    return problems


# Keys that are fields of every problem; the objective counts while it is made.
OF_PROBLEMS = ("objective", "num_microbatches", "max_in_flight", "contention", "ready_order",
               "second_j", "max_phases")  # fmt: skip


def _imported(cfg: DictConfig, workload: Workload) -> Problem:
    from placement import importers

    allowed = typing.get_type_hints(importers.Options).keys() - {"cluster"}
    for name in workload.options:
        if name not in allowed:
            raise AppError(
                f"workload: {workload.spec}: there is no option {name!r}"
                f"{meant(name, allowed) or ';'} there are name, {', '.join(sorted(allowed))}"
            )
    options: Any = workload.options
    try:
        problem = importers.load(workload.spec, objective=cfg.objective, **options)
    except TypeError as error:
        raise AppError(
            f"workload: {workload.spec}: a value is of the wrong type: {error}"
        ) from error
    cli.say_if_predicted(workload.name, problem)
    return problem


def _synthetic_problems(cfg: DictConfig) -> dict[str, Problem]:
    from placement.workloads.synthetic import families, giph

    draws: dict[str, Callable[[int], Problem]] = {**families(), "giph": giph}
    problems, listed = {}, cfg.get("synthetic") or ListConfig([])
    for node in listed if isinstance(listed, ListConfig) else [listed]:
        options = node if isinstance(node, DictConfig) else {"family": node}
        family, seeds = options.get("family"), options.get("seeds", 0)
        if family not in draws or not {*options} <= {"family", "seeds"}:
            near = meant(str(family), draws) or ";"
            raise AppError(
                f"synthetic: {node} is no family, nor {{family: NAME, seeds: [0, 1]}}{near} "
                f"there are {', '.join(draws)}"
            )
        for seed in seeds_of(seeds, "seeds"):
            problems[f"{family}-{seed}"] = draws[family](seed).with_objective(cfg.objective)
    return problems


def _measured_problems(job: Job, models: Sequence[Workload]) -> dict[str, Problem]:
    if not models:
        return {}
    from placement.capturing import capture
    from placement.costs.measure import cached_path, load_or_measure
    from placement.problem import Problem

    cfg = job.cfg
    cluster = instantiate(cfg.cluster)
    described = [d.name for d in cluster.devices if d.like is not None]
    if described and cfg.get("execute"):
        raise AppError(
            f"cluster {cluster.name!r}: {', '.join(described)} cannot run anything, being "
            "described in terms of other devices; add execute=false"
        )
    problems = {}
    for model in models:
        job.report(f"{model.name}: loading and capturing", None)
        with cli.says_nothing_in_answers():
            module, inputs = workloads.load(model.spec, **model.options)
            graph = capture(module, inputs, name=model.name)

        def measuring(what: str, share: float | None, name: str = model.name) -> None:
            job.report(f"{name}: {what}", share)

        with _alone(cached_path(graph, cluster).parent / "measuring", report=job.report):
            profile = load_or_measure(graph, cluster, repeats=cfg.repeats, progress=measuring)
        profile.save(job.folder / model.name / "profile.npz")
        problems[model.name] = Problem(graph, cluster, profile, objective=cfg.objective)
    return problems


@contextmanager
def _alone(lock: Path, report: cli.Progress) -> Iterator[None]:
    """Jobs at the same time take turns: measurements would disturb each other.

    Who has waited finds the profile that another has measured. Where there can be no lock (no
    permission, a file system without locks) nobody waits.
    """
    import fcntl

    with ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("w"))
            report("waiting while another process measures", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            report(f"not waiting for others that measure: {error}", None)
        yield


def save_best(
    job: Job,
    comparison: Comparison,
    problems: Mapping[str, Problem],
    planners: Mapping[str, Planner],
    chosen: Sequence[Workload],
) -> None:
    """``plan.json``, ``trace.json`` and ``gantt.png`` of the best placement of every workload."""
    from placement.executor import Executor
    from placement.plan import make_plan
    from placement.report import gantt, trace
    from placement.report.run_folder import measured_timelines
    from placement.report.table import CompareError
    from placement.simulator import simulate

    specs = {w.name: w.spec for w in chosen if w.is_default}  # plans keep no options
    for name, problem in problems.items():
        job.report(f"{name}: plan, trace and picture", None)
        folder = job.folder / name
        if (profile := folder / "profile.npz").is_file():
            job.mirror.artifact(f"profile-{name}", "profile", profile)
        try:
            best = comparison.best(name)
        except CompareError as error:
            cli.say(f"no plan: {error}")
            continue
        solution = comparison.solutions[name, best.planner, best.seed]
        plan = make_plan(
            problem,
            solution,
            planner=best.planner,
            parameters=_parameters(job.cfg, planners.get(best.planner), best.seed),
            workload=specs.get(name),
            measured=_measured(best),
        )
        plan.save(folder / "plan.json")
        aliases: tuple[str, ...] = ("best", "measured") if best.num_rounds else ("best",)
        if not is_best_of_sweep(job.folder, best):
            aliases = aliases[1:]
        job.mirror.artifact(f"plan-{name}", "plan", folder / "plan.json", aliases=aliases)
        placement, order, picture = solution.placement, solution.schedule, folder / "gantt.png"
        predicted, measured = simulate(problem, placement, order), None
        if best.num_rounds:  # the run that the report shows; an order, rounds do not follow
            measured = measured_timelines(job.folder, name).get(str(best.placement_id))
            if measured is None or order is not None:
                measured = Executor(problem).run(placement, schedule=order)
        both = [t for t in (predicted, measured) if t is not None]
        trace.write_trace(folder / "trace.json", both, problem.graph.op_name)
        try:
            gantt.plot_gantt(predicted, measured, picture, f"{name}, {best.planner}")
        except gantt.PlotError as error:
            cli.say(f"no picture: {error}")
        else:
            job.mirror.image(f"gantt/{name}", picture)


def save_pictures(job: Job, comparison: Comparison) -> None:
    """``curves.png``, what every planner found over time, and ``pareto.png``: what latency,
    period and energy cost each other."""
    from placement.report import curves, gantt, pareto

    for name, plot in (("curves", curves.plot_curves), ("pareto", pareto.plot_pareto)):
        path = job.folder / f"{name}.png"
        try:
            plot(comparison, path)
        except gantt.PlotError as error:
            cli.say(f"no {path.name}: {error}")
        else:
            job.mirror.image(name, path)


def save_report(job: Job) -> None:
    """``report.html``, unless the run is one of a sweep; with tables and curves an artifact."""
    from placement.report import html

    if HydraConfig.get().mode != RunMode.MULTIRUN:
        html.write_report(job.folder, progress=job.report)
    names = ("report.html", "compare.csv", "compare.md", "curves.png", "pareto.png")
    present = [job.folder / name for name in names if (job.folder / name).exists()]
    job.mirror.artifact("report", "report", *present)


def _parameters(cfg: DictConfig, planner: Planner | None, seed: int | None) -> dict[str, Any]:
    """The planner's fields as ``compare`` set them."""
    from placement.plan import parameters_of
    from placement.search.planner import Budget, prepared

    budget = Budget(seconds=cfg.get("seconds"), evaluations=cfg.get("evaluations"))
    return parameters_of(None if planner is None else prepared(planner, seed, budget))


def _measured(row: Row) -> Any:
    from placement.plan import Measured, Spread, now

    if not row.num_rounds:
        return None
    latency_s, period_s = (
        Spread(
            median_s=getattr(row, f"measured_{what}_s"),
            iqr_s=getattr(row, f"measured_{what}_iqr_s"),
        )
        for what in ("latency", "period")
    )
    where = {"when": now(), "machine": platform.node()[:200]}
    return Measured(latency_s=latency_s, period_s=period_s, n=row.num_rounds, **where)


_MOST_TABLES = 8  # of single workloads, on a screen


def show(job: Job, comparison: Comparison, contents: str) -> None:
    """Tables for people and what lies where; or, with ``--json``, one object for machines."""
    from placement.report import table

    if not job.cfg.json:
        count = len({row.workload for row in comparison.rows})
        few = count <= _MOST_TABLES
        table.print_tables((table.tables if few else table.overall)(comparison))
        if not few:
            print(f"tables of each of the {count} workloads: compare.md")
        print(f"in {job.folder}: {contents}")
        return
    rows = [
        {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()}
        for row in map(asdict, comparison.rows)
    ]
    cli.print_json({"folder": str(job.folder), "rows": rows})


def metric_s(comparison: Comparison) -> float:
    """Seconds, what sweepers minimise: the predicted objective of the best planner.

    Geometric mean over workloads; inf where nothing fits. The placements on one device that are
    rows of every comparison do not count.
    """
    from placement.report.row import SINGLE, groups
    from placement.report.table import geometric_mean

    answers = [row for row in comparison.rows if not row.planner.startswith(SINGLE)]
    by_workload = groups(answers, "workload").values()
    return geometric_mean(min(r.value_s for r in rows) for rows in by_workload)
