"""What to say of a module that cannot be captured: the construct, the user's line, the remedy."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from placement.program import CaptureError, DependsOnValues, leaves_of

Called = list[tuple[Callable[..., Any], str]]  # a function, and the user's line that calls it

# What a trace does not follow: the functions that users call for it, and what to do instead.
_UNTRACED: dict[str, tuple[tuple[Callable[..., Any], ...], str]] = {
    "derivatives": (
        (
            *(torch.autograd.grad, torch.autograd.backward, torch.func.grad, torch.func.vjp),
            *(torch.func.grad_and_value, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian),
        ),
        "write the derivative out, or return what is differentiated",
    ),
    "nested tensors": (
        (torch.nested.nested_tensor, torch.nested.as_nested_tensor, torch.nested.narrow),
        "use padded tensors and a mask",
    ),
    "packed sequences": (
        (nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pack_sequence),
        "give the recurrent layer padded sequences, and mask what it makes of the padding",
    ),
}


def not_exported(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,
    *,
    training: bool,
    prefix: str,
) -> CaptureError:
    """What ``torch.export`` raised, in the user's words; the module is called once for that."""
    where = where_in(error, module, prefix)
    text, kind = first_line(error), type(error).__name__
    try:  # with gradients, if it asks for some
        called = _called(module, args, kwargs, training or "does not require grad" in text)
    except Exception as own:
        return fails_itself(module, own)
    values = _depends_on_values(kind, text, where)
    return (DependsOnValues if values else CaptureError)(
        _special_part(module, args, kwargs, prefix)
        or _made_in_inference_mode(text)
        or _untraced(called, f"{kind}: {text}")
        or values
        or _loses_values(called, text, where)
        or _returns(text, where)
        or f"torch.export cannot trace the module{where}: {kind}: {text}. Rewrite "
        + ("that line" if where else "it")
        + ", or capture a submodule that leaves it out"
    )


def _called(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
) -> Called:
    """Of what a trace does not follow, what the module calls; it is left as it was."""
    buffers = [
        (buffer, buffer.detach().clone())
        for buffer in module.buffers()
        if not buffer.is_inference()
    ]
    functions = [torch.func.vmap, *(f for group, _ in _UNTRACED.values() for f in group)]
    try:
        with (
            torch.set_grad_enabled(training),
            torch.random.fork_rng(devices=[]),
            calls_from_user(functions) as called,
        ):
            module(*args, **kwargs)
    finally:  # in training mode a call changes statistics
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return called


def fails_itself(module: nn.Module, error: Exception) -> CaptureError:
    """The module, not its trace, raised this on the example inputs."""
    return CaptureError(
        f"{module._get_name()} itself fails on the example inputs{user_line(error)}: "
        f"{type(error).__name__}: {first_line(error)}"
    )


