"""``placement plan``: let a planner decide."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import fields, is_dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from placement import cli
from placement.cli import serving

if TYPE_CHECKING:
    from placement.cli.serving import Served
    from placement.plan import Measured, Plan
    from placement.problem import Planner, Problem, Solution
    from placement.schedulers import Scheduler

EXAMPLE = """examples:
  placement plan resnet50 --planner local_search --seconds 10 --out plan.json
  placement plan bert_base --planner heft --objective latency --json
  placement plan graph.txt --devices 4 --bandwidth 1e9 --planner contiguous_dp
  placement plan model.onnx --devices 2 --dim batch=1 --planner heft --objective latency
  placement plan resnet50 --planner heft --measurements 100 --trials runs.jsonl
  placement plan resnet50 --planner heft --predict polynomial
  placement plan config.json --cluster home.yaml --objective decode --context 8192
  placement plan config.json --cluster home.yaml --context 8192 --experts counts.csv
  placement plan --without cpu:1 --start plan.json --out smaller.json

The machine-readable result (--json) is one object with the keys planner, objective, value_s,
lower_bound_s, seconds, evaluations, feasible, assignment. Where the planner or --scheduler decides
an order, value_s is of that order, and order has, for every device, its operators in turn, each
with the number of its micro-batch. Where micro-batches take turns (--max-phases) assignment is that
of the first phase, and phases has what each later one has elsewhere. With --measurements planner is
measured_search, and there also are measured_s, measured_single_s (of the best single device) and
measurements; where one device is the plan although several are predicted better, by less than
predictions err, split_value_s of these and margin; with the planner replicated also stages, each
with its devices; with the planner policy also network, the files of the networks that were asked,
or none. For a language model there also is memory: of every device weights_bytes, kv_cache_bytes,
buffers_bytes, needed_bytes and there_bytes; and prefill_s, decode_s, weights (how often these count
in value_s), interval (of both, within which nine in ten are), tokens_per_s and bounds: of both,
least_s, which no placement is below, and where the other seconds go, slow_s, turns_s and handing_s;
or largest_context where nothing fits. Where --experts parts layers, hot_experts has those that stay
with each layer.
"""


_FILE_OPTIONS = (
    ("devices", int, "K", "number of devices"),
    ("bandwidth", float, "BYTES_PER_S", "of the links between them"),
    ("memory", int, "BYTES", "memory of each"),
    ("flops", float, "FLOP_PER_S", "peak rate of each, for ONNX"),
    ("memory-bandwidth", float, "BYTES_PER_S", "of each one's memory, for ONNX"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    add = cli.adding(parser)
    add(
        "--planner NAME", "e.g. heft; a wrong one lists all (best_of; for language models layer_dp)"
    )
    configure_problem(parser, "?")
    add("--seconds", "budget of the planner", float)
    add("--evaluations", "budget of the planner", int)
    add("--seed", "of the planner's random numbers", int)
    add(
        "--margin SHARE",
        "one device is the plan unless several are predicted better by more (by default by "
        "what predictions of the profile err); 0: whatever the planner answers",
        float,
    )
    add(
        "--measurements K",
        "run K placements for real, the planner's first; the fastest is the plan",
        int,
    )
    add("--trials FILE", "keep these runs; after Ctrl-C the same command continues them")
    add("--scheduler NAME", "also fix the order of all micro-batches, e.g. searched or one_f_one_b")
    add("--start plan.json", "search from this plan, of the same problem")
    add(
        "--without DEVICE[,DEVICE]",
        "with --start: plan without devices that are gone; may be repeated",
        list,
    )
    add("--out FILE", "write the plan")
    add("--trace FILE", "write the predicted timeline")
    add(
        "options option=value",
        "an option of the planner, e.g. patience=2; a wrong one lists all",
        nargs="*",
        default=[],
    )


def configure_problem(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """The arguments that ``load_problem`` reads."""
    add = cli.adding(parser)
    add("workload", f"a model ({cli.A_MODEL}) or a problem file", nargs=nargs)
    add(
        "--objective NAME",
        "period, latency, energy, max_load, piecewise_latency; for a language model prefill, "
        "decode, serve; default: period, or the file's",
    )
    add("--cluster FILE", "devices (YAML); default: this machine")
    add("--profile FILE", "measured times; default: the saved ones, or measure now")
    add("--predict KIND", "predict times instead of measuring: roofline, polynomial or trees")
    add("--microbatches M", "micro-batches of a pipelined run (32)", int)
    add("--in-flight W", "so many micro-batches at a time (4)", int)
    add(
        "--max-phases K",
        "let micro-batches take turns between up to K placements, as replicas do (1)",
        int,
    )
    add(
        "--pieces K",
        "cut operators of a model into so many pieces where that pays; or shares: 0.25,0.75",
    )
    add(
        "--on NAME=DEVICE",
        "an operator, or a module and all below it, runs on that device only; * for any text; "
        "may be given again",
        list,
        default=[],
    )
    add(
        "--second-j J",
        "the objective energy minimises joules + J x seconds per micro-batch (0)",
        float,
    )
    cli.add_mode(parser)
    serving.configure(parser)
    group = parser.add_argument_group("a file that names no devices, or no times (ONNX)")
    for name, kind, unit, what in _FILE_OPTIONS:
        group.add_argument(f"--{name}", type=kind, metavar=unit, help=what)
    group.add_argument(
        "--dim",
        action="append",
        metavar="NAME=SIZE",
        help="size of a dimension that ONNX leaves open, e.g. batch=1; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    from placement import planners, schedulers
    from placement.planners.residence import refitted, with_buffers
    from placement.replan import NothingFits
    from placement.search.margin import unless_one_device
    from placement.tools.clock import clock

    cli.check_outputs(args.out, args.trace, args.trials)
    start = _start(args)
    _check_measurable(args, start)
    served = serving.of(args)
    args.planner = args.planner or ("layer_dp" if served else "best_of")
    planner = load_planner(args)
    cli.search_here(args.scheduler)
    scheduler = None if args.scheduler is None else schedulers.load(args.scheduler)
    with cli.progress() as report, cli.says_when_compiling():
        try:
            if start is None:
                problem = load_problem(args, report, served)
            else:
                problem = _left(args, start, report)
        except NothingFits as error:
            if args.json:
                cli.print_json({"feasible": False, "why": str(error)})
            cli.say(str(error))
            return cli.NO
        if start is not None:
            planner = _searching_from(start, planner, problem, args)
        told = problem.cluster if start is None else None  # sizes in a plan were chosen
        began = clock()
        if problem.cluster.streaming:
            report("sizing buffers", None)
            problem = with_buffers(problem)
        report(f"planning with {args.planner}", None)
        with cli.says_nothing_in_answers():
            solution = planners.solve(planner, problem)
            problem, solution = refitted(problem, solution, told)
        took = clock() - began
        if isfinite(solution.value_s):
            solution = _checked(args, problem, solution)
            if args.measurements is None:
                margin = getattr(planner, "margin", None) if args.margin is None else args.margin
                solution = unless_one_device(problem, solution, margin)
        measured = None
        if args.measurements is not None and isfinite(solution.value_s):
            solution, measured = _measured(args, problem, solution, report)
        planned = solution
        if scheduler is not None and isfinite(solution.value_s):
            report(f"ordering with {args.scheduler}", None)
            solution = _ordered(args, scheduler, problem, solution)
            measured = None  # what ran was not in this order
    plan = None
    if isfinite(solution.value_s) and (args.out or args.trace or not args.json):
        plan = _plan(args, planner, problem, solution, measured)
        if start is not None:
            plan = _of_same_graph(plan, start)
        _save(args, plan, problem, solution)
    if args.json:
        was = {} if start is None else {"was_value_s": start.predicted.value_s}
        more = served.answer(problem, solution) if served else {}
        cli.print_json(_answer(args, problem, solution, plan, took) | more | was)
    if not isfinite(solution.value_s):
        why = solution.stats.get("infeasible", "no placement that fits and can run was found")
        cli.say(served.why_not(problem) if served else why)
        return cli.NO
    if args.measurements is not None:
        _say_measured(solution)
    else:
        _say_kept(args, problem, planned)
        _say_longer(problem, planned)
    _say_network(args, problem, planned)
    if plan is not None:
        _show(args, plan, problem, solution, served)
    return cli.OK


def _start(args: argparse.Namespace) -> Plan | None:
    """The plan of ``--start``, whose problem is planned again, on its devices.

    Raises:
        UsageError: an option that says something else of the problem, or ``--start`` is missing.
    """
    from placement.cli.show import shipped
    from placement.plan import load_plan

    # argparse leaves what follows a flag to the options.
    words = [word for word in (args.workload, *args.options) if word is not None]
    args.workload = next((w for w in words if not re.match(r"\w+=", w)), None)
    args.options = [w for w in words if w != args.workload]
    if args.start is None:
        if args.without:
            raise cli.UsageError(f"--without {args.without[0]}: say from which plan, --start FILE")
        if args.workload is None:
            raise cli.UsageError(
                "the workload is missing: a model or a problem file, or a plan with --start; see: "
                "placement plan --help"
            )
        return None
    plan = load_plan(args.start)
    args.workload = args.workload or shipped(plan)
    if args.workload is None:
        raise cli.UsageError(
            f"{args.start} names no model that is shipped: name what it is of, a problem file or "
            "package.module:function, behind placement plan"
        )
    names = ["predict", "optimizer", "pieces", "objective"]
    if not cli.is_file(args.workload):  # of a file no plan says how it was read
        names += ["cluster", "mode", *_names_for_file()]
    for name in names:
        if getattr(args, name) is not None:
            raise cli.UsageError(
                f"--{name.replace('_', '-')}: with --start it is the plan's; leave it out"
            )
    if args.planner is None and not plan.phases:
        args.planner = "macro_search"
        if args.seconds is None and args.evaluations is None:
            args.seconds = 0.5  # its devices are gone: a line is waiting
    return plan


def _left(args: argparse.Namespace, start: Plan, report: cli.Progress) -> Problem:
    """The problem of ``start`` without the devices that are gone."""
    from placement.cli.replan import problem_of
    from placement.replan import remaining

    _check_settings(args)
    pins = _pins(args)
    without = [name.strip() for text in args.without or () for name in text.split(",")]
    if args.without and not any(without):
        raise cli.UsageError(
            f"--without names no device; devices are {[d.name for d in start.cluster.devices]}"
        )
    problem = problem_of(start, args.workload, args.profile, report, **_for_file(args))
    start.placement(problem.graph, problem.cluster)  # or it says what differs
    problem = _changed(args, problem)
    problem = remaining(problem, without) if without else problem
    return problem.pinned(pins) if pins else problem


def _searching_from(
    start: Plan, planner: Any, problem: Problem, args: argparse.Namespace
) -> Planner:
    """The planner with what ``start`` decided as its first placement, as far as it may stay.

    Raises:
        UsageError: it does not begin with a placement.
    """
    from placement.replan import Kept
    from placement.search.planner import options_of

    if "start" in options_of(planner):
        number = {name: d for d, name in enumerate(problem.cluster.device_names)}
        stay = [
            name if name in number and problem.supported[n, number[name]] else ""
            for n, name in enumerate(start.assignment.values())
        ]
        return replace(planner, start=Kept(tuple(stay)))
    if not start.phases:
        raise cli.UsageError(
            f"--start is for a planner that searches from a placement, e.g. macro_search or "
            f"local_search; {args.planner} does not"
        )
    return planner


def _of_same_graph(plan: Plan, start: Plan) -> Plan:
    """The plan with the graph of ``start``, of which a problem file knows less."""
    from placement.plan import whole_modules

    parameters = plan.planner.parameters | {"start": start.planner.name}
    changed: dict[str, Any] = {
        "planner": plan.planner.model_copy(update={"parameters": parameters})
    }
    if start.graph.modules:
        where = whole_modules(start.graph.modules, list(plan.assignment.values()))
        changed |= {"graph": start.graph, "device_map": where}
    return plan.model_copy(update=changed)


def _check_measurable(args: argparse.Namespace, start: Plan | None) -> None:
    """Refuse what cannot run before anything that takes long.

    Raises:
        UsageError: a file instead of a model, devices that are not here, or no budget.
    """
    if args.measurements is None:
        if args.trials is not None:
            raise cli.UsageError(f"--trials {args.trials} is for --measurements")
        return
    if args.measurements < 1:
        raise cli.UsageError(f"--measurements {args.measurements} must be positive")
    if cli.is_file(args.workload):
        raise cli.UsageError(f"--measurements is for models; {args.workload!r} is a problem file")
    if args.objective not in (None, "period", "latency"):
        raise cli.UsageError(
            f"--measurements is for --objective period or latency, not {args.objective}"
        )
    phases = args.max_phases or (1 if start is None else len(start.assignments))
    if phases > 1:
        raise cli.UsageError(
            f"--max-phases {phases}: --measurements moves operators of all micro-batches "
            "alike: use --max-phases 1 with it, or leave --measurements out"
        )
    away = [d.name for d in cli.cluster_of(args.cluster).devices if d.like is not None]
    if away:
        raise cli.UsageError(f"--measurements is for devices that are here; {away} are described")


def _checked(args: argparse.Namespace, problem: Problem, solution: Solution) -> Solution:
    """The answer as the simulator sees it; say so where the planner sees it otherwise."""
    from placement.simulator import as_simulated

    true = as_simulated(problem, solution)
    wrong = [
        f"{what} = {claimed} (simulator: {value})"
        for what, claimed, value in (
            ("value_s", solution.value_s, true.value_s),
            ("lower_bound_s", solution.lower_bound_s, f"at most {true.value_s}"),
        )
        if claimed != getattr(true, what)
    ]
    if wrong:
        cli.say(
            f"warning: planner {args.planner!r} answered {' and '.join(wrong)}; the simulator's "
            "word counts. placement.testing.check_planner checks a planner of yours"
        )
    return true


def _ordered(
    args: argparse.Namespace, scheduler: Scheduler, problem: Problem, solution: Solution
) -> Solution:
    """The answer in the order of the scheduler, with the value that it has in that order."""
    from placement.simulator import as_simulated

    phases, count = len(np.atleast_2d(solution.placement)), problem.num_microbatches
    if count % phases:
        raise cli.UsageError(
            f"--scheduler {args.scheduler}: an order of {count} micro-batches is run again and "
            f"again, and the answer of {args.planner} has {phases} phases: add --microbatches "
            f"{count + -count % phases}, or --max-phases 1"
        )
    with cli.says_nothing_in_answers():
        schedule = scheduler(problem, solution.placement, problem.num_microbatches)
    why = f"the placement does not fit in the order of {args.scheduler}"
    stats = {**solution.stats, "infeasible": why}  # is said only if it is so
    return as_simulated(problem, replace(solution, schedule=schedule, stats=stats))


def _measured(
    args: argparse.Namespace, problem: Problem, solution: Solution, report: cli.Progress
) -> tuple[Solution, Measured]:
    """What running placements for real makes of the planner's answer, and the runs of that."""
    import platform

    from placement.executor import Executor
    from placement.plan import Measured, Spread, now
    from placement.runs.measured_search import search_measured
    from placement.runs.trials import Trials

    trials = Trials(problem, Executor(problem), measurements=args.measurements, path=args.trials)
    fastest = search_measured(trials, solution.placement, seed=args.seed or 0, progress=report)
    runs = trials.samples.of(fastest.placement)
    # The number that is said and compared: without drift, which a median of few runs has.
    spread = Spread(median_s=fastest.stats["measured_s"], iqr_s=Spread.of(runs).iqr_s)
    measured = Measured(
        **{f"{problem.objective}_s": spread},
        n=len(runs),
        when=now(),
        machine=platform.node()[:200],
    )
    return replace(fastest, lower_bound_s=solution.lower_bound_s), measured


