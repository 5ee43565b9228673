"""Does training in a pipeline give plain PyTorch's losses, and does it pay?

    python -m experiments.training [MODEL ...] [--steps 10] [--rounds 7] [--microbatches 8]

Trains a CNN of the size of ResNet-18 and a small GPT-2 on two one-core devices, beside plain
PyTorch, from the same parameters on the same micro-batches: losses step by step, and the
parameters at the end. Then seconds per step of the pipeline under each schedule, of one device,
and of plain PyTorch with one thread and with all: interleaved in one process, medians of the
rounds. Writes ``experiments/results/training.{json,md}``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from experiments.runs import in_turns, measured_problem
from experiments.study import Option, Options, Rows, Study, run, say
from experiments.tables import Column, table
from placement import planners, schedulers
from placement.capturing import capture
from placement.capturing.training import plain_step
from placement.executor import Trainer
from placement.problem import Problem
from placement.runs.ways import timed
from placement.schedule import Schedule
from placement.simulator import list_schedule, simulate
from placement.tools.threads import torch_threads
from placement.workloads import import_transformers

SCHEDULES = ("one_f_one_b", "gpipe", "zero_bubble", "searched")


@dataclass(frozen=True)
class Task:
    """What is trained: ``examples(count, seed)`` gives micro-batches."""

    module: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    examples: Callable[[int, int], list[Any]]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def resnet18(batch: int = 8, image: int = 64, **config: Any) -> Task:
    """ResNet-18: basic blocks [2, 2, 2, 2], 11 M parameters; SGD with momentum."""
    transformers = import_transformers()
    settings = {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
    torch.manual_seed(0)
    module = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(**settings | {"num_labels": 10} | config)
    )

    def examples(count: int, seed: int) -> list[Any]:
        g = torch.Generator().manual_seed(seed)
        shape = batch, 3, image, image
        return [
            (torch.randn(shape, generator=g), torch.randint(10, (batch,), generator=g))
            for _ in range(count)
        ]

    return Task(
        module,
        lambda out, target: F.cross_entropy(out.logits, target),
        examples,
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-4),
    )


def gpt2_small(batch: int = 4, length: int = 128, **config: Any) -> Task:
    """GPT-2 with 4 layers of hidden size 256, tied embeddings, no dropout; AdamW."""
    transformers = import_transformers()
    settings = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 4096}
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    gpt2 = transformers.GPT2Config(
        **settings | without | {"n_positions": length, "use_cache": False} | config,
        bos_token_id=0,
        eos_token_id=0,
    )
    module = transformers.GPT2LMHeadModel(gpt2)

    def examples(count: int, seed: int) -> list[Any]:
        g = torch.Generator().manual_seed(seed)
        texts = [torch.randint(gpt2.vocab_size, (batch, length), generator=g) for _ in range(count)]
        return [({"input_ids": x}, x) for x in texts]

    def loss(out: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    return Task(module, loss, examples, lambda p: torch.optim.AdamW(p, lr=3e-4))


def resnet_tiny() -> Task:
    return resnet18(2, 16, depths=[1, 1], hidden_sizes=[4, 8], embedding_size=4)


def gpt2_tiny() -> Task:
    return gpt2_small(2, 8, n_layer=2, n_embd=16, n_head=2, vocab_size=50)


MODELS = {x.__name__: x for x in (resnet18, gpt2_small, resnet_tiny, gpt2_tiny)}


def rows(options: Options) -> Iterator[dict[str, Any]]:
    for model in options.models:
        task = MODELS[model]()
        problem = problem_of(task, options)
        answer = planners.load(options.planner)(problem)
        single = planners.load("single_device")(problem)
        yield {
            "model": model,
            "operators": problem.num_ops,
            "parameters": sum(p.numel() for p in task.module.parameters()),
            "on_device": np.bincount(answer.placement, minlength=2).tolist(),
            **compare(task, problem, answer.placement, options.steps),
            "ways": times(task, problem, answer.placement, single.placement, options),
        }


def problem_of(task: Task, options: Options) -> Problem:
    optimizer = task.optimizer(task.module.parameters())
    how: dict[str, Any] = {"mode": "training", "loss": task.loss, "optimizer": optimizer}
    graph = capture(task.module, task.examples(1, 0)[0], **how)
    return measured_problem(graph, num_microbatches=options.microbatches)


def compare(task: Task, problem: Problem, placement: Any, steps: int) -> dict[str, Any]:
    """Losses of every step, ours and plain PyTorch's, from the same parameters."""
    plain = copy.deepcopy(task.module).train()
    optimizer, expected = (task.optimizer(m.parameters()) for m in (task.module, plain))
    where = (problem.graph, problem.cluster, placement)
    losses = np.empty((steps, 2))
    with (
        Trainer(*where, optimizer, priority=problem.priority) as trainer,
        torch_threads(problem.cluster.devices[0].threads),
    ):
        for step in range(steps):
            batches = task.examples(problem.num_microbatches, step)
            ours, theirs = trainer.step(batches), plain_step(plain, expected, batches, task.loss)
            losses[step] = float(ours.mean()), float(theirs.mean())
    pairs = zip(task.module.parameters(), plain.parameters(), strict=True)
    far = [float((a.detach() - b.detach()).abs().max()) for a, b in pairs]
    return {
        "losses": losses.tolist(),
        "max_loss_difference": float(np.abs(losses[:, 0] - losses[:, 1]).max()),
        "max_parameter_difference": max(far),
    }


