"""``placement-compare``: every planner on every workload, predicted and measured, in one table."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before anything else is imported, as Ctrl-C may come meanwhile
    from placement import commands

    sys.exit(commands.compare())

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from agents.cli.entries import planners_of, workloads_of
from agents.cli.job import (
    AppError,
    job,
    launch,
    make_problems,
    metric_s,
    save_best,
    save_pictures,
    save_report,
    seeds_of,
    show,
)
from agents.cli.sweeps import once
from placement.cli import says_if_busy

if TYPE_CHECKING:
    from placement.problem import Problem


def app(cfg: DictConfig) -> float:
    """One comparison; returns the best planner's objective in seconds."""
    return once(cfg, _compare)


def _compare(cfg: DictConfig) -> float:
    from placement.executor import Executor
    from placement.runs.compare import compare
    from placement.search.planner import Budget

    def executor(problem: Problem) -> Executor | None:
        return None if problem.graph.program is None else Executor(problem)

    from placement.tools.parallel import check

    check(cfg.parallel)
    if not cfg.planner:
        raise AppError("no planner: add e.g. planner=heft")
    planners, chosen = planners_of("planner", cfg.planner), workloads_of(cfg.workload)
    runs = cfg.execute and not all(w.is_file for w in chosen)  # files are only predicted
    with job(cfg, "compare") as run, says_if_busy() if runs else nullcontext():
        problems, mirror = make_problems(run, chosen), run.mirror
        comparison = compare(
            problems,
            planners,
            seeds_of(cfg.seed),
            out_dir=run.folder,
            executor=executor if cfg.execute else None,
            rounds=cfg.rounds,
            budget=Budget(cfg.seconds, cfg.evaluations),
            progress=lambda what: run.report(what, None),
            parallel=cfg.parallel,
        )
        mirror.comparison(comparison)
        save_pictures(run, comparison)
        save_best(run, comparison, problems, planners, chosen)
        save_report(run)
    files = "compare.csv, compare.md, curves.png, pareto.png; per workload plan.json, trace.json"
    page = (run.folder / "report.html").is_file()  # jobs of a sweep have none
    show(run, comparison, "report.html, " * page + files)
    return metric_s(comparison)


def main(words: Sequence[str] | None = None) -> int:
    """Entry point."""
    return launch(app, "compare", words)
