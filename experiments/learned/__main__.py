"""Studies of the learned planner; their budgets were written down before the runs.

    python -m experiments.learned zero_shot [--also NAME=PATH]  # one evaluation, and four
    python -m experiments.learned published                  # seven published learners, trained
    python -m experiments.learned dispatch                   # one decode, and the best of many
    python -m experiments.learned resched --checkout FOLDER  # beside a published network
    python -m experiments.learned folds [--seeds N] [--minutes M]  # leave-architecture-out
    python -m experiments.learned split [--seeds N]          # the same, operators in pieces
    python -m experiments.learned gnn [--train latency]      # the released message passing

Policies are the released ones; ``--also`` names further ones. Each study writes
``experiments/results/learned_NAME.csv`` and ``.md``. A budget of seconds is processor time: every
run has a process of its own, all kernels loaded, whose clock that is. What is finished lies in
``runs/learned/NAME``, a file per run: the same command continues, and ``--processes 2`` shares the
work between two cores. Words after the study choose problems: those whose name begins so.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.learned import dispatch, folds, gnn, published, resched, split, zero_shot
from experiments.study import run

STUDIES = (
    zero_shot.STUDY, published.STUDY, dispatch.STUDY, resched.STUDY, folds.STUDY, split.STUDY,
    gnn.STUDY,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return run(STUDIES, argv)


if __name__ == "__main__":
    raise SystemExit(main())
