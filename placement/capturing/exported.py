"""A PyTorch module as torch's own graph of operators, and what must hold for it to be placed.

``torch.export`` (Ansel et al., "PyTorch 2", ASPLOS 2024) traces the module once. Its
*training* representation is used as it is: it keeps ``conv2d``, ``linear``, ``batch_norm`` and
attention as eager PyTorch has them, so one operator of the graph is one call of eager. Only
where an in-place operator would make the order of two readers matter is the graph
functionalised, because a distributed run keeps no other order than that of the edges.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import operator
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from placement.capturing.errors import (
    check_tensors,
    first_line,
    node_line,
    not_exported,
    where_in,
)
from placement.capturing.patches import patched
from placement.program import (
    CaptureError,
    DependsOnValues,
    leaves_of,
    signature,
    storage_of,
    view_of,
)

# Regions that functionalisation dissolves into plain operators.
_WRAPPERS = ("wrap_with_autocast", "wrap_with_set_grad_enabled", "autograd_call")

_DROPOUTS = (
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
)

# Of their first argument they read nothing but shape and dtype.
_OVERWRITES = (
    torch.ops.aten.copy.default,
    torch.ops.aten.fill.Scalar,
    torch.ops.aten.fill.Tensor,
    torch.ops.aten.zero.default,
)

# With statistics of the batch, they write to the running ones: arguments 3 and 4.
_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    training: bool = False,
    prefix: str = "",
) -> Any:
    """The exported program of ``module``; the module is left as it was.

    In evaluation mode without gradients, or for training: then submodules that are in
    evaluation mode stay so, unless the whole module is. ``prefix`` is what messages leave out of
    paths in the module.
    """
    held = (*module.named_parameters(), *module.named_buffers())
    for name in (name for name, x in held if is_lazy(x)):  # a trace would leave its module broken
        raise CaptureError(
            f"{name.removeprefix(prefix)!r} has no shape yet: call the module once, and capture it "
            "then"
        )
    whole = training and not module.training
    lost: list[tuple[nn.Module, str]] = []

    def note(owner: nn.Module, name: str, value: Tensor | None) -> None:
        # Torch follows assignments to buffers of the root itself, but of no other module. What
        # was written in place may be assigned too: self.s = torch.add(..., out=self.s).
        old = owner._buffers.get(name)
        if owner is not module and old is not None and old is not value:
            lost.append((owner, name))

    with left_as_it_was(module):
        for m in module.modules():
            m.training = training and (m.training or whole)
        # The trace tells inputs apart by identity, so one tensor given twice must become two.
        inputs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        try:
            with (
                left_as_it_was(module) as replaced,
                register_module_buffer_registration_hook(note),
                quiet() as messages,
                torch.set_grad_enabled(training),
                patched(training),
            ):
                exported = torch.export.export(module, *inputs, strict=False)
        except CaptureError as error:
            raise CaptureError(f"{error}{where_in(error, module, prefix)}") from error
        except Exception as error:
            raise not_exported(
                module, args, kwargs, error, training=training, prefix=prefix
            ) from error
    check_tensors(exported, prefix)
    stored = exported.state_dict | exported.constants
    buffers = exported.graph_signature.inputs_to_buffers
    used = {n.name for n in exported.graph.nodes if n.op == "placeholder" and n.users}
    read = {id(stored[name]) for node, name in buffers.items() if node in used}
    lost = [(m, name) for m, name in lost if training or id(m._buffers[name]) in read]
    if lost:
        owner, name = lost[0]
        path = next(path for path, m in module.named_modules() if m is owner)
        full = ".".join(filter(None, (path, name))).removeprefix(prefix)
        raise CaptureError(
            f"the module changes its buffer {full!r} by assigning to it, "
            + (
                f"which torch.export loses: write it in place (self.{name}.copy_(...))"
                if training
                else "so that its calls are not independent: make the update depend on "
                "self.training"
            )
        )
    # What is new, or replaced before it is read, is a left-over: no later call depends on it, nor
    # on such a buffer in evaluation mode.
    for message in messages:
        for path in re.findall(r"self\.([\w.]+)(?=[, ])", message):
            parent, _, name = path.rpartition(".")
            replaced.append((path, vars(module.get_submodule(parent)).get(name)))
    for path, value in replaced:
        if any(value is x for x in stored.values()):
            raise CaptureError(
                f"the module keeps state between calls in its attribute "
                f"{path.removeprefix(prefix)!r}, so that "
                "its calls are not independent: make the state an input and an output"
            )
    return exported


@contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[list[tuple[str, Any]]]:
    """Put back attributes of all submodules, and what their dicts, lists and sets hold.

    Given is, in the end, what was replaced (None: added), with the attribute's path.
    """
    parts = list(module.named_modules())
    before = {id(vars(m)): (f"{path}.".lstrip("."), vars(m), dict(vars(m))) for path, m in parts}
    waiting = [(f"{path}.{k}".lstrip("."), x) for path, m in parts for k, x in vars(m).items()]
    while waiting:
        path, x = waiting.pop()
        if isinstance(x, dict | list | set) and id(x) not in before:
            before[id(x)] = path, x, _held(x)
        elif not isinstance(x, tuple):
            continue
        waiting.extend((path, y) for y in _held(x).values())
    replaced: list[tuple[str, Any]] = []
    try:
        yield replaced
    finally:
        for path, x, was in before.values():
            now, missing = _held(x), object()
            other = [k for k in was | now if was.get(k, missing) is not now.get(k, missing)]
            if not other:
                continue
            replaced += [
                (f"{path}{k}" if path[-1:] in (".", "") else path, was.get(k)) for k in other
            ]
            x.clear()
            if isinstance(x, list):
                x.extend(was.values())
            else:
                x.update(was)


def _held(x: Any) -> dict[Any, Any]:
    """What a container holds, by key or position; the elements of a set as keys."""
    if isinstance(x, dict):
        return dict(x)
    return dict.fromkeys(x) if isinstance(x, set) else dict(enumerate(x))


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Trace without gradients and torch's own reports; its warnings about attributes are given."""
    reports: list[str] = []
    disabled = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stderr(io.StringIO()),
            torch.no_grad(),
        ):
            warnings.simplefilter("always")
            yield reports
            texts = [str(w.message) for w in caught]
            reports.extend(text for text in texts if "assigned during export" in text)
    finally:
        logging.disable(disabled)