def orders(problem: Problem, placement: Any, seconds: float) -> dict[str, Schedule | None]:
    """Every schedule of the placement; None is the live list order."""
    m = problem.num_microbatches
    schedules: dict[str, Schedule | None] = {"live list": None}
    schedules["list"] = list_schedule(problem, placement, m)
    for name in SCHEDULES:
        options = {"seconds": seconds} if name == "searched" else {}
        try:
            schedules[name] = schedulers.load(name, **options)(problem, placement, m)
        except ValueError as error:  # e.g. a placement that the method does not order
            say(f"{name}: {error}")
    return schedules


def times(
    task: Task, problem: Problem, placement: Any, single: Any, options: Options
) -> dict[str, Any]:
    """Seconds per step of every way to train: median, and the ratio of each round to others."""
    batches = task.examples(problem.num_microbatches, 0)
    plain = copy.deepcopy(task.module).train()
    expected = task.optimizer(plain.parameters())
    schedules = orders(problem, placement, options.seconds)

    def plainly(count: int) -> None:
        torch.set_num_threads(count)
        plain_step(plain, expected, batches, task.loss)

    cores = sum(len(d.cores) for d in problem.cluster.devices)
    ways: dict[str, Callable[[], Any]] = {
        f"plain, {cores} threads": partial(plainly, cores),
        "plain, 1 thread": partial(plainly, 1),
    }
    with ExitStack() as opened:
        opened.enter_context(torch_threads(torch.get_num_threads()))  # as they are afterwards
        placed = [(name, placement, schedule) for name, schedule in schedules.items()]
        for name, at, schedule in [("one device", single, None), *placed]:
            optimizer = task.optimizer(task.module.parameters())
            how = {"max_in_flight": problem.max_in_flight, "priority": problem.priority}
            where = problem.graph, problem.cluster, at
            trainer = Trainer(*where, optimizer, schedule=schedule, **how)
            opened.callback(trainer.close)
            ways[name] = partial(trainer.step, batches)
        seconds = in_turns({n: partial(timed, way) for n, way in ways.items()}, options.rounds)
    predicted = {
        "one device": simulate(problem, single),
        **{name: simulate(problem, placement, s) for name, s in schedules.items()},
    }
    best = seconds[f"plain, {cores} threads"]
    lines = {}
    for name, took in seconds.items():
        line: dict[str, Any] = {"seconds": float(np.median(took))}
        line |= {"predicted": None, "peak_mib": None}
        if name in predicted:
            line["predicted"] = predicted[name].makespan_s
            line["peak_mib"] = [x / 2**20 for x in predicted[name].peak_bytes.tolist()]
        line["over plain"] = float(np.median(best / took))
        line["over one device"] = float(np.median(seconds["one device"] / took))
        lines[name] = line
    return lines


def parts(rows: Rows, options: Options) -> dict[str, str]:
    equality = table(
        rows,
        Column("model", "model"),
        Column("operators", "operators"),
        Column("parameters", "parameters", 1, 1e-6, " M"),
        Column("steps", lambda r: len(r["losses"])),
        Column("largest difference of a loss", lambda r: f"{r['max_loss_difference']:.1e}"),
        Column("of a parameter", lambda r: f"{r['max_parameter_difference']:.1e}"),
    )
    columns = (
        Column("way", "way"),
        Column("measured", "seconds", unit=" s"),
        Column("predicted, without update", "predicted", unit=" s"),
        Column("over plain", "over plain", 2, unit="x"),
        Column("over one device", "over one device", 2, unit="x"),
    )
    models = [
        f"## {row['model']}: seconds per step of {options.microbatches} micro-batches\n\n"
        + table([{"way": name, **way} for name, way in row["ways"].items()], *columns)
        for row in rows
    ]
    return {"table": equality, "models": "\n".join(models)}


STUDY = Study(
    name="training",
    rows=rows,
    parts=parts,
    options={
        "models": Option(("resnet18", "gpt2_small"), ", ".join(MODELS), word=True, metavar="MODEL"),
        "steps": Option(10, "compared with plain PyTorch"),
        "rounds": Option(7, "of measuring"),
        "microbatches": Option(8, "of a step"),
        "planner": "best_of",
        "seconds": Option(20.0, "of the searched schedule"),
    },
    facts=lambda o: {name: getattr(o, name) for name in ("rounds", "microbatches", "planner")},
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
