"""A DLRM whose fast device has memory for a quarter of the tables: whole tables, or hot rows.

    python -m experiments.zipf_rows [--rows 400000] [--batches 6]

Two one-core devices of this machine, the second with a quarter of the memory; rows are looked up by
Zipf's law. Whole tables are placed by ``best_of`` on measured costs; or the rows that are read most
are apart (``pieces.hot_rows``, counted on other batches). A line has milliseconds of a call, as
predicted and as run; results are compared with the module's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from placement import planners
from placement.capturing import capture
from placement.cluster import Cluster
from placement.costs.measure import measure
from placement.executor import Runner
from placement.graph import OpGraph
from placement.pieces import hot_rows, row_counts
from placement.problem import Problem
from placement.workloads.dlrm import DLRM

TABLES, DIM, BATCH, LOOKUPS, EXPONENT = 4, 64, 1024, 16, 1.05


def inputs_of(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch; row ``r`` has a share of ``1 / r ** EXPONENT``, in an order of its own."""
    rng = np.random.default_rng(seed)
    share = 1.0 / np.arange(1, rows + 1) ** EXPONENT
    order = np.random.default_rng(1).permutation(rows)
    found = order[rng.choice(rows, (TABLES, BATCH, LOOKUPS), p=share / share.sum())]
    return torch.from_numpy(rng.standard_normal((BATCH, 13), np.float32)), torch.from_numpy(found)


def call(graph: OpGraph, cluster: Cluster, module: DLRM, batches: Sequence[tuple]) -> list[float]:
    """Milliseconds of a call of the best placement: predicted, run."""
    profile = measure(graph, cluster)
    problem = Problem(graph, cluster, profile, "latency", num_microbatches=1)  # type: ignore[arg-type]
    answer = planners.load("best_of", evaluations=2000)(problem)
    spans = []
    with Runner(graph, cluster, answer.placement, priority=problem.priority) as runner:
        for batch in batches * 5:
            began = time.perf_counter()
            found = runner(*batch)
            spans.append(time.perf_counter() - began)
            torch.testing.assert_close(found, module(*batch), rtol=1e-4, atol=1e-5)
    return [answer.value_s * 1e3, float(np.median(spans[len(batches) :])) * 1e3]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=400_000, help="of each table")
    parser.add_argument("--batches", type=int, default=6, help="that rows are counted on")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    module = DLRM(TABLES, options.rows, DIM, bottom=(64,), top=(64,)).eval()
    batches = [inputs_of(options.rows, seed) for seed in range(2 * options.batches)]
    seen, later = batches[: options.batches], batches[options.batches :]
    whole = capture(module, later[0], name="dlrm")
    quarter = int(whole.param_bytes.sum()) // 4
    first, second, *_ = Cluster.detect().devices
    short = replace(second, memory_bytes=quarter + int(whole.tensor_bytes.sum()) + 2**20)
    cluster = Cluster("quarter", (first, short))
    parted = hot_rows(whole, row_counts(whole, seen), quarter)
    told, ran = {}, {}
    for name, graph in (("whole tables", whole), ("hot rows", parted)):
        told[name], ran[name] = call(graph, cluster, module, later)
        print(f"{name}: predicted {told[name]:.2f} ms, run {ran[name]:.2f}; results equal")
    gains = (x["whole tables"] / x["hot rows"] for x in (told, ran))
    print("hot rows over whole tables: predicted {:.2f}x, run {:.2f}x".format(*gains))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
