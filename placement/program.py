"""What runs an operator graph: its calls, parameters and inputs, as ``capture`` found them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from placement.problem import check_kinds

_SHORT = {
    "float": "f",
    "bfloat": "bf",
    "int": "i",
    "uint": "u",
    "complex": "c",
    "bool": "b",
}


class CaptureError(ValueError):
    """The module cannot be captured; the message names the construct and what to do."""


class DependsOnValues(CaptureError):
    """Values of tensors decide which operators there are, or their shapes."""


class InputError(ValueError):
    """The inputs of a call are not those the program was captured for."""


def check_captured(graph: Any, cluster: Any, error: type[Exception]) -> None:
    """Raises: ``error``, they are no graph with a program, and no cluster to run it on."""
    check_kinds(error, graph=graph, cluster=cluster)
    if not isinstance(graph.program, Program):
        raise error(
            f"graph {graph.name!r} has no program to run; capture the module: "
            "placement.capture(module, inputs)"
        )


@dataclass(frozen=True)
class Ref:
    """In a template: graph tensor number ``tensor``."""

    tensor: int


@dataclass(frozen=True)
class Param:
    """In a template: ``program.params[index]``."""

    index: int


@dataclass(frozen=True, eq=False)
class Step:
    """One operator call.

    Attributes:
        target: the operator, e.g. ``torch.ops.aten.linear.default``.
        args, kwargs: its arguments, with ``Ref`` and ``Param`` in the place of tensors, at any
            depth of lists, tuples and dicts. A ``torch.device`` among them is the one the module
            was captured on: whoever runs the step elsewhere puts the device there.
        outputs: graph tensors that the call produces; unused elements of a tuple are left out.
        multi: whether the call returns a tuple or list, of which
        output_index: ``outputs[i]`` is element ``output_index[i]``.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    multi: bool
    output_index: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """What executes an ``OpGraph`` with ``N`` operators and ``P`` parameters.

    Attributes:
        steps: ``[N]`` operator calls; step ``n`` is operator ``n``.
        params: ``[P]`` the module's own parameters, buffers and constants (not copies).
        param_names: ``[P]`` the first name of each in the module.
        state_names: all names of the module's ``state_dict``, also those of what nobody reads.
        input_tensors: graph tensor numbers of the tensors among the inputs, in input order.
        input_names: names of the module's arguments, as the example gave them.
        arg_names: names of the arguments that a call may give by position.
        input_spec: the inputs as JSON; see ``inputs_from_spec``.
        leaf_names: name of every leaf of the inputs, e.g. ``input_ids`` or ``state[0]``.
        example_leaves: every leaf of the example inputs: a tensor (the caller's own) or a constant.
        output_leaves: every leaf of the outputs: ``Ref``, ``Param`` or a constant.
        in_tree, out_tree: the structures (``torch.utils._pytree``) around these leaves.
        gradients: of a training step, (parameter, graph tensor that is its gradient); whoever runs
            the program adds them up over the micro-batches.
        new_buffers: (buffer, graph tensor that is its new value), e.g. a running mean; written
            back before the next micro-batch reads the buffer.
        has_target: the last argument is the loss function's second, and none of the module.
        optimizer: class of the optimizer whose state the graph counts as memory.
        is_random: whether operators draw random numbers (e.g. dropout in training mode).
        pieces: which operators of the module were cut, and how (``placement.pieces``); None: none.
        comes_back: (input, output that is this input of the next call), graph tensors: keys and
            values. They lie where they were made; so ways to run are timed, and so it is predicted.
    """

    steps: tuple[Step, ...]
    params: tuple[Tensor, ...]
    param_names: tuple[str, ...]
    input_tensors: tuple[int, ...]
    input_names: tuple[str, ...]
    arg_names: tuple[str, ...]
    input_spec: dict[str, Any]
    leaf_names: tuple[str, ...]
    example_leaves: tuple[Any, ...]
    output_leaves: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    gradients: tuple[tuple[int, int], ...] = ()
    new_buffers: tuple[tuple[int, int], ...] = ()
    has_target: bool = False
    optimizer: str | None = None
    is_random: bool = False
    state_names: tuple[str, ...] = ()
    pieces: Any = None
    comes_back: tuple[tuple[int, int], ...] = ()

    @property
    def example_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the example inputs, by reference, in the order of ``input_tensors``."""
        return tuple(x for x in self.example_leaves if isinstance(x, Tensor))

    @property
    def target_tensors(self) -> frozenset[int]:
        """Graph tensors among the inputs that the loss function is given, not the module."""
        leaves = zip(self.leaf_names, self.example_leaves, strict=True)
        named = [re.split(r"[\[.]", name)[0] for name, x in leaves if isinstance(x, Tensor)]
        pairs = zip(self.input_tensors, named, strict=True)
        return frozenset(t for t, name in pairs if self.has_target and name == self.input_names[-1])

    def flatten_inputs(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Tensor]:
        """The tensors of a call, in the order of ``input_tensors``.

        An argument may be given by position or by name, whichever the example used.

        Raises:
            InputError: an argument is missing or unknown, or a tensor's shape or dtype or a
                constant is not that of the example.

        A tensor with other strides than the example's is copied: what was captured may rely on
        them (``torch.export`` leaves out what they make needless, and keeps them as constants).
        """
        kwargs = kwargs or {}
        leaves = [*args, *kwargs.values()]
        names = (*self.arg_names[: len(args)], *kwargs)
        if names == self.input_names and [*map(_form, leaves)] == self._forms:
            return leaves  # what follows asks for no more, and takes as long as some kernels
        by_name = self._by_name(args, kwargs)
        leaves, tree = pytree.tree_flatten([by_name[name] for name in self.input_names])
        if tree != self.in_tree:
            as_given, as_captured = (
                str(pytree.tree_unflatten([_LEAF] * x.num_leaves, x))[1:-1][:200]
                for x in (tree, self.in_tree)
            )
            raise InputError(
                f"inputs are nested as ({as_given}), but were captured as ({as_captured}): give "
                "them as captured, or capture the module again with inputs like these"
            )
        tensors = []
        for name, example, got in zip(self.leaf_names, self.example_leaves, leaves, strict=True):
            if isinstance(example, Tensor):
                if not isinstance(got, Tensor):
                    raise InputError(f"input {name!r} must be a tensor, got {type(got).__name__}")
                if got.layout is not torch.strided or (got.is_meta and not example.is_meta):
                    what = "has no values (device 'meta')" if got.is_meta else f"is {got.layout}"
                    raise InputError(f"input {name!r} {what}: give a dense tensor with values")
                if got.shape != example.shape or got.dtype != example.dtype:
                    raise InputError(
                        f"input {name!r} is {describe(got)}, but was captured as "
                        f"{describe(example)}: give that, or capture the module again"
                    )
                tensors.append(_laid_out_as(example, got))
            elif (
                isinstance(got, Tensor)
                or type(got) is not type(example)
                or (got != example and (got == got or example == example))  # nan is unlike itself
            ):
                shown = describe(got) if isinstance(got, Tensor) else repr(got)
                raise InputError(
                    f"input {name!r} is {shown}, but was captured with the constant {example!r}: "
                    "capture the module again to change it"
                )
        return tensors

    @cached_property
    def _forms(self) -> list[Any] | None:
        """Of the inputs, if each is a tensor, and none expanded."""
        is_flat = self.in_tree == pytree.tree_structure([0] * len(self.input_names))
        forms = [*map(_form, self.example_leaves)]
        expanded = any(map(_overlaps, self.example_tensors))
        return forms if is_flat and not expanded and None not in forms else None

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        expected = ", ".join(self.input_names)
        if len(args) > len(self.arg_names):
            named = [f"{name}=..." for name in self.input_names if name not in self.arg_names]
            hint = f", of these by name: {', '.join(named)}" if named else ""
            raise InputError(f"{len(args)} positional inputs given, expected ({expected}){hint}")
        by_name = dict(zip(self.arg_names, args, strict=False))
        twice = sorted(by_name.keys() & kwargs.keys())
        by_name.update(kwargs)
        missing = [name for name in self.input_names if name not in by_name]
        unknown = [name for name in by_name if name not in self.input_names]
        for what, names in (("given twice", twice), ("missing", missing), ("unknown", unknown)):
            if names:
                raise InputError(
                    f"input {names[0]!r} is {what}: the module was captured with ({expected}); "
                    "give these, or capture it again"
                )
        return by_name

    @cached_property
    def _is_single(self) -> bool:
        """Whether the output is in no structure."""
        return bool(self.out_tree == pytree.tree_structure(0))

    def timing_inputs(self) -> list[Tensor]:
        """Copies of the example inputs, laid out alike, for a timing run.

        Of the same values: an index, a probability or a matrix to factorise cannot be any number.
        """
        return [_laid_out_as(x, x.detach().clone()) for x in self.example_tensors]

    def unflatten_outputs(self, leaves: Sequence[Any]) -> Any:
        """The module's own output structure around ``leaves`` (one per ``output_leaves``)."""
        if self._is_single:
            return leaves[0]
        return pytree.tree_unflatten(list(leaves), self.out_tree)