def parameters_of(
    exported: Any, trained: nn.Module | None = None, *, unread: bool = False
) -> tuple[list[Tensor], list[str], dict[str, int]]:
    """Distinct parameters, buffers and constants, their names, and which a placeholder is.

    The same memory seen the same way is one (tied parameters); of what is ``trained`` two
    parameters are two, by their names in the module. ``unread``: also those that no operator of the
    forward reads.
    """
    own = () if trained is None else (*trained.named_parameters(), *trained.named_buffers())
    own_name = {id(x): name for name, x in own}
    signature = exported.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    seen: dict[Any, int] = {}
    params: list[Tensor] = []
    param_names: list[str] = []
    param_at: dict[str, int] = {}
    for node in exported.graph.nodes:
        if node.op != "placeholder" or node.name not in names or not (node.users or unread):
            continue
        full_name = names[node.name]
        stored = exported.state_dict
        real = stored[full_name] if full_name in stored else exported.constants[full_name]
        key = view_of(real)
        one = params[seen[key]] if key in seen else None
        apart = trained and one is not real and nn.Parameter in (type(one), type(real))
        if one is None or apart:
            seen[key] = len(params)
            params.append(real)
            param_names.append(own_name.get(id(real), full_name))
        param_at[node.name] = seen[key]
    return params, param_names, param_at


def check_static(nodes: Sequence[fx.Node]) -> None:
    """Every operator must give tensors of fixed shapes, and there must be no control flow."""
    for node in nodes:
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            construct = str(target)
            if construct not in _WRAPPERS:
                raise CaptureError(
                    f"the module uses the construct {construct!r}{node_line(node)}, which is no "
                    "fixed list of operators: use torch.where for a choice, unroll a loop, or "
                    "choose a plain implementation (e.g. attn_implementation='sdpa')"
                )
        values = [x for x in leaves_of(node.meta.get("val")) if x is not None]
        if not all(isinstance(x, Tensor) and all(type(d) is int for d in x.shape) for x in values):
            raise DependsOnValues(
                f"{target} gives a number or a shape that depends on the values of a tensor"
                f"{node_line(node)}: use masks or torch.where(condition, a, b), or make the value "
                "a constant of the module"
            )


