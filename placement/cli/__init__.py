"""The verbs of the ``placement`` command, and what they share.

Data goes to standard output, everything else to standard error. A verb's file has
``configure(parser)`` and ``run(args) -> exit code``; both import what is slow when they need it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from placement.tools.ownership import PACKAGES, check_packages, is_yours
from placement.tools.progress import Progress as Progress
from placement.tools.progress import printable as printable
from placement.tools.progress import progress as progress
from placement.tools.progress import say as say
from placement.tools.progress import says_when_compiling as says_when_compiling
from placement.tools.shown import WIDTH as WIDTH
from placement.tools.shown import byte_size as byte_size
from placement.tools.shown import count as count
from placement.tools.shown import print_table as print_table
from placement.tools.shown import seconds as seconds
from placement.tools.streams import any_output as any_output
from placement.tools.streams import full_output

if TYPE_CHECKING:
    from placement.cluster import Cluster
    from placement.graph import OpGraph
    from placement.plan import Plan
    from placement.problem import Problem


class ExitCode(IntEnum):
    """What a command ends with."""

    OK = 0
    NO = 1
    BAD_INPUT = 2
    DEFECT = 70
    INTERRUPTED = 130


class Limits(NamedTuple):
    """What a command takes at most, and how much of an answer it shows; ``--json`` shows all."""

    batches: int = 1_000_000  # of a run: more would only fill the memory
    log_bytes: int = 2**28  # of a log; the rest is not read
    log_line: int = 2**14  # characters of a line; what else is in it does not matter
    message: int = 1_000  # characters of an error
    prose: int = 100  # columns
    rows: int = 20  # of what may be many: operators that moved, graphs that failed
    operators: int = 10  # of a profile, the most expensive ones
    features: int = 15  # operators of ``profile --features``, likewise
    devices: int = 4  # columns of a table


LIMITS = Limits()
OPTIMIZER = "AdamW"
OK, NO, BAD_INPUT, DEFECT, INTERRUPTED = ExitCode
EXIT_CODES = (
    "exit codes: 0 done; 1 the answer is no; 2 bad input; 70 a defect of ours; 130 interrupted"
)
AFTER_INTERRUPT = (
    "no file is half written, and profiles that were finished are kept for the same command"
)
A_DEFECT = "a defect, unless it is in code of yours: please report what is above"
A_MODEL = "a shipped one, your own package.module:function, or a folder of save_pretrained"
FILES = (".json", ".txt", ".npz", ".onnx", ".gguf", ".yaml", ".pt", ".pt2", ".pth", ".py")
BUSY = 0.25  # other programs' share of the cores above which timings are doubtful
IN_OPERATOR = "raised on device"  # begins the note that a runner gives to an error
NO_MEMORY = "not enough memory for a problem of this size"
TRACE_WRITTEN = "trace written to {}; open it at https://ui.perfetto.dev"


class UsageError(ValueError):
    """A command that cannot be carried out as given; the message says what to type."""


def one_line(text: str) -> str:
    """What an error says, whatever a file made of it: one line, of a limited length."""
    text = " ".join(text.split())
    if len(text) <= LIMITS.message:
        return text
    half = LIMITS.message // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"


def guarded(
    work: Callable[[], int],
    explain: Callable[[Exception], str | None],
    *,
    debug: bool = False,
    interrupted: str = "interrupted",
) -> int:
    """The exit code of ``work``; what ends it is one message, with ``debug`` the traceback too.

    ``explain`` says what to tell the user of an error; None: it is a defect of ours.
    """
    any_output()
    try:
        with interruptible(), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
            check_packages()
            code = work()
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        say(interrupted)
        return INTERRUPTED
    except Exception as error:
        return told(error, explain, debug=debug)


def told(error: Exception, explain: Callable[[Exception], str | None], *, debug: bool) -> int:
    """Say what ``guarded`` does of an error that is being handled; its exit code."""
    message = explain(error)
    if debug or message is None:
        traceback.print_exc()
    if message is None:
        say(A_DEFECT)
        return DEFECT
    say(f"error: {message}")
    return BAD_INPUT


def explain(error: Exception) -> str | None:
    """What to tell the user: a mistake of theirs has a class of ours, the machine's says itself."""
    is_ours = type(error).__module__.partition(".")[0] in PACKAGES
    if not is_ours and not isinstance(error, OSError | MemoryError):
        at = next((x for x in getattr(error, "__notes__", ()) if x.startswith(IN_OPERATOR)), None)
        if at is None:
            return raised_in_yours(error, "--debug") or None
        return one_line(
            f"{type(error).__name__}: {error}; {at}: does the module itself run on these inputs?"
        )
    return full_output(error) or one_line(str(error)) or NO_MEMORY


