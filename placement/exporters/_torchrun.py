"""Run the pipeline that the JSON file beside this script describes:

    torchrun --nproc-per-node RANKS THIS_FILE package.module:function

The function returns ``(module, inputs)``, for training ``(module, (inputs, target), loss)``; its
inputs are one micro-batch, batch first. Exit code 1: torch cannot run it, as one line says, or the
pipeline computes something else than the plain module.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.utils import _pytree as pytree

from placement.exporters._ranks import arguments, differs, model, on_rank, to


def main() -> int:
    data = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return on_rank(data["ranks"], "torch.distributed.pipelining", partial(run, data))


def run(data: dict[str, Any], rank: int, device: torch.device) -> int:
    """The pipeline with this rank's stages; the last of them is compared with the plain module."""
    world = len(data["ranks"])
    module, example, *loss = model()
    training = data["mode"] == "training"
    target = None
    if training and loss:
        example, target = example
    module = module.train(training).to(device)
    example, target = to(example, device), to(target, device)
    args = tensors_only(module, example)
    loss_fn = (loss[0] if loss else lambda out, _: mean(out)) if training else None

    with torch.no_grad():
        expected = module(*args)
        if loss_fn is not None:
            expected = loss_fn(expected, target)
    split = {path: SplitPoint.BEGINNING for path in data["split_points"]}
    for path in split:
        module.get_submodule(path)  # raises where the model is not that of the plan
    with torch.set_grad_enabled(training):  # a region without gradients cannot be split
        pipe = pipeline(module, args, split_spec=split)
    if pipe.num_stages != len(split) + 1:
        print(f"{pipe.num_stages} stages, {len(split) + 1} planned: a module runs more than once")
        return 1
    first: Any = pipe.get_stage_module(0)
    nodes = first.graph.nodes
    reads = sum(n.op == "placeholder" for n in nodes)
    if reads < len(args):
        print(
            f"the first stage reads {reads} of {len(args)} inputs, and torch gives it all of them"
        )
        return 1
    for i in range(pipe.num_stages):
        send_contiguous(pipe.get_stage_module(i))
    stages = [pipe.build_stage(s, device) for s in range(rank, pipe.num_stages, world)]
    schedule_class = get_schedule_class(data["schedule"])
    many = issubclass(schedule_class, PipelineScheduleMulti)
    if many and (skip := past_a_stage(pipe.split_gm.graph)):
        print(
            f"stage {skip[1]} reads from stage {skip[0]}, and torch's {data['schedule']} sends to "
            "the next only; give every device one stage: placement export ... once=true --nearest"
        )
        return 1
    count = data["num_microbatches"]
    schedule = schedule_class(stages if many else stages[0], count, loss_fn=loss_fn)  # type: ignore
    whole = repeated(args, count) if rank == 0 else ()
    last = (pipe.num_stages - 1) % world == rank
    for _ in range(2):  # the first one warms up
        losses: list[torch.Tensor] = []
        more: dict[str, Any] = {}
        if training and last:
            fake = torch.zeros(count, device=device) if target is None else repeated(target, count)
            more = {"target": fake, "losses": losses}
        dist.barrier()
        began = time.perf_counter()
        with torch.set_grad_enabled(training):
            out = schedule.step(*whole, **more)
        dist.barrier()
        took_s = time.perf_counter() - began
    if not last:
        return 0
    actual: Any = losses if training else out
    expected = [expected] * count if training else repeated(expected, count)
    wrong = differs(actual, expected)
    answer = {"stages": pipe.num_stages, "schedule": data["schedule"], "equal": not wrong}
    print(json.dumps(answer | {"seconds_per_microbatch": took_s / count, "wrong": wrong}))
    return 1 if wrong else 0


def tensors_only(module: torch.nn.Module, example: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of the example, which become all that the module is called with.

    Torch gives a stage neither constants nor what is in lists and dicts.
    """
    args, kwargs = arguments(example)
    leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
    at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    forward = module.forward

    def of_tensors(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, x in zip(at, tensors, strict=True):
            filled[i] = x
        args, kwargs = pytree.tree_unflatten(filled, tree)
        return forward(*args, **kwargs)

    module.forward = of_tensors
    return tuple(leaves[i] for i in at)


def send_contiguous(stage: Any) -> None:
    """Tensors between stages have a layout that can be sent: an expanded one has not."""
    for node in stage.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = contiguous(node.meta["val"])
    output = stage.graph.output_node()
    with stage.graph.inserting_before(output):
        for node in output.all_input_nodes:
            value = node.meta["val"]
            if isinstance(value, torch.Tensor) and not value.is_contiguous():
                copy = stage.graph.call_function(torch.ops.aten.contiguous.default, (node,))
                copy.meta["val"] = contiguous(value)
                output.replace_input_with(node, copy)
    stage.recompile()


def contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def past_a_stage(graph: torch.fx.Graph) -> tuple[int, int] | None:
    """Two stages of which the second reads from the first though others lie between; or None."""
    made_by: dict[torch.fx.Node, int] = {}
    stage = 0
    for node in graph.nodes:
        sources = [made_by[x] for x in node.all_input_nodes if x in made_by]
        if node.op == "call_module":
            if sources and min(sources) < stage - 1:
                return min(sources), stage
            made_by[node] = stage
            stage += 1
        elif sources:
            made_by[node] = sources[0]
    return None


def repeated(value: Any, count: int) -> Any:
    """The micro-batch ``count`` times, as one batch."""
    return pytree.tree_map_only(torch.Tensor, lambda x: torch.cat([x] * count), value)


def mean(out: Any) -> torch.Tensor:
    """A stand-in for a loss: the mean of the outputs' means, as for shipped workloads."""
    leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
    return torch.stack([x.float().mean() for x in leaves if x.is_floating_point()]).mean()


if __name__ == "__main__":
    sys.exit(main())