def _form(x: Any) -> Any:
    """All that inputs of calls have in common; None: it is no dense tensor."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return None
    return x.shape, x.dtype, x.stride(), x.is_meta


def _laid_out_as(example: Tensor, tensor: Tensor) -> Tensor:
    strides = example.stride()
    if not tensor.numel():
        return tensor
    if _overlaps(example):  # expanded or unfolded: nothing can be written there
        return tensor.contiguous()
    if tensor.stride() == strides:
        return tensor
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements may share memory."""
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _example_tensor(x: Mapping[str, Any]) -> Tensor:
    """The tensor that a record of an input spec describes, of zeros if whole numbers, else ones.

    Raises:
        InputError: it describes none, or one whose elements share memory.
    """
    dtype, shape, is_strided = getattr(torch, str(x["dtype"]), None), x["shape"], "strides" in x
    strides: Any = x.get("strides", shape)
    sane = isinstance(dtype, torch.dtype) and all(
        isinstance(row, list) and all(type(d) is int and d >= 0 for d in row)
        for row in (shape, strides)
    )
    if sane and is_strided:
        sane = len(strides) == len(shape) and not _overlaps(
            torch.empty_strided(shape, strides, device="meta")
        )
    if not sane:
        raise InputError(
            f"{x} describes no tensor: expected e.g. "
            "{'shape': [1, 3, 224, 224], 'dtype': 'float32'}"
        )
    assert isinstance(dtype, torch.dtype)
    integral = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    plain = (torch.zeros if integral else torch.ones)(shape, dtype=dtype)
    if not is_strided:
        return plain
    return torch.empty_strided(shape, strides, dtype=dtype).copy_(plain)


