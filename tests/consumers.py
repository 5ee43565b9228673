"""Real consumers of what is exported, and small models of four families to give them."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from placement.capturing import capture
from placement.cluster import Cluster, Device
from placement.graph import OpGraph
from placement.plan import Plan, make_plan
from placement.problem import Problem, Solution
from tests.problems import every_link, problem_on

FAMILIES = ("llama", "gpt2", "bert", "vit")
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}


def family(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of ``transformers`` with two layers and random weights, and its inputs."""
    import transformers as t

    torch.manual_seed(0)
    words = {"vocab_size": 32, "max_position_embeddings": 16, **SMALL}
    ids = {"input_ids": torch.randint(32, (2, 6))}
    if name == "llama":
        config = t.LlamaConfig(intermediate_size=24, num_key_value_heads=2, **words)
        config.use_cache = False
        return t.LlamaForCausalLM(config).eval(), ids
    if name == "gpt2":
        config = t.GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=32, n_positions=16)
        config.use_cache = False
        return t.GPT2Model(config).eval(), ids
    if name == "bert":
        return t.BertModel(t.BertConfig(intermediate_size=24, **words)).eval(), ids
    config = t.ViTConfig(intermediate_size=24, image_size=8, patch_size=4, **SMALL)
    return t.ViTForImageClassification(config).eval(), {"pixel_values": torch.randn(2, 3, 8, 8)}


@cache
def captured(name: str) -> OpGraph:
    """The graph of a family's model: a capture takes seconds."""
    return capture(*family(name))


def problem_of(graph: OpGraph, devices: tuple[str, ...] = ("cuda:0", "cuda:1")) -> Problem:
    """Operators of equal seconds on devices that need not be there."""
    kinds = [d.partition(":")[0] for d in devices]
    links = every_link(devices, 1e-6, 1e10)
    described = [Device(d, k, memory_bytes=10**9) for d, k in zip(devices, kinds, strict=True)]
    cluster = Cluster("any", tuple(described), links)
    seconds = np.full((graph.num_ops, len(devices)), 1e-4)
    return problem_on(graph, seconds, cluster=cluster, links=links, num_microbatches=4)


def placed(problem: Problem, on: Any, **facts: Any) -> Plan:
    """The plan with operators ``on`` these devices; a colocation group is where its first is."""
    first = np.unique(problem.graph.group, return_index=True)[1]
    where = np.asarray(on, np.int32)[first][problem.graph.group]
    return make_plan(problem, Solution(where, 1.0), planner="by hand", **facts)


def cuts(problem: Problem, some: Any) -> Iterator[Plan]:
    """Plans with everything from operator ``cut`` on the second device."""
    for cut in some:
        yield placed(problem, np.arange(problem.num_ops) >= cut)


class Somewhere(torch.Tensor):
    """A tensor that says which pretended GPU it is on, and minds."""

    @staticmethod
    def on(x: torch.Tensor, device: str) -> torch.Tensor:
        y = x.detach().as_subclass(Somewhere)
        y.__dict__["where"] = device
        return y

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            leaves = pytree.tree_leaves((args, kwargs or {}))
            homes = {x.__dict__["where"] for x in leaves if isinstance(x, Somewhere)}
            if len(homes) > 1:
                raise RuntimeError(f"tensors on {sorted(homes)} meet in {func}")
            out = func(*args, **(kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, lambda x: Somewhere.on(x, next(iter(homes))), out)


def run_in_accelerate(module, device_map, args, kwargs, monkeypatch, main=None) -> list[Any]:
    """What the module computes as dispatched by accelerate, on GPUs that are only pretended.

    Inputs are brought to ``main``, or to the first device of the map, as ``from_pretrained`` does.
    Of accelerate, the two verbs that move tensors are replaced, and nothing else.

    Raises:
        RuntimeError: tensors of different GPUs meet.
    """
    from accelerate import dispatch_model, hooks

    def put(owner: Any, name: str, device: str, **_: Any) -> None:
        *path, last = name.split(".")
        owner = owner.get_submodule(".".join(path))
        held = owner._parameters if last in owner._parameters else owner._buffers
        held[last] = Somewhere.on(held[last], device)
        if held is owner._parameters:
            held[last] = torch.nn.Parameter(held[last], requires_grad=False)
            held[last].__dict__["where"] = device

    def send(x: Any, device: Any, **_: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda y: Somewhere.on(y, str(device)), x)

    with monkeypatch.context() as m, torch.no_grad():
        m.setattr(hooks, "set_module_tensor_to_device", put)
        m.setattr(hooks, "send_to_device", send)
        first = main or next(iter(device_map.values()))
        dispatch_model(module, device_map, main_device=first, force_hooks=True)
        out = module(*args, **kwargs)
    return tensors(out)


def tensors(out: Any) -> list[torch.Tensor]:
    """The tensors of a module's outputs, plain ones."""
    leaves = pytree.tree_leaves(dict(out) if hasattr(out, "items") else out)
    return [x.as_subclass(torch.Tensor) for x in leaves if isinstance(x, torch.Tensor)]


def first_match(rules: str, tensor: str) -> str | None:
    """Where llama.cpp puts a tensor: by the first rule whose pattern is found in its name."""
    pairs = [rule.rpartition("=")[::2] for rule in rules.strip().split(",")]
    return next((buffer for pattern, buffer in pairs if re.search(pattern, tensor)), None)
