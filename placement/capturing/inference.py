"""Inference: the exported graph, node by node, as an ``OpGraph`` and its ``Program``."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from placement.capturing.builder import Builder
from placement.capturing.errors import module_path, node_line
from placement.capturing.exported import (
    argument_names,
    calls_of,
    check_static,
    export,
    first_transformed,
    first_unsafe,
    functionalise,
    is_random,
    parameters_of,
    signature_of,
)
from placement.capturing.known import KnownValues
from placement.capturing.numerics import Watch, check_numbers
from placement.graph import OpGraph
from placement.program import (
    CaptureError,
    DependsOnValues,
    Param,
    Program,
    Ref,
    Step,
    input_spec,
    run_program,
    split_inputs,
)


def capture_inference(module: nn.Module, example_inputs: Any, name: str | None = None) -> OpGraph:
    """See ``placement.capture``."""
    args, kwargs = split_inputs(example_inputs)
    spec = input_spec(example_inputs)
    try:
        exported = _static(module, args, kwargs, nullcontext())
    except DependsOnValues:  # perhaps on those of buffers alone
        exported = _static(module, args, kwargs, KnownValues(module))
    if first_unsafe(calls_of(exported)) is not None:
        exported = functionalise(exported)
        unsafe = first_unsafe(calls_of(exported))
        if unsafe is not None:
            is_region = isinstance(unsafe.target, torch._ops.HigherOrderOperator)  # around it
            raise CaptureError(
                f"{unsafe.args[0] if is_region else unsafe.target} cannot be made one plain "
                f"operator{node_line(unsafe)}, as it changes what it is given: rewrite that line "
                "with one that returns a new tensor"
            )
    builder = _Builder(exported)
    values = [*args, *kwargs.values()]
    leaves = pytree.tree_leaves(values)
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    inputs = placeholders[len(placeholders) - len(leaves) :]
    for node, leaf in zip(inputs, leaves, strict=True):
        builder.add_input(node, leaf)
    input_tensors = tuple(range(len(builder.tensor_src)))
    calls = calls_of(exported)
    for node in calls:
        builder.add_call(node)
    name = name or type(module).__name__
    if not builder.steps:
        raise CaptureError(f"{name} has no operators: there is nothing to place")
    flat = [builder.template(x) for x in exported.graph.output_node().args[0]]
    outputs, out_tree = _with_sizes(flat, exported.call_spec.out_spec)
    arg_names, input_names = argument_names(module, args, kwargs)
    graph = builder.graph(
        name,
        values,
        input_names,
        input_tensors=input_tensors,
        arg_names=arg_names,
        input_spec=spec,
        output_leaves=tuple(outputs),
        out_tree=out_tree,
        is_random=any(map(is_random, calls)),
        state_names=tuple(exported.state_dict),
    )
    program = graph.program
    assert isinstance(program, Program)
    if not program.is_random:
        example = program.example_tensors

        def run(watch: Watch | None) -> list[Any]:
            return pytree.tree_leaves(run_program(program, example, watch))

        check_numbers(module, args, kwargs, run)
    return graph


def _static(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], around: Any) -> Any:
    with around:
        exported = export(module, args, kwargs)
    if first_transformed(exported) is not None:
        exported = functionalise(exported)
    check_static(calls_of(exported))
    return exported


def _with_sizes(leaves: list[Any], tree: Any) -> tuple[list[Any], Any]:
    """Shapes among the outputs, which torch takes apart and makes tuples of, as leaves."""
    if tree.type is torch.Size:
        return [torch.Size(leaves)], pytree.tree_structure(0)
    if not tree.children():
        return leaves, tree
    rest = iter(leaves)
    parts = [_with_sizes([*islice(rest, x.num_leaves)], x) for x in tree.children()]
    whole = [leaf for some, _ in parts for leaf in some]
    return whole, pytree.TreeSpec(tree.type, tree.context, [part for _, part in parts])


class _Builder(Builder):
    """Collects the graph while the nodes of the trace pass by once."""

    def __init__(self, exported: Any) -> None:
        super().__init__()
        self.params, self.param_names, at = parameters_of(exported)
        # What a node is in a template.
        self.value: dict[fx.Node, Any] = {
            node: Param(at[node.name]) for node in exported.graph.nodes if node.name in at
        }

    def add_input(self, node: fx.Node, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            self.value[node] = Ref(self._add_tensor(-1, node))
        else:
            self.value[node] = leaf

    def add_call(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            return  # folded into its producer
        if target is torch.ops.aten._assert_tensor_metadata.default:
            return  # always true: flatten_inputs checks shapes and dtypes
        assert isinstance(target, torch._ops.OpOverload)
        n = len(self.steps)
        args = tuple(self.template(x) for x in node.args)
        kwargs = {k: self.template(x) for k, x in node.kwargs.items()}
        self.group.append(n)
        outputs, index = self._add_outputs(n, node)
        multi = isinstance(node.meta["val"], list | tuple)
        step = Step(target, args, kwargs, outputs, multi, index)
        self.add_step(step, node.name, str(target), module_path(node), signature_of(node))

    def _add_outputs(self, n: int, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        value = node.meta["val"]
        if isinstance(value, Tensor):
            tensor = self._add_tensor(n, node)
            self.value[node] = Ref(tensor)
            return (tensor,), (0,)
        if value is None:
            return (), ()
        if not all(x is None or isinstance(x, Tensor) for x in value):
            raise CaptureError(
                f"{node.target} gives a list among its results{node_line(node)}, which no operator "
                "of a graph can: let another operator, or the caller, do that"
            )
        readers: dict[int, list[fx.Node]] = {}
        for user in node.users:
            assert user.target is operator.getitem, f"{user} takes all outputs of {node}"
            if user.users:
                readers.setdefault(int(user.args[1]), []).append(user)  # type: ignore[arg-type]
        outputs = []
        for i in sorted(readers):
            outputs.append(self._add_tensor(n, readers[i][0]))
            for user in readers[i]:
                self.value[user] = Ref(outputs[-1])
        return tuple(outputs), tuple(sorted(readers))

    def _add_tensor(self, src: int, node: fx.Node) -> int:
        """Number the tensor of ``node``; if it is a view, operator ``src`` joins its base's group.

        A view of a parameter is free to be anywhere: every device has its own copy of it.
        """
        call = node.args[0] if node.target is operator.getitem else node
        assert isinstance(call, fx.Node)
        bases = [
            self.tensor_root[self.value[arg].tensor]
            for arg in call.all_input_nodes
            if isinstance(self.value[arg], Ref) and arg.meta["memory"] == node.meta["memory"]
        ]
        t = self.add_tensor(src, node, min(bases, default=None))
        owner = self.tensor_src[self.tensor_root[t]]
        if owner >= 0 and self.group[owner] != self.group[src]:
            old, new = self.group[src], self.group[owner]
            self.group = [new if g == old else g for g in self.group]
        return t

    def template(self, arg: Any) -> Any:
        """An argument of a node, with ``Ref`` and ``Param`` for nodes and plain containers."""
        if isinstance(arg, fx.Node):
            return self.value[arg]
        if isinstance(arg, list):
            return [self.template(x) for x in arg]
        if isinstance(arg, tuple):
            return tuple(self.template(x) for x in arg)
        if isinstance(arg, dict):
            return {k: self.template(x) for k, x in arg.items()}
        return arg