def fill(
    template: Any,
    tensors: Mapping[int, Tensor] | Sequence[Tensor],
    params: Sequence[Tensor],
    device: torch.device | None = None,
) -> Any:
    """``template`` with tensors in the place of ``Ref`` and ``Param``.

    ``device``, if given, takes the place of every ``torch.device``.
    """

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return tensors[leaf.tensor]
        if isinstance(leaf, Param):
            return params[leaf.index]
        return device if device is not None and isinstance(leaf, torch.device) else leaf

    return mapped(template, of)


def run_program(
    program: Program,
    inputs: Sequence[Tensor],
    watch: Callable[[int, Tensor], None] | None = None,
    device: torch.device | None = None,
) -> list[Any]:
    """Run every step in order on the devices where the tensors already are.

    Args:
        inputs: flattened input tensors, as ``flatten_inputs`` returns them.
        watch: is given every graph tensor's number and values as they are made.
        device: takes the place of every ``torch.device``, if it is given.

    Returns:
        One value per output leaf; ``unflatten_outputs`` gives them their structure. A tensor is
        freed after its last use.
    """
    last_use: dict[int, int] = {}
    for n, step in enumerate(program.steps):
        for leaf in leaves_of((step.args, step.kwargs)):
            if isinstance(leaf, Ref):
                last_use[leaf.tensor] = n
    for leaf in program.output_leaves:
        if isinstance(leaf, Ref):
            last_use[leaf.tensor] = len(program.steps)
    dying: dict[int, list[int]] = {}
    for tensor, n in last_use.items():
        dying.setdefault(n, []).append(tensor)

    live = dict(zip(program.input_tensors, inputs, strict=True))
    with torch.no_grad():
        for n, step in enumerate(program.steps):
            args, kwargs = fill((step.args, step.kwargs), live, program.params, device)
            value = step.target(*args, **kwargs)
            for tensor, index in zip(step.outputs, step.output_index, strict=True):
                if tensor in last_use:
                    live[tensor] = value[index] if step.multi else value
                    if watch is not None:
                        watch(tensor, live[tensor])
            del value
            for tensor in dying.get(n, ()):
                del live[tensor]
    return [fill(leaf, live, program.params) for leaf in program.output_leaves]


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs in any accepted form as ``(args, kwargs)``.

    Raises:
        CaptureError: neither a tensor, a tuple nor a mapping.
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple):
        if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], Mapping):
            return inputs[0], dict(inputs[1])
        return inputs, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise CaptureError(
        f"example inputs must be a tensor, a tuple (positional), a dict (keyword) or (tuple, dict)"
        f"; got {type(inputs).__name__}"
    )


class _Leaf:
    """Stands for what is no container, where a structure is shown."""

    def __repr__(self) -> str:
        return "*"


_LEAF = _Leaf()


