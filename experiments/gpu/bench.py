"""``Bench``: what a section works with. It writes rows, keeps to times, measures a model once."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import placement.costs.measure as measuring
from experiments.gpu.models import PREDICTED, Model, captured
from experiments.study import ROOT, StudyError, say
from placement import importers
from placement.cluster import Cluster
from placement.costs.measure import measure
from placement.graph import OpGraph
from placement.problem import Problem
from placement.profile import Profile
from placement.tools.files import write_atomic

DATASET, HOME = ROOT / "experiments" / "dataset", "plans.json"
LONGEST_S = 470.0  # all sections together: a machine is lent for eight minutes
# Python drops an exception that is raised within a destructor, and ``Late`` is one: it comes again.
AGAIN_S = 5.0
GIB = 2**30
HOST_BYTES = 96 * GIB  # at least: memory of a lent machine grows as it is used, and says little

# What differs in ``placement.costs`` here: what is learned once is not measured again, and what
# costs most is done once.
_QUICK: dict[str, dict[str, Any]] = {
    "measure.EFFORT": {"patience": 1, "order_rounds": 2},
    "calibration.EFFORT": {"run_s": 0.02, "cuts": (1, 3, 7, 15, 31), "rounds": 1},
    "calibration.LIKELY": {"error": 0.08},  # of one run on a virtual machine
}
# And of models of which many placements run, to be compared with what is predicted.
_WELL: dict[str, dict[str, Any]] = _QUICK | {
    "calibration.EFFORT": _QUICK["calibration.EFFORT"] | {"rounds": 2},
    "calibration.LIKELY": {"error": 0.05},
}
# And on the emulated GPU, whose times mean nothing.
_BRIEF: dict[str, dict[str, Any]] = {
    "measure.EFFORT": {"patience": 1, "order_rounds": 1, "together_s": 0.0},
    "transfers.EFFORT": {"link_bytes": (2**12, 2**16), "long_bytes": 2**18, "streamed": 4},
    "calibration.EFFORT": {
        "run_s": 0.0, "runs": (2, 3), "cuts": (1, 3), "rounds": 1, "steps": 2, "evaluations": 20
    },
}  # fmt: skip


@dataclass(eq=False)
class Limit:
    """When an item has to end (``time.perf_counter``), and whether ``Late`` was raised for it."""

    until: float
    is_over: bool = False


class Late(BaseException):
    """The time of an item is over. No ``Exception``: code within the item may go on after those."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit


