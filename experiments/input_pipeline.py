"""What loading ahead gains, and what it costs in memory.

    python -m experiments.input_pipeline [--rounds 3] [--count 64]

A loader that costs 30 to 200 % of a step feeds a pipeline over two one-core devices, and one
over a single one-core device (a core is free then). It waits (``time.sleep``: disk, network),
computes in NumPy (without the interpreter's lock) or computes in Python (with it); the last also in
a process of its own, by a ``torch.utils.data.DataLoader``. Three ways:

* in turn: load, run, load, run (what a ``DataLoader`` gives is loaded ahead by its process);
* in the caller: ``runner.stream(data, workers=0)``;
* automatic: ``runner.stream(data)``.

The bound is the slower of loader (in one thread, or its process) and devices, each alone. Where
both need the same cores it cannot be reached; the shared bound is then all their work spread over
the cores.
Rounds are interleaved: every round measures the bound and every way; medians of the rounds.
Writes ``experiments/results/input_pipeline.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from experiments._study import RESULTS, say
from placement.cluster import Cluster
from placement.executor import Runner
from placement.files import write_atomic
from placement.measure import provenance
from placement.program import capture
from placement.workloads.tiny import tiny_mlp

IN_A_PROCESS = "Python, in a process"
KINDS = ("waiting", "NumPy", "Python", IN_A_PROCESS)
SHARES = (0.3, 0.6, 1.0, 2.0)
WAYS = ("in turn", "in the caller", "automatic")


class Data:
    """A map-style data set whose items take ``seconds``; counts the items in memory."""

    def __init__(self, item: Tensor, count: int, kind: str, seconds: float) -> None:
        self.item, self.count, self.kind = item, count, kind
        self.made = self.done = self.most = 0
        self.numbers = np.linspace(0.0, 1.0, 4000)
        self.units = 0
        if kind != "waiting":
            tries = 200
            for _ in range(3):  # the last counts: the interpreter makes the first ones slow
                began = time.perf_counter()
                for _ in range(tries):
                    self._unit()
                took_s = time.perf_counter() - began
            self.units = round(seconds * tries / took_s)
        self.seconds = seconds

    def _unit(self) -> None:
        if self.kind == "NumPy":
            np.sin(self.numbers)
        else:
            for _ in range(500):
                pass

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if self.kind == "waiting":
            time.sleep(self.seconds)
        for _ in range(self.units):
            self._unit()
        self.made += 1
        self.most = max(self.most, self.made - self.done)
        return self.item.clone()


@dataclass(frozen=True)
class Row:
    """One loader on one pipeline; medians over the rounds.

    Attributes:
        load_s, step_s: an item of the loader and a step of the devices, each alone.
        shared_s: all the work per item spread over the cores, or the slower of the two.
        period_s: seconds per item of each way.
        share: of the bound ``max(load_s, step_s)`` that each way's throughput reaches.
        shared_share: likewise of the bound ``shared_s``.
        items: most items that were in memory between loading and result, of each way; empty where
            another process has some of them.
        item_bytes: what one weighs.
    """

    num_devices: int
    kind: str
    cost: float
    load_s: float
    step_s: float
    shared_s: float
    period_s: dict[str, float]
    share: dict[str, float]
    shared_share: dict[str, float]
    items: dict[str, int]
    item_bytes: int


def seconds_per_item(outputs: Iterable[Any], data: Data | None = None) -> float:
    """From the begin, so that nothing that was loaded ahead before is for nothing."""
    count, began = 0, time.perf_counter()
    for _ in outputs:
        count += 1
        if data is not None:
            data.done += 1
    return (time.perf_counter() - began) / count


def outputs(runner: Runner, loader: Any, way: str) -> Iterator[Any]:
    """Results for all items; not even a process is asked for them before the first is taken."""
    if way == "in turn":
        items = (
            loader
            if isinstance(loader, DataLoader)
            else map(loader.__getitem__, range(len(loader)))
        )
        yield from (runner(item) for item in items)
    else:
        yield from runner.stream(loader, workers=0 if way == "in the caller" else None)


def run(runner: Runner, data: Data, loader: Any, way: str) -> tuple[float, int]:
    """Seconds per item, and most items in memory (if they are loaded in this process)."""
    data.made = data.done = data.most = 0
    return seconds_per_item(outputs(runner, loader, way), data), data.most


def in_a_process(data: Data) -> DataLoader[Tensor]:
    """What loads it in one process, which is started by the first round and stays.

    Not by ``fork``: the copy of a process with threads may hold a lock for ever.
    """
    return DataLoader(
        data,
        batch_size=None,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    )


def study(num_devices: int, rounds: int, count: int, width: int) -> list[Row]:
    """Every kind and cost of loader on one pipeline."""
    layers = 6 * num_devices
    module, (item,) = tiny_mlp(batch=64, width=width, layers=layers)
    graph = capture(module, item)
    machine = Cluster.detect()
    cluster = Cluster("some", machine.devices[:num_devices])
    placement = np.arange(graph.num_ops) * num_devices // graph.num_ops
    rows = []
    with Runner(graph, cluster, placement) as runner:

        def devices() -> float:
            return seconds_per_item(runner.stream_tensors([item] for _ in range(count)))

        step_s = float(np.median([devices() for _ in range(3)]))
        for kind in KINDS:
            for cost in SHARES:
                data = Data(item, count, kind, cost * step_s)
                loader = in_a_process(data) if kind == IN_A_PROCESS else data
                load, step = [], []
                period: dict[str, list[float]] = {way: [] for way in WAYS}
                items = dict.fromkeys(WAYS, 0)
                for r in range(rounds + 1):
                    given = loader if loader is not data else (data[i] for i in range(count))
                    both = [seconds_per_item(given), devices()]
                    found = {way: run(runner, data, loader, way) for way in WAYS}
                    if r == 0:
                        continue  # warm-up
                    load.append(both[0])
                    step.append(both[1])
                    for way, (seconds, most) in found.items():
                        period[way].append(seconds)
                        items[way] = max(items[way], most)
                bound = np.maximum(load, step)
                work = 0.0 if kind == "waiting" else np.array(load)
                spread = (work + num_devices * np.array(step)) / len(machine.devices)
                shared = np.maximum(bound, spread)
                rows.append(
                    Row(
                        num_devices=num_devices,
                        kind=kind,
                        cost=cost,
                        load_s=float(np.median(load)),
                        step_s=float(np.median(step)),
                        shared_s=float(np.median(shared)),
                        period_s={w: float(np.median(v)) for w, v in period.items()},
                        share={w: float(np.median(bound / v)) for w, v in period.items()},
                        shared_share={w: float(np.median(shared / v)) for w, v in period.items()},
                        items={} if loader is not data else items,
                        item_bytes=item.nbytes,
                    )
                )
                say(line(rows[-1]))
    return rows


HEAD = (
    "| devices | loader | costs | step | in turn | in the caller | automatic "
    "| of shared cores | items in memory | KiB |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    """One line of the table: shares of the bound, and memory of the three ways."""
    shares = " | ".join(f"{100 * row.share[way]:.0f} %" for way in WAYS)
    most = [row.items[way] for way in WAYS if row.items]
    items = " / ".join(map(str, most)) or "–"
    kib = " / ".join(f"{num * row.item_bytes / 1024:.0f}" for num in most) or "–"
    return (
        f"| {row.num_devices} | {row.kind} | {100 * row.cost:.0f} % | {1e3 * row.step_s:.1f} ms | "
        f"{shares} | {100 * row.shared_share['automatic']:.0f} % | {items} | {kib} |"
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024, help="of the model: how long a step is")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [row for d in (2, 1) for row in study(d, options.rounds, options.count, options.width)]
    made_on = provenance(rounds=options.rounds, count=options.count)
    table = "\n".join([HEAD, *map(line, rows)]) + "\n"
    facts = "\n".join(f"- {k}: {v}" for k, v in made_on.items())
    text = (
        "# Loading ahead: throughput as a share of the slower of loader and devices\n\n"
        "`python -m experiments.input_pipeline`\n\n"
        f"{table}\n"
        "Shares are of the bound of one loading thread, so several can exceed 100 % where loading "
        "is\nthe slower. *Of shared cores*: the automatic way as a share of what the cores of this "
        "machine\ncan do at all for loading and devices together. Memory: most items between "
        "loading and\nresult, in the order in turn / in the caller / automatic.\n\n"
        f"{facts}\n"
    )
    write_atomic(options.out / "input_pipeline.md", text)
    values = {"rows": [vars(row) for row in rows], "made_on": made_on}
    write_atomic(options.out / "input_pipeline.json", json.dumps(values, indent=1) + "\n")
    print(table)


if __name__ == "__main__":
    main()