@contextmanager
def calls_from_user(functions: Sequence[Callable[..., Any]]) -> Iterator[Called]:
    """Which of these Python functions is called inside, and the user's line that does it."""
    by_code = {f.__code__: f for f in functions}  # type: ignore[attr-defined]
    calls: Called = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in by_code:
            return
        function = by_code[frame.f_code]
        while frame is not None and _is_foreign(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            calls.append((function, _shown(frame.f_code.co_filename, frame.f_lineno)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def _shown(file: str, line: int) -> str:
    source = linecache.getline(file, line).strip()
    return f" at {file}:{line}" + (f" `{source}`" if source else "")


def _special_part(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], prefix: str
) -> str:
    """What the module consists of, or is given, that has no plain tensors; empty if nothing."""
    for path, m in module.named_modules():
        kind = f"{type(m).__module__}.{type(m).__qualname__}"
        path = path.removeprefix(prefix)
        named = f"submodule {path!r} is a {kind}" if path else f"the module is a {kind}"
        if isinstance(m, torch.jit.ScriptModule):
            return f"{named}, made by TorchScript: capture the module that it was made from"
        if isinstance(m, nn.parallel.DistributedDataParallel):
            return f"{named}, which talks to other processes: capture what it wraps, its .module"
        if any(isinstance(x, torch.ScriptObject) for x in vars(m).values()):
            return (
                f"{named}, whose weights are packed in an object of C++ (a quantised module): "
                "capture the module as it was before it was quantised"
            )
    held = [
        *((f"parameter {k.removeprefix(prefix)!r}", x) for k, x in module.named_parameters()),
        *((f"buffer {k.removeprefix(prefix)!r}", x) for k, x in module.named_buffers()),
        *(
            (f"input {pytree.keystr(path[1:])}", x)
            for path, x in pytree.tree_flatten_with_path((args, kwargs))[0]
        ),
    ]
    return next(filter(None, (_special_tensor(name, x) for name, x in held)), "")


def _special_tensor(name: str, x: Any) -> str:
    """What is wrong with a tensor that is not one block of memory with strides; else empty."""
    if not isinstance(x, Tensor):
        return ""
    if x.is_nested:
        return f"{name} is a nested tensor: use padded tensors and a mask"
    if x.is_quantized:
        return f"{name} is a quantised tensor: use its .dequantize(), or integers and a scale"
    if x.layout != torch.strided:
        kind = "sparse" if "sparse" in str(x.layout) else "opaque"
        return (
            f"{name} is a {kind} tensor ({x.layout}): make it a dense one (.to_dense()), or keep "
            "its indices and values as tensors and use index_add or scatter_add"
        )
    return ""


# What is wrong, by what torch.export said; empty: something else.
def _made_in_inference_mode(text: str) -> str:
    if "inference tensor" not in text.lower():
        return ""
    return (
        "the module or its inputs were made in torch.inference_mode(), which a trace cannot "
        "leave: make them outside of it, or in torch.no_grad()"
    )


def _untraced(called: Called, error: str) -> str:
    for what, (group, remedy) in _UNTRACED.items():
        line = next((at for f, at in called if f in group), "")
        if line:
            return f"torch.export cannot trace {what}{line}: {remedy} ({error})"
    return ""


def _depends_on_values(kind: str, text: str, where: str) -> str:
    if "DataDependent" in kind or "data-dependent" in text:
        return (
            f"a Python branch, loop or index depends on the values of a tensor{where}: "
            "use torch.where or masks instead, or make the value a constant of the module "
            f"({text})"
        )
    if "DynamicOutputShape" in kind:
        return (
            f"{text} gives a shape that depends on the values of a tensor{where}: make what "
            "depends on it (e.g. a loss) of the outputs, outside of what is captured"
        )
    return ""


def _loses_values(called: Called, text: str, where: str) -> str:
    if "found a fake tensor in the exported program" not in text:
        return ""
    line = next((at for f, at in called if f is torch.func.vmap), where)
    return f"torch.export loses a value that no operator made{line}: " + (
        "write the operators of torch.func.vmap for the whole batch"
        if line != where
        else "use x.detach() instead of x.data, and keep no tensors outside of the module"
    )


def _returns(text: str, where: str) -> str:
    unknown = re.search(r"Found <class '(.+)'> in output", text)
    if not unknown and not where:  # a set that a module returns, in the words of PyTorch 2.11
        unknown = re.search(r"unhashable type: '(.+)'", text)
    if not unknown:
        return ""
    what = unknown[1]
    if what.endswith("Cache"):
        remedy = (
            "add use_cache=False to its keyword inputs; to decode with a cache: "
            "docs/transformers.md"
        )
    else:
        remedy = "let it return tensors, constants, or tuples, lists and dicts of them"
        if "." in what and not what.startswith("torch."):
            remedy += (
                "; a data class is one of these after torch.export.register_dataclass"
                f"({what.rpartition('.')[2]})"
            )
    return f"the module returns a {what}: {remedy}"


def check_tensors(exported: Any, prefix: str) -> None:
    """Every tensor that is used must be one block of memory with strides."""
    signature = exported.graph_signature
    names = {
        node: f"{what} {name.removeprefix(prefix)!r}"
        for what, of_kind in (
            ("parameter", signature.inputs_to_parameters),
            ("buffer", signature.inputs_to_buffers),
            ("constant", signature.inputs_to_lifted_tensor_constants),
        )
        for node, name in of_kind.items()
    }
    for node in exported.graph.nodes:
        if node.op == "placeholder" and not node.users:
            continue
        name = names.get(node.name, f"input {node.name!r}")
        if node.op == "call_function":
            name = f"the result of {node.target}{node_line(node)}"
        for x in leaves_of(node.meta.get("val")):
            wrong = _special_tensor(name, x)
            if wrong:
                raise CaptureError(wrong)
    for name in signature.inputs_to_lifted_custom_objs.values():
        value = exported.constants[name]
        raise CaptureError(
            f"the module uses a {type(value).__module__}.{type(value).__qualname__}, which is no "
            "tensor: draw random numbers without a generator of their own, or make them an input"
        )


def first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def where_in(error: BaseException, module: nn.Module, prefix: str) -> str:
    """The user's line, and the module of torch's own that it calls, or nothing."""
    paths = {id(m): path.removeprefix(prefix) for path, m in module.named_modules()}
    inner: Any = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        this = frame.f_locals.get("self")
        inner = this if id(this) in paths and frame.f_code.co_name == "forward" else inner
    where = user_line(error)
    if inner is not None and type(inner).__module__.startswith("torch."):
        shown = repr(inner)
        shown = type(inner).__name__ if "\n" in shown else shown
        where += f" in module {paths[id(inner)]!r}, {shown}"
    return where


def user_line(error: BaseException) -> str:
    """`` at file:line: `source` `` of the deepest frame of the user's code, or nothing."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not _is_foreign(file):
            where = _shown(file, line)
    return where


def _is_foreign(file: str) -> bool:
    """Whether a file is torch's, of what it stands on, of Python or one beside this one."""
    if file.startswith("<") or Path(file).parent in Path(__file__).parents[:2]:
        return True
    parts = Path(file).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1] in ("torch", "sympy", "mpmath", "numpy")
    return file.startswith((str(Path(torch.__file__).parent), sysconfig.get_path("stdlib")))


def node_line(node: fx.Node) -> str:
    """The user's line that made ``node``, as torch recorded it, and the module."""
    path = module_path(node)
    inside = f" in module {path!r}" if path else ""
    frames = re.findall(r'File "([^"<]+)", line (\d+), in .*\n\s*(.*)', node.stack_trace or "")
    lines = [f" at {file}:{line} `{text}`" for file, line, text in frames if not _is_foreign(file)]
    return inside + (lines[-1] if lines else "")


def module_path(node: fx.Node) -> str:
    """Path of the deepest module around the node; a module's repeated calls are one path."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return re.sub(r"@\d+", "", path)