@dataclass
class Bench:
    """What a section works with. Times are those of ``time.perf_counter``.

    Attributes:
        out: the folder of results.
        work: a folder of files by which sections share what they measured.
        emulated: the GPU is: everything is to be tiny.
        models: captured before, by name.
        part: this section's number among those that run beside each other, and how many these are.
        until: when it will be stopped.
        fair_s: seconds that the model of which it is the turn may take.
        began: when the script did.
        limits: of each item that is under way; the outermost first.
    """

    out: Path
    work: Path
    section: str
    emulated: bool
    models: dict[str, Model] = field(default_factory=dict)
    part: tuple[int, int] = (0, 1)
    until: float = field(default_factory=lambda: time.perf_counter() + LONGEST_S)
    fair_s: float = LONGEST_S
    began: float = field(default_factory=time.perf_counter)
    limits: list[Limit] = field(default_factory=list)

    def emit(self, item: str, **facts: Any) -> None:
        """A row of results, on the disk when this returns."""
        facts = {k: None if v != v else v for k, v in facts.items()}  # JSON knows no nan
        at = round(time.perf_counter() - self.began, 2)
        row = {"section": self.section, "item": item, **facts, "at": at}
        with (self.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=float) + "\n")
            file.flush()
            os.fsync(file.fileno())
        texts = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        say(" ".join(f"{k}={text}" for k, text in texts.items()))

    @contextmanager
    def item(self, name: str, seconds: float = 60.0) -> Iterator[None]:
        """What fails in it, or takes longer, becomes a row, and what follows the item goes on.

        An item whose time is over ends at once, with all items in it.
        """
        began = time.perf_counter()
        limit = Limit(began + seconds)
        self.limits.append(limit)
        self._set_alarm()
        try:
            yield
        except (Exception, Late) as failure:
            if isinstance(failure, Late) and failure.limit is not limit:
                raise
            notes = " ".join(getattr(failure, "__notes__", ()))
            text = " ".join(f"{type(failure).__name__}: {failure} {notes}".split())
            if isinstance(failure, Late):
                text = f"stopped, as {seconds:.3g} s for {name!r} were over"
            self.emit(name, failed=text[:300], seconds=time.perf_counter() - began)
            with (self.out / "traces.txt").open("a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
        finally:
            self.limits.remove(limit)
            self._set_alarm()

    def _set_alarm(self) -> None:
        """``Late`` is raised when the first of the limits is over; and again every ``AGAIN_S``."""

        def ring(*_: Any) -> None:
            for limit in self.limits:
                if limit.until <= time.perf_counter():
                    limit.is_over = True
                    raise Late(limit)

        now = time.perf_counter()
        left_s = [AGAIN_S if x.is_over else max(x.until - now, 1e-3) for x in self.limits]
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, min(left_s, default=0.0), AGAIN_S)  # 0: no alarm

    def part_s(self, count: int) -> float:
        """Seconds for one of ``count`` items: at most 1.5 times its part of what is left."""
        return max(1.0, (1.5 if count > 1 else 1) * (self.until - time.perf_counter()) / count)

    @property
    def cluster(self) -> Cluster:
        """The CPU cores, or this section's part of them, and the first GPU."""
        cpu, *cards = Cluster.detect().devices
        if not cards or cards[0].kind != "cuda":
            raise StudyError(f"torch {torch.__version__} sees no CUDA device here")
        card, (number, count) = cards[0], self.part
        if count > 1:  # cores of its own; the thread that launches kernels may be on any
            cores = cpu.cores[number::count] or cpu.cores
            cpu = replace(cpu, cores=cores, threads=len(cores))
            card = replace(card, cores=())
        if not self.emulated:
            cpu = replace(cpu, memory_bytes=max(cpu.memory_bytes, HOST_BYTES))
        return Cluster("gpu", (cpu, card))

    @property
    def planning_s(self) -> float:
        return 0.2 if self.emulated else 1.0

    @property
    def gpu(self) -> torch.device:
        return torch.device("cuda:0")

    def model(self, key: str) -> Model:
        """As it was captured before; or now, where it was not."""
        if key not in self.models:
            self.models[key] = captured(key)
        return self.models[key]

    def measured(
        self, key: str, graph: OpGraph, cluster: Cluster, repeats: int = 3, calibrate: bool = True
    ) -> Profile:
        """The profile of ``graph``: an earlier section's, where one has written it as ``key``."""
        path = self.work / f"{key}.npz"
        if path.exists():
            earlier = Profile.load(path)
            if earlier.graph_fingerprint == graph.fingerprint:
                return earlier
        with ExitStack() as stack:
            changed = _BRIEF if self.emulated else _WELL if key in PREDICTED else _QUICK
            for what, changes in changed.items():
                usual = resolve_name(f"placement.costs.{what}")
                other = usual._replace(**changes)
                stack.enter_context(patch(f"placement.costs.{what}", other))
            for name in ("measure_links", "batch_seconds"):  # of the machine, not of a model
                shared = partial(once, self.work / f"{name}.pickle", getattr(measuring, name))
                stack.enter_context(patch.object(measuring, name, shared))
            in_time = partial(self._calibrated, key, measuring.calibrated if calibrate else None)
            stack.enter_context(patch.object(measuring, "calibrated", in_time))
            profile = measure(graph, cluster, repeats=1 if self.emulated else repeats)
        profile.save(path)
        self.keep(key, Problem(graph, cluster, profile))
        return profile

    def _calibrated(
        self, key: str, by: Any, graph: OpGraph, cluster: Cluster, profile: Profile
    ) -> Profile:
        """The profile calibrated, if there is time: sections to come need one in any case."""
        if by is not None:
            with self.item(f"{key}, calibration", 0.8 * self.fair_s):
                return by(graph, cluster, profile)  # type: ignore[no-any-return]
        return profile

    def home(self, name: str, graph: OpGraph) -> np.ndarray | None:
        """int32 ``[N]``: what ``gpu_results plans --home`` planned from an earlier run.

        None: there is none of this very graph.
        """
        for path in sorted(DATASET.glob(f"*/{HOME}")):
            known = json.loads(path.read_text("utf-8")).get(name, {})
            if known.get("graph") == graph.fingerprint:
                return np.array(known["placement"], np.int32)
        return None

    def keep(self, key: str, problem: Problem) -> None:
        """As a file, to plan from with other versions of PyTorch, which capture another graph."""
        problem = replace(problem, graph=problem.graph.without_program())
        importers.save(problem, self.work / f"{key}.json.gz")


def once(path: Path, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``call`` gave the first time, in whichever process; it is kept in the file ``path``."""
    if not path.exists():
        write_atomic(path, pickle.dumps(call(*args, **kwargs)))
    return pickle.loads(path.read_bytes())
