"""``optimize``: from a module to the fastest way found to run it here, in one call."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from placement import planners
from placement.capturing import capture
from placement.cluster import Cluster
from placement.costs.calibration import corrected
from placement.costs.fused import dealt_or, load_or_measure_compiled
from placement.costs.measure import check_here, load_or_measure
from placement.executor import Runner, equality
from placement.executor.runner import without_mode
from placement.executor.streamed import streaming_where_short
from placement.graph import OpGraph
from placement.objective import Objective
from placement.pieces import Moves, PiecesError, shares_of, split
from placement.plan import make_plan, parameters_of
from placement.plan.reached import reached
from placement.planners.residence import refitted, with_buffers
from placement.problem import Problem, Solution
from placement.profile import ProfileError
from placement.program import split_inputs, split_item
from placement.runs.ways import (
    ROUNDS,
    TorchCompiled,
    Way,
    alone,
    calls,
    difference,
    inferring,
    measure,
    one_by_one,
    timed,
    torch_compiled,
)
from placement.simulator import score
from placement.tools.compiler import missing_compiler
from placement.tools.named import meant
from placement.tools.progress import Progress, progress, say, says_when_compiling
from placement.tools.shown import count
from placement.tools.shown import seconds as shown
from placement.tools.threads import torch_threads

if TYPE_CHECKING:
    from placement.executor.loader import InputPipeline
    from placement.plan import Measured, Plan, Spread
    from placement.profile import Profile

PLANNER = "best_of"
# What else a plan or a device alone may be, and the attributes of ``Runner`` that say so.
_OPTIONS = ("cuda_graphs", "compiled")
_VARIANTS = {
    " as CUDA graphs": _OPTIONS[:1],
    ", compiled": _OPTIONS[1:],
    ", compiled, as CUDA graphs": _OPTIONS,
}
MODULE = ("plain", "compiled")  # ways that call the module


@dataclass(frozen=True)
class OptimizeParams:
    """The numbers of ``optimize``.

    Attributes:
        max_phases: replicas may take so many turns.
        least_batches: of a stream that tells a period.
        unlike: times as long as the profile says: other programs took turns on the cores.
        close: times the best device's prediction: another device may be the best one.
        longer: times as long as predicted: planned again with what that shows of the costs.
        worth: of the time of one device: several that take longer are not kept.
        compiling: times as long as planning may take, after which nothing more is compiled.
        captured: calls after which what can be one is a graph.
        least_told_s: below, waking threads takes as long as such a difference.
    """

    max_phases: int = 8
    least_batches: int = 8
    unlike: float = 1.5
    close: float = 2.0
    longer: float = 1.1
    worth: float = 0.95
    compiling: float = 12.0
    captured: int = 6
    least_told_s: float = 1e-3


PARAMS = OptimizeParams()


class OptimizeError(ValueError):
    """The module cannot be optimised as asked; the message says what to change."""


class NothingFits(OptimizeError):
    """No placement was found that fits into memory and can run."""


class OptimizedRunner(Runner):
    """A ``Runner`` that knows where it comes from.

    Attributes:
        measured: the ways to run the module that took turns: ``plan``, ``single`` (the best
            device alone, where the plan is another), ``plain`` (the module itself, with the
            threads that PyTorch has in this process) and ``compiled`` (the same by
            ``torch.compile``, frozen or not, whichever is faster: ``compiled_as`` says which).
            Each of the first two is as CUDA graphs, or compiled, where that computes the same and
            is clearly faster; ``cuda_graphs`` and ``compiled`` say whether what is kept is, and
            so does the plan.
        compiled_as: what ``torch.compile`` was asked for, and how long it took.
        kept: the fastest of them, which calls and streams go. Several devices are kept only
            where they are faster than one by 5 %, and by more than the measurements vary.
        plan: the better of ``plan`` and ``single``, with what was predicted and measured, also
            where ``kept`` is ``plain``; ``plan.save(path)``.
        planned: what the planner chose, before anything had run.
        reached: how much of what the machine can do that is, where a model does not fit a device.
    """

    plan: Plan
    planned: Plan
    reached: str = ""
    measured: Mapping[str, Measured]
    kept: str
    compiled_as: str = ""
    _alone_s: tuple[float, float]  # of the best device: by its profile, and as it ran
    _by_torch: TorchCompiled | None = None
    _module: Callable[..., Any] | None = None  # called itself, where PyTorch is the fastest
    _modes: Sequence[tuple[nn.Module, bool]] = ()  # of its parts: whether they were training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_changed = any(part.training is not mode for part, mode in self._modes)
        if self._module is None or is_changed or torch._C._is_any_autocast_enabled():
            # The plan sees no mode of after the capture, and refuses autocast.
            return super().__call__(*args, **kwargs)
        program = self.graph.program
        assert program is not None
        program.flatten_inputs(args, kwargs)  # refuses what a plan refuses
        devices = {x.device for x in program.example_tensors}
        if len(devices) == 1:  # as a plan's, inputs may be anywhere
            there = partial(Tensor.to, device=devices.pop())
            args, kwargs = pytree.tree_map_only(Tensor, there, (args, kwargs))
        outputs = self._module(*args, **kwargs)
        return pytree.tree_map_only(
            Tensor, without_mode, outputs, is_leaf=lambda x: isinstance(x, torch.Size)
        )

    def stream(self, loader: Any, **options: Any) -> Iterator[Any]:
        if self._module is None:
            return super().stream(loader, **options)
        return self._one_by_one(self.load_ahead(loader, **{"workers": 0} | options))

    def _one_by_one(self, items: InputPipeline) -> Iterator[Any]:
        with items:
            for item in items:
                self._flatten(item)  # refuses what a plan refuses
                args, kwargs = split_item(item)
                yield self(*args, **kwargs)

    def close(self) -> None:
        self._module = None
        super().close()


def optimize(
    module: nn.Module,
    inputs: Any,
    devices: Cluster | Sequence[str] | None = None,
    objective: str = "period",
    seconds: float = 10.0,
    *,
    quiet: bool = False,
    workload: str | None = None,
    compiled: bool | None = None,
    pieces: int | tuple[float, ...] | None = None,
) -> OptimizedRunner:
    """The module on the devices of this machine, where a planner placed it and a run agreed.

    Captures the module, measures every operator on every device (kept for the next call), plans
    with ``best_of``, checks that the results are the module's, and runs the plan, the best device
    alone and the plain module in turns, each of them compiled too. If a plan of several devices
    takes longer than predicted, it plans and runs once more, with costs corrected by what ran. If
    one device takes another time than its profile says, by half and more, it measures the operators
    again, once, and begins anew. Where several devices are not clearly faster than one, the runner
    uses that one. Where plain PyTorch, or ``torch.compile``, is the fastest, the runner calls the
    module itself. For ``latency``, whole operators of a chain cannot run at the same time: so all
    of this is done again with operators in ``pieces``, and the faster is kept. What came out is
    said on standard error.

    Args:
        module: in evaluation mode.
        inputs: example inputs, as ``placement.capture`` takes them.
        devices: a ``Cluster`` of this machine, or names of ``Cluster.detect()``; None: all.
        objective: ``period``, seconds between two results of a stream, or ``latency``, seconds of
            a call.
        seconds: most that planning takes, and about as much for running the ways in turns.
            Capturing, measuring a model for the first time, and compiling are not in it.
        quiet: say nothing.
        workload: ``package.module:function`` that makes the module, for the plan's file.
        compiled: whether compiled runs, and ``torch.compile``, take part. None: yes, where there is
            a compiler, until that took twelve times ``seconds``. What is compiled is kept for the
            next call; of ``torch.compile`` what PyTorch keeps.
        pieces: into how many operators may be cut, or the share of each piece, see
            ``placement.pieces.split``; 1: none is. None: two, for ``latency`` where two of the
            devices are CPUs of the same kind.

    Returns:
        OptimizedRunner: call it as the module, ``stream`` through it; a context manager. Its
        ``kept``, ``plan`` and ``measured`` say what was decided and why.

    Raises:
        OptimizeError: not a module, a module in training mode, an objective that cannot be
            measured, no time, results that differ, or nothing that fits.
        CaptureError: the module cannot be captured.
        ClusterError, ProfileError: no such device on this machine.
    """
    if not isinstance(module, nn.Module):
        raise OptimizeError(f"module is a {type(module).__name__}, not a torch.nn.Module")
    if module.training:
        raise OptimizeError(
            "the module is in training mode, where dropout and batch normalisation compute "
            "something else: call module.eval() first"
        )
    check_options(objective, seconds)
    cluster = cluster_of(devices)
    shares = _shares(pieces, objective, cluster)
    with progress(quiet) as report, says_when_compiling(quiet):
        report("capturing", None)
        graph = capture(module, inputs, name=workload)
        goal = Objective(objective)
        options: Any = {"report": report, "workload": workload, "compiled": compiled}

        def problem(graph: OpGraph, profile: Profile) -> Problem:
            return Problem(
                graph,
                *streaming_where_short(graph, cluster, profile),
                objective=goal,
                max_phases=PARAMS.max_phases if goal.is_throughput else 1,
            )

        runner, profile = optimized(
            graph, cluster, problem, inputs, seconds, module, quiet=quiet, **options
        )
        with ExitStack() as on_error:
            on_error.callback(runner.close)
            try:
                cut = graph
                if shares:
                    report("cutting operators", None)
                    compiles = compiled is not False and not missing_compiler()
                    with torch_threads(cluster.devices[0].threads):
                        moves = Moves.of(profile.links)
                        cut = split(graph, shares, moves=moves, compiled=compiles)
                if cut is not graph:
                    costs = problem(cut, load_or_measure(cut, cluster, progress=report))
                    options["by_torch"] = runner._by_torch
                    runner = _faster_of(runner, fastest(costs, inputs, seconds, module, **options))
            except (PiecesError, OptimizeError) as error:
                if pieces is not None:  # as nobody asked for them, what ran is the answer
                    raise
                if not quiet:
                    say(f"operators stay whole: {error}")
            on_error.pop_all()
    if not quiet:
        say(verdict(runner))
    return runner


def optimized(
    graph: OpGraph,
    cluster: Cluster,
    problem: Callable[[OpGraph, Profile], Problem],
    inputs: Any,
    seconds: float,
    module: nn.Module,
    *,
    quiet: bool = False,
    **options: Any,
) -> tuple[OptimizedRunner, Profile]:
    """``fastest`` of the ``problem`` with measured costs, which are measured again if in doubt."""
    report = options["report"]
    costs = load_or_measure(graph, cluster, progress=report)
    runner = fastest(problem(graph, costs), inputs, seconds, module, **options)
    if why := _doubt(runner):  # as after a busy hour
        runner.close()
        if not quiet:
            say(f"{why}: measuring the operators again")
        costs = load_or_measure(graph, cluster, again=True, progress=report)
        runner = fastest(problem(graph, costs), inputs, seconds, module, **options)
    return runner, costs


def _shares(
    pieces: int | tuple[float, ...] | None, objective: str, cluster: Cluster
) -> tuple[float, ...]:
    """Of each piece; empty: operators stay whole. Raises: PiecesError, out of range."""
    if pieces is None:
        kinds = [(d.model, d.threads) for d in cluster.devices if d.kind == "cpu"]
        pieces = 2 if objective == "latency" and len({*kinds}) < len(kinds) else 1
    return () if pieces == 1 else shares_of(pieces)


def _faster_of(whole: OptimizedRunner, cut: OptimizedRunner) -> OptimizedRunner:
    """The faster of two that ran one after another, each beside the plain module; closes the other.

    One device alone, which is compared with, has whole operators.
    """
    whole_s, cut_s = (
        median_s(x.measured[x.kept], x.plan.objective)
        / median_s(x.measured["plain"], x.plan.objective)
        for x in (whole, cut)
    )
    if cut.kept != "plan" or cut_s >= PARAMS.worth * whole_s:
        cut.close()
        return whole
    whole.close()
    way = "plan" if len(devices_of(whole.plan)) == 1 else "single"
    if way in whole.measured:  # else no device holds the module
        cut.measured = {**cut.measured, "single": whole.measured[way]}
    return cut


def fastest(
    problem: Problem,
    inputs: Any,
    seconds: float,
    module: nn.Module | None = None,
    *,
    report: Progress = lambda *_: None,
    workload: str | None = None,
    compiled: bool | None = False,
    by_torch: TorchCompiled | None = None,
) -> OptimizedRunner:
    """``optimize`` from the problem on: plans, and keeps what is the fastest when it runs.

    Args:
        module: whose results are to be equal, and which takes part itself; None: neither.
        by_torch: the module as ``torch.compile`` made it before.

    Raises:
        OptimizeError: results that differ, or nothing that fits.
    """
    report(f"planning with {PLANNER}", None)
    planner = planners.load(PLANNER, seconds=seconds / 2)  # perhaps twice
    told, problem = problem.cluster, with_buffers(problem)
    problem, solution = refitted(problem, planners.solve(planner, problem), told)
    planned = _plan(problem, workload, solution, planner)
    if problem.graph.program.is_random or (compiled is None and missing_compiler()):
        compiled = False  # where results are random nothing can be compared
    patience = Patience(
        np.inf if compiled else 0.0 if compiled is False else PARAMS.compiling * seconds
    )
    whole: dict[str, Callable[..., Any]] = {} if module is None else {"plain": inferring(module)}
    if module is not None and patience.is_left():
        with patience.spent():
            by_torch = by_torch or torch_compiled(module, inputs, problem.cluster, report)
        whole |= {} if by_torch is None else {"compiled": by_torch}

    costs = _compiled_costs(problem, patience, report)

    def run(plan: Plan, problem: Problem, compiles: bool) -> _Ran:
        runner = _runner(problem, plan)
        with ExitStack() as on_error:
            on_error.callback(runner.close)
            checked = module is not None and not problem.graph.program.is_random
            for _ in plan.assignments if checked else ():  # replicas take turns
                wrong = difference(runner, module, inputs)
                if wrong:
                    raise OptimizeError(f"the results differ from those of the module: {wrong}")
            each = whole, inputs, seconds / 2, patience, report
            ways, variants = _in_turns(problem, runner, plan, *each, compiles=compiles)
            on_error.pop_all()
        return _Ran(plan, runner, ways, variants)

    whole_ops = costs is None  # else what compiled runs take has a plan of its own
    ran = run(planned, problem, whole_ops)
    alone_s = _alone_s(planned, ran.ways)
    with ExitStack() as on_error:
        on_error.callback(ran.runner.close)
        if corrects := _with_costs_of(problem, planned, ran.ways):
            report(f"planning again with {PLANNER}", None)
            again = _plan(corrects, workload, planners.solve(planner, corrects), planner)
            if len(devices_of(again)) > 1 and again.assignments != planned.assignments:
                with suppress(torch.OutOfMemoryError):  # the plan that ran stays
                    both = ran, run(again, corrects, whole_ops)
                    ran, slower = sorted(both, key=lambda x: x.over_single)
                    slower.runner.close()
        if costs is not None:
            report(f"planning compiled runs with {PLANNER}", None)
            found = dealt_or(costs, planners.solve(planner, costs))
            known = replace(costs.profile, graph_fingerprint=problem.graph.fingerprint)
            own = replace(costs, graph=problem.graph, profile=known)  # plans know no kernels
            with suppress(NothingFits):  # with packed weights: the plan that ran stays
                again = _plan(own, workload, found, planner)
                if len(devices_of(again)) > 1:
                    ran, slower = sorted((ran, run(again, own, True)), key=lambda x: x.over_single)
                    slower.runner.close()
        on_error.pop_all()
    runner = _kept(problem, ran, workload)
    runner.planned, runner.reached = planned, reached(problem, solution)
    runner._alone_s = alone_s
    runner._by_torch, runner.compiled_as = by_torch, "" if by_torch is None else by_torch.what
    if runner.kept in MODULE:
        assert module is not None, "it took turns"
        runner.stop()
        runner._module = whole[runner.kept]
        runner._modes = [(part, part.training) for part in module.modules()]
    return runner


@dataclass(frozen=True)
class _Ran:
    """A plan that ran, its runner (not closed), and the ways that took turns with it, by name.

    ``variants``: what else a way may be, see ``_VARIANTS``, if it computes the same so.
    """

    plan: Plan
    runner: OptimizedRunner
    ways: Mapping[str, Measured]
    variants: Mapping[str, Measured]

    @property
    def over_single(self) -> float:
        """How many times as long as the best device alone the plan takes, each as it is fastest.

        Seconds, where no device can do it alone.
        """
        objective, every = self.plan.objective, {**self.ways, **self.variants}
        plan_s, single_s = (
            min((median_s(every[x], objective) for x in names if x in every), default=1.0)
            for way in ("plan", _best_single(self.ways, objective))
            for names in [[way, *(way + suffix for suffix in _VARIANTS)]]
        )
        return plan_s / single_s


class Patience:
    """Seconds that may be spent on compiling."""

    def __init__(self, left_s: float) -> None:
        self._left_s = left_s

    def is_left(self) -> bool:
        return self._left_s > 0

    @contextmanager
    def spent(self, counts: bool = True) -> Iterator[None]:
        """What is done inside is taken off, if it ``counts``."""
        began = time.monotonic()
        yield
        self._left_s -= (time.monotonic() - began) if counts else 0.0


def _kept(problem: Problem, ran: _Ran, workload: str | None) -> OptimizedRunner:
    """The fastest of the ways."""
    plan, runner, ways, objective = ran.plan, ran.runner, dict(ran.ways), ran.plan.objective
    options: dict[str, tuple[str, ...]] = {}  # by way, the attributes that make it what it is
    for suffix, variant in _VARIANTS.items():
        for name in ran.ways:
            other = ran.variants.get(name + suffix)
            if other and _is_faster(other, ways[name], objective, clearly=True):
                ways[name], options[name] = other, variant
    best = _best_single(ways, objective)
    named = {"plan": "plan", "single": best} | {str(name): name for name in MODULE}
    measured = {way: ways[name] for way, name in named.items() if name in ways}
    kept, several = "plan", len(devices_of(plan)) > 1
    if best and not _is_faster(measured["plan"], measured["single"], objective, clearly=several):
        runner.close()
        on = np.full(problem.num_ops, problem.cluster.index(best), np.int32)
        solution = Solution(on, float(score(problem, on[None])[0]))
        kept, plan = "single", _plan(problem, workload, solution)
        runner = _runner(problem, plan)
    if named[kept] in options:
        runner.stop()  # it is made so when it begins
        for option in options[named[kept]]:
            setattr(runner, option, True)
    facts: dict[str, Any] = {"measured": measured[kept]}
    facts |= {option: getattr(runner, option) for option in _OPTIONS}
    runner.plan = plan.model_copy(update=facts)
    took_s = {way: median_s(m, objective) for way, m in measured.items()}
    runner.measured, runner.kept = measured, kept
    quickest = min(MODULE, key=lambda way: took_s.get(way, np.inf))
    if took_s.get(quickest, np.inf) <= took_s[kept]:
        runner.kept = quickest
    return runner


def _best_single(ways: Mapping[str, Measured], objective: str) -> str:
    """The best device of those that took turns with the plan; empty: none did."""
    singles = ways.keys() - {"plan", *MODULE}
    return min(singles, key=lambda name: median_s(ways[name], objective), default="")


def _with_costs_of(problem: Problem, plan: Plan, ways: Mapping[str, Measured]) -> Problem | None:
    """The problem with the costs that the plan had when it ran, if it took longer than it was to.

    What a search finds first is what is predicted too short. None: there is nothing to learn.
    """
    told_s = getattr(plan.predicted, f"{plan.objective}_s")
    singles = ways.keys() - {"plan", *MODULE}
    unlike = (
        len(devices_of(plan)) > 1
        and median_s(ways["plan"], plan.objective) > PARAMS.longer * told_s
    )
    if not (unlike and singles):
        return None
    graph, cluster = problem.graph, problem.cluster
    rows = [np.full(problem.num_ops, cluster.index(name), np.int32) for name in singles]
    took = [(np.nan, median_s(ways[name], "period")) for name in singles]
    latency_s = np.nan if plan.phases else median_s(ways["plan"], "latency")
    rows.append(plan.placement(graph, cluster))
    took.append((latency_s, median_s(ways["plan"], "period")))
    profile = corrected(problem, rows, np.array(took))
    declared = {(x.src, x.dst): x for x in cluster.links}
    links = tuple(declared.get((x.src, x.dst), x) for x in profile.links)
    return replace(problem, profile=replace(profile, links=links))


def _compiled_costs(problem: Problem, patience: Patience, report: Progress) -> Problem | None:
    """The problem of compiled runs, in which operators of a kernel stay together.

    None: one device or GPUs, no time, or nothing that is compiled.
    """
    cluster = problem.cluster
    if len(cluster.devices) < 2 or not patience.is_left() or cluster.streaming:
        return None
    if any(device.kind != "cpu" for device in cluster.devices):
        return None
    with patience.spent(), suppress(ProfileError):
        found = load_or_measure_compiled(problem.graph, cluster, problem.profile, progress=report)
        return replace(problem, graph=found[0], profile=found[1])
    return None


def _is_faster(one: Measured, other: Measured, objective: str, *, clearly: bool) -> bool:
    """Whether one way is kept rather than the other.

    ``clearly``: by some percent, as a machine's speed drifts, and the middle halves are apart.
    """
    (a, a_iqr), (b, b_iqr) = (
        (x.median_s, x.iqr_s) for x in (_spread(m, objective) for m in (one, other))
    )
    return a < min(PARAMS.worth * b, b - (a_iqr + b_iqr) / 2) if clearly else a <= b


def verdict(runner: OptimizedRunner) -> str:
    """What was measured, and what follows."""
    plan = runner.plan
    took_s = {way: median_s(m, plan.objective) for way, m in runner.measured.items()}
    devices = devices_of(plan)
    used = " and ".join(devices) + (", in pieces" if plan.pieces else "")
    on = tuple(option for option in _OPTIONS if getattr(runner, option))
    graphs = next((x for x, options in _VARIANTS.items() if options == on), "")
    plain = f"plain PyTorch with {count(torch.get_num_threads(), 'thread')}"
    ways = {"plan": f"{'in turns ' if plan.phases else ''}on {used}{graphs}", "plain": plain}
    ways["compiled"] = runner.compiled_as
    if plan.planner.name != runner.planned.planner.name:
        ways |= {"single": f"on {used}{graphs}", "plan": "as it was planned"}
    elif "single" in took_s:
        ways["single"] = "on one"
    if runner.kept in MODULE:
        begin = f"{ways[runner.kept]} is the fastest here, so the runner calls the module itself"
    elif runner.kept == "single" and len(devices_of(runner.planned)) > 1:
        begin = f"several devices do not pay here, so {used} works alone{graphs}"
    elif len(devices) == 1:
        begin = f"the best plan is {used} alone{graphs}"
    else:
        faster = [
            f"{took_s[way] / took_s['plan']:.2f} times as fast as {name}"
            for way, name in [(x, ways[x]) for x in MODULE] + [("single", "one device")]
            if way in took_s
        ]
        begin = f"{len(devices)} devices are {', and '.join(faster)}"
    what = "a call" if plan.objective == "latency" else "between two results"
    each = ", ".join(f"{shown(s)} {ways[way]}" for way, s in took_s.items())
    doubt = _doubt(runner)
    if doubt:
        model = shlex.quote(plan.graph.workload or "package.module:function")
        doubt = (
            f"; {doubt}, so other programs used the machine during one of the two: again when they "
            f"have ended: placement optimize {model} --objective {plan.objective}"
        )
    limit = f"; as planned {runner.reached}" if runner.reached else ""
    return f"{begin}; measured {what}: {each}{limit}{doubt}"


def _alone_s(plan: Plan, ways: Mapping[str, Measured]) -> tuple[float, float]:
    """Seconds of the best device alone: by its profile, and as it ran; 0: neither is known.

    Operator by operator: profiles know neither CUDA graphs nor compiled runs.
    """
    if plan.fallback is None:
        return 0.0, 0.0
    name = plan.fallback.device
    took = ways.get("plan" if devices_of(plan) == [name] else name)
    if took is None:
        return 0.0, 0.0
    return getattr(plan.fallback, f"{plan.objective}_s"), median_s(took, plan.objective)


def _doubt(runner: OptimizedRunner) -> str:
    """That one device took another time than its profile says; empty: it did not."""
    told_s, one_s = runner._alone_s
    if told_s < PARAMS.least_told_s or max(one_s / told_s, told_s / one_s) < PARAMS.unlike:
        return ""
    return f"one device took {shown(one_s)}, by its profile {shown(told_s)}"


def devices_of(plan: Plan) -> list[str]:
    """Those that the plan uses, in the order of their first operators."""
    return list(dict.fromkeys(device for on in plan.assignments for device in on.values()))


def check_options(objective: str, seconds: float) -> None:
    """Raises: OptimizeError, an objective that cannot be measured, or no time."""
    able = [x.value for x in Objective if x.is_measurable]
    if objective not in able:
        raise OptimizeError(
            f"objective {objective!r} cannot be measured{meant(str(objective), able) or ';'} use "
            "period (seconds between two results: its inverse is the throughput) or latency "
            "(seconds of a call)"
        )
    if not (isinstance(seconds, int | float) and 0 < seconds < np.inf):
        raise OptimizeError(f"seconds = {seconds}: must be positive")


def cluster_of(devices: Cluster | Sequence[str] | None) -> Cluster:
    """The devices that are asked for; None: all of this machine.

    Raises:
        OptimizeError, ClusterError, ProfileError: no such device here.
    """
    if isinstance(devices, Cluster):
        check_here(devices)
        return devices
    here = Cluster.detect()
    if devices is None:
        return here
    names = [devices] if isinstance(devices, str) else devices
    if not isinstance(names, Sequence):
        raise OptimizeError(
            f"devices = {devices!r}: give a Cluster, or names as in {here.device_names}"
        )
    return replace(here, devices=tuple(here.devices[here.index(name)] for name in names))


def _plan(problem: Problem, workload: str | None, solution: Solution, planner: Any = None) -> Plan:
    """That of a planner, or of a single device. Raises: NothingFits, no answer does."""
    if not np.isfinite(solution.value_s):
        why = solution.stats.get("infeasible", "no placement that fits and can run was found")
        raise NothingFits(why)
    facts: Any = {"parameters": parameters_of(planner) if planner else {}, "workload": workload}
    name = PLANNER if planner else "single_device"
    return make_plan(problem, solution, planner=name, **facts)


def _runner(problem: Problem, plan: Plan) -> OptimizedRunner:
    graph, cluster = problem.graph, problem.cluster
    placement = plan.placement(graph, cluster)
    options = plan.run_options(graph, in_order=False)
    runner = OptimizedRunner(graph, cluster, placement, **options)
    runner.outputs_stay = bool(graph.program.comes_back)
    return runner


def _in_turns(
    problem: Problem,
    runner: Runner,
    plan: Plan,
    whole: Mapping[str, Callable[..., Any]],
    inputs: Any,
    seconds: float,
    patience: Patience,
    report: Progress,
    *,
    compiles: bool,
) -> tuple[dict[str, Measured], dict[str, Measured]]:
    """The plan, devices alone, by name, and what calls the ``whole`` module, timed in turns.

    And the variants that compute the same, each by the name of its way and its own.

    Args:
        compiles: the plan may be compiled, too.
    """
    short = bool(problem.cluster.streaming)  # of memory: a GPU has room for one at a time
    others = _singles(problem, plan, seconds / 4)
    close_s = PARAMS.close * (plan.fallback or plan.predicted).value_s
    expected_s = plan.fallback.period_s if plan.fallback else plan.predicted.latency_s
    fit = seconds / ((2 + len(others)) * (ROUNDS + 1) * max(expected_s, 1e-9))
    batches = int(np.clip(fit, PARAMS.least_batches, plan.num_microbatches))
    runners = {"plan": runner}
    variants: set[str] = set()
    with ExitStack() as stack:
        for name, is_close in others.items():
            single = stack.enter_context(alone(plan, runner, name))
            once, _ = calls(single, single, inputs, batches)
            if is_close or min(timed(once) for _ in range(2)) <= close_s:
                runners[name] = single
        for name, other in [] if short else [*runners.items()]:
            for suffix, options in _VARIANTS.items():
                # One device alone that matters has whole operators.
                is_beside = other is not runner and problem.graph.program.pieces is not None
                later = other is runner and not compiles and "compiled" in options
                if is_beside or later or not _may_be(options, other, patience):
                    continue
                variant = _runner(problem, plan) if other is runner else alone(plan, runner, name)
                for option in options:
                    setattr(variant, option, True)
                with patience.spent("compiled" in options):
                    is_same = _is_same(stack.enter_context(variant), other, inputs, report)
                if is_same:
                    runners[name + suffix] = variant
                    variants.add(name + suffix)
        ways = {name: calls(r, r, inputs, batches) for name, r in runners.items()}
        ways |= {name: _called(call, inputs, batches) for name, call in whole.items()}
        measured = one_by_one(ways, runners, report) if short else measure(ways, report)
    return measured, {name: measured.pop(name) for name in variants}


def _may_be(options: Sequence[str], runner: Runner, patience: Patience) -> bool:
    """Whether a variant has something to work on, and computes the same again."""
    kinds = {runner.cluster.devices[d].kind for d in np.unique(runner.placement)}
    if runner.graph.program.is_random or ("compiled" in options and not patience.is_left()):
        return False
    # What a GPU launches kernel by kernel is not worth compiling.
    return ("cuda" if "cuda_graphs" in options else "cpu") in kinds


def _is_same(variant: Runner, runner: Runner, inputs: Any, report: Progress) -> bool:
    """Whether something of it is what it is to be, and computes what others do."""
    args, kwargs = split_inputs(inputs)
    try:
        if variant.compiled:
            variant.compile(report)
        for _ in range(PARAMS.captured if variant.cuda_graphs else 1):
            outputs = pytree.tree_leaves(variant(*args, **kwargs))
    except RuntimeError:  # there is no room for both, or a library refuses
        return False
    expected = pytree.tree_leaves(runner(*args, **kwargs))
    tolerance = equality.Tolerance.of([*runner.graph.program.params, *expected], runner.cluster)
    does = {"cuda_graphs": variant.num_graphs, "compiled": variant.num_compiled}
    is_another = all(does[option] for option in _OPTIONS if getattr(variant, option))
    return is_another and not equality.difference(outputs, expected, tolerance)


def _singles(problem: Problem, plan: Plan, most_s: float) -> dict[str, bool]:
    """The best device by its profile, and of other kinds those that may be it; not the plan's.

    And a CPU that is by far no better by its profile (False), if it takes at most ``most_s`` there:
    others may have used it meanwhile, so two calls are to tell.
    """
    if plan.fallback is None:
        return {}
    devices = problem.cluster.devices
    able = [d for d in range(len(devices)) if problem.supported[:, d].all()]
    alone_s = score(problem, np.repeat(np.array(able, np.int32)[:, None], problem.num_ops, 1))
    best_of_kind: dict[tuple[str, str, int], tuple[str, bool]] = {}  # of devices that are alike
    for i in np.argsort(alone_s, kind="stable"):
        device = devices[able[i]]
        is_close = bool(alone_s[i] <= PARAMS.close * plan.fallback.value_s)
        asks = device.kind == "cpu" and all(kind != "cpu" for kind, *_ in best_of_kind)
        if is_close or (asks and alone_s[i] <= most_s):
            kind = device.kind, device.model, device.threads
            best_of_kind.setdefault(kind, (device.name, is_close))
    return {name: close for name, close in best_of_kind.values() if [name] != devices_of(plan)}


def _called(call: Callable[..., Any], inputs: Any, batches: int) -> Way:
    """A module as PyTorch runs it, with all of its threads: one call, and the mean of several."""
    args, kwargs = split_inputs(inputs)

    def once() -> None:
        call(*args, **kwargs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def often() -> float:
        return sum(timed(once) for _ in range(batches)) / batches

    return once, often


def _spread(measured: Measured, objective: str) -> Spread:
    spread = measured.latency_s if objective == "latency" else measured.period_s
    assert spread is not None, "both were measured"
    return spread


def median_s(measured: Measured, objective: str) -> float:
    """What was measured of the objective."""
    return _spread(measured, objective).median_s
