"""Plans for the next run on a GPU, made without one from what the last has measured.

    python -m experiments.gpu.home [--seconds 5] [PATTERN ...]

A section has a second for a plan, on a machine that is lent. Here every problem of the last run
has more; where the graph that is captured there is still the same, the placement runs beside the
one that is made there. Writes ``plans.json`` beside the problems.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from experiments.gpu.bench import HOME
from experiments.study import launch, say
from placement import planners
from placement.planners.residence import refitted, with_buffers
from placement.tools.files import write_atomic


def plan(seconds: float, patterns: Sequence[str]) -> int:
    """Plan every problem that a name matches; what was planned of others stays."""
    from experiments.gpu_results import last_home, problems

    path = last_home() / HOME
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name, problem in problems(patterns).items():
        planner = planners.load("best_of", seconds=seconds)
        posed = with_buffers(problem)
        _, solution = refitted(posed, planner(posed))
        known[name] = {
            "graph": problem.graph.fingerprint,
            "predicted_s": solution.value_s,
            "placement": solution.placement.tolist(),
        }
        say(f"{name}: {solution.value_s * 1e3:.3g} ms")
    write_atomic(path, json.dumps(known, separators=(",", ":")) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("patterns", nargs="*", help="of names, such as latency/*_half")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each plan")
    options = parser.parse_args(argv)
    return launch(lambda: plan(options.seconds, options.patterns))


if __name__ == "__main__":
    raise SystemExit(main())