def first_unsafe(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The first call that cannot run as traced, or None; ``nodes`` in graph order.

    An operator may work in place where nobody can notice: the memory it writes to is fresh, not
    a view, and no other operator or output reads the argument.
    """
    fresh: set[fx.Node] = set()
    for node in nodes:
        if node.target is operator.getitem:
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            return node
        written = _mutated(node)
        if not all(arg in fresh and len(arg.users) == 1 for arg in written):
            return node
        memory = set(node.meta["memory"])
        aliased = [arg for arg in node.all_input_nodes if memory.intersection(arg.meta["memory"])]
        if aliased == written:  # both empty, or in place on what was fresh
            fresh.add(node)
    return None


def calls_of(exported: Any) -> list[fx.Node]:
    """The call nodes in order.

    On the way every node's ``meta["memory"]`` becomes the identities of its tensors' memory.
    """
    handed_on: dict[int, int] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and not node.users:  # may be of any kind
            continue
        memory = [storage_of(x) for x in leaves_of(node.meta.get("val")) if isinstance(x, Tensor)]
        if _is_idle_dropout(node):
            handed_on[memory[0]] = node.args[0].meta["memory"][0]
        node.meta["memory"] = [handed_on.get(m, m) for m in memory]
    return [node for node in exported.graph.nodes if node.op == "call_function"]


def _is_idle_dropout(node: fx.Node) -> bool:
    """Dropout that drops nothing hands on its input, but torch records a new tensor for it."""
    return node.target in _DROPOUTS and not (node.args[1] and node.args[2])


def _mutated(node: fx.Node) -> list[Any]:
    """The arguments that an operator writes to."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    written: list[Any] = []
    for i, a in enumerate(target._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(a.name)
            written.extend(leaves_of(value))
    if target in _NORMS and node.args[5]:  # which the schema does not say
        written.extend(x for x in node.args[3:5] if x is not None)
    return written


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers: dropout and its like only where they drop."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for i, a in enumerate(target._schema.arguments):
        if a.name in ("train", "training", "p", "dropout", "dropout_p"):
            default = a.default_value if a.has_default_value() else None
            value = node.args[i] if i < len(node.args) else node.kwargs.get(a.name, default)
            if value in (False, 0.0):
                return False
    return True


def first_transformed(exported: Any) -> fx.Node | None:
    """The first call of ``torch.func`` (vmap, jvp), whose tensors have no memory, or None."""
    plain = torch._ops.OpOverload | torch._ops.HigherOrderOperator
    calls = (n for n in exported.graph.nodes if n.op == "call_function")
    return next(
        (n for n in calls if not isinstance(n.target, plain) and n.target is not operator.getitem),
        None,
    )


def functionalise(exported: Any) -> Any:
    """The program without in-place operators, regions of autocast and vmap."""
    transformed = first_transformed(exported)
    for node in filter(_is_idle_dropout, exported.graph.nodes):
        # Else torch would take a write to its output for one that its input does not see.
        node.target, node.args = torch.ops.aten.alias.default, node.args[:1]
    _keep_names(exported.graph_module)
    try:
        with quiet():
            exported = exported.run_decompositions({})
    except Exception as error:
        what = (
            f"uses torch.func{node_line(transformed)} for what"
            if transformed is not None
            else "has an in-place operator or an autocast region that"
        )
        raise CaptureError(
            f"the module {what} torch cannot make plain operators of: {first_line(error)}. Only "
            "vmap and jvp can be captured: write derivatives out"
            if transformed is not None
            else f"the module {what} torch cannot remove: {first_line(error)}"
        ) from error
    signature = exported.graph_signature
    for buffer in _changed_buffers(exported):
        raise CaptureError(
            f"the module changes its buffer {buffer!r} in evaluation mode too, so that its calls "
            "are not independent: make the update depend on self.training"
        )
    for name in getattr(signature, "parameters_to_mutate", {}).values():
        raise CaptureError(
            f"the module changes its parameter {name!r} when it is called (an embedding with "
            "max_norm does), so that its calls are not independent: do that in the training loop"
        )
    for name in signature.user_inputs_to_mutate.values():
        raise CaptureError(
            f"the module changes its input {name!r} in place: let it work on a copy "
            f"({name} = {name}.clone())"
        )
    return exported


def _changed_buffers(exported: Any) -> list[str]:
    """Buffers that a call changes for the next one; others are no longer among the outputs.

    A call that writes a whole buffer before anything reads it (the frequencies of RoPE ``longrope``
    of transformers) leaves nothing behind that a later call sees.
    """
    signature, output = exported.graph_signature, exported.graph.output_node()
    holder = {name: node for node, name in signature.inputs_to_buffers.items()}
    unread = {
        node.name
        for node in exported.graph.find_nodes(op="placeholder")
        if all(
            user.target in _OVERWRITES and user.args[0] is node and node not in user.args[1:]
            for user in node.users
        )
    }
    changed = signature.buffers_to_mutate.items()
    whole = {result for result, buffer in changed if holder[buffer] in unread}
    output.args = (tuple(x for x in output.args[0] if getattr(x, "name", None) not in whole),)
    return [buffer for result, buffer in changed if result not in whole]


def _keep_names(program: fx.GraphModule) -> None:
    """Let the bodies of regions run node by node: else torch forgets whose their operators are."""
    for _, body in program.named_children():
        if isinstance(body, fx.GraphModule):
            _keep_names(body)
            body.forward = fx.Interpreter(body).run


def signature_of(node: fx.Node) -> str:
    """Kind, shapes, dtypes and constants of a call; where it runs is not part of it."""
    return signature(
        node.target,
        node.args,
        node.kwargs,
        lambda x: x.meta.get("val") if isinstance(x, fx.Node) else x,
    )


def argument_names(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of forward's positional arguments, and of those that the example gives."""
    positional = []
    for p in inspect.signature(module.forward).parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            positional.append(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            extra = range(len(args) - len(positional))
            positional.extend(f"{p.name}[{i}]" for i in extra)
    return tuple(positional), (*positional[: len(args)], *kwargs)


def named_leaves(
    values: Sequence[Any], input_names: Sequence[str]
) -> tuple[tuple[str, ...], tuple[Any, ...], Any]:
    """Names of the leaves of the inputs, the leaves, and how they are nested."""
    paths, tree = pytree.tree_flatten_with_path(list(values))
    names = (input_names[path[0].idx] + pytree.keystr(path[1:]) for path, _ in paths)  # type: ignore[attr-defined]
    return tuple(names), tuple(leaf for _, leaf in paths), tree