def _say_measured(solution: Solution) -> None:
    took_s, single_s = solution.stats["measured_s"], solution.stats["measured_single_s"]
    text = f"measured {cli.seconds(took_s)} in {solution.stats['measurements']} runs"
    if isfinite(single_s):
        text += f"; the best single device {cli.seconds(single_s)}, {single_s / took_s:.2f} times"
    cli.say(text)


def _say_kept(args: argparse.Namespace, problem: Problem, solution: Solution) -> None:
    """Where a planner's answer is better, but not by more than predictions err."""
    split_s = solution.stats.get("split_value_s")
    best_s = solution.stats.get("best_value_s", solution.value_s) if split_s is None else split_s
    if split_s is None and best_s >= solution.value_s:
        return
    kept = "the baseline's placement: the search's"
    if split_s is not None:
        kept = f"one device: what {args.planner} answers, on several,"
    better = 1 - best_s / (solution.value_s + problem.called_s(solution.placement))
    cli.say(
        f"kept {kept} is predicted {abs(better):.1%} {'better' if better > 0 else 'worse'}, and "
        f"the calibration error is {solution.stats['margin']:.1%}; --margin 0 takes it, "
        "--measurements 40 decides by running"
    )


def _say_longer(problem: Problem, solution: Solution) -> None:
    """Where items of a long stream take longer: the last of a short one have nobody behind."""
    from placement.objective import Objective
    from placement.simulator import score

    count, long = problem.num_microbatches, 512
    if problem.objective is not Objective.PERIOD or count >= long or not solution.value_s:
        return
    stream = replace(problem, num_microbatches=long)
    more = float(score(stream, solution.placement[None])[0]) / solution.value_s - 1
    if more > 0.03:  # what is worth a line
        cli.say(
            f"in a stream of {long} items each takes {more:.0%} longer than in one of "
            f"{count}, which this plan is for; --microbatches {long} plans for it"
        )


