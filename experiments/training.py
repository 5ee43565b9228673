"""Does training in a pipeline give plain PyTorch's losses, and does it pay?

    python -m experiments.training [MODEL ...] [--steps 10] [--rounds 7] [--microbatches 8]

Trains a CNN of the size of ResNet-18 and a small GPT-2 on two one-core devices, beside plain
PyTorch, from the same parameters on the same micro-batches: losses step by step, and the
parameters at the end. Then seconds per step of the pipeline under each schedule, of one device,
and of plain PyTorch with one thread and with all: interleaved in one process, medians of the
rounds. Writes ``experiments/results/training.{json,md}``.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from experiments._study import RESULTS
from placement import planners, schedulers
from placement.cluster import Cluster
from placement.executor import Trainer
from placement.files import write_atomic
from placement.measure import measure, provenance
from placement.problem import Problem
from placement.program import capture
from placement.schedule import Schedule
from placement.simulator import list_schedule, simulate
from placement.training import plain_step
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
        return [
            (
                torch.randn(batch, 3, image, image, generator=g),
                torch.randint(10, (batch,), generator=g),
            )
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
    made = transformers.GPT2Config(
        **settings | without | {"n_positions": length, "use_cache": False} | config,
        bos_token_id=0,
        eos_token_id=0,
    )
    module = transformers.GPT2LMHeadModel(made)

    def examples(count: int, seed: int) -> list[Any]:
        g = torch.Generator().manual_seed(seed)
        texts = [torch.randint(made.vocab_size, (batch, length), generator=g) for _ in range(count)]
        return [({"input_ids": x}, x) for x in texts]

    def loss(out: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    return Task(module, loss, examples, lambda p: torch.optim.AdamW(p, lr=3e-4))


def resnet_tiny() -> Task:
    """For a first look: seconds."""
    return resnet18(2, 16, depths=[1, 1], hidden_sizes=[4, 8], embedding_size=4)


def gpt2_tiny() -> Task:
    """For a first look: seconds."""
    return gpt2_small(2, 8, n_layer=2, n_embd=16, n_head=2, vocab_size=50)


MODELS = {x.__name__: x for x in (resnet18, gpt2_small, resnet_tiny, gpt2_tiny)}


def problem_of(task: Task, options: argparse.Namespace) -> Problem:
    """The training step on two devices of this machine, measured."""
    graph = capture(
        task.module,
        task.examples(1, 0)[0],
        mode="training",
        loss=task.loss,
        optimizer=task.optimizer(task.module.parameters()),
        split_backward=options.split_backward,
    )
    cluster = Cluster("two", Cluster.detect().devices[:2])
    profile = measure(graph, cluster, repeats=10)
    return Problem(graph, cluster, profile, num_microbatches=options.microbatches)


def compare(task: Task, problem: Problem, placement: Any, steps: int) -> dict[str, Any]:
    """Losses of every step, ours and plain PyTorch's, from the same parameters."""
    plain = copy.deepcopy(task.module).train()
    optimizer, expected = (task.optimizer(m.parameters()) for m in (task.module, plain))
    threads = torch.get_num_threads()
    rows = []
    with Trainer(
        problem.graph, problem.cluster, placement, optimizer, priority=problem.priority
    ) as trainer:
        try:
            torch.set_num_threads(problem.cluster.devices[0].threads)
            for step in range(steps):
                batches = task.examples(problem.num_microbatches, step)
                ours = trainer.step(batches)
                theirs = plain_step(plain, expected, batches, task.loss)
                rows.append([float(ours.mean()), float(theirs.mean())])
        finally:
            torch.set_num_threads(threads)
    pairs = zip(task.module.parameters(), plain.parameters(), strict=True)
    far = [float((a.detach() - b.detach()).abs().max()) for a, b in pairs]
    losses = np.array(rows)
    return {
        "losses": rows,
        "max_loss_difference": float(np.abs(losses[:, 0] - losses[:, 1]).max()),
        "max_parameter_difference": max(far),
    }


def orders(problem: Problem, placement: Any, seconds: float) -> dict[str, Schedule | None]:
    """Every schedule of the placement; None is the live list order."""
    m = problem.num_microbatches
    found: dict[str, Schedule | None] = {"live list": None}
    found["list"] = list_schedule(problem, placement, m)
    for name in SCHEDULES:
        if name in schedulers.names():
            options = {"seconds": seconds} if name == "searched" else {}
            try:
                found[name] = schedulers.load(name, **options)(problem, placement, m)
            except ValueError as error:  # e.g. a placement that the method does not order
                print(f"{name}: {error}")
    return found


