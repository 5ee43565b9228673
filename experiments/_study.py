"""What the studies share: public data, runs under a limit, rows that survive an interruption."""

from __future__ import annotations

import argparse
import csv
import ctypes
import io
import itertools
import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from placement import cli, planners
from placement.cluster import Cluster, Device, Link
from placement.files import write_atomic
from placement.graph import OpGraph
from placement.problem import OBJECTIVES, Objective, Planner, Problem
from placement.profile import Profile

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
RESULTS = Path(__file__).parent / "results"
GIB = 2**30


class StudyError(ValueError):
    """A study cannot run as asked for, or a planner's run came to nothing; see the message."""


# --- data ----------------------------------------------------------------------------------------


def public(data: Path, *patterns: str) -> dict[str, Path]:
    """Files of public workloads under ``data``, by path relative to it, sorted.

    Raises:
        StudyError: there are none; the message says where they are published.
    """
    found = {
        path.relative_to(data).as_posix(): path
        for pattern in patterns
        for path in sorted(data.glob(pattern))
    }
    if not found:
        raise StudyError(
            f"no file {' or '.join(patterns)} in {data}: the workloads are public, but not part of "
            "this project. Take them from github.com/msr-fiddle/dnn-partitioning "
            "(throughput-inputs as dnn_partitioning/throughput, latency-inputs as "
            "dnn_partitioning/latency), github.com/msr-fiddle/pipedream (profiles, each graph.txt "
            "as pipedream/NAME.txt), github.com/xinyuyao/Doppler (compute_graph as doppler) and "
            "github.com/moirai-placement/moirai (spreadsheets, converted to moirai/NAME.json), and "
            "name the folder with --data"
        )
    return found


# --- runs under a limit --------------------------------------------------------------------------

Status = str  # ok, refused, failed, out of time, out of memory, killed


@dataclass(frozen=True)
class Run:
    """How a call in a process of its own ended.

    Attributes:
        status: ``ok``; ``refused``, it raised a ``ValueError``; ``failed``, another error;
            ``out of time``; ``out of memory``; ``killed``, the process ended without an answer.
        value: what it returned, None unless ``ok``.
        seconds: it took.
        peak_bytes: largest resident memory of the process, ``grown_bytes``: of these, above
            what it held when it began (Python, compiled kernels, the problem); None if it died.
        note: the error's text.
    """

    status: Status
    value: Any
    seconds: float
    peak_bytes: int | None = None
    grown_bytes: int | None = None
    note: str = ""


def limited(call: Callable[[], Any], seconds: float, memory_bytes: int | None = None) -> Run:
    """Run ``call`` in a forked process on one core, for so long and with so much memory.

    Whatever happens to that process, this one goes on. ``memory_bytes`` limits its address
    space, which is larger than what is resident.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(send, call, memory_bytes))
    began = time.perf_counter()
    process.start()
    send.close()
    try:
        if not receive.poll(seconds):
            return Run("out of time", None, seconds, note=f"ended after {seconds:g} s")
        try:
            status, value, took, peak, before, note = receive.recv()
        except EOFError:
            process.join()
            code = process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            took = time.perf_counter() - began
            return Run("killed", None, took, note=f"the process ended by {how}")
        return Run(status, value, took, peak, max(0, peak - before), note)
    finally:
        process.kill()
        process.join()
        receive.close()


def _child(send: Any, call: Callable[[], Any], memory_bytes: int | None) -> None:
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers it
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # What the parent freed and kept for later is returned, or it would be used uncounted.
    with suppress(OSError, AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)
    # A fork begins with its parent's peak, but holds less: mapped files are not copied.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    value, status, note = None, "ok", ""
    began = time.perf_counter()
    try:
        value = call()
    except MemoryError as error:
        status, note = "out of memory", str(error)
    except ValueError as error:
        status, note = "refused", str(error)
    except Exception as error:  # a study reports mistakes, ours included, and goes on
        status, note = "failed", f"{type(error).__name__}: {error}"
    took = time.perf_counter() - began
    send.send((status, value, took, resident_bytes(), before, note))


def resident_bytes() -> int:
    """Largest resident memory of this process so far."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else 1024 * int(peak)


@dataclass(frozen=True)
class Guarded:
    """A planner in a process of its own; what stops it is a ``StudyError`` with the reason."""

    planner: Planner
    limit_s: float
    memory_bytes: int

    def __call__(self, problem: Problem) -> Any:
        """The planner's solution, with the ``peak_bytes`` of ``Run`` among its ``stats``."""
        return self._run(self.planner, problem)

    def _run(self, planner: Planner, problem: Problem) -> Any:
        run = limited(lambda: planner(problem), self.limit_s, self.memory_bytes)
        if run.status != "ok":
            raise StudyError(f"{run.status}: {run.note}")
        return replace(run.value, stats=run.value.stats | {"peak_bytes": run.peak_bytes})


@dataclass(frozen=True)
class GuardedSearch(Guarded):
    """The same with a seed, which is the planner's."""

    seed: int = 0

    def __call__(self, problem: Problem) -> Any:
        """As ``Guarded``."""
        return self._run(replace(self.planner, seed=self.seed), problem)  # type: ignore[type-var]