def _say_network(args: argparse.Namespace, problem: Problem, solution: Solution) -> None:
    """Where the learned planner had nothing that was trained."""
    if solution.stats.get("network") == "none":
        cli.say(
            f"no network is involved for {problem.objective}: a search by hand-written rules "
            "decides; policy=FILE takes a policy that you have trained (placement-train), or its "
            "name one that ships (docs/policies.md)"
        )


def _plan(
    args: argparse.Namespace,
    planner: Planner,
    problem: Problem,
    solution: Solution,
    measured: Measured | None,
) -> Plan:
    from placement.plan import make_plan, parameters_of

    parameters = parameters_of(planner)
    if args.measurements is not None:
        parameters = {"start": {"planner": args.planner, **parameters}}
        parameters |= {"measurements": args.measurements, "seed": args.seed or 0}
    return make_plan(
        problem,
        solution,
        planner=_decided(args),
        parameters=parameters,
        workload=None if problem.graph.program is None else args.workload,
        measured=measured,
    )


def _save(args: argparse.Namespace, plan: Plan, problem: Problem, solution: Solution) -> None:
    """Files come before talk: whoever reads that may have gone."""
    if args.out:
        cli.save_plan(plan, args.out)
    if args.trace:
        from placement.report.trace import write_trace
        from placement.simulator import simulate

        timeline = simulate(problem, solution.placement, solution.schedule)
        write_trace(args.trace, [timeline], problem.graph.op_name)


