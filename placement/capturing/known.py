"""Values that no input decides: a trace has none, and is told those that Python asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

# Functions of which Python needs the result.
_ASKS = {"item", "tolist", "numpy", "equal", "allclose", "__contains__"} | {
    f"__{kind}__" for kind in ("bool", "int", "float", "index")
}
# Those with results as long as values say, in memory of their own.
_AS_LONG = {"argwhere", "bincount", "combinations", "masked_select", "nonzero", "one_hot"} | {
    *("repeat_interleave", "unique", "unique_consecutive", "where"),
}
# Those to which a single integer is a size or a place.
_SIZED = {"__getitem__", "arange", "expand", "full", "narrow", "pad", "repeat", "reshape"} | {
    *("new_full", "new_ones", "new_zeros", "ones", "split", "view", "zeros"),
}


class KnownValues(TorchFunctionMode):
    """Computes beside a trace of the module, which it surrounds, what its buffers decide.

    Not what draws random numbers, nor what has been written to through another tensor.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self._own = module, dict(module.named_buffers())
        self._values: Any = WeakIdKeyDictionary()  # and how often each tensor had been written to

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if proxy_tensor.get_proxy_mode() is None:
            return func(*args, **kwargs)
        if self._own:  # the trace has put others in their place
            for path, x in self._module.named_buffers():
                self._values[x] = x._version, self._own[path]
            self._own = {}
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            self._values.pop(args[0], None)  # what is written through it is not counted
        if name in _SIZED:
            sizes = pytree.tree_map_only(Tensor, self._as_number, (args[1:], kwargs))
            args, kwargs = (*args[:1], *sizes[0]), sizes[1]
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        try:
            copies = {id(x): self._value(x) for x in given}
            a, k = pytree.tree_map_only(Tensor, lambda x: copies[id(x)], (args, kwargs))
            with _disable_current_modes(), torch.random.fork_rng(devices=[]):
                before_chance = torch.get_rng_state()
                known = func(*a, **k)
                is_known = torch.equal(before_chance, torch.get_rng_state())
        except Exception:  # an input decides it, or it is not to be computed so
            is_known = False
        if not is_known:
            return func(*args, **kwargs)
        is_mask = name == "__getitem__" and any(x.dtype == torch.bool for x in given[1:])
        if name in _ASKS:
            return known
        if name in _AS_LONG or is_mask:
            return pytree.tree_map_only(Tensor, torch.ops.aten.lift_fresh_copy.default, known)
        before = [x._version for x in given]
        outputs = func(*args, **kwargs)
        for x, version in zip(given, before, strict=True):
            if x._version != version:
                self._values[x] = x._version, copies[id(x)]
        for x, value in zip(*map(pytree.tree_leaves, (outputs, known)), strict=True):
            if isinstance(x, Tensor):
                self._values[x] = x._version, value
        return outputs

    def _value(self, x: Tensor) -> Tensor:
        """A copy, which may be written to.

        Raises:
            KeyError: an input decides it, or chance.
        """
        version, value = self._values[x] if proxy_tensor.is_fake(x) else (x._version, x)
        if version != x._version:
            raise KeyError(x)
        with _disable_current_modes():
            return value.detach().clone()

    def _as_number(self, x: Tensor) -> Tensor | int:
        if x.dim() > 0 or x.dtype not in (torch.int64, torch.int32):
            return x
        try:
            value = self._value(x)
        except KeyError:
            return x
        with _disable_current_modes():
            return int(value)