# --- planners ------------------------------------------------------------------------------------


def budgeted(name: str, seconds: float) -> Planner:
    """The planner with this budget, where it takes one."""
    known = options_of(name)
    given = {key: seconds for key in ("seconds", "lp_seconds") if key in known}
    return planners.load(name, **given)


def options_of(name: str) -> set[str]:
    """Names of a planner's fields."""
    kind = planners.find(name)
    return {f.name for f in fields(kind)} if is_dataclass(kind) else set()


def is_search(name: str) -> bool:
    """It draws, and uses up any budget: seconds as well as evaluations."""
    return {"seed", "seconds", "evaluations"} <= options_of(name)


def warm(names: Sequence[str], objectives: Sequence[Objective] = OBJECTIVES) -> None:
    """Compile, or load, every kernel now: processes that are forked later inherit them."""
    ops = np.arange(6)
    graph = OpGraph.build(
        "warm", [f"op{n}" for n in ops], ops, 1 + ops, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]
    )
    links = tuple(Link(a, b, 1e-3, 1e3) for a in "ab" for b in "ab" if a != b)
    seconds = np.repeat(1.0 + ops[:, None], 2, axis=1)
    profile = Profile(("a", "b"), seconds, 0 * seconds, links)
    # Where memory may be too small, and where it never is: orders are searched only there.
    for memory, objective in itertools.product((40, 2**40), objectives):
        devices = tuple(Device(x, "acc", memory_bytes=memory, busy_w=2.0, idle_w=1.0) for x in "ab")
        cluster = Cluster("warm", devices, links)
        for name in names:
            try:
                budgeted(name, 0.2)(Problem(graph, cluster, profile, objective))
            except Exception as error:  # will come up again where it is reported
                say(f"{name} cannot do {objective}: {error}")


# --- rows ----------------------------------------------------------------------------------------

R = TypeVar("R")


class Store(Generic[R]):
    """Finished rows (dataclasses) on disk, one JSON object per line, so that a study continues."""

    def __init__(self, path: Path, kind: type[R], fresh: bool = False) -> None:
        """Read what is there; ``fresh`` forgets it."""
        self.path, self.rows = path, list[R]()
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in [] if fresh else lines:
            try:
                self.rows.append(kind(**json.loads(line)))
            except (TypeError, ValueError):  # cut off, or of another version
                continue
        write_atomic(path, "".join(map(_line, self.rows)))

    def find(self, **key: Any) -> R | None:
        """The row with these values."""
        for row in self.rows:
            if all(getattr(row, name) == value for name, value in key.items()):
                return row
        return None

    def add(self, row: R) -> R:
        """Keep a row."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())
        return row


def _line(row: Any) -> str:
    return json.dumps(asdict(row)) + "\n"


def to_csv(rows: Sequence[Any]) -> str:
    """One line per row, one column per field; empty where None."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([f.name for f in fields(rows[0])])
    for row in rows:
        writer.writerow(["" if v is None else v for v in asdict(row).values()])
    return text.getvalue()


def to_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is a name, the others are figures."""

    def line(words: Sequence[str]) -> str:
        return "| " + " | ".join(w.replace("|", "\\|").replace("\n", " ") for w in words) + " |"

    rule = "|---|" + "---:|" * (len(header) - 1)
    return "\n".join([line(header), rule, *map(line, cells)]) + "\n"


def provenance(**facts: Any) -> str:
    """When, where and with which versions, as a Markdown list."""
    from importlib import metadata

    from placement.measure import provenance

    versions = {}
    for name in ("numpy", "numba", "scipy", "ortools"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return "".join(f"- {k}: {v}\n" for k, v in provenance(**versions, **facts).items())


# --- text ----------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Progress, to standard error."""
    print(text, file=sys.stderr, flush=True)


def number(value: float | None, digits: int = 3, scale: float = 1.0, unit: str = "") -> str:
    """A figure of a table; a dash where there is none."""
    if value is None or not np.isfinite(value):
        return "–"
    return f"{scale * value:.{digits}f}{unit}"


def command_line(module: str, argv: Sequence[str] | None) -> str:
    """The command that makes the results again; of folders elsewhere the last name alone."""
    words = sys.argv[1:] if argv is None else argv
    given = shlex.join(Path(w).name if w[:1] == "/" else w for w in words)
    return f"python -m {module} {given}".rstrip()


def common_options(parser: argparse.ArgumentParser, name: str) -> None:
    """The options that every study has."""
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the public workloads")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / name, help="what is finished, to continue"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what is finished")


def launch(study: Callable[[], None]) -> int:
    """Run a study; users' errors are one message and exit code 2."""
    try:
        with cli.interruptible():
            study()
    except KeyboardInterrupt:
        say("interrupted; the same command continues")
        return 130
    except ValueError as error:
        ours = ("placement", "envs", "agents", "experiments")
        if type(error).__module__.partition(".")[0] not in ours:
            raise
        say(f"error: {error}")
        return 2
    return 0