def _show(
    args: argparse.Namespace,
    plan: Plan,
    problem: Problem,
    solution: Solution,
    served: Served | None,
) -> None:
    from placement.cli.show import show_plan
    from placement.plan.reached import reached

    if not args.json:
        show_plan(plan)
        if served:
            served.table(problem, solution)
            if command := served.check(plan):
                print(f"to check it: {command}")
        elif line := reached(problem, solution):
            print(line)
    if args.out:
        here = problem.graph.program is not None and not plan.missing_devices()
        then = f"; next: {cli.run_command(args.out, args.workload)}" if here else ""
        if served:  # there is nothing that could run here
            to = served.runs_in(plan)
            out = {"vllm": "vllm.env", "llama_cpp": "llama.ot"}[to]
            then = f"; next: placement export {shlex.quote(args.out)} --to {to} --out {out}"
            then += " (--list: others)"
        cli.say(f"plan written to {args.out}{then}")
    if args.trace:
        cli.say(cli.TRACE_WRITTEN.format(args.trace))


def _decided(args: argparse.Namespace) -> str:
    """Who chose: with measurements their search, which only began with the planner's answer."""
    return args.planner if args.measurements is None else "measured_search"


def load_planner(args: argparse.Namespace) -> Planner:
    """The planner with its options; budget and seed go to planners that have such an option."""
    from placement import planners

    check_budget(args)
    cli.search_here(args.planner)
    options = dict(option(text) for text in args.options)
    kind = planners.find(args.planner)
    known = {f.name for f in fields(kind)} if is_dataclass(kind) else set()
    for key in ("seconds", "evaluations", "seed", "margin"):
        value = getattr(args, key, None)
        if value is None:
            continue
        if key in known:
            options[key] = value
        elif key != "margin":  # which the command knows
            cli.say(f"planner {args.planner!r} has no {key}: --{key} {value} is not used")
    return planners.load(args.planner, **options)


