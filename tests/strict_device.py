"""A device that refuses to be mixed with the CPU, as CUDA does, for training without a GPU.

Every operator runs on the CPU; what is on the device is wrapped, and torch sees another device.
Importing this module changes torch for the rest of the process: use it in one of its own.

    python -m tests.strict_device EXPERIMENT ...

trains each experiment of ``conf`` for a moment with ``device="strict"``, and prints its name.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("strict")
STRICT = torch.device("strict:0")
MAY_INDEX = ("aten::index", "aten::index_put_", "aten::_index_put_impl_")  # with rows on the CPU


class OnStrict(Tensor):
    """Says that it is on the device; ``raw`` holds the numbers."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnStrict:
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=STRICT
        )
        tensor.raw = raw
        return tensor

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(call, *args, **kwargs or {})

    def tolist(self) -> Any:
        """As of a tensor on the CPU."""
        return self.raw.tolist()

    def numpy(self, **_: Any) -> Any:
        """Raises, as on a GPU."""
        raise TypeError("can't convert strict:0 device type tensor to numpy: use Tensor.cpu()")

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied = OnStrict(self.raw.detach().clone())
        return torch.nn.Parameter(copied) if isinstance(self, torch.nn.Parameter) else copied


def _run(call: Any, *args: Any, **kwargs: Any) -> Any:
    """``call`` on the CPU.

    Raises: RuntimeError, where CUDA would: a tensor or a generator of the CPU beside one of ours.
    """
    name = call.name().partition(".")[0]
    if name == "aten::_to_copy":
        target = kwargs.pop("device", None) or args[0].device
        there = call(_raw(args[0]), **kwargs)
        return OnStrict(there) if torch.device(target).type == "strict" else there
    if name == "aten::copy_":
        _raw(args[0]).copy_(_raw(args[1]))
        return args[0]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    ours = {id(x.raw): x for x in leaves if isinstance(x, OnStrict)}
    if not ours and torch.device(kwargs.get("device") or STRICT).type != "strict":
        return call(*args, **kwargs)
    may = name in MAY_INDEX and isinstance(leaves[0], OnStrict)
    for x in leaves:
        other = isinstance(x, Tensor) and not isinstance(x, OnStrict) and x.dim() > 0
        if isinstance(x, torch.Generator) or (other and ours and not may):
            raise RuntimeError(f"{call}: strict:0 and {x.device} are mixed")
    leaves = [torch.device("cpu") if isinstance(x, torch.device) else _raw(x) for x in leaves]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    result = call(*args, **kwargs)
    return pytree.tree_map(
        lambda x: ours.get(id(x), OnStrict(x)) if isinstance(x, Tensor) else x, result
    )


def _raw(x: Any) -> Any:
    return x.raw if isinstance(x, OnStrict) else x


_anything = torch.library.Library("_", "IMPL")
_anything.fallback(_run, "PrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
for _name in ("arange", "arange.start", "arange.start_step"):  # else made empty, then grown
    _call = getattr(torch.ops.aten.arange, _name.partition(".")[2] or "default")
    _aten.impl(
        _name,
        lambda *args, _call=_call, **kwargs: OnStrict(_call(*args, dtype=kwargs.get("dtype"))),
        "PrivateUse1",
    )


def main(experiments: list[str]) -> None:
    """Train each; whatever mixes devices raises."""
    from hydra import compose, initialize_config_module
    from hydra.utils import instantiate

    from agents.training import train
    from placement.planners import load
    from tests.problems import random_problem

    torch.__future__.set_swap_module_params_on_conversion(True)
    heft = load("heft")
    problems = [random_problem(0, n, 3, objective="latency") for n in (12, 16)]
    for name in experiments:
        if name.startswith("released"):
            with initialize_config_module("conf", version_base="1.3"):
                cfg = compose("train", [f"experiment={name}"])
            config = instantiate(cfg.training, _convert_="all")
        else:
            config = import_module(name).CONFIG
        config = replace(
            config, device="strict", total_steps=32, num_checks=1, num_envs=2, steps_per_env=16,
            samples=1, imitation_epochs=1,
        )  # fmt: skip
        solutions = [heft(p).placement for p in problems] if name == "doppler" else None
        with tempfile.TemporaryDirectory() as folder:  # with the checkpoint that a run writes
            facts = {"baseline": load("single_device"), "solutions": solutions, "out_dir": folder}
            train(config.generator or problems, config=config, **facts)
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
