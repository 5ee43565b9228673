"""What the executor is compared with on a GPU, each as fast as we know how to make it.

Plain PyTorch, a CUDA graph of the whole model, and two ways to run a model that does not fit:
accelerate's, and a stream of layers through pinned memory by hand.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from placement.executor.graphs import recorded
from placement.program import split_inputs
from placement.runs import ways


def timed(call: Callable[[], Any], times: int = 1) -> float:
    """Seconds of a call: the median of so many, after one that does not count."""
    call()
    return statistics.median(ways.timed(call) for _ in range(times))


def ratio(value: float | None, base: float | None) -> float:
    """nan where one of them is not known."""
    return value / base if value is not None and base else math.nan


def resident(module: nn.Module, device: torch.device) -> Callable[[Any], list[Tensor]]:
    """Plain PyTorch: a copy of the module on the GPU, called with inputs that are there."""
    plain = copy.deepcopy(module).to(device)

    @torch.inference_mode()
    def call(inputs: Any) -> list[Tensor]:
        args, kwargs = split_inputs(inputs)
        return [x for x in pytree.tree_leaves(plain(*args, **kwargs)) if isinstance(x, Tensor)]

    return call


def moved(inputs: Any, device: torch.device) -> Any:
    """On the device, at once or soon; other threads of the host can go on where it is pinned."""

    def there(x: Any) -> Any:
        return x.to(device, non_blocking=True) if isinstance(x, Tensor) else x

    return pytree.tree_map(there, inputs)


def pinned(inputs: Any) -> Any:
    """The same in memory of the host that the GPU reads fastest."""

    def copied(x: Any) -> Any:
        return torch.empty_like(x, pin_memory=True).copy_(x) if isinstance(x, Tensor) else x

    return pytree.tree_map(copied, inputs)


class WholeGraph:
    """A CUDA graph of all that a call launches."""

    def __init__(self, call: Callable[[Any], list[Tensor]], inputs: Any, device: torch.device):
        given = moved(inputs, device)
        self.inputs = tensors_of(given)
        for _ in range(3):  # libraries choose kernels, and get memory that is not the graph's
            call(given)
        pool = torch.cuda.graph_pool_handle()
        self.graph, self.outputs = recorded(lambda: call(given), pool, device)

    def __call__(self, inputs: Any) -> list[Tensor]:
        for x, y in zip(self.inputs, tensors_of(inputs), strict=True):
            x.copy_(y, non_blocking=True)
        self.graph.replay()
        return [x.clone() for x in self.outputs]


def tensors_of(inputs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(split_inputs(inputs)) if isinstance(x, Tensor)]


class Layer(nn.Module):
    """Attention and a perceptron; PyTorch's own may take another way where nothing is trained."""

    def __init__(self, width: int, heads: int = 0) -> None:
        super().__init__()
        self.heads = heads or max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attended(self, x: Tensor, is_causal: bool = True) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.out(seen.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def mixed(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attended(self.norm1(x))
        return x + self.mixed(self.norm2(x))


class ExpertLayer(Layer):
    """With two experts for every token; all are computed, as a batch: sixteen tokens need all."""

    def __init__(self, width: int, experts: int = 8) -> None:
        super().__init__(width)
        del self.up, self.down
        self.router = nn.Linear(width, experts)
        self.ups = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.downs = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def mixed(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best = scores.topk(2)
        share = torch.zeros_like(scores).scatter(-1, best.indices, best.values)
        rows = x.flatten(0, -2).expand(len(self.ups), -1, -1)
        made = torch.bmm(nn.functional.gelu(torch.bmm(rows, self.ups)), self.downs)
        return (made * share.flatten(0, -2).T.unsqueeze(-1)).sum(0).view_as(x)


class BlockLayer(Layer):
    """Of a diffusion transformer: what a step is conditioned on scales and shifts."""

    def __init__(self, width: int, heads: int = 0) -> None:
        super().__init__(width, heads)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        x = x + gate1 * self.attended(self.norm1(x) * (1 + scale1) + shift1, is_causal=False)
        return x + gate2 * self.mixed(self.norm2(x) * (1 + scale2) + shift2)


LAYERS = (Layer, ExpertLayer, BlockLayer)


class Decoder(nn.Module):
    """Layers that are equal in form, between what makes their inputs and what makes the output."""

    def __init__(self, layers: int, width: int, of: Callable[[int], Layer] = Layer) -> None:
        super().__init__()
        one = of(width)  # drawing numbers for each would take longer than all that is measured
        self.layers = nn.ModuleList(copy.deepcopy(one) for _ in range(layers))

    def enter(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    def leave(self, x: Tensor) -> Tensor:
        return x

    def forward(self, *inputs: Tensor) -> Tensor:
        x, *rest = self.enter(*inputs)
        for layer in self.layers:
            x = layer(x, *rest)
        return self.leave(x)


class DiffusionTransformer(Decoder):
    """As ``DiTTransformer2DModel`` of diffusers, from its ``config.json``; weights are random.

    Peebles and Xie, Scalable Diffusion Models with Transformers, ICCV 2023. Inputs are latents and
    the embedding of a step and a class, which all layers share.
    """

    def __init__(
        self,
        num_layers: int,
        num_attention_heads: int,
        attention_head_dim: int,
        in_channels: int,
        out_channels: int,
        patch_size: int,
    ) -> None:
        width = num_attention_heads * attention_head_dim
        super().__init__(num_layers, width, partial(BlockLayer, heads=num_attention_heads))
        self.patches = nn.Conv2d(in_channels, width, patch_size, patch_size)
        self.condition = nn.Linear(width, width)
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, patch_size**2 * out_channels)

    def enter(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        latents, condition = inputs
        tokens = self.patches(latents).flatten(2).transpose(1, 2)
        return tokens, nn.functional.silu(self.condition(condition))

    def leave(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))  # type: ignore[no-any-return]


def streamed(model: Decoder, inputs: Any, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """The strong alternative, and how many layers stay: all for which there is room.

    The others come from pinned memory, each in one copy, while the one before it is computed. What
    is before and behind the layers stays.
    """
    vectors = [pinned(nn.utils.parameters_to_vector(y.parameters()).detach()) for y in model.layers]
    whole = copy.deepcopy({k: v for k, v in model._modules.items() if k != "layers"})
    shell = copy.copy(model)
    shell._modules = whole | {"layers": nn.ModuleList()}
    shell.to(device)
    given = tensors_of(inputs)

    def placed(vector: Tensor) -> tuple[Tensor, nn.Module]:
        """A vector on the device, and a layer whose parameters are its parts."""
        there, layer = vector.to(device), copy.deepcopy(model.layers[0])
        parts = there.split([y.numel() for y in layer.parameters()])
        for (name, y), part in zip([*layer.named_parameters()], parts, strict=True):
            owner = layer.get_submodule(name.rpartition(".")[0])
            part = nn.Parameter(part.view(y.shape), requires_grad=False)
            setattr(owner, name.rpartition(".")[2], part)
        return there, layer

    slots = [placed(vectors[0]) for _ in range(2)]
    stay: dict[int, nn.Module] = {}
    copies, compute = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    arrived, used = ([torch.cuda.Event() for _ in slots] for _ in range(2))

    @torch.inference_mode()
    def run() -> Tensor:
        come = [i for i in range(len(vectors)) if i not in stay]

        def fetch(n: int) -> None:
            """The ``n``-th of those that come, to its slot."""
            if n < len(come):
                with torch.cuda.stream(copies):
                    copies.wait_event(used[n % 2])
                    slots[n % 2][0].copy_(vectors[come[n]], non_blocking=True)
                    arrived[n % 2].record(copies)

        fetch(0)
        y, *rest = shell.enter(*(x.to(device) for x in given))
        for i in range(len(vectors)):
            if i in stay:
                y = stay[i](y, *rest)
                continue
            n = come.index(i)
            fetch(n + 1)
            compute.wait_event(arrived[n % 2])
            y = slots[n % 2][1](y, *rest)
            used[n % 2].record(compute)
        return shell.leave(y).cpu()

    run()  # libraries take what they need first
    # Spread over the model, however many they are: while one that stays is computed another comes.
    for i in sorted(range(len(vectors)), key=lambda i: f"{i:016b}"[::-1]):
        try:
            stay[i] = placed(vectors[i])[1]
            run()
        except torch.OutOfMemoryError:
            stay.pop(i, None)
            break
    torch.cuda.empty_cache()
    return run, len(stay)


def offloaded_seconds(module: nn.Module, inputs: Any, limits: dict[Any, int]) -> float:
    """Seconds with accelerate, which keeps what fits first and copies the rest for every call.

    It counts parameters, and not the gaps between them: where memory runs out it is told of less,
    in steps, down to half of the memory of its first device.
    """
    first, *_ = limits
    for part in (1.0, 0.9, 0.75):
        with suppress(torch.OutOfMemoryError):
            told = limits | {first: int(part * limits[first])}
            return _offloaded_seconds(module, inputs, told)
        gc.collect()  # accelerate's hooks and their module refer to each other
        torch.cuda.empty_cache()
    return _offloaded_seconds(module, inputs, limits | {first: limits[first] // 2})


def _offloaded_seconds(module: nn.Module, inputs: Any, limits: dict[Any, int]) -> float:
    import accelerate

    args, kwargs = split_inputs(inputs)
    module, whole = copy.deepcopy(module), [*(x.__name__ for x in LAYERS), "EmbeddingBag"]
    where = accelerate.infer_auto_device_map(module, limits, no_split_module_classes=whole)
    first = next(iter(limits))
    if first in where.values():
        accelerate.dispatch_model(module, where, main_device=first)
    else:  # nothing stays there: ``dispatch_model`` would compute all on the CPU
        accelerate.cpu_offload(module, execution_device=first)
    return timed(
        lambda: pytree.tree_map(Tensor.cpu, pytree.tree_leaves(module(*args, **kwargs))), 3
    )
