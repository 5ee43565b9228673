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

import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from experiments.runs import in_turns
from experiments.study import Option, Options, Rows, Study, run, say
from experiments.tables import Column, table
from placement.capturing import capture
from placement.cluster import Cluster
from placement.executor import Runner
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


def seconds_each(outputs: Iterable[Any], data: Data | None = None) -> float:
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


def one_round(runner: Runner, data: Data, loader: Any, way: str) -> tuple[float, int]:
    """Seconds per item, and most items in memory (if they are loaded in this process)."""
    data.made = data.done = data.most = 0
    return seconds_each(outputs(runner, loader, way), data), data.most


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


def rows(options: Options) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    for num_devices in (2, 1):
        module, (item,) = tiny_mlp(batch=64, width=options.width, layers=6 * num_devices)
        graph = capture(module, item)
        cluster = Cluster("some", Cluster.detect().devices[:num_devices])
        placement = np.arange(graph.num_ops) * num_devices // graph.num_ops
        with Runner(graph, cluster, placement) as runner:
            alone = partial(devices, runner, item, options.count)
            step_s = float(np.median([alone() for _ in range(3)]))
            for kind in KINDS:
                for cost in SHARES:
                    data = Data(item, options.count, kind, cost * step_s)
                    row = row_of(runner, data, cost, options.rounds)
                    say(f"{num_devices} devices, {kind}, {100 * cost:.0f} %: {row['share']}")
                    yield row


def devices(runner: Runner, item: Tensor, count: int) -> float:
    return seconds_each(runner.stream_tensors([item] for _ in range(count)))


def row_of(runner: Runner, data: Data, cost: float, rounds: int) -> dict[str, Any]:
    """One loader: medians over the rounds of it alone, the devices alone, and the three ways.

    ``load_s``, ``step_s``: an item of the loader and a step of the devices, each alone.
    ``shared_s``: all the work per item spread over the cores, or the slower of the two.
    ``period_s``: seconds per item of each way; ``share``, ``shared_share``: of the bounds
    ``max(load_s, step_s)`` and ``shared_s`` that its throughput reaches. ``items``: most items that
    were in memory between loading and result, empty where another process has some of them.
    """
    loader = in_a_process(data) if data.kind == IN_A_PROCESS else data
    num_devices = runner.cluster.num_devices

    def load() -> float:
        alone = loader if loader is not data else (data[i] for i in range(data.count))
        return seconds_each(alone)

    values = in_turns(
        {
            "load": load,
            "step": partial(devices, runner, data.item, data.count),
            **{way: partial(one_round, runner, data, loader, way) for way in WAYS},
        },
        rounds,
    )
    load_s, step_s = values["load"], values["step"]
    period = {way: values[way][:, 0] for way in WAYS}
    bound = np.maximum(load_s, step_s)
    work = 0.0 if data.kind == "waiting" else load_s
    spread = (work + num_devices * step_s) / Cluster.detect().num_devices
    shared = np.maximum(bound, spread)
    return {
        "num_devices": num_devices,
        "kind": data.kind,
        "cost": cost,
        "load_s": float(np.median(load_s)),
        "step_s": float(np.median(step_s)),
        "shared_s": float(np.median(shared)),
        "period_s": {w: float(np.median(v)) for w, v in period.items()},
        "share": {w: float(np.median(bound / v)) for w, v in period.items()},
        "shared_share": {w: float(np.median(shared / v)) for w, v in period.items()},
        "items": {} if loader is not data else {w: int(values[w][:, 1].max()) for w in WAYS},
        "item_bytes": data.item.nbytes,
    }


def parts(rows: Rows, options: Options) -> dict[str, str]:
    def most(scale: float, row: dict[str, Any]) -> str:
        return " / ".join(f"{row['items'][w] * scale:.0f}" for w in WAYS if row["items"]) or "–"

    def share(way: str, row: dict[str, Any]) -> float:
        return row["share"][way]

    columns = (
        Column("devices", "num_devices"),
        Column("loader", "kind"),
        Column("costs", "cost", 0, 100, " %"),
        Column("step", "step_s", 1, 1e3, " ms"),
        *(Column(way, partial(share, way), 0, 100, " %") for way in WAYS),
        Column("of shared cores", lambda r: r["shared_share"]["automatic"], 0, 100, " %"),
        Column("items in memory", partial(most, 1)),
        Column("KiB", lambda r: most(r["item_bytes"] / 1024, r)),
    )
    return {"table": table(rows, *columns)}


STUDY = Study(
    name="input_pipeline",
    rows=rows,
    parts=parts,
    options={"rounds": 3, "count": 64, "width": Option(1024, "of the model: how long a step is")},
    facts=lambda options: {"rounds": options.rounds, "count": options.count},
)
main = partial(run, (STUDY,))

if __name__ == "__main__":
    sys.exit(main())