def raised_in_yours(error: Exception, more: str) -> str:
    """What an error says that code of the user's raised, and where; nothing if it is not theirs.

    ``more``: what shows the traceback.
    """
    if type(error).__module__.partition(".")[0] in PACKAGES:
        return ""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__")).split(".")[0]
        if package in PACKAGES:
            return ""
        # PyG writes code of its layers into temporary files.
        if is_yours(file) and is_yours(getattr(sys.modules.get(package), "__file__", None) or file):
            notes = "; ".join(["", *getattr(error, "__notes__", ())])
            return one_line(
                f"{type(error).__name__}: {error}; raised in code of yours, "
                f"{frame.f_code.co_qualname} ({file}:{line}){notes}; {more} shows more"
            )
    return ""


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends what is inside, wherever it comes.

    No exception passes through C code that calls Python (a callback of the compiler of the
    kernels, a destructor): Python reports it and goes on, and the Ctrl-C would be lost. It comes
    again a moment later, when that call is over.
    """
    report = sys.unraisablehook
    timers: list[threading.Timer] = []

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # A signal of its own, which also wakes what waits.
            again = signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
            timers.append(threading.Timer(0.05, *again))
            timers[-1].start()
        else:
            report(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    except Exception as error:
        # What a callback did not finish, e.g. a kernel that is half compiled, or a kernel's result.
        if timers or isinstance(error.__cause__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = report
        for timer in timers:  # what has ended is not interrupted
            timer.cancel()


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    print(json.dumps(value, indent=1, allow_nan=False))


def others_s() -> float | None:
    """Seconds that other programs worked so far on the cores of this one; None: unknown."""
    try:
        stat = Path("/proc/stat").read_text(encoding="ascii")
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):  # not Linux
        return None
    lines = [line.split() for line in stat.splitlines()]
    worked = (1, 2, 3, 6, 7, 8)  # not: idle, waiting for a disk
    ticks = sum(int(line[i]) for line in lines if line[0] in mine for i in worked)
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


@contextmanager
def says_if_busy() -> Iterator[None]:
    """Say in the end if other programs worked on the cores that were measured."""
    before_s, begun = others_s(), time.monotonic()
    yield
    after_s, took_s = others_s(), time.monotonic() - begun
    if before_s is None or after_s is None or took_s < 1:  # nothing was measured
        return
    busy, usable = (after_s - before_s) / took_s, len(os.sched_getaffinity(0))
    if busy > BUSY * usable:
        say(
            f"other programs kept {busy:.1f} of {usable} cores busy meanwhile: what was measured "
            "is too slow, and differs from run to run"
        )


def says_nothing_in_answers() -> AbstractContextManager[object]:
    """What anybody's code prints inside goes to standard error: answers are for machines."""
    return redirect_stdout(sys.stderr)


def search_here(spec: str | None) -> None:
    """Modules of the working directory are found where ``spec`` is ``package.module:name``."""
    if ":" in (spec or "") and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: it must not hide installed packages


def load_workload(spec: str) -> tuple[Any, Any]:
    """``(module, inputs)``; see ``placement.workloads.load``."""
    from placement import workloads

    search_here(spec)
    with says_nothing_in_answers():
        loaded: tuple[Any, Any] = workloads.load(spec)
    return loaded


def run_command(plan: str, spec: str) -> str:
    """What to type to run a plan of a workload."""
    from placement import workloads

    # Code of yours is not called on a plan's word: it is named again.
    model = [] if spec in workloads.names() else ["--model", spec]
    return shlex.join(["placement", "run", plan, *model])


def capture_workload(
    spec: str,
    report: Progress,
    mode: str = "inference",
    optimizer: str | None = None,
    pieces: tuple[float, ...] | None = None,
) -> OpGraph:
    """The graph of a workload, named after it; ``optimizer`` (``torch.optim``) is for training.

    With ``pieces``, the share of each, operators are cut where that pays.
    """
    report(f"loading {spec}", None)
    if mode != "training":
        module, inputs = load_workload(spec)
    else:
        module, inputs, loss, chosen = load_training(spec, optimizer)
    from placement.capturing import capture

    report(f"capturing {spec}", None)
    with says_nothing_in_answers():
        if mode != "training":
            graph = capture(module, inputs, name=spec)
            return graph if pieces is None else _in_pieces(graph, pieces, report)
        return capture(module, inputs, name=spec, mode="training", loss=loss, optimizer=chosen)


def _in_pieces(graph: OpGraph, shares: tuple[float, ...], report: Progress) -> OpGraph:
    from placement.pieces import split

    report(f"cutting operators of {graph.name}", None)
    cut = split(graph, shares)
    if cut is graph:
        say(f"no operator of {graph.name} is worth cutting in {len(shares)} pieces: all are whole")
    return cut


def pieces_of(text: str | None) -> tuple[float, ...] | None:
    """The share of each piece, of ``--pieces 2`` or ``--pieces 0.25,0.75``.

    Raises:
        UsageError: no numbers; PiecesError: out of range.
    """
    if text is None:
        return None
    from placement.pieces import shares_of

    try:
        ways = tuple(map(float, text.split(","))) if "," in text else int(text)
    except ValueError:
        raise UsageError(f"--pieces {text}: write a number, or shares as 0.25,0.75") from None
    return shares_of(ways)