def times(
    task: Task, problem: Problem, placement: Any, single: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds per step of every way to train: median, and the ratio of each round to others."""
    batches = task.examples(problem.num_microbatches, 0)
    plain = copy.deepcopy(task.module).train()
    expected = task.optimizer(plain.parameters())
    schedules = orders(problem, placement, options.seconds)
    trainers = {
        name: Trainer(
            problem.graph,
            problem.cluster,
            at,
            task.optimizer(task.module.parameters()),
            max_in_flight=problem.max_in_flight,
            priority=problem.priority,
            schedule=schedule,
        )
        for name, at, schedule in (
            ("one device", single, None),
            *((name, placement, schedule) for name, schedule in schedules.items()),
        )
    }

    def plainly(threads: int) -> Callable[[], Any]:
        def run() -> None:
            torch.set_num_threads(threads)
            plain_step(plain, expected, batches, task.loss)

        return run

    cores = sum(len(d.cores) for d in problem.cluster.devices)
    ways: dict[str, Callable[[], Any]] = {
        f"plain, {cores} threads": plainly(cores),
        "plain, 1 thread": plainly(1),
    }
    ways |= {name: (lambda t=t: t.step(batches)) for name, t in trainers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    threads = torch.get_num_threads()
    try:
        for r in range(options.rounds + 1):
            for name, run in ways.items():
                began = time.perf_counter()
                run()
                if r > 0:  # the first round warms up
                    seconds[name].append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
        for trainer in trainers.values():
            trainer.close()
    predicted = {
        "one device": simulate(problem, single),
        **{name: simulate(problem, placement, s) for name, s in schedules.items()},
    }
    best = np.array(seconds[f"plain, {cores} threads"])
    return {
        name: {
            "seconds": float(np.median(took)),
            "predicted": predicted[name].makespan_s if name in predicted else None,
            "peak_mib": [x / 2**20 for x in predicted[name].peak_bytes.tolist()]
            if name in predicted
            else None,
            "over plain": float(np.median(best / np.array(took))),
            "over one device": float(np.median(np.array(seconds["one device"]) / np.array(took))),
        }
        for name, took in seconds.items()
    }


def study(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Equality and seconds of one model."""
    task = MODELS[model]()
    problem = problem_of(task, options)
    answer = planners.load(options.planner)(problem)
    single = planners.load("single_device")(problem)
    return {
        "model": model,
        "operators": problem.num_ops,
        "parameters": sum(p.numel() for p in task.module.parameters()),
        "on_device": np.bincount(answer.placement, minlength=2).tolist(),
        **compare(task, problem, answer.placement, options.steps),
        "ways": times(task, problem, answer.placement, single.placement, options),
    }


def report(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The page with the tables."""
    text = ["# Training steps on two one-core devices", "", "`python -m experiments.training`", ""]
    text += ["| model | operators | parameters | steps | largest difference of a loss | of a "]
    text[-1] += "parameter |"
    text.append("|---|---|---|---|---|---|")
    for r in rows:
        text.append(
            f"| {r['model']} | {r['operators']} | {r['parameters'] / 1e6:.1f} M | "
            f"{len(r['losses'])} | {r['max_loss_difference']:.1e} | "
            f"{r['max_parameter_difference']:.1e} |"
        )
    for r in rows:
        text += ["", f"## {r['model']}: seconds per step of {facts['microbatches']} micro-batches"]
        text += [
            "",
            "| way | measured | predicted, without update | over plain | over one device |",
        ]
        text.append("|---|---|---|---|---|")
        for name, way in r["ways"].items():
            predicted = "" if way["predicted"] is None else f"{way['predicted']:.3f} s"
            text.append(
                f"| {name} | {way['seconds']:.3f} s | {predicted} | {way['over plain']:.2f}x | "
                f"{way['over one device']:.2f}x |"
            )
    text += ["", *(f"- {k}: {v}" for k, v in facts.items()), ""]
    return "\n".join(text)


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=("resnet18", "gpt2_small"), metavar="MODEL")
    parser.add_argument("--steps", type=int, default=10, help="compared with plain PyTorch")
    parser.add_argument("--rounds", type=int, default=7, help="of measuring")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step")
    parser.add_argument("--planner", default="best_of")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the searched schedule")
    parser.add_argument(
        "--split-backward", action="store_true", help="gradients of weights by themselves"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    rows = [study(model, options) for model in options.models]
    facts = provenance(
        rounds=options.rounds,
        microbatches=options.microbatches,
        planner=options.planner,
        split_backward=options.split_backward,
    )
    page = report(rows, facts)
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out / "training.json", json.dumps({"rows": rows, **facts}, indent=1))
    write_atomic(options.out / "training.md", page)
    print(page)


if __name__ == "__main__":
    main()
