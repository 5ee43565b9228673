"""``placement run --distributed``: the devices of a plan spread over processes."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from placement import cli
from placement.cli.ranks import spawn, words_of
from placement.cli.train import training
from placement.cli.ways import Differs, Work, carry_out, inference, model_of, turns

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
    names = ("timeout", "model", "batches", "trace", "out", "wandb", "weights")
    return words_of(args, ["run", args.plan, "--distributed"], (*names, "against_single_device"))


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
            report("loading and capturing the model", None)
            work = (_train if plan.graph.mode == "training" else _infer)(args, plan, batches, world)
            if world.rank == 0:
                try:
                    return carry_out(args, plan, batches, work, report)
                except Differs as error:
                    raise RankError(str(error)) from error
            for in_order, record in turns(args, plan):
                work.make(in_order=in_order, record=record).serve()
            return cli.OK
    except RankError as error:
        if world.speaks:
            cli.say(f"the run has ended: {error}")
        code: int = cli.NO
    except Exception as error:
        code = cli.told(error, cli.explain, debug=args.debug)
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait for a rank which is gone must not keep this one


def _infer(args: argparse.Namespace, plan: Plan, batches: int, world: World) -> Work:
    from placement.executor.distributed import DistributedRunner, with_weights

    graph, module, inputs = _model(args, plan)
    make = _made(plan, DistributedRunner, graph, world=world)
    if args.weights:
        graph = with_weights(graph, args.weights, make(in_order=False).own_params())
        make = _made(plan, DistributedRunner, graph, world=world)
    return inference(plan, make, module, inputs, batches)


def _made(plan: Plan, kind: Any, graph: Any, *more: Any, world: World) -> Callable[..., Any]:
    """``make`` of ``Work``."""
    cluster = plan.cluster.build()
    place = plan.placement(graph, cluster)

    def make(*, in_order: bool, record: bool = False) -> Any:
        options = plan.run_options(graph, in_order=in_order)
        return kind(graph, cluster, place, *more, world=world, record=record, **options)

    return make


def _model(args: argparse.Namespace, plan: Plan) -> tuple[Any, Any, Any]:
    """Graph, module and inputs; with ``--weights`` no module, and if possible never its values."""
    import torch

    from placement.capturing import capture
    from placement.program import inputs_from_spec

    name = model_of(plan, args.model)
    if args.weights:
        with torch.device("meta"):
            module, inputs = cli.load_workload(name)
        graph = plan.cut(capture(module, inputs))
        if plan.graph_differences(graph):  # some models export otherwise without values
            module, inputs = cli.load_workload(name)
            graph = plan.cut(capture(module, inputs))
        return graph, None, inputs_from_spec(plan.graph.input_spec or {})
    module, inputs = cli.load_workload(name)
    return plan.cut(capture(module, inputs)), module, inputs


def _train(args: argparse.Namespace, plan: Plan, batches: int, world: World) -> Work:
    from placement.capturing import capture
    from placement.executor.distributed import DistributedTrainer

    module, example, loss, optimizer = cli.load_training(
        model_of(plan, args.model), plan.graph.optimizer
    )
    graph = capture(module, example, mode="training", loss=loss, optimizer=optimizer)
    make = _made(plan, DistributedTrainer, graph, optimizer, world=world)
    return training(plan, make, module, example, loss, batches)
