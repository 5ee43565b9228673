"""``placement run`` for a plan of a training step."""

from __future__ import annotations

import argparse
import copy
from typing import TYPE_CHECKING, Any

from placement import cli
from placement.cli.ways import Way, keep, measure, model_of, show, timed

if TYPE_CHECKING:
    from placement.executor import Trainer
    from placement.plan import Plan

STEPS = 2  # that are compared with plain PyTorch


def run(args: argparse.Namespace, plan: Plan, batches: int) -> int:
    """Train a few steps: compare with plain PyTorch, and measure.

    Exit code 1: losses or parameters differ from plain PyTorch's.
    """
    free = plan.model_copy(update={"order": None})  # takes any number of micro-batches
    with cli.progress() as report:
        report("loading the model", None)
        module, example, loss, optimizer = cli.load_training(
            model_of(plan, args.model), plan.graph.optimizer
        )
        report("capturing the model", None)
        trainer = plan.bind_training(module, optimizer, example, loss=loss)
        trainers = {"plan": trainer}
        try:
            compared = not trainer.graph.program.is_random
            if compared:
                wrong = difference(trainer, module, example, loss, batches)
                if wrong:
                    if args.json:
                        cli.print_json({"numerics_equal": False, "difference": wrong})
                    cli.say(f"the results differ from those of plain PyTorch: {wrong}")
                    return cli.NO
            single = plan.fallback.device if plan.fallback else None
            if args.against_single_device and single:
                trainers["single"] = alone(free, trainer, single)
            one = trainer
            if plan.order is not None:
                one = trainers["one"] = free.bind_training(module, optimizer, example, loss=loss)
            ways = {"plan": steps(one, trainer, example, batches)}
            if "single" in trainers:
                ways["single"] = steps(trainers["single"], trainers["single"], example, batches)
            measured = measure(ways, report)
        finally:
            for other in trainers.values():
                other.close()
        trace = None
        if args.trace:
            report("recording a trace", None)
            trace = recorded_trace(plan, module, optimizer, example, loss, batches)
    show(plan, measured, single, as_json=args.json, compared=compared)
    keep(args, plan, measured["plan"], trace)
    return cli.OK


def difference(trainer: Trainer, module: Any, example: Any, loss: Any, batches: int) -> str:
    """How losses and parameters differ from plain PyTorch's after a few steps; or nothing.

    Plain PyTorch runs with the threads of the devices, as in ``cli.ways.difference``.
    """
    import torch

    from placement.capturing.training import plain_step

    plain = copy.deepcopy(module)
    if not plain.training:  # as captured: else submodules in evaluation mode stay so
        plain.train()
    # By position: the copy has the same parameters in the same order.
    twin = dict(zip(module.parameters(), plain.parameters(), strict=True))
    groups = [
        group | {"params": [twin[p] for p in group["params"]]}
        for group in trainer.optimizer.param_groups
    ]
    kind: Any = type(trainer.optimizer)
    optimizer = kind(groups)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(max(d.threads for d in trainer.runner.cluster.devices))
        for _ in range(STEPS):
            losses = trainer.step([example] * batches)
            expected = plain_step(plain, optimizer, [example] * batches, loss)
            torch.testing.assert_close(losses, expected)
        trainer.sync()
        for (name, a), b in zip(
            module.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(a, b, msg=f"{name} differs")
    except AssertionError as error:
        return " ".join(str(error).split())
    finally:
        torch.set_num_threads(threads)
    return ""


def alone(plan: Plan, trainer: Trainer, device: str) -> Trainer:
    """The same step on one device."""
    import numpy as np

    from placement.executor import Trainer

    graph, cluster = trainer.graph, trainer.runner.cluster
    return Trainer(
        graph,
        cluster,
        np.full(graph.num_ops, cluster.index(device), np.int32),
        trainer.optimizer,
        max_in_flight=plan.max_in_flight,
        priority=plan.priority,
    )


def steps(one: Trainer, many: Trainer, example: Any, batches: int) -> Way:
    """Forward and backward of one micro-batch, and a step per micro-batch."""
    return (
        lambda: one.accumulate([example]),
        lambda: timed(lambda: many.step([example] * batches)) / batches,
    )


def recorded_trace(
    plan: Plan, module: Any, optimizer: Any, example: Any, loss: Any, batches: int
) -> dict[str, Any]:
    """The measured timeline of one more step, with everything recorded."""
    from placement.cli.show import costless_problem
    from placement.executor.executor import measured_timeline

    with plan.bind_training(module, optimizer, example, loss=loss, record=True) as trainer:
        trainer.step([example] * batches)
        first = trainer.runner.next_batch
        trainer.step([example] * batches)
        problem = costless_problem(trainer.graph, trainer.runner.cluster)
        timeline = measured_timeline(problem, trainer.runner, first, batches)
        return timeline.to_trace(trainer.graph.op_name)
