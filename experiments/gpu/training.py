"""Sections that train: a module on the GPU, and a policy with its network there."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from experiments.gpu.bench import Bench
from experiments.gpu.memory import memory_of
from experiments.gpu.models import all_on, tf32
from experiments.gpu_baselines import moved, ratio, tensors_of, timed
from experiments.training import resnet18
from placement import planners
from placement.capturing import capture
from placement.capturing.training import mean_of_outputs
from placement.cluster import Cluster
from placement.executor import Trainer
from placement.executor.equality import error
from placement.graph import OpGraph
from placement.problem import Problem
from placement.program import split_inputs
from placement.simulator import simulate


def training(bench: Bench) -> None:
    """Steps on the GPU beside plain PyTorch's there; and with memory for half of the activations.

    How far gradients are from float64's is compared with how far plain PyTorch's are: rounding
    alone makes 2 % of those of an untrained ResNet-50.
    """
    if bench.emulated:
        small = {
            "depths": [1],
            "hidden_sizes": [8],
            "embedding_size": 4,
            "layer_type": "bottleneck",
        }
        module, inputs = resnet18(2, 16, **small).module.train(), torch.randn(2, 3, 16, 16)
    else:
        module, inputs, _ = bench.model("resnet50")
        module = copy.deepcopy(module).train()
        inputs = pytree.tree_map(lambda x: torch.randn(8, *x.shape[1:]), inputs)
    # Autograd does not know the emulated GPU's tensors.
    gpu = torch.device("cpu") if bench.emulated else bench.gpu
    with tf32(False):
        exact, plain = (loss_and_gradients(module, inputs, gpu, x) for x in ("double", "float"))
    example, begin = (moved(inputs, gpu), None), copy.deepcopy(module.state_dict())
    steps = Steps(bench, module, example, begin, exact, max(4 * apart(plain, exact), 1e-5))
    with bench.item("eager"):
        step_s = timed(eager_step(module, steps.example, gpu), steps.times)
        bench.emit("eager", step_ms=step_s * 1e3, error=apart(plain, exact))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    options: Any = {"mode": "training", "loss": mean_of_squares, "optimizer": optimizer}
    graph = capture(module, (inputs, None), **options)
    for name in ("all on the GPU", "as CUDA graphs"):
        with bench.item(name):
            steps.row(name, graph, bench.cluster, all_on(graph, 1))
    held, peak = steps.sizes_mib["all on the GPU"]
    room = (held + 0.5 * (peak - held)) * 2**20
    with bench.item("recomputed, half of the activations"), memory_of(bench, room) as capped:
        kinds = ("ResNetEmbeddings", "ResNetBottleNeckLayer")
        blocks = [name for name, x in module.named_modules() if type(x).__name__ in kinds]
        again = capture(module, (inputs, None), recompute=blocks, **options)
        name, facts = "recomputed, half of the activations", {"room_mib": room / 2**20}
        steps.row(name, again, capped, all_on(again, 1), **facts)
    with bench.item("CPU and GPU, half of the activations"):
        _on_both(steps, graph, room)


@dataclass
class Steps:
    """Training steps of one module, checked and timed.

    Attributes:
        example: inputs on the GPU, and no target.
        begin: the parameters before the first step.
        exact: loss and gradients of float64.
        allowed: how far those of a step may be ``apart`` from them.
        sizes_mib: by row, what the GPU holds between steps, and at most.
    """

    bench: Bench
    module: nn.Module
    example: Any
    begin: dict[str, Any]
    exact: tuple[float, Tensor]
    allowed: float
    sizes_mib: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def times(self) -> int:
        return 1 if self.bench.emulated else 5

    def trainer(
        self, graph: OpGraph, cluster: Cluster, placement: np.ndarray, as_graphs: bool
    ) -> Trainer:
        """With the parameters as they were, and a fresh optimizer."""
        self.module.load_state_dict(self.begin)
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        trainer = Trainer(graph, cluster, placement, optimizer, max_in_flight=2)
        trainer.runner.cuda_graphs = as_graphs
        return trainer

    def row(
        self, name: str, graph: OpGraph, cluster: Cluster, placement: np.ndarray, **facts: Any
    ) -> None:
        """Losses and gradients of a step, and then times and memory of steps with a new trainer."""
        one = graph, cluster, placement, name == "as CUDA graphs"
        with tf32(False), self.trainer(*one) as trainer:
            losses = trainer.accumulate([self.example] * 4)
            named = trainer.gradients()
            ours = [named[k].double().flatten().cpu() for k, _ in self.module.named_parameters()]
            facts["error"] = apart((float(losses[-1]), torch.cat(ours)), self.exact)
            facts["not_graphed"] = ", ".join(trainer.runner.not_graphed.values())
        with self.trainer(*one) as trainer:
            trainer.step([self.example] * 2)
            torch.cuda.synchronize()
            facts["kept_mib"] = torch.cuda.memory_allocated() / 2**20
            torch.cuda.reset_peak_memory_stats()
            times = self.times if placement.all() else min(self.times, 2)  # CPU cores take long
            step_s = timed(lambda: trainer.step([self.example] * 2), times)
            facts["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        self.sizes_mib[name] = (facts["kept_mib"], facts["peak_mib"])
        facts |= {"on_gpu": float((placement == 1).mean()), "allowed": self.allowed}
        self.bench.emit(name, step_ms=step_s * 1e3, **facts, ok=facts["error"] <= self.allowed)


def _on_both(steps: Steps, graph: OpGraph, room: float) -> None:
    """A plan for both devices with ``room`` bytes on the GPU."""
    bench = steps.bench
    profile = bench.measured("training", graph, bench.cluster, 1, calibrate=False)
    with memory_of(bench, room) as capped:
        problem = Problem(graph, capped, profile, objective="period", num_microbatches=2)
        placement = planners.load("best_of", seconds=bench.planning_s)(problem).placement
        predicted = float(simulate(problem, placement).peak_bytes[1]) / 2**20
        facts = {"room_mib": room / 2**20, "predicted_mib": predicted}
        steps.row("CPU and GPU, half of the activations", graph, capped, placement, **facts)


def mean_of_squares(outputs: Any, target: Any = None) -> Tensor:
    """A loss that is not the difference of large numbers."""
    return mean_of_outputs([x.square() for x in tensors_of(outputs)])


def loss_and_gradients(
    module: nn.Module, inputs: Any, device: torch.device, dtype: str
) -> tuple[float, Tensor]:
    """Of plain PyTorch in ``dtype``; the gradients of all parameters as one vector of float64."""
    plain = getattr(copy.deepcopy(module).to(device), dtype)()
    args, kwargs = split_inputs(pytree.tree_map(lambda x: getattr(x.to(device), dtype)(), inputs))
    loss = mean_of_squares(plain(*args, **kwargs))
    loss.backward()
    gradients = [x.grad.double().flatten().cpu() for x in plain.parameters()]  # type: ignore[union-attr]
    return loss.item(), torch.cat(gradients)


def apart(ours: tuple[float, Tensor], exact: tuple[float, Tensor]) -> float:
    """Error of gradients; or 1000 times that of the loss, where this is more."""
    of_loss = abs(ours[0] / exact[0] - 1)
    return max(error(ours[1], exact[1]), 1e3 * of_loss)


def eager_step(module: nn.Module, example: Any, device: torch.device) -> Callable[[], Any]:
    """Plain PyTorch's step of two micro-batches."""
    plain = copy.deepcopy(module).to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    args, kwargs = split_inputs(example[0])

    def step() -> list[float]:
        losses = [mean_of_squares(plain(*args, **kwargs)) / 2]
        losses[0].backward()
        losses.append(mean_of_squares(plain(*args, **kwargs)) / 2)
        losses[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return [x.item() for x in losses]

    return step


def policy(bench: Bench) -> None:
    """Steps per second of PPO, with the network on the CPU (one core) and on the GPU.

    Episodes are played on the CPU in any case: of a small network's training about a third.
    """
    for hidden, num_ops in ((16, 8),) if bench.emulated else ((64, 64), (256, 512)):
        rates, name = {}, f"hidden {hidden}, {num_ops} operators"
        for device in ("cpu",) if bench.emulated else ("cpu", "cuda"):
            with bench.item(f"{name}, {device}", 20):
                steps_per_s(device, hidden, 1)  # contexts, kernels
                rates[f"{device}_steps_per_s"] = steps_per_s(device, hidden, 2, num_ops)
        times_as_fast = ratio(rates.get("cuda_steps_per_s"), rates.get("cpu_steps_per_s"))
        bench.emit(name, **rates, gpu_over_cpu=times_as_fast)


def steps_per_s(device: str, hidden: int, updates: int, num_ops: int = 64) -> float:
    """Of a training with so many updates, on a graph of ``num_ops`` operators and two devices."""
    from agents.encoder import NetworkConfig
    from agents.training import train as learn
    from agents.training.config import TrainConfig
    from placement.workloads.synthetic import Family, random_graph

    problem = Family(random_graph(num_ops, 6, 1.0), 2)(0)
    network = NetworkConfig(hidden=hidden)
    options, steps = {"num_envs": 16, "num_checks": 1, "cold": True}, updates * 16 * num_ops
    config = TrainConfig(total_steps=steps, device=device, network=network, **options)
    began = time.perf_counter()
    learn([problem], config=config)
    return steps / (time.perf_counter() - began)
