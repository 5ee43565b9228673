"""The training step of a module as an operator graph: forward, backward, gradients.

The loss and its gradients are traced *through autograd itself*: ``make_fx`` runs the exported
module and ``torch.autograd.grad`` on fake tensors and records every kernel below autograd. So
the graph holds the very kernels that eager training calls, forward and backward, and no
decompositions (``torch.export``'s own joint graph decomposes, e.g., the backward of batch
normalisation into a dozen element-wise operators). A second trace removes in-place operators,
because a distributed run keeps no other order than that of the edges; new values of buffers
become outputs that are written back.

**One operator of the graph is one call of the module's forward, or its backward.** The kernels
of a call that autograd splits (``linear`` is a transpose and a matrix product) stay together.
Views cost nothing and are made again where they are read, so what flows between operators are
tensors with memory of their own: a stored activation is a tensor that a backward operator reads.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from placement.graph import OpGraph
from placement.program import (
    CaptureError,
    InputError,
    Param,
    Program,
    Ref,
    Step,
    argument_names,
    check_static,
    export,
    first_line,
    input_spec,
    inputs_from_spec,
    module_path,
    quiet,
    signature_of,
    split_inputs,
    storage_of,
)

TARGET = "target"  # the name of the loss function's second argument among the inputs

_aten = torch.ops.aten
_higher = torch.ops.higher_order
Owner = tuple[int, bool]  # (number of the call in the forward, whether it is its backward)
Part = tuple[int, str]  # (number of the call, "", "_backward" or "_weight_backward")


class WithLoss(nn.Module):
    """``loss(module(inputs), target)``; positional inputs, keyword inputs and target in a row."""

    def __init__(self, module: nn.Module, loss: Callable[..., Any], keywords: tuple[str, ...]):
        super().__init__()
        self.module = module
        self._loss = loss
        self._keywords = keywords

    def forward(self, *values: Any) -> Any:
        num_args = len(values) - 1 - len(self._keywords)
        named = dict(zip(self._keywords, values[num_args:-1], strict=True))
        return self._loss(self.module(*values[:num_args], **named), values[-1])


def capture_training(
    module: nn.Module,
    example_inputs: Any,
    *,
    name: str | None,
    loss: Callable[..., Any] | None,
    optimizer: torch.optim.Optimizer | None,
    colocate_backward: bool,
    split_backward: bool,
) -> OpGraph:
    """See ``placement.capture``."""
    inputs, target = split_example(example_inputs) if loss else (example_inputs, None)
    args, kwargs = split_inputs(inputs)
    spec = input_spec(inputs)
    arg_names, input_names = argument_names(module, args, kwargs)
    values = [*args, *kwargs.values()]
    if loss is None:
        exported = export(module, args, kwargs, training=True)
    else:
        if TARGET in (*arg_names, *input_names):
            raise CaptureError(
                f"the module has an argument {TARGET!r}, which is what the second argument of the "
                "loss function is called: rename it, or let the module return its loss (loss=None)"
            )
        values.append(target)
        input_names = (*input_names, TARGET)
        spec["kwargs"] |= input_spec({TARGET: target})["kwargs"]
        wrapped = WithLoss(module, loss, tuple(kwargs)).train(module.training)
        exported = export(wrapped, tuple(values), {}, training=True)
    check_static([n for n in exported.graph.nodes if n.op == "call_function"])
    joint = _trace(exported, module, pytree.tree_leaves(values), optimizer, split_backward)
    pieces = _pieces(joint, split_backward)
    builder = _Builder(joint, pieces, "module." if loss else "", colocate_backward)
    paths, in_tree = pytree.tree_flatten_with_path(values)
    program = Program(
        steps=tuple(builder.steps),
        params=tuple(builder.params),
        param_names=tuple(builder.param_names),
        input_tensors=tuple(range(joint.num_inputs)),
        input_names=input_names,
        arg_names=arg_names,
        input_spec=spec,
        leaf_names=tuple(
            input_names[path[0].idx] + pytree.keystr(path[1:])  # type: ignore[attr-defined]
            for path, _ in paths
        ),
        example_leaves=tuple(leaf for _, leaf in paths),
        output_leaves=(Ref(builder.loss),),
        in_tree=in_tree,
        out_tree=pytree.tree_structure(0),
        gradients=tuple(builder.gradients),
        new_buffers=tuple(builder.new_buffers),
        optimizer=None if optimizer is None else type(optimizer).__name__,
        is_random=any(_draws(node) for node in joint.kernels),
    )
    # A gradient accumulator and the optimizer's state live where the gradient is added up.
    sizes = [p.numel() * p.element_size() for p in builder.params]
    kept = [sizes[p] + state_bytes(optimizer, builder.params[p]) for p, _ in builder.gradients]
    keepers = [
        (builder.tensor_src[t], len(sizes) + i) for i, (_, t) in enumerate(builder.gradients)
    ]
    return OpGraph.build(
        name or type(module).__name__,
        builder.op_name,
        builder.tensor_src,
        builder.tensor_bytes,
        builder.uses,
        op_kind=builder.op_kind,
        op_module=builder.op_module,
        op_signature=builder.op_signature,
        tensor_root=builder.tensor_root,
        param_bytes=[*sizes, *kept],
        param_uses=[*builder.param_uses, *keepers],
        group=builder.group,
        is_backward=builder.is_backward,
        output_tensor=[builder.loss],
        program=program,
    )


def split_example(example: Any) -> tuple[Any, Any]:
    """``(inputs, target)`` of an example for training with a loss function.

    Raises:
        CaptureError: it is not a pair.
    """
    if isinstance(example, tuple | list) and len(example) == 2:
        return example[0], example[1]
    raise CaptureError(
        "with a loss function an example is a pair (inputs, target), as a data loader gives it, "
        f"and the loss is loss(module(inputs), target); got {type(example).__name__}"
    )


def flatten_example(program: Program, example: Any) -> list[Tensor]:
    """The tensors of a micro-batch, given like the example that the step was captured with.

    Raises:
        InputError: it is unlike that example.
    """
    if TARGET not in program.input_names or TARGET in program.arg_names:
        return program.flatten_inputs(*split_inputs(example))
    try:
        inputs, target = split_example(example)
        args, kwargs = split_inputs(inputs)
    except CaptureError as error:
        raise InputError(str(error)) from None
    return program.flatten_inputs(args, {**kwargs, TARGET: target})


def example_from_spec(spec: Mapping[str, Any]) -> Any:
    """An example like the one whose ``Program.input_spec`` is given; a pair if it has a target.

    Raises:
        InputError: the specification is damaged.
    """
    args, kwargs = inputs_from_spec(spec)
    if TARGET not in kwargs:
        return args, kwargs
    target = kwargs.pop(TARGET)
    return (args, kwargs), target


def plain_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Any],
    loss: Callable[..., Any] | None,
) -> Tensor:
    """What a step means: plain PyTorch on the same micro-batches; their losses, ``[M]``."""
    losses = []
    for example in microbatches:
        inputs, target = split_example(example) if loss else (example, None)
        args, kwargs = split_inputs(inputs)
        outputs = module(*args, **kwargs)
        value = loss_of(loss(outputs, target) if loss else outputs)
        (value / len(microbatches)).backward()
        losses.append(value.detach())
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses)


def mean_of_outputs(outputs: Any, target: Any = None) -> Tensor:
    """The mean of all floating-point outputs: a stand-in where only the work counts, not what
    is learned."""
    found = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    found = [x.mean() for x in found if x.is_floating_point()]
    if not found:
        raise CaptureError("the module has no floating-point output to make a loss of")
    return torch.stack(found).mean()


def state_bytes(optimizer: torch.optim.Optimizer | None, param: Tensor) -> int:
    """Bytes that ``optimizer`` keeps for ``param`` after a step, found out on a tiny stand-in."""
    group = (
        next((g for g in optimizer.param_groups if any(x is param for x in g["params"])), None)
        if optimizer is not None
        else None
    )
    if group is None:
        return 0
    small = nn.Parameter(torch.zeros((2,) * param.dim(), dtype=param.dtype))
    small.grad = torch.zeros_like(small)
    probe = optimizer_like(optimizer, [{**group, "params": [small]}])
    probe.step()
    state = [x for x in probe.state[small].values() if isinstance(x, Tensor)]
    each = sum(x.element_size() for x in state if x.shape == small.shape)
    fixed = sum(x.numel() * x.element_size() for x in state if x.shape != small.shape)
    return each * param.numel() + fixed


def optimizer_like(optimizer: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the same class for other parameters; the groups hold all settings."""
    return type(optimizer)(groups, lr=groups[0]["lr"])


