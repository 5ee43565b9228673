"""Budgets, seeds and problem splits of ``experiments.learned``, written before the runs.

Every study takes its numbers from here. An option of the command line changes one for a trial run;
the results then say which, and that it is not what was written down.

They are what two cores do in about two hours. Most were longer and were cut before any run (seconds
of searches twice to five times, of trainings five times). Two were cut when the first cells turned
out slow: the evaluations on throughput graphs (of 1,000,000; the cells of that budget are in no
table), and GiPH's graphs and best known (of 100, and 2,000 evaluations per operator). Evaluations
of ``published`` were cut before any of its runs (of 500).

Splits: whatever is measured in these studies was not trained on. Public files, captured models and
the graphs of ``synthetic`` with a seed of ``HELD_OUT`` or above belong to the studies; the released
policy may train on synthetic graphs of smaller seeds.
"""

from __future__ import annotations

from experiments.study import Option

HELD_OUT = 900  # first seed of synthetic graphs that nothing is trained on

# Everything that constructs a placement, and every dynamic program: what the learned planner must
# never be worse than. Exact methods (cp_sat, mip) and searches are not among them.
BASELINES = (
    "single_device", "round_robin", "heft", "peft", "m_etf", "m_sct", "m_topo",
    "critical_path_first", "critical_path_greedy", "level_balance", "level_pipeline",
    "balanced_split", "contiguous_dp", "antichain_dp", "ideal_dp", "pipedream", "coarsened",
)  # fmt: skip
# One rule each, no search and no budget: what one forward pass is compared with.
HEURISTICS = ("single_device", "heft", "peft", "m_etf", "m_sct", "m_topo", "contiguous_dp")
SEARCHES = ("local_search", "simulated_annealing")  # annealing is the cold, calibrated one
CAPTURED = ("resnet50", "inception", "bert_base", "lstm", "vit", "gpt2", "convnext", "dlrm", "t5")


# Every shipped workload and public file against all of ``BASELINES``.
AGAINST = {
    "seconds": Option(2.0, "processor seconds of each planner, of the learned one with its start"),
    "seeds": Option(5, "of the learned planner"),
    "repeats": Option(10, "of the profiles that have to be measured"),
}

# Captured models, run for real: the learned planner against the best baselines.
EXECUTED = {
    "workloads": Option(
        "dlrm,bert_tiny_hidden128,lstm,resnet50,inception", "comma-separated names"
    ),
    "seconds": Option(4.0, "of the learned planner"),
    "baselines": Option(4, "so many of BASELINES run: those with the least predicted values"),
    "measurements": Option(
        40, "runs that the learned planner may also make, to choose by what is measured"
    ),
    "seeds": Option(5, "of the learned planner"),
    "rounds": Option(5, "interleaved measurements of every placement"),
    "repeats": Option(10, "of the profiles that have to be measured"),
}

# Who chooses the moves, and the searches, at equal cost.
GUIDED = {
    "seconds": Option(2.0, "processor seconds of each run on latency graphs"),
    "load_seconds": Option(4.0, "the same on throughput operator graphs"),
    # For ``max_load`` every move that is looked at counts, as its delta is exact.
    "evaluations": Option(10_000, "of each run where evaluations are limited instead"),
    "few": Option(2_000, "evaluations on latency graphs once more: about one for each operator"),
    "load_evaluations": Option(200_000, "the same on throughput operator graphs"),
    "seeds": Option(5, "of the planners"),
    "graphs": Option(1, "seeds HELD_OUT.. of each family of large graphs"),
}

# One evaluation and four; pipelines of families that no network ever saw.
ZERO_SHOT = {
    "graphs": Option(1, "seeds HELD_OUT.. of each synthetic family"),
    "pipelines": Option(6, "of each family that was never drawn"),
    "repeats": Option(10, "of the profiles that have to be measured"),
}

# 10 evaluations and one for every four groups, on the graphs of the study above.
FEW = {
    "seeds": Option(3, "of every planner that draws"),
    "graphs": Option(1, "seeds HELD_OUT.. of each synthetic family"),
    "known_seconds": Option(2.0, "of each search for the best known value"),
    "repeats": Option(10, "of the profiles that have to be measured"),
}

# GiPH's own distribution, 2 N evaluations.
GIPH = {
    "graphs": Option(40, "problems drawn"),
    "per_operator": Option(2, "evaluations, times the operators"),
    "known_per_operator": Option(200, "the same for the search whose result counts as best known"),
    "seeds": Option(5, "of every planner that draws"),
}

# DOPPLER's four graphs.
DOPPLER = {
    "evaluations": Option(4_000, "budgets in evaluations"),
    "many": Option(20_000, "budgets in evaluations"),
    "seconds": Option(2.0, "a budget in processor seconds"),
    "known": Option(100_000, "evaluations of the searches whose result counts as best known"),
    "seeds": Option(5, "of every planner that draws"),
}

# Published learners as configured here, beside rules and searches.
PUBLISHED = {
    "steps": Option(20_000, "of each training"),
    "evaluations": Option(100, "of every run"),
    "seconds": Option(2.0, "processor seconds of every run, where these are limited instead"),
    "seeds": Option(3, "trainings of each method, and of every planner that draws"),
}
