"""``placement run --distributed``: the devices of a plan spread over processes."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from placement import cli
from placement.cli.ranks import spawn
from placement.cli.ways import answered, differs, model_of, trace_of
from placement.runs.ways import alone, calls, difference, measure

if TYPE_CHECKING:
    from placement.executor.distributed_world import World
    from placement.plan import Plan

_LOCAL = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a rank that ends is our message to write
}


def run(args: argparse.Namespace, plan: Plan, batches: int) -> int:
    """As a rank that ``torchrun`` or ``spawn`` has started; or start all of them here.

    Exit code 1: the results differ from the plain module's, or a rank failed.
    """
    if args.weights and plan.graph.mode == "training":
        raise cli.UsageError("--weights is for inference: training starts from the model's values")
    if args.against_single_device and (args.weights or plan.graph.mode == "training"):
        what = "--weights" if args.weights else "training"
        raise cli.UsageError(
            f"--against-single-device: not with --distributed and {what}; a run without "
            "--distributed measures it"
        )
    return _rank(args, plan, batches) if "RANK" in os.environ else _spawn(args, plan)


def _spawn(args: argparse.Namespace, plan: Plan) -> int:
    model_of(plan, args.model)  # or else every rank would say so
    if args.weights:
        from placement.executor.distributed import opened

        opened(args.weights)
    devices = [d.name for d in plan.cluster.devices]
    count = len(devices) if args.processes is None else args.processes
    if not 1 <= count <= len(devices):
        raise cli.UsageError(
            f"--processes {count}: the plan has {len(devices)} devices, and each process needs "
            f"one of its own: give from 1 to {len(devices)}"
        )
    missing = plan.missing_devices()
    if missing:
        raise cli.UsageError(
            f"this machine cannot run the plan alone: {'; '.join(missing)}. On every host: "
            f"{more_hosts(args)}"
        )
    code = spawn(count, _words(args), _LOCAL)
    if code == cli.OK:
        cli.say(f"for more hosts, on each of them: {more_hosts(args)}")
    return code


def _words(args: argparse.Namespace) -> list[str]:
    """What each rank is to do, as it would be typed."""
    words = ["run", args.plan, "--distributed", "--timeout", f"{args.timeout:g}"]
    for name in ("model", "batches", "trace", "out", "wandb", "weights"):
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    flags = ("against_single_device", "json", "debug")
    return words + [f"--{x.replace('_', '-')}" for x in flags if getattr(args, x, False)]


def more_hosts(args: argparse.Namespace) -> str:
    """The command for each of several hosts."""
    return (
        "torchrun --nnodes HOSTS --nproc-per-node PROCESSES --rdzv-backend c10d "
        f"--rdzv-endpoint FIRST_HOST:29500 -m placement {shlex.join(_words(args))}"
    )


def _rank(args: argparse.Namespace, plan: Plan, batches: int) -> int:
    from placement.executor.distributed import direct, pin
    from placement.executor.distributed_world import RankError, World

    cluster = plan.cluster.build()
    pin(cluster)
    world = World.join(args.timeout, direct(cluster))

    def ended(*_: object) -> None:
        # By torchrun, because another rank ended: why, is known in a moment.
        raise world.why(2.0) or RankError(f"rank {world.rank} was told to end")

    before = signal.signal(signal.SIGTERM, ended)
    try:
        with world, cli.progress(quiet=world.rank != 0) as report:
            work = _train if plan.graph.mode == "training" else _infer
            return work(args, plan, batches, world, report)
    except RankError as error:
        if world.speaks:
            cli.say(f"the run has ended: {error}")
        code = cli.NO
    except Exception as error:
        code = cli.told(error, cli.explain, debug=args.debug)
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait for a rank which is gone must not keep this one


def _infer(
    args: argparse.Namespace, plan: Plan, batches: int, world: World, report: cli.Progress
) -> int:
    from placement.executor.distributed import DistributedRunner
    from placement.executor.distributed_world import RankError

    report("loading and capturing the model", None)
    graph, module, inputs = _model(args, plan)
    cluster = plan.cluster.build()
    place = plan.placement(graph, cluster)

    def make(*, in_order: bool = False, record: bool = False) -> DistributedRunner:
        options = plan.run_options(graph, in_order=in_order)
        return DistributedRunner(graph, cluster, place, world=world, record=record, **options)

    if args.weights:
        from placement.executor.distributed import with_weights

        graph = with_weights(graph, args.weights, make().own_params())
    runner = make()
    if world.rank:  # one run after the other, as rank 0 calls them
        runner.serve()
        if plan.order is not None:
            make(in_order=True).serve()
        if args.trace:
            make(in_order=True, record=True).serve()
        return cli.OK
    single = plan.fallback.device if plan.fallback else None
    with ExitStack() as runners:
        runners.enter_context(runner)
        compared = module is not None and not graph.program.is_random
        if compared and (wrong := difference(runner, module, inputs)):
            raise RankError(differs(args, "the plain module", wrong))
        ways = {"plan": calls(runner, runner, inputs, batches)}
        if args.against_single_device and single:
            other = runners.enter_context(alone(plan, runner, single))
            ways["single"] = calls(other, other, inputs, batches)
        measured = measure(ways, report)
    if plan.order is not None:
        with make(in_order=True) as ordered:
            _, often = calls(ordered, ordered, inputs, batches)
            again = measure({"plan": (lambda: None, often)}, report)
        followed = {"period_s": again["plan"].period_s}
        measured["plan"] = measured["plan"].model_copy(update=followed)
    trace = None
    if args.trace:
        report("recording a trace", None)
        with make(in_order=True, record=True) as recorded:
            trace = trace_of(recorded, lambda: list(recorded.stream([inputs] * batches)), batches)
    return answered(args, plan, measured, trace, compared=compared)


def _model(args: argparse.Namespace, plan: Plan) -> tuple[Any, Any, Any]:
    """Graph, module and inputs; with ``--weights`` no module, and if possible never its values."""
    import torch

    from placement.capturing import capture
    from placement.program import inputs_from_spec

    name = model_of(plan, args.model)
    if args.weights:
        with torch.device("meta"):
            module, inputs = cli.load_workload(name)
        graph = capture(module, inputs)
        if plan.graph_differences(graph):  # some models export otherwise without values
            module, inputs = cli.load_workload(name)
            graph = capture(module, inputs)
        return graph, None, inputs_from_spec(plan.graph.input_spec or {})
    module, inputs = cli.load_workload(name)
    return capture(module, inputs), module, inputs


def _train(
    args: argparse.Namespace, plan: Plan, batches: int, world: World, report: cli.Progress
) -> int:
    from placement.capturing import capture
    from placement.cli import train
    from placement.executor.distributed import DistributedTrainer
    from placement.executor.distributed_world import RankError

    report("loading and capturing the model", None)
    module, example, loss, optimizer = cli.load_training(
        model_of(plan, args.model), plan.graph.optimizer
    )
    graph = capture(module, example, mode="training", loss=loss, optimizer=optimizer)
    cluster = plan.cluster.build()
    place = plan.placement(graph, cluster)

    def make(*, in_order: bool, record: bool = False) -> DistributedTrainer:
        options = plan.run_options(graph, in_order=in_order)
        return DistributedTrainer(
            graph, cluster, place, optimizer, world=world, record=record, **options
        )

    trainer = make(in_order=True, record=bool(args.trace))
    if world.rank:
        trainer.serve()
        if plan.order is not None:
            make(in_order=False).serve()
        return cli.OK
    with trainer:
        compared = not graph.program.is_random
        if compared and (wrong := train.difference(trainer, module, example, loss, batches)):
            raise RankError(differs(args, "plain PyTorch", wrong))
        once, often = train.steps(trainer, trainer, example, batches)
        way = (once if plan.order is None else lambda: None, often)
        measured = measure({"plan": way}, report)
        trace = None
        if args.trace:
            step = partial(trainer.step, [example] * batches)
            trace = trace_of(trainer.runner, step, batches)
    if plan.order is not None:  # one micro-batch alone has no order to follow
        with make(in_order=False) as free:
            once, _ = train.steps(free, free, example, batches)
            again = measure({"plan": (once, lambda: 0.0)}, report)
        alone_s = {"latency_s": again["plan"].latency_s}
        measured["plan"] = measured["plan"].model_copy(update=alone_s)
    return answered(args, plan, measured, trace, compared=compared)