class _Recorder:
    """Writes into every traced node to which call of the forward it belongs."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        self._graph = mode.tracer.graph
        self._owner: Owner | None = None
        self.switch(None)

    def switch(self, owner: Owner | None) -> None:
        """What was traced since the last switch is its owner's; what follows is ``owner``'s."""
        for node in reversed(self._graph.nodes):
            if "owner" in node.meta:
                break
            node.meta["owner"] = self._owner
        self._owner = owner


class _Forward(fx.Interpreter):
    """Runs the exported graph; notes for every kernel, and every autograd node, whose it is."""

    def __init__(self, module: Any, recorder: _Recorder, calls: list[fx.Node], known: set[Any]):
        super().__init__(module, garbage_collect_values=False)
        self._recorder, self._calls, self._known = recorder, calls, known

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        call = len(self._calls)
        self._calls.append(n)
        self._recorder.switch((call, False))
        result = super().run_node(n)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._follow(tensor.grad_fn, call)
        return result

    def _follow(self, node: Any, call: int) -> None:
        """The autograd nodes from ``node`` on that are new are those of ``call``."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._known:
                continue
            self._known.add(node)
            node.register_prehook(lambda _: self._recorder.switch((call, True)))
            waiting.extend(following for following, _ in node.next_functions)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _higher.wrap_with_set_grad_enabled:
            enabled, body, *operands = args
            with torch.set_grad_enabled(enabled):
                return self._nested(body, operands)
        if target is _higher.wrap_with_autocast:
            device_type, dtype, enabled, _, body, *operands = args
            with torch.autocast(device_type, dtype, enabled, cache_enabled=False):
                return self._nested(body, operands)
        return super().call_function(target, args, kwargs)

    def _nested(self, body: Any, operands: Sequence[Any]) -> Any:
        return _Forward(body, self._recorder, self._calls, self._known).run(*operands)