def check_budget(args: argparse.Namespace) -> None:
    """Raises: UsageError, ``--seconds``, ``--evaluations`` or ``--seed`` out of range."""
    for key in ("seconds", "evaluations"):
        value = getattr(args, key)
        if value is not None and not (value > 0 and isfinite(value)):
            raise cli.UsageError(
                f"--{key} {value} must be positive and finite; leave it out for no limit"
            )
    if args.seed is not None and args.seed < 0:
        raise cli.UsageError(f"--seed {args.seed} must be at least 0")
    margin = getattr(args, "margin", None)
    if margin is not None and not 0 <= margin < 1:
        raise cli.UsageError(f"--margin {margin} must be a share, 0 <= margin < 1")


def load_problem(args: argparse.Namespace, report: cli.Progress, served: Served | None) -> Problem:
    """The problem of the arguments, with what they pin to a device there."""
    pins = _pins(args)
    problem = _problem(args, report, served)
    return problem.pinned(pins) if pins else problem


def _pins(args: argparse.Namespace) -> dict[str, str]:
    """Device by operator or module, of ``--on``. Raises: UsageError, it is no such pair."""
    wrong = [text for text in args.on if not all(text.rpartition("="))]
    if wrong:
        raise cli.UsageError(f"--on {wrong[0]!r}: write NAME=DEVICE, as encoder.layer.0=cpu:0")
    return {name: device for name, _, device in (text.rpartition("=") for text in args.on)}


