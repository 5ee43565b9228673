"""``placement-train``: train one policy on all the workloads, then compare it with its baseline."""

from __future__ import annotations

import sys

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from agents.app import job, launch, make_planner, make_problems, metric_s, save_best


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="train")
def app(cfg: DictConfig) -> float:
    """One training; returns the policy's objective in seconds."""
    from agents.planner import PolicyPlanner
    from agents.trained import TrainedPolicy
    from agents.training import Row, train
    from placement.compare import compare
    from placement.report import table

    baseline, config = make_planner(cfg.baseline), instantiate(cfg.training, _convert_="all")
    policy = None if cfg.policy is None else TrainedPolicy.load(cfg.policy)
    with job(cfg, "train") as run:
        problems = make_problems(run)

        def progress(row: Row) -> None:
            run.mirror.log(row, step=int(row["steps"]))
            text = f"training: greedy {row['greedy_speedup']:.3f}x, best {row['best_speedup']:.3f}x"
            run.report(text, min(1.0, row["steps"] / config.total_steps))

        trained = train(
            list(problems.values()),
            config=config,
            baseline=baseline,
            policy=policy,
            out_dir=run.folder,
            callback=progress,
        )
        trained.save(run.folder / "policy.npz")
        run.mirror.artifact("policy", "policy", run.folder / "policy.npz", ["best"])
        planners = {
            "baseline": baseline,
            "policy": PolicyPlanner(run.folder / "policy.npz", seed=cfg.seed, baseline=baseline),
        }
        comparison = compare(
            problems,
            planners,
            [cfg.seed],
            out_dir=run.folder,
            progress=lambda what: run.report(what, None),
        )
        run.mirror.comparison(comparison)
        save_best(run, comparison, problems, planners)
    table.print_tables(table.tables(comparison))
    print(f"in {run.folder}: policy.npz, metrics.csv, compare.csv, compare.md and plans")
    return metric_s(comparison)


def main() -> int:
    """Entry point."""
    return launch(app)


if __name__ == "__main__":
    sys.exit(main())