class _Functional(fx.Interpreter):
    """Runs the traced step again, for the trace without in-place operators."""

    def __init__(self, module: Any, recorder: _Recorder, split_backward: bool) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._recorder = recorder
        self._split_backward = split_backward

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function":
            self._recorder.switch(n.meta["owner"])
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # Its schema does not say that it writes to the running statistics.
        if target is _aten.native_batch_norm.default and args[3] is not None and args[5]:
            *values, mean, var = _aten._native_batch_norm_legit_functional.default(*args, **kwargs)
            args[3].copy_(mean)
            args[4].copy_(var)
            return tuple(values)
        if target is _aten.native_batch_norm_backward.default and args[7]:
            args = (*args[:3], None, None, *args[5:])  # the batch's own statistics are used
        if target is _aten.convolution_backward.default and self._split_backward:
            *first, (of_input, of_weight, of_bias) = args
            if of_input and (of_weight or of_bias):
                given, *_ = target(*first, (True, False, False))
                _, *trained = target(*first, (False, of_weight, of_bias))
                return (given, *trained)
        return super().call_function(target, args, kwargs)


@dataclass(frozen=True, eq=False)
class _Joint:
    """The loss and its gradients as one list of functional kernel calls.

    Attributes:
        kernels: in order; ``meta["owner"]`` says whose they are. Views and getitems included.
        calls: the calls of the exported forward, by number.
        params, param_names: distinct parameters, buffers and constants.
        source: what a placeholder is: ``Param``, or ``Ref`` of an input tensor.
        num_inputs: tensors among the inputs.
        loss: its node.
        gradients, new_buffers: (number in ``params``, node).
    """

    kernels: list[fx.Node]
    calls: list[fx.Node]
    params: list[Tensor]
    param_names: list[str]
    source: dict[fx.Node, Param | Ref]
    num_inputs: int
    loss: fx.Node
    gradients: list[tuple[int, fx.Node]]
    new_buffers: list[tuple[int, fx.Node]]