def _problem(args: argparse.Namespace, report: cli.Progress, served: Served | None) -> Problem:
    """The problem in a file, or of a workload on a cluster, measured where it has not been."""
    if served:
        problem = served.load()
        cli.say_if_predicted(args.workload, problem)
        return problem
    _check_settings(args)
    if cli.is_file(args.workload):
        problem = _in_file(args)
        cli.say_if_predicted(args.workload, problem)
        return _changed(args, problem)
    for name in _names_for_file():
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise cli.UsageError(f"--{option} is for problem files; {args.workload!r} is none")
    return _changed(args, _of_workload(args, report))


def _names_for_file() -> list[str]:
    """Arguments that are for a file only."""
    return [*(name.replace("-", "_") for name, *_ in _FILE_OPTIONS), "dim"]


def _for_file(args: argparse.Namespace) -> dict[str, Any]:
    """What the arguments say that a file does not, as ``importers.load`` takes it."""
    options = {name: getattr(args, name) for name in ("mode", *_names_for_file())}
    options["dims"] = _dims(options.pop("dim"))
    options["cluster"] = None if args.cluster is None else cli.cluster_of(args.cluster)
    return options


def _check_second_j(args: argparse.Namespace, objective: str) -> None:
    if args.second_j is not None and objective != "energy":
        raise cli.UsageError(
            f"--second-j {args.second_j:g} is for --objective energy, not {objective}"
        )


def _changed(args: argparse.Namespace, problem: Problem) -> Problem:
    """The problem with the numbers that were given."""
    chosen = {
        "num_microbatches": args.microbatches,
        "max_in_flight": args.in_flight,
        "second_j": args.second_j,
        "max_phases": args.max_phases,
    }
    _check_second_j(args, problem.objective)
    return replace(problem, **{key: x for key, x in chosen.items() if x is not None})


def _in_file(args: argparse.Namespace) -> Problem:
    from placement import importers

    if args.profile is not None:
        raise cli.UsageError("--profile is for workloads; a problem file has its own")
    for name in ("predict", "optimizer", "pieces"):
        if getattr(args, name) is not None:
            raise cli.UsageError(f"--{name} is for workloads; {args.workload!r} is a file")
    return importers.load(args.workload, objective=args.objective, **_for_file(args))


def _of_workload(args: argparse.Namespace, report: cli.Progress) -> Problem:
    """With times that are given, predicted, or measured here where they have not been."""
    from placement.costs import predictors
    from placement.objective import Objective
    from placement.problem import Problem
    from placement.profile import Profile

    mode = cli.mode_of(args)
    # Everything that may be mistaken comes before what takes long.
    if args.profile is not None and args.predict is not None:
        raise cli.UsageError("--predict and --profile: times are either predicted or measured")
    cli.search_here(args.predict)
    pieces = cli.pieces_of(args.pieces)
    method = None if args.predict is None else predictors.load(args.predict)
    profile = None if args.profile is None else Profile.load(args.profile)
    cluster = cli.cluster_of(args.cluster)
    objective = Objective(args.objective or Objective.PERIOD)
    _check_second_j(args, objective)
    if profile is not None:
        profile = profile.for_cluster(cluster)
    if pieces is not None and mode == "training":
        raise cli.UsageError("--pieces is for inference: leave it out with --mode training")
    graph = cli.capture_workload(args.workload, report, mode, args.optimizer, pieces)
    if method is not None:
        from placement.costs.measure_within import predict_here

        report(f"predicting with {args.predict}", None)
        profile = predict_here(graph, cluster.workers, method)
        profile = profile.for_cluster(cluster) if cluster.streaming else profile
        cli.say_if_predicted(args.workload, Problem(graph, cluster, profile))
    elif profile is None:
        from placement.costs.measure import load_or_measure
        from placement.executor.streamed import streaming_where_short

        with cli.says_if_busy():
            profile = load_or_measure(graph, cluster, progress=report)
        if not objective.is_analytic:
            cluster, profile = streaming_where_short(graph, cluster, profile)
    return Problem(graph, cluster, profile, objective=objective)