def split_item(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``split_inputs`` of what a data loader gives: lists where ``capture`` was given a tuple."""
    return split_inputs(tuple(item) if isinstance(item, list) else item)


def input_spec(inputs: Any) -> dict[str, Any]:
    """``inputs`` as JSON: ``{"args": [...], "kwargs": {...}}``, shapes instead of values.

    A tensor is ``{"shape": [...], "dtype": "float32"}``, with ``"strides"`` if it is not contiguous
    (``channels_last``, of which a capture may have other operators), a tuple ``{"tuple": [...]}``,
    a number that JSON has no word for ``{"float": "-inf"}``; lists, dicts and constants are
    themselves.

    Raises:
        CaptureError: an input is of a type that JSON cannot hold.
    """
    args, kwargs = split_inputs(inputs)

    def encode(x: Any, where: str) -> Any:
        if isinstance(x, Tensor):
            said: dict[str, Any] = {"shape": list(x.shape), "dtype": dtype_name(x.dtype)}
            if x.layout == torch.strided and not (x.is_contiguous() or _overlaps(x)):
                said["strides"] = list(x.stride())
            return said
        if type(x) is float and not math.isfinite(x):
            return {"float": str(x)}
        if x is None or type(x) in (bool, int, float, str):
            return x
        if type(x) in (list, tuple):
            items = [encode(y, f"{where}[{i}]") for i, y in enumerate(x)]
            return items if type(x) is list else {"tuple": items}
        if isinstance(x, dict) and all(isinstance(k, str) for k in x):
            return {k: encode(y, f"{where}[{k!r}]") for k, y in x.items()}
        raise CaptureError(
            f"input {where} is a {type(x).__module__}.{type(x).__qualname__}: inputs must be "
            "tensors, numbers, strings, None, or lists, tuples and dicts (whose keys are strings) "
            "of them"
        )

    return {
        "args": [encode(x, f"args[{i}]") for i, x in enumerate(args)],
        "kwargs": {k: encode(x, k) for k, x in kwargs.items()},
    }


def inputs_from_spec(spec: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of the shapes and dtypes of ``input_spec``: integers 0, others 1.

    Raises:
        InputError: the specification is damaged.
    """

    def decode(x: Any) -> Any:
        if isinstance(x, list):
            return [decode(y) for y in x]
        if not isinstance(x, dict):
            return x
        if x.keys() - {"strides"} == {"shape", "dtype"}:
            return _example_tensor(x)
        if x.keys() == {"tuple"}:
            return tuple(decode(y) for y in x["tuple"])
        if x.keys() == {"float"} and x["float"] in ("inf", "-inf", "nan"):
            return float(x["float"])
        return {k: decode(y) for k, y in x.items()}

    args, kwargs = spec.get("args"), spec.get("kwargs")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise InputError(
            f"input specification must have a list 'args' and a dict 'kwargs', got {sorted(spec)}"
        )
    return tuple(decode(x) for x in args), {k: decode(x) for k, x in kwargs.items()}


def leaves_of(template: Any) -> Iterator[Any]:
    """Every leaf of nested lists, tuples and dicts (values), in order."""
    if isinstance(template, list | tuple):
        for x in template:
            yield from leaves_of(x)
    elif isinstance(template, dict):
        for x in template.values():
            yield from leaves_of(x)
    else:
        yield template


def mapped(template: Any, of: Callable[[Any], Any]) -> Any:
    """The template with ``of(leaf)`` in the place of every leaf (see ``leaves_of``)."""
    if isinstance(template, list | tuple):
        return type(template)(mapped(x, of) for x in template)
    if isinstance(template, dict):
        return {k: mapped(x, of) for k, x in template.items()}
    return of(template)


def signature(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], of: Callable[[Any], Any]
) -> str:
    """Kind, shapes, dtypes and constants of a call; where it runs is not part of it.

    ``of(leaf)`` is the tensor that a leaf stands for, or what else it is.
    """

    def shown(x: Any) -> str:
        if isinstance(x, list | tuple):
            return f"[{', '.join(map(shown, x))}]"
        x = of(x)
        if isinstance(x, Tensor):
            return describe(x)
        if isinstance(x, torch.device):
            return "device"
        return short_dtype(x) if isinstance(x, torch.dtype) else repr(x)

    named = [f"{k}={shown(x)}" for k, x in kwargs.items() if k not in ("device", "pin_memory")]
    return f"{target}({', '.join([*map(shown, args), *named])})"


def describe(tensor: Tensor) -> str:
    """E.g. ``f32[1,3,224,224]``."""
    return f"{short_dtype(tensor.dtype)}[{','.join(str(d) for d in tensor.shape)}]"


def short_dtype(dtype: torch.dtype) -> str:
    kind, bits = re.fullmatch(r"([a-z]+)(.*)", dtype_name(dtype)).groups()  # type: ignore[union-attr]
    return _SHORT.get(kind, kind) + bits


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def storage_of(tensor: Tensor) -> int:
    """Identity of the memory behind a tensor; fake tensors of a trace share it as real ones do."""
    return int(tensor.untyped_storage()._cdata)


def view_of(x: Tensor) -> Any:
    """Equal for tensors that see the same memory the same way."""
    return storage_of(x), x.storage_offset(), x.shape, x.stride(), x.dtype