def _trace(
    exported: Any,
    module: nn.Module,
    leaves: list[Any],
    optimizer: torch.optim.Optimizer | None,
    split_backward: bool,
) -> _Joint:
    """Trace loss and gradients of an exported program whose inputs have these leaves."""
    signature = exported.graph_signature
    placeholders = [n.name for n in exported.graph.nodes if n.op == "placeholder"]
    params, param_names, param_at = _parameters(exported, module)
    own = {param_at[name] for name in signature.inputs_to_parameters if name in param_at}
    trained = {id(p) for g in optimizer.param_groups for p in g["params"]} if optimizer else None
    trainable = [
        i
        for i, p in enumerate(params)
        if i in own and p.requires_grad and (trained is None or id(p) in trained)
    ]
    if not trainable:
        raise CaptureError(
            "there is nothing to train: no parameter that the module uses has requires_grad=True"
            + (" and belongs to the optimizer" if optimizer else "")
        )
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    flat = [x.detach() for x in (*params, *tensors)]
    calls: list[fx.Node] = []
    with_gradient: list[int] = []

    def step(*given: Tensor) -> list[Tensor]:
        recorder = _Recorder()
        for i in trainable:
            given[i].requires_grad_()
        rest = iter(given[len(params) :])
        operands = [
            given[param_at[name]] if name in param_at else None
            for name in placeholders[: len(placeholders) - len(leaves)]
        ]
        operands += [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        values = _Forward(exported.graph_module, recorder, calls, set()).run(*operands)
        loss = loss_of(pytree.tree_unflatten(values, exported.call_spec.out_spec))
        recorder.switch((len(calls) - 1, True))
        found = torch.autograd.grad(loss, [given[i] for i in trainable], allow_unused=True)
        with_gradient.extend(i for i, g in zip(trainable, found, strict=True) if g is not None)
        memory = {storage_of(x) for x in given}
        gradients = [g for g in found if g is not None]
        gradients = [g.clone() if storage_of(g) in memory else g for g in gradients]
        recorder.switch(None)
        return [loss, *gradients]

    def functional(*given: Tensor) -> Any:
        recorder = _Recorder()
        results = _Functional(traced, recorder, split_backward).run(*given)
        recorder.switch(None)
        return results

    try:
        with quiet(), torch.enable_grad():
            traced = make_fx(step, tracing_mode="fake")(*flat)
            pure = make_fx(
                torch.func.functionalize(functional, remove="mutations"), tracing_mode="fake"
            )(*flat)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"autograd cannot be traced through the module: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    nodes = list(pure.graph.nodes)
    given = [n for n in nodes if n.op == "placeholder"]
    written = [n for n in nodes if n.target is _aten.copy_.default]
    loss, *gradients = nodes[-1].args[0]
    new_buffers = []
    for node in written:
        at = given.index(node.args[0])
        if at >= len(params) or at in own:
            what = f"parameter {param_names[at]!r}" if at < len(params) else "input"
            raise CaptureError(
                f"the module changes its {what} in place: let it work on a copy (x = x.clone())"
            )
        new_buffers.append((at, node.args[1]))
    return _Joint(
        kernels=[n for n in nodes if n.op == "call_function" and n not in written],
        calls=calls,
        params=params,
        param_names=param_names,
        source={
            n: Param(i) if i < len(params) else Ref(i - len(params)) for i, n in enumerate(given)
        },
        num_inputs=len(tensors),
        loss=loss,
        gradients=list(zip(with_gradient, gradients, strict=True)),
        new_buffers=new_buffers,
    )


def _parameters(exported: Any, module: nn.Module) -> tuple[list[Tensor], list[str], dict[str, int]]:
    """Distinct parameters, buffers and constants, their names, and which a placeholder is.

    The same memory seen the same way is one (tied parameters), by its first name in the module.
    """
    own_name = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
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
        if node.op != "placeholder" or node.name not in names or not node.users:
            continue
        full_name = names[node.name]
        stored = exported.state_dict
        real = stored[full_name] if full_name in stored else exported.constants[full_name]
        key = (storage_of(real), real.storage_offset(), real.shape, real.stride(), real.dtype)
        if key not in seen:
            seen[key] = len(params)
            params.append(real)
            param_names.append(own_name.get(id(real), full_name))
        param_at[node.name] = seen[key]
    return params, param_names, param_at


def loss_of(outputs: Any) -> Tensor:
    """The loss among what the module, or the loss function, returned."""
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        shown = (
            f"a tensor of shape {tuple(found.shape)}"
            if isinstance(found, Tensor)
            else (f"a {type(found).__name__}")
        )
        raise CaptureError(
            "training needs a loss, one floating-point number: from the loss function, or as what "
            f"the module returns (itself, its first output or its output 'loss'); got {shown}. "
            "Give one: capture(module, (inputs, target), mode='training', "
            "loss=torch.nn.functional.cross_entropy)"
        )
    if not found.requires_grad:
        raise CaptureError("the loss depends on no parameter that has requires_grad=True")
    return found


def _is_view(node: fx.Node) -> bool:
    """Whether the node's value is memory of its first argument."""
    if node.target is operator.getitem:
        assert isinstance(node.args[0], fx.Node)
        return _is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is _aten._unsafe_view.default:
        return True
    return any(r.alias_info is not None for r in node.target._schema.returns)


def _draws(node: fx.Node) -> bool:
    """Whether a kernel draws random numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":  # attention is tagged whether it drops or not
            given = node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(given)
    return True


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` is a view of: itself, unless it is a view."""
    while node.op == "call_function" and _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _producer(node: fx.Node) -> fx.Node | None:
    """The kernel that makes a root, or None if it is given."""
    if node.op == "placeholder":
        return None
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def _pieces(joint: _Joint, split_backward: bool) -> list[tuple[Part, list[fx.Node]]]:
    """The kernels that are needed, as operators: those of one call, and of its backward.

    Operators come in a topological order. Kernels of one part are split where together they
    would close a cycle through another operator.
    """
    ends = [joint.loss, *(n for _, n in (*joint.gradients, *joint.new_buffers))]
    needed: set[fx.Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    kernels = [
        n
        for n in joint.kernels
        if n in needed and n.target is not operator.getitem and not _is_view(n)
    ]
    of_weights = _of_weights(joint, needed) if split_backward else set()
    piece_of: dict[fx.Node, int] = {}
    pieces: list[tuple[Part, list[fx.Node]]] = []
    after: list[set[int]] = []
    latest: dict[Part, int] = {}

    def leads_to(a: int, b: int) -> bool:
        seen, waiting = {a}, [a]
        while waiting:
            for c in after[waiting.pop()] - seen:
                if c == b:
                    return True
                seen.add(c)
                waiting.append(c)
        return False

    for kernel in kernels:
        producers = [_producer(_root(x)) for x in kernel.all_input_nodes]
        before = {piece_of[p] for p in producers if p is not None}
        call, backward = kernel.meta["owner"]
        weights = "_weight" if kernel in of_weights else ""
        part = (call, f"{weights}_backward" if backward else "")
        mine = latest.get(part)
        if mine is None or any(p != mine and leads_to(mine, p) for p in before):
            mine = latest[part] = len(pieces)
            pieces.append((part, []))
            after.append(set())
        pieces[mine][1].append(kernel)
        piece_of[kernel] = mine
        for p in before - {mine}:
            after[p].add(mine)
    missing = Counter(b for bs in after for b in bs)
    ready = [i for i in range(len(pieces)) if not missing[i]]
    order = []
    while ready:  # numbers are by first kernel, so this keeps as close to the trace as it can
        i = heappop(ready)
        order.append(pieces[i])
        for j in after[i]:
            missing[j] -= 1
            if not missing[j]:
                heappush(ready, j)
    assert len(order) == len(pieces), "pieces are free of cycles"
    return order


def _of_weights(joint: _Joint, needed: set[fx.Node]) -> set[fx.Node]:
    """Kernels whose results go into gradients of parameters and into no other call's backward."""
    results = {n for _, n in joint.gradients}
    others = {joint.loss, *(n for _, n in joint.new_buffers)}
    found: set[fx.Node] = set()
    for node in reversed(joint.kernels):
        readers = [x for x in node.users if x in needed and x.op == "call_function"]
        own = all(x in found and x.meta["owner"] == node.meta["owner"] for x in readers)
        if own and node in needed - others and (readers or node in results):
            found.add(node)
    return found


class _Builder:
    """Numbers operators, tensors and parameters of a joint graph."""

    def __init__(
        self,
        joint: _Joint,
        pieces: list[tuple[Part, list[fx.Node]]],
        prefix: str,
        colocate_backward: bool,
    ) -> None:
        self._joint = joint
        self._prefix = prefix
        self.steps: list[Step] = []
        self.params: list[Tensor] = []
        self.param_names: list[str] = []
        self.op_name: list[str] = []
        self.op_kind: list[str] = []
        self.op_module: list[str] = []
        self.op_signature: list[str] = []
        self.is_backward: list[bool] = []
        self.tensor_src: list[int] = [-1] * joint.num_inputs
        self.tensor_bytes: list[int] = [0] * joint.num_inputs
        self.tensor_root: list[int] = list(range(joint.num_inputs))
        self.uses: list[tuple[int, int]] = []
        self.param_uses: list[tuple[int, int]] = []
        self._param_at: dict[int, int] = {}
        self._value: dict[fx.Node, Ref | Param] = {}
        for node, source in joint.source.items():
            if isinstance(source, Ref):
                self._value[node] = source
                self.tensor_bytes[source.tensor] = _num_bytes(node)
        names: Counter[str] = Counter()
        for (part, kernels), results in zip(pieces, _outputs(joint, pieces), strict=True):
            self._add(part, kernels, results, names)
        number = {
            node: value.tensor for node, value in self._value.items() if isinstance(value, Ref)
        }
        self.loss = number[joint.loss]
        self.gradients = [(self._param(p), number[n]) for p, n in joint.gradients]
        self.new_buffers = [(self._param(p), number[n]) for p, n in joint.new_buffers]
        self.group = self._groups([part for part, _ in pieces], colocate_backward)

    def _add(
        self,
        part: Part,
        kernels: list[fx.Node],
        results: list[fx.Node],
        names: Counter[str],
    ) -> None:
        n = len(self.steps)
        node, suffix = self._joint.calls[part[0]], part[1]
        function, operands = _compile(kernels, results)
        args = [self._source(x) for x in operands]
        outputs = []
        for result in results:
            t = len(self.tensor_src)
            outputs.append(t)
            self._value[result] = Ref(t)
            self.tensor_src.append(n)
            self.tensor_bytes.append(_num_bytes(result))
            base = self._value.get(_root(result))
            self.tensor_root.append(base.tensor if isinstance(base, Ref) else t)
        multi = len(results) != 1
        self.steps.append(
            Step(
                function,
                (torch.device("cpu"), *args),
                {},
                tuple(outputs),
                multi,
                tuple(range(len(outputs))),
            )
        )
        for x in args:
            if isinstance(x, Ref):
                self.uses.append((x.tensor, n))
            else:
                self.param_uses.append((n, x.index))
        name = f"{node.name}{suffix}"
        again = names[name]
        names[name] += 1
        self.op_name.append(f"{name}_part{again + 1}" if again else name)
        self.op_kind.append(f"{node.target}{suffix}")
        path = module_path(node)
        self.op_module.append(path.removeprefix(self._prefix) if path != self._prefix[:-1] else "")
        text = signature_of(node)
        if suffix:
            text = f"{suffix.strip('_').replace('_', ' ')} of {text}"
        self.op_signature.append(f"{text} part {again + 1}" if again else text)
        self.is_backward.append(bool(suffix))

    def _source(self, node: fx.Node) -> Ref | Param:
        if node not in self._value:
            source = self._joint.source[node]
            assert isinstance(source, Param), "tensors are made before they are read"
            self._value[node] = Param(self._param(source.index))
        return self._value[node]

    def _param(self, i: int) -> int:
        """The number of a parameter among those that the graph uses."""
        if i not in self._param_at:
            self._param_at[i] = len(self.params)
            self.params.append(self._joint.params[i])
            self.param_names.append(self._joint.param_names[i])
        return self._param_at[i]

    def _groups(self, parts: list[Part], colocate_backward: bool) -> list[int]:
        """A call and its backward together; who reads a buffer with who writes it.

        Who reads the old value of a buffer comes before who writes the new one: an edge says so.
        """
        first: dict[Any, int] = {}
        group = [first.setdefault(x[0] if colocate_backward else x, n) for n, x in enumerate(parts)]
        for p, tensor in self.new_buffers:
            writer = self.tensor_src[tensor]
            self.param_uses.append((writer, p))
            for op in [op for op, q in self.param_uses if q == p]:
                old, new = group[op], group[writer]
                group = [new if g == old else g for g in group]
                if op > writer:
                    raise CaptureError(
                        f"{self.op_name[op]!r} reads the buffer {self.param_names[p]!r} while "
                        f"{self.op_name[writer]!r} writes it: read a copy (x = x.clone())"
                    )
                if op < writer:
                    self.uses.append((self.steps[op].outputs[0], writer))
        return group


def _outputs(joint: _Joint, pieces: list[tuple[Part, list[fx.Node]]]) -> list[list[fx.Node]]:
    """Of every piece: the roots that others read, then views that are results of the step."""
    piece_of = {kernel: n for n, (_, kernels) in enumerate(pieces) for kernel in kernels}
    found: list[dict[fx.Node, None]] = [{} for _ in pieces]
    for n, (_, kernels) in enumerate(pieces):
        for kernel in kernels:
            for x in kernel.all_input_nodes:
                root = _root(x)
                producer = _producer(root)
                if producer is not None and piece_of[producer] != n:
                    found[piece_of[producer]][root] = None
    for node in (joint.loss, *(n for _, n in (*joint.gradients, *joint.new_buffers))):
        producer = _producer(_root(node))
        assert producer is not None, "gradients have memory of their own"
        found[piece_of[producer]][node] = None
    assert all(found), "all kernels are needed"
    return [sorted(nodes, key=_is_view) for nodes in found]


def _compile(
    piece: list[fx.Node], results: list[fx.Node]
) -> tuple[Callable[..., Any], list[fx.Node]]:
    """A function of (device, operands...) that runs the kernels, and the operands.

    Source is generated as in ``placement.executor.share``; a value is dropped after its last use.
    """
    order: list[fx.Node] = []  # kernels, and views in front of their readers
    operands: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    mine = set(piece)

    def visit(node: fx.Node) -> None:
        if node in seen:
            return
        seen.add(node)
        producer = _producer(_root(node))
        if node is _root(node) and (producer is None or producer not in mine):
            operands[node] = None
            return
        for x in node.all_input_nodes:
            visit(x)
        order.append(node)

    for node in (*piece, *results):
        visit(node)
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        last[node] = i
        for x in node.all_input_nodes:
            last[x] = i
    for node in results:
        last[node] = len(order)
    names: dict[str, Any] = {}

    def bind(value: Any) -> str:
        names[name := f"k{len(names)}"] = value
        return name

    variable = {x: f"a{i}" for i, x in enumerate(operands)}
    variable |= {x: f"v{i}" for i, x in enumerate(order)}

    def source(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return variable[arg]
        if isinstance(arg, torch.device):
            return "device"
        if arg is None or type(arg) in (bool, int):
            return repr(arg)
        if isinstance(arg, list | tuple):
            items = "".join(source(x) + "," for x in arg)
            return f"[{items}]" if isinstance(arg, list) else f"({items})"
        return bind(arg)

    lines = [f"def run(device, {', '.join(variable[x] for x in operands)}):"]
    for i, node in enumerate(order):
        if node.target is operator.getitem:
            lines.append(f"    {variable[node]} = {source(node.args[0])}[{node.args[1]}]")
        else:
            arguments = [source(x) for x in node.args]
            arguments += [f"{k}={source(x)}" for k, x in node.kwargs.items()]
            lines.append(
                f"    {variable[node]} = {bind(_callable(node.target))}({', '.join(arguments)})"
            )
        done = [variable[x] for x in dict.fromkeys((*node.all_input_nodes, node)) if last[x] == i]
        if done:
            lines.append(f"    del {', '.join(done)}")
    returned = ", ".join(variable[x] for x in results)
    lines.append(f"    return {returned}")
    exec("\n".join(lines), names)
    return names["run"], list(operands)


def _callable(target: Any) -> Callable[..., Any]:
    if target is not _aten.mkldnn_rnn_layer.default:
        return target  # type: ignore[no-any-return]

    def layer(*args: Any) -> Any:
        with torch.enable_grad():  # or it keeps nothing for its backward
            return target(*args)

    return layer


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