def _check_settings(args: argparse.Namespace) -> None:
    """What a problem would refuse too, but only once it is captured and measured.

    Raises:
        UsageError: an unknown objective, or a number out of range.
    """
    from placement.objective import Objective
    from placement.tools.limits import MOST
    from placement.tools.named import meant

    if args.objective is not None and args.objective not in list(Objective):
        near = meant(args.objective, map(str, Objective)) or ";"
        names = ", ".join(Objective)
        raise cli.UsageError(f"--objective {args.objective} is unknown{near} use one of {names}")
    for option, value in (("--microbatches", args.microbatches), ("--in-flight", args.in_flight)):
        if value is not None and not 1 <= value <= cli.LIMITS.batches:
            raise cli.UsageError(f"{option} {value}: must be from 1 to {cli.LIMITS.batches:,}")
    if args.max_phases is not None and not 1 <= args.max_phases <= MOST.phases:
        raise cli.UsageError(f"--max-phases {args.max_phases}: must be from 1 to {MOST.phases}")
    if args.second_j is not None and not 0 <= args.second_j < float("inf"):
        raise cli.UsageError(f"--second-j {args.second_j}: joules must be a number of at least 0")


def _dims(words: list[str] | None) -> dict[str, int] | None:
    if words is None:
        return None
    dims = {}
    for text in words:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal():
            raise cli.UsageError(f"--dim {text}: give a name and a size, as in --dim batch=1")
        dims[name] = int(size)
    return dims


def option(text: str, of: str = "planner") -> tuple[str, Any]:
    """``key=value`` as a pair; ``of`` is who takes it."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise cli.UsageError(f"{text!r}: {of} options are given as option=value")
    return key, value


def _answer(
    args: argparse.Namespace, problem: Problem, solution: Solution, plan: Plan | None, took: float
) -> dict[str, Any]:
    """What machines read; the keys are a contract. A ``plan`` has the bound."""
    from placement.plan import proved_bound_s

    bound_s = plan.lower_bound_s[problem.objective] if plan else proved_bound_s(problem, solution)
    took_s = float(solution.stats.get("seconds", took))
    order, devices = solution.schedule, problem.cluster.device_names
    names = ["measured_s", "measured_single_s", "measurements", "network"]
    names += ["replicated_period_s", "stages", "turns", "split_value_s", "margin"]
    measured = {key: solution.stats[key] for key in names if key in solution.stats}
    if not isfinite(measured.get("measured_single_s", 0.0)):
        measured["measured_single_s"] = None
    return {
        "planner": _decided(args),
        "objective": args.objective or problem.objective,
        **decision(problem, solution, lower_bound_s=bound_s, seconds=took_s),
        **({} if order is None else {"order": order.named(problem.graph, devices)}),
        **measured,
    }


def decision(problem: Problem, solution: Solution, **facts: float) -> dict[str, Any]:
    """Of an answer for machines: value, ``facts``, and where operators are, phases as in a plan."""
    devices, names = problem.cluster.device_names, problem.graph.op_name
    phases = np.atleast_2d(solution.placement)
    feasible = isfinite(solution.value_s)
    answer = {
        "value_s": float(solution.value_s) + problem.called_s(phases) if feasible else None,
        **facts,
        "evaluations": solution.stats.get("evaluations"),
        "feasible": feasible,
        "assignment": {op: devices[d] for op, d in zip(names, phases[0].tolist(), strict=True)},
    }
    later = [
        {names[n]: devices[phase[n]] for n in np.flatnonzero(phase != phases[0]).tolist()}
        for phase in phases[1:]
    ]
    return answer | ({"phases": later} if later else {})