def load_training(spec: str, optimizer: str | None) -> tuple[Any, Any, Any, Any]:
    """``(module, example, loss, optimizer)``; see ``placement.workloads.load_training``.

    Raises:
        UsageError: ``torch.optim`` has no such optimizer that trains with its default settings.
    """
    from placement import workloads

    search_here(spec)
    with says_nothing_in_answers():
        module, example, loss = workloads.load_training(spec)
    from torch import optim

    name = optimizer or OPTIMIZER
    kind: Any = getattr(optim, name, None)
    is_one = isinstance(kind, type) and issubclass(kind, optim.Optimizer)
    if not is_one or kind is optim.Optimizer:
        raise UsageError(f"--optimizer {name}: torch.optim has no such optimizer; e.g. AdamW, SGD")
    try:
        return module, example, loss, kind(module.parameters())
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"--optimizer {name}: not with its default settings ({error}); e.g. AdamW, SGD"
        ) from error


def adding(to: argparse._ActionsContainer) -> Callable[..., None]:
    """What adds arguments to a parser: ``add("--out FILE", "write it there")``, as help shows them.

    The third is the type of the value; ``bool`` is a flag, ``list`` may be given again.
    """
    words: dict[Any, dict[str, Any]] = {
        None: {}, bool: {"action": "store_true"}, list: {"action": "append"}
    }  # fmt: skip

    def add(shown: str, help: str | None = None, kind: Any = None, **more: Any) -> None:
        name, _, metavar = shown.partition(" ")
        more |= words.get(kind, {"type": kind}) | ({"metavar": metavar} if metavar else {})
        to.add_argument(name, help=help, **more)

    return add


def add_mode(parser: argparse.ArgumentParser) -> None:
    """``--mode`` and ``--optimizer`` for a workload."""
    add = adding(parser)
    add("--mode NAME", "inference or training; default: inference, or the file's")
    add("--optimizer NAME", f"a class of torch.optim, for training ({OPTIMIZER})")


def mode_of(args: argparse.Namespace) -> str:
    """The mode of a workload.

    Raises:
        UsageError: an unknown mode, or an optimizer for inference.
    """
    mode = args.mode or "inference"
    if mode not in ("inference", "training"):
        raise UsageError(f"--mode {mode}: must be inference or training")
    if args.optimizer is not None and mode != "training":
        raise UsageError(f"--optimizer {args.optimizer} is for --mode training")
    return mode


def say_if_predicted(name: str, problem: Problem) -> None:
    """Tell where times come from if nobody measured them."""
    predicted = problem.profile.predicted
    if predicted is not None and predicted.any():
        say(
            f"{name}: the times of {int(predicted.any(axis=1).sum())} of {problem.num_ops} "
            "operators are predicted from their description, not measured"
        )


def cluster_of(path: str | None) -> Cluster:
    """The cluster of a YAML file, or this machine."""
    from placement.cluster import Cluster

    return Cluster.detect() if path is None else Cluster.from_yaml(path)


def save_plan(plan: Plan, path: str) -> None:
    """Write a plan that took long to make; where that fails it is printed.

    Raises:
        UsageError: it cannot be written there.
    """
    from placement.tools.files import FileError

    try:
        plan.save(path)
    except FileError as error:
        print(plan.model_dump_json(indent=1))
        raise UsageError(f"{error}; the plan is on standard output instead") from error


def is_file(spec: str) -> bool:
    """Whether ``spec`` is an existing file rather than the name of a workload.

    Raises:
        UsageError: it looks like a file, but there is none.
    """
    if not looks_like_file(spec):
        return False
    if os.path.exists(spec):
        return True
    hint = "no such file or folder"
    if re.fullmatch(r"[\w-]+/[\w.-]+", spec) and Path(spec).suffix not in FILES:
        hint += (
            "; a model of the Hub is not downloaded here: save it, in Python "
            f"AutoModelForCausalLM.from_pretrained({spec!r}).save_pretrained('my_model'), and name "
            "that folder"
        )
    raise UsageError(f"{spec}: {hint}")


def check_is_model(spec: str) -> None:
    """Raises: UsageError, ``spec`` is the name of a file, where the name of a model is needed."""
    if looks_like_file(spec):
        from placement.tools.files import model_file

        raise UsageError(
            f"{spec}: "
            + (
                model_file(spec, b"")
                or f"a file, where a model is needed: {A_MODEL}; a file is planned: placement plan "
                f"{shlex.quote(spec)} "
                "--planner best_of"
            )
        )


def looks_like_file(spec: str) -> bool:
    """A name that no workload can have, or that of a file that is there.

    A folder is a workload: a model of transformers.
    """
    if os.path.isdir(spec):
        return False
    return "/" in spec or Path(spec).suffix in FILES or os.path.isfile(spec)


def check_outputs(*paths: str | None) -> None:
    """Raise ``FileError`` now, not after the work, for what could not be written then."""
    from placement.tools.files import check_writable

    for path in paths:
        if path is not None:
            check_writable(path)
