"""``placement run`` for a plan of a training step."""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from placement import cli
from placement.cli.ways import Work, model_of
from placement.runs.ways import Way, timed
from placement.tools.threads import torch_threads

if TYPE_CHECKING:
    from placement.executor import Trainer
    from placement.plan import Plan


def here(args: argparse.Namespace, plan: Plan, batches: int) -> Work:
    """Training on this machine."""
    module, example, loss, optimizer = cli.load_training(
        model_of(plan, args.model), plan.graph.optimizer
    )
    free = plan.model_copy(update={"order": None})  # takes any number of micro-batches

    def make(*, in_order: bool, record: bool) -> Trainer:
        which = plan if in_order else free
        return which.bind_training(module, optimizer, example, loss=loss, record=record)

    return training(free, make, module, example, loss, batches)


def training(plan: Plan, make: Any, module: Any, example: Any, loss: Any, batches: int) -> Work:
    """``make`` as in ``Work``; a few steps are compared with plain PyTorch's."""
    return Work(
        make,
        lambda trainer: difference(trainer, module, example, loss, batches),
        lambda trainer: steps(trainer, example, batches),
        partial(alone, plan),
        lambda trainer: trainer.step([example] * batches),
    )


def difference(trainer: Trainer, module: Any, example: Any, loss: Any, batches: int) -> str:
    """How losses, gradients and parameters differ from plain PyTorch's in a few steps; or nothing.

    Plain PyTorch runs with the threads of the devices, as in ``runs.ways.difference``. What is
    small beside all gradients, or parameters, is held to their size: some gradients are nothing
    but rounding, e.g. of a bias before a normalisation. On a GPU, where rounding is another, Adam
    makes a step of the learning rate of that.
    """
    from placement.capturing.training import plain_step
    from placement.executor.equality import Tolerance, error, said

    def compare(ours: dict[str, Any], expected: dict[str, Any], free: float = 0.0) -> str:
        real = [x for x in expected.values() if x.is_floating_point() and x.numel()]
        count = max(sum(x.numel() for x in real), 1)
        scale = float(sum(x.detach().double().square().sum() for x in real) / count) ** 0.5
        for name, wanted in expected.items():
            off = error(ours[name], wanted, scale)
            if off > tolerance.relative and not (
                free and float((ours[name].cpu() - wanted.cpu()).abs().max()) <= free
            ):
                return said(name, ours[name], wanted, tolerance, scale)
        return ""

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
    seen: dict[str, Any] = {}

    def keep_gradients(*_: Any) -> None:
        seen.update({k: p.grad.clone() for k, p in plain.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep_gradients)
    state = [*module.parameters(), *module.buffers()]
    tolerance = Tolerance.of(state, trainer.runner.cluster)
    steps = 2
    with torch_threads(max(d.threads for d in trainer.runner.cluster.devices)):
        for _ in range(steps):
            losses = trainer.accumulate([example] * batches)
            gradients = trainer.gradients()
            trainer.update()
            expected = plain_step(plain, optimizer, [example] * batches, loss)
            wrong = compare({"the loss": losses}, {"the loss": expected})
            if wrong := wrong or compare(gradients, {k: seen[k] for k in gradients}):
                return f"{wrong} (gradients)" if "the loss" not in wrong else wrong
        trainer.sync()
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        on_gpu = any(d.kind == "cuda" for d in trainer.runner.cluster.devices)
        free = 2.1 * steps * max(rates, default=0.0) if on_gpu else 0.0
        return compare(module.state_dict(), plain.state_dict(), free)


def alone(plan: Plan, trainer: Trainer, device: str) -> Trainer:
    """The same step on one device."""
    import numpy as np

    from placement.executor import Trainer

    graph, cluster = trainer.graph, trainer.runner.cluster
    placement = np.full(graph.num_ops, cluster.index(device), np.int32)
    options: Any = {"max_in_flight": plan.max_in_flight, "priority": plan.priority}
    return Trainer(graph, cluster, placement, trainer.optimizer, **options)


def steps(trainer: Trainer, example: Any, batches: int) -> Way:
    """Forward and backward of one micro-batch, and a step per micro-batch."""
    from placement.capturing.training import flatten_example

    inputs = flatten_example(trainer.graph.program, example)
    return (
        lambda: list(trainer.runner.stream_tensors([inputs])),
        lambda: timed(lambda: trainer.step([example] * batches)) / batches,
    )
