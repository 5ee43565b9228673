"""Compiled runs: consecutive operators of a CPU device as one artefact of PyTorch's Inductor.

An artefact is the extension module that Inductor builds with ``cpp_wrapper`` (Ansel et al., PyTorch
2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation,
ASPLOS 2024): a function of handles of tensors, which lets go of the interpreter's lock while it
computes, so that devices do not wait for each other. It is kept in the cache folder; another
process loads it in less than a millisecond and imports no Inductor. There are two kinds of it. A
*plain* one reads parameters where they are. A *frozen* one has them folded and packed for the
libraries of this processor; it is of these values only, and its constants need memory of their own.
Which is faster, or whether neither is, is measured once for a run and kept too.

To others a run is what it was (see ``share.runs_of``). A run that cannot be compiled, or computes
something else, is interpreted as before, by itself, and ``Artefacts.eager`` says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import operator
import os
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib import machinery, util
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from placement.cluster import Cluster, Device, cpu_model
from placement.executor import equality
from placement.executor.constants import is_known, with_constants
from placement.executor.generated import Call, Generated
from placement.executor.graphs import launches
from placement.executor.share import Share
from placement.program import Param, Program, Ref, leaves_of, mapped, run_program, view_of
from placement.tools.compiler import missing_compiler
from placement.tools.files import FileError, cache_folder, write_atomic
from placement.tools.linears import MKL, ONEDNN, PACKS, linear_calls
from placement.tools.progress import Progress, say
from placement.tools.threads import torch_threads

_CPU = torch.device("cpu")
PLAIN, FROZEN, EAGER = "plain", "frozen", "eager"
_FORMAT = 3  # of the files; to be raised with what artefacts of this module look like
_FILES = ".so", ".json", ".bin"  # of an artefact: code, operands, constants
_ENTRY = "inductor_entry_cpp"  # the function of the extension module, and its name
_ADDRESS = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # where the extension looks for PyTorch's
_LEAST = 3  # operators that compute something: a call of an artefact costs as much as two
_ROUNDS, _LONG_S = 5, 0.5  # in which kinds take turns, and after which they take no fourth
_LEAST_ROUNDS = 3  # the first is of what no cache holds yet
_ALIGN = 64  # bytes: libraries read packed weights in lines of the cache
_MKLDNN = 3  # PyTorch's number of this layout
_WORTH = 0.97  # of the time of a kind that needs less
_FAR_AHEAD = 0.7  # of the time of operators: weights are most of such a run
_FROZEN_KEPT = 3  # artefacts of a run for other values of its parameters, beside those in use
_CONVOLUTIONS = torch.ops.aten.conv2d.default, torch.ops.aten.convolution.default
_COMPILING = threading.Lock()  # Inductor compiles for one thread at a time
_INLINED = 8  # elements: Inductor writes constants of at most so many into the code
_DAMAGED = OSError, ValueError, LookupError, TypeError, ImportError, RuntimeError
# Kept here: while one thread compiles, ``build`` puts others into their places, which what runs in
# another thread must not call.
_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
_tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs


@dataclass(frozen=True)
class Recipe:
    """A run as a graph of Inductor, and what it reads and makes.

    Attributes:
        ops: the operators.
        reads: tensors of the program that it reads, as the graph's inputs come first.
        params: parameters of the program that it reads.
        known: tensors that are the same in every call, and that it reads.
        makes: tensors that it hands on.
        text: equal for runs that compute the same, whatever their operators are called.
    """

    ops: tuple[int, ...]
    reads: tuple[int, ...]
    params: tuple[int, ...]
    known: tuple[int, ...]
    makes: tuple[int, ...]
    text: str


def recipe(
    program: Program, run: Sequence[int], makes: Sequence[int], known: Mapping[int, Tensor]
) -> Recipe:
    """That of a run which hands on the tensors ``makes``."""
    steps = {op: with_constants(program.steps[op], known) for op in run}
    steps = {op: step for op, step in steps.items() if not is_known(step, known)}
    own = {t for step in steps.values() for t in step.outputs}
    leaves = [x for step in steps.values() for x in leaves_of((step.args, step.kwargs))]
    refs = dict.fromkeys(x.tensor for x in leaves if isinstance(x, Ref) and x.tensor not in own)
    names: dict[Any, str] = {}

    def named(x: Any) -> Any:
        if isinstance(x, Ref | Param):  # an artefact knows which operand is a parameter
            role = "p" if isinstance(x, Param) else "k" if x.tensor in known else "t"
            return names.setdefault(x, f"{role}{len(names)}")
        if isinstance(x, list | tuple):
            return [type(x).__name__, *map(named, x)]
        if isinstance(x, dict):
            return {k: named(v) for k, v in x.items()}
        return repr(x)

    rows = [
        [str(s.target), *map(named, (s.args, s.kwargs, [*map(Ref, s.outputs)])), s.output_index]
        for s in steps.values()
    ]
    made = tuple(t for t in makes if t not in known)
    return Recipe(
        ops=tuple(steps),
        reads=tuple(t for t in refs if t not in known),
        params=tuple(dict.fromkeys(x.index for x in leaves if isinstance(x, Param))),
        known=tuple(t for t in refs if t in known),
        makes=made,
        text=json.dumps([rows, named([*map(Ref, made)])]),
    )


def graph_of(
    program: Program,
    run: Recipe,
    params: Mapping[int, Tensor],
    known: Mapping[int, Tensor],
    frozen: bool,
    device: torch.device = _CPU,
) -> fx.GraphModule:
    """The graph of a run, of which the inputs are its ``reads``, and unless ``frozen`` the rest.

    ``device`` takes the place of every ``torch.device`` constant.
    Nodes have the number of their operator in ``meta["custom"]``, which Inductor keeps.
    """
    graph, root = fx.Graph(), nn.Module()
    nodes: dict[Any, Any] = {Ref(t): graph.placeholder(f"t{t}") for t in run.reads}
    others: list[Param | Ref] = [*map(Param, run.params), *map(Ref, run.known)]
    for x in others:
        name = f"p{x.index}" if isinstance(x, Param) else f"k{x.tensor}"
        if frozen:
            held = params[x.index] if isinstance(x, Param) else known[x.tensor]
            root.register_parameter(name, nn.Parameter(held, requires_grad=False))
            nodes[x] = graph.get_attr(name)
        else:
            nodes[x] = graph.placeholder(name)

    def filled(x: Any) -> Any:
        if isinstance(x, Ref | Param):
            return nodes[x]
        return device if isinstance(x, torch.device) else x

    for op in run.ops:
        step = with_constants(program.steps[op], known)
        args, kwargs = mapped((step.args, step.kwargs), filled)
        value = graph.call_function(step.target, args, kwargs)
        value.meta["custom"] = {"op": op}
        for t, i in zip(step.outputs, step.output_index, strict=True):
            nodes[Ref(t)] = (
                graph.call_function(operator.getitem, (value, i)) if step.multi else value
            )
    graph.output(tuple(nodes[Ref(t)] for t in run.makes))
    return fx.GraphModule(root, graph)


@dataclass
class Built:
    """What Inductor has built of a graph.

    Attributes:
        path: the extension module, and ``entry``, its function.
        operands: what it was called with: inputs of the graph, and constants.
        packed: by address, packed weights of linear layers: the layer's, for how many rows, by
            which library.
        inlined: whether numbers that follow from parameters may be in its code.
        outputs: what it gave.
        seconds: how long it took.
    """

    path: Path
    entry: Any
    operands: list[Tensor]
    packed: dict[int, tuple[Tensor, int, str]]
    inlined: bool
    outputs: list[Tensor]
    seconds: float


def build(
    graph: fx.GraphModule, inputs: Sequence[Tensor], threads: int, frozen: bool, **patches: Any
) -> Built:
    """Compile a graph for ``threads`` threads and call it once.

    Args:
        patches: more of Inductor's options, e.g. ``**{"cpp.enable_kernel_profile": True}``.

    Raises:
        Refused: its outputs share memory with its inputs, or Inductor makes several parts of it.
        RuntimeError: Inductor refuses the graph, or there is no compiler that works.
    """
    from torch._inductor import codecache
    from torch._inductor.constant_folding import ConstantFolder

    entries: list[Any] = []
    operands: list[Tensor] = []
    results: list[list[Tensor]] = []
    load = codecache.CppWrapperCodeCache.load_pybinding

    def loaded(*args: Any, **kwargs: Any) -> Any:
        entries.append(load(*args, **kwargs))
        return entries[-1]

    packed: dict[int, tuple[Tensor, int, str]] = {}
    inlined: list[fx.Node] = []  # those that are folded to so few numbers
    fold = ConstantFolder._deduce_value

    def folded(folder: Any, node: fx.Node) -> Any:
        value = fold(folder, node)
        for library, pack in PACKS.items():
            if pack is not None and node.target is pack and isinstance(value, Tensor):
                weights, rows = folder.fetch_args_kwargs_from_env(node)[0]
                packed[torch.ops.mkldnn.data_ptr(value)] = weights, rows, library
        if node.op == "call_function" and isinstance(value, Tensor) and value.numel() <= _INLINED:
            inlined.append(node)
        return value

    def given(values: list[Tensor]) -> Any:
        operands[:] = values
        return _handles(values)

    def made(values: Any) -> Any:
        results.append(_tensors(values))
        return results[-1]

    options = {
        "cpp_wrapper": True,
        "cpp.threads": threads,
        "compile_threads": 1,  # or processes start that have nothing to do: there is one module
        "freezing": frozen,
        "fx_graph_cache": False,  # what is kept is kept here; and a hit would load nothing
        "fallback_random": True,
        **patches,
    }
    began = time.perf_counter()
    with compiling(), ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(codecache.CppWrapperCodeCache, "load_pybinding", loaded))
        stack.enter_context(patch(ConstantFolder, "_deduce_value", folded))
        stack.enter_context(_faster_linears())
        artefact = compiled_alone(graph, inputs, options)
        seconds = time.perf_counter() - began
        aoti: Any = torch._C._aoti
        stack.enter_context(patch(aoti, "unsafe_alloc_void_ptrs_from_tensors", given))
        stack.enter_context(patch(aoti, "alloc_tensors_by_stealing_from_void_ptrs", made))
        outputs = artefact(*inputs)
    if len(entries) != 1 or len(results) != 1:
        raise Refused(f"Inductor made {len(entries)} parts of it")
    if not isinstance(outputs, list | tuple):
        outputs = (outputs,)
    (raw,) = results
    if [*map(view_of, raw)] != [*map(view_of, outputs)]:
        raise Refused("what it makes shares memory with what it reads")
    (entry,) = entries
    path = Path(entry.__self__.__file__)
    return Built(path, entry, operands, packed, bool(inlined), raw, seconds)


@contextmanager
def _faster_linears() -> Iterator[None]:
    """Frozen linear layers are of oneDNN meanwhile, where it is faster than MKL.

    Inductor takes MKL for float32, which takes 2.3 times as long on an EPYC (Zen 5).
    """
    from torch._inductor.fx_passes import mkldnn_fusion

    packs: Any = getattr(mkldnn_fusion, "CpuMkldnnDeviceOp", None)
    if packs is None or None in PACKS.values():  # a build without one of them
        yield
        return
    pack_weight, pack = packs.pack_linear_weight, packs.pack_linear

    def chosen(own: Any, graph: Any, is_lp: bool, weight: fx.Node, rows: Any) -> Any:
        value = weight.args[0].meta["val"]  # type: ignore[union-attr]
        if type(rows) is int and value.dtype == torch.float32:
            is_lp = is_lp or _onednn_is_faster(rows, *value.shape, torch.get_num_threads())
        return pack_weight(own, graph, is_lp, weight, rows)

    def as_chosen(own: Any, graph: Any, is_lp: bool, rows: Any, x: Any, weight: Any, b: Any) -> Any:
        return pack(own, graph, is_lp or weight.target is PACKS[ONEDNN], rows, x, weight, b)

    with (
        mock.patch.object(packs, "pack_linear_weight", chosen),
        mock.patch.object(packs, "pack_linear", as_chosen),
    ):
        yield


@cache
def _onednn_is_faster(rows: int, width: int, columns: int, threads: int) -> bool:
    """Whether a linear layer of float32 takes less time than with MKL, with so many threads."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.inference_mode():
        x, weight, bias = (
            torch.randn(rows, width),
            torch.randn(columns, width),
            torch.zeros(columns),
        )
        took_s = _timed(linear_calls(x, weight, bias))
    return took_s[ONEDNN] < _WORTH * took_s[MKL]


def is_worth(program: Program, run: Sequence[int], known: Container[int]) -> bool:
    """Whether a run may be faster compiled: of several operators, or of one whose weights count."""
    steps = [program.steps[op] for op in run if launches(program.steps[op], known)]
    leaves = [x for step in steps for x in leaves_of((step.args, step.kwargs))]
    packs = any(isinstance(x, Param) and program.params[x.index].ndim > 1 for x in leaves)
    return bool(steps) and (packs or len(steps) >= _LEAST)


def values_of(
    program: Program, needed: Collection[int], images_last: bool = False
) -> dict[int, Tensor]:
    """Tensors of the program where its inputs are the example's: inputs, and what is ``needed``."""
    inputs = program.timing_inputs()
    if images_last:
        inputs = [with_channels_last(x) for x in inputs]
    values = dict(zip(program.input_tensors, inputs, strict=True))
    if values.keys() >= set(needed):
        return values

    def watch(tensor: int, value: Tensor) -> None:
        if tensor in needed:
            values[tensor] = value

    here = replace(program, params=tuple(x.detach().cpu() for x in program.params))
    run_program(here, [x.cpu() for x in inputs], watch, _CPU)
    return values


def with_channels_last(x: Tensor) -> Tensor:
    """An input that may be images, with the channels of each pixel side by side; or another."""
    return x.contiguous(memory_format=torch.channels_last) if _may_be_images(x) else x


def _may_be_images(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point()


def reads_channels_last(program: Program) -> bool:
    """Whether compiled runs are to read images with channels last, and hand them on so.

    Inductor's convolutions have them so inside of a run, and would lay out again what comes in and
    what leaves it. Not where an operator cannot read it, or reads memory by its own strides, or
    results of the model would be laid out in another way.
    """
    if not any(step.target in _CONVOLUTIONS for step in program.steps):
        return False
    if any(str(step.target).startswith("aten.as_strided") for step in program.steps):
        return False
    if not any(map(_may_be_images, program.example_tensors)):
        return False
    leave = {x.tensor for x in program.output_leaves if isinstance(x, Ref)}
    try:
        before, after = (values_of(program, leave, last) for last in (False, True))
    except RuntimeError:  # a view of what lies in another order
        return False
    return all(before[t].stride() == after[t].stride() for t in leave)


def compiled_alone(
    graph: fx.GraphModule, inputs: Sequence[Tensor], patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """What Inductor makes of a graph, which it may change, with ``patches`` of its options.

    Raises:
        Exception: Inductor refuses the graph, or what it needs is missing.
    """
    import torch._inductor

    standalone_compile: Any = torch._inductor.standalone_compile
    donated = {"donate_graph_module": True}  # or it is copied, with its parameters
    if donated.keys() - signature(standalone_compile).parameters:  # PyTorch before 2.13
        donated = {}
        graph.__dict__["__deepcopy__"] = lambda _: graph
    made: Callable[..., Any] = standalone_compile(
        graph,
        list(inputs),
        dynamic_shapes="from_example_inputs",
        options={"config_patches": patches},
        **donated,
    )
    return made


@contextmanager
def compiling() -> Iterator[None]:
    """One thread at a time, without gradients; what Inductor says of its own caches is not said."""
    log = logging.getLogger("torch._inductor.standalone_compile")
    with _COMPILING, torch.no_grad(), torch.fx.traceback.preserve_node_meta():
        before = log.level
        log.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            log.setLevel(before)


@dataclass(frozen=True)
class Artefact:
    """An artefact that is loaded.

    Attributes:
        entry: its function.
        fixed: operands in order; None: one of the run's ``reads``.
        slots: (place among the operands, place among the run's ``reads``).
        bytes: of the constants that it has beside the module's parameters.
    """

    entry: Any
    fixed: list[Tensor | None]
    slots: list[tuple[int, int]]
    bytes: int

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        operands: list[Any] = self.fixed.copy()
        for i, read in self.slots:
            operands[i] = values[read]
        return called(self.entry, operands)


def called(entry: Any, operands: list[Tensor]) -> list[Tensor]:
    """What the function of an extension makes of its operands."""
    return _tensors(entry(_handles(operands)))  # type: ignore[no-any-return]


def write(built: Built, places: Mapping[Any, Any], path: Path) -> None:
    """Write the files of an artefact: its constants, what its operands are, the extension last.

    ``places``: by view, what an operand is that is no constant.

    Raises:
        FileError: they cannot be written there.
    """
    data = bytearray()

    def described(x: Tensor) -> Any:
        if x.is_mkldnn and (of := built.packed.get(torch.ops.mkldnn.data_ptr(x))):
            return ["packed", described(of[0].detach()), *of[1:]]
        return (None if x.is_mkldnn else places.get(view_of(x))) or _written(x, data)

    operands = [*map(described, built.operands)]
    if data:
        write_atomic(path.with_suffix(".bin"), bytes(data))
    facts = {"operands": operands, "bytes": len(data), "inlined": built.inlined}
    write_atomic(path.with_suffix(".json"), json.dumps(facts))
    write_atomic(path, built.path.read_bytes())


def remove(path: Path) -> None:
    """Delete the files of an artefact."""
    for suffix in _FILES:
        path.with_suffix(suffix).unlink(missing_ok=True)


def touch(path: Path) -> None:
    """Say that an artefact is in use: of a cache, what is old is deleted."""
    for suffix in _FILES:
        with suppress(FileNotFoundError):  # of constants, where there are none
            os.utime(path.with_suffix(suffix))


def _written(x: Tensor, data: bytearray) -> list[Any]:
    """Append the memory of a constant to ``data``; what is needed to make it again."""
    shape, strides, opaque = [*x.shape], [*x.stride()], []
    if x.is_mkldnn:
        size, address = torch.ops.mkldnn._nbytes(x), torch.ops.mkldnn.data_ptr(x)
        opaque = torch.ops.mkldnn._get_mkldnn_serialized_md(x).tolist()
    else:
        if not x.is_contiguous():
            x = torch.empty_strided(shape, strides, dtype=x.dtype).copy_(x)
        size, address = x.untyped_storage().nbytes() - x.storage_offset() * x.itemsize, x.data_ptr()
    begin = len(data)
    data += ctypes.string_at(address, size)
    data += bytes(-len(data) % _ALIGN)
    dtype = str(x.dtype).removeprefix("torch.")
    return ["constant", begin, size, dtype, shape, strides, opaque]


def load(
    path: Path, run: Recipe, params: Mapping[int, Tensor], known: Mapping[int, Tensor]
) -> Artefact:
    """An artefact from its files, with the parameters ``params``.

    Raises:
        _DAMAGED: they are not there, damaged, or of another PyTorch.
    """
    described = json.loads(path.with_suffix(".json").read_text())
    data = None
    if described["bytes"]:
        # Mapped, not read: processes share the memory.
        name = str(path.with_suffix(".bin"))
        data = torch.from_file(name, shared=False, size=described["bytes"], dtype=torch.uint8)
    values = {"param": [params[p] for p in run.params], "known": [known[t] for t in run.known]}
    values["transposed"] = [_transposed(x) for x in values["param"]]
    slots: list[tuple[int, int]] = []
    packed: dict[str, Tensor] = {}
    own_bytes = described["bytes"]

    def operand(what: str, place: Any, *rest: Any) -> Tensor:
        nonlocal own_bytes
        if what in values:
            return values[what][place]
        if what == "packed":
            key = repr((place, rest))
            if key not in packed:  # steps of a recurrent network read the same weights
                rows, library = rest
                packed[key] = PACKS[library](operand(*place), rows)
                own_bytes += torch.ops.mkldnn._nbytes(packed[key])
            return packed[key]
        assert data is not None, "it has constants"
        return _read(data, place, *rest)

    fixed: list[Tensor | None] = []
    for i, (what, *rest) in enumerate(described["operands"]):
        if what == "read":
            slots.append((i, rest[0]))
        fixed.append(None if what == "read" else operand(what, *rest))
    guards: Any = torch._C._dynamo.guards
    os.environ.setdefault(_ADDRESS, str(guards._torchinductor_pyobject_tensor_data_ptr))
    name = f"{path.stem}.{_ENTRY}"
    spec = util.spec_from_file_location(
        name, path, loader=machinery.ExtensionFileLoader(name, str(path))
    )
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Artefact(getattr(module, _ENTRY), fixed, slots, own_bytes)


def _read(
    data: Tensor,
    begin: int,
    size: int,
    dtype: str,
    shape: list[int],
    strides: list[int],
    opaque: list[int],
) -> Tensor:
    """A constant in ``data``, which is to live as long."""
    part = data[begin : begin + size]
    if not opaque:
        return part.view(getattr(torch, dtype)).as_strided(shape, strides)
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    handle = ctypes.c_void_p()
    numbers = ctypes.c_int64 * len(shape)
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(part.data_ptr()),
        ctypes.c_int64(len(shape)),
        numbers(*shape),
        numbers(*strides),
        ctypes.c_int64(0),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{dtype}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(_MKLDNN),
        (ctypes.c_uint8 * len(opaque))(*opaque),
        ctypes.c_int64(len(opaque)),
    )
    if failed:
        raise ValueError("a packed constant cannot be read")
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
    (tensor,) = _tensors([make(handle, None, None)])
    tensor._memory = part  # type: ignore[attr-defined]
    return tensor  # type: ignore[no-any-return]


class CompiledRun:
    """What a worker calls for a run: the artefact reads and writes its list of tensors.

    With a ``clock`` all of the time is the first operator's, and the others end with it.
    """

    def __init__(
        self,
        ops: tuple[int, ...],
        run: Recipe,
        artefact: Artefact,
        fixed: Mapping[int, Tensor],
        clock: tuple[list[Any], Callable[[], Any]] | None,
    ) -> None:
        self._ops, self._artefact, self._fixed, self._clock = ops, artefact, fixed, clock
        self._slots = [(i, run.reads[read]) for i, read in artefact.slots]
        self._makes = run.makes

    def __call__(self, env: list[Any], nothing_arrived: Callable[[], bool]) -> None:
        operands: list[Any] = self._artefact.fixed.copy()
        for i, t in self._slots:
            operands[i] = env[t]
        for t, value in zip(self._makes, called(self._artefact.entry, operands), strict=True):
            env[t] = value
        for t, value in self._fixed.items():
            env[t] = value
        if self._clock is not None:
            marks, mark = self._clock
            now = mark()
            for op in self._ops:
                marks += (op, now)


@cache
def here() -> str:
    """Versions and processor that an artefact is for."""
    capability = torch.backends.cpu.get_cpu_capability()
    facts = torch.__version__, torch.version.git_version, capability, cpu_model()
    return repr((_FORMAT, platform.python_version(), platform.machine(), *facts))


def folder() -> Path:
    """Where artefacts are kept."""
    return cache_folder() / "compiled"


def digest(*parts: str | bytes) -> str:
    """A name for what is made of these."""
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        h.update(part.encode() if isinstance(part, str) else part)
        h.update(b"\0")
    return h.hexdigest()


def form_of(x: Tensor) -> str:
    """Equal for tensors that one artefact may read."""
    return f"{x.dtype}{tuple(x.shape)}{x.stride()}"


def _transposed(x: Tensor) -> Tensor:
    """A parameter as a product reads it whose weights have a row for each input."""
    return x.t() if x.ndim == 2 else x


def _layout(x: Tensor) -> Any:
    """Where its elements lie: a dimension of one has any stride."""
    strides = [n for n, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return x.dtype, x.shape, strides


def _bytes_of(x: Tensor) -> bytes:
    values = x.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(values).digest()  # type: ignore[arg-type]


def reason_of(error: BaseException) -> str:
    """What is wrong, in one line."""
    line = next((x.strip()[:200] for x in str(error).splitlines() if x.strip()), "")
    return line if isinstance(error, Refused | NoCompiler) else f"{type(error).__name__}: {line}"


def _timed(ways: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of the fastest of some calls of each; they take turns.

    Of this thread alone, which others cannot lengthen, where it is the only one.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    took_s, began = dict.fromkeys(ways, float("inf")), time.perf_counter()
    with torch.inference_mode():
        for r in range(_ROUNDS):
            for name, call in ways.items():
                start = clock()
                call()
                took_s[name] = min(took_s[name], clock() - start)
            if r + 1 >= _LEAST_ROUNDS and time.perf_counter() - began > _LONG_S:
                break
    return took_s


class Refused(RuntimeError):
    """A run is no artefact, and will be none the next time; the message says why."""


class NoCompiler(RuntimeError):
    """There is none that Inductor could call."""


class Artefacts:
    """Those of one device.

    Args:
        params: the parameters on this device, by number.
        known: tensors that are the same in every call (see ``constants``).
        images_last: whether inputs are ``with_channels_last``.
        since: when the first device of the runner began, by the clock of files (``time.time``).
        report: called as the work proceeds.

    Attributes:
        eager: the first operator of each run that is none, and why not.
        frozen: parameters whose values are part of artefacts.
        packed: by parameter, bytes of constants that runs have beside it: what is made of several
            parameters is divided as their sizes are.
        compiled: how many runs are artefacts.
        seconds: spent on compiling; 0 where all of them were kept.
    """

    def __init__(
        self,
        program: Program,
        device: Device,
        params: Mapping[int, Tensor],
        known: Mapping[int, Tensor],
        images_last: bool,
        since: float,
        report: Progress,
    ) -> None:
        self.eager: dict[int, str] = {}
        self.frozen: set[int] = set()
        self.packed: dict[int, float] = {}
        self.compiled, self.seconds = 0, 0.0
        self._program, self._device, self._report = program, device, report
        self._params, self._known = params, known
        self._images_last, self._since = images_last, since
        self._recipes: dict[int, Recipe] = {}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def of(
        self,
        runs: Sequence[tuple[int, ...]],
        share: Share,
        generated: Generated,
        clock: tuple[list[Any], Callable[[], Any]] | None = None,
    ) -> Generated:
        """The runs of a ``fused`` share, each as the kind that is the fastest."""
        calls, wholes, known = dict(generated.calls), dict[int, tuple[int, ...]](), self._known
        for run in runs:
            num_kernels = sum(launches(self._program.steps[op], known) for op in run)
            if is_worth(self._program, run, known):
                # Whatever the order of a plan, the same operators are the same artefact.
                makes = share.outputs[run[0]]
                self._recipes[run[0]] = recipe(self._program, sorted(run), sorted(makes), known)
                wholes[run[0]] = run
            elif num_kernels:
                self.eager[run[0]] = f"fewer than {_LEAST} operators that compute something"
        try:
            with torch_threads(self._device.threads):
                for i, (first, run) in enumerate(wholes.items()):
                    self._report(f"compiling for {self._device.name}", i / len(wholes))
                    if artefact := self._fastest(first, generated.calls[first]):
                        fixed = {t: known[t] for t in share.outputs[first] if t in known}
                        made = self._recipes[first], artefact, fixed
                        calls[first] = CompiledRun(run, *made, clock)
                        self.compiled += 1
                        self._pack(self._recipes[first], artefact.bytes)
        finally:
            self.__dict__.pop("_values", None)
            if clock is not None:
                clock[0].clear()
        return replace(generated, calls=calls)

    def _pack(self, run: Recipe, size: int) -> None:
        """Count the constants of a run."""
        sizes = {p: self._params[p].nbytes for p in run.params}
        for p, own in sizes.items():
            share = size * own / max(1, sum(sizes.values()))
            self.packed[p] = self.packed.get(p, 0.0) + share

    def _fastest(self, first: int, call: Call) -> Artefact | None:
        """The run that begins with ``first``, as the fastest kind; None: as it is."""
        run = self._recipes[first]
        forms = [form_of(self._params[p]) for p in run.params]
        forms += [form_of(self._known[t]) for t in run.known]
        forms += [form_of(self._values[t]) for t in run.reads]  # heads and groups of heads
        name = digest(here(), run.text, str(forms), str(self._device.threads))
        noted = folder() / f"{name}.kind"
        kind, why = None, ""
        with suppress(*_DAMAGED):
            kind, why = json.loads(noted.read_text())
        try:
            if kind is None:
                kind, why = self._chosen(run, name, call)
                self._write(noted, json.dumps([kind, why]))
            if kind != EAGER:
                self.frozen |= set(run.params) if kind == FROZEN else set()
                return self._artefact(run, kind, name, call)
        except Exception as error:  # e.g. Inductor's own, of an operator or of the compiler
            kind, why = EAGER, reason_of(error)
            if isinstance(error, Refused):
                self._write(noted, json.dumps([kind, why]))
        self.eager[first] = why
        return None

    def _chosen(self, run: Recipe, name: str, call: Call) -> tuple[str, str]:
        """The fastest kind of a run, and why if it is none.

        A plain one is not built where a frozen one is far ahead of what is to be beaten.
        """
        reads = [self._values[t] for t in run.reads]
        ways: dict[str, Callable[[], Any]] = {EAGER: lambda: self._interpreted(run, call)}
        if run.params:
            with suppress(Exception):  # a plain one may do, or says what is wrong with it
                ways[FROZEN] = partial(self._artefact(run, FROZEN, name, call), reads)
        if FROZEN in ways:
            took_s = _timed(ways)
            if took_s[FROZEN] < _FAR_AHEAD * took_s[EAGER]:
                return FROZEN, ""
        ways[PLAIN] = partial(self._artefact(run, PLAIN, name, call), reads)
        took_s = _timed(ways)
        kind = EAGER
        for other in (PLAIN, FROZEN):  # each needs more than those before: memory too
            if other in took_s and took_s[other] < _WORTH * took_s[kind]:
                kind = other
        times = ", ".join(f"{s * 1e6:.0f} us {way}" for way, s in took_s.items())
        return kind, f"it takes {times}" if kind == EAGER else ""

    def _artefact(self, run: Recipe, kind: str, name: str, call: Call) -> Artefact:
        """One kind of a run, from the cache or built now.

        Raises:
            Refused: it computes something else.
            Exception: what Inductor raised.
        """
        values = [self._params[p] for p in run.params] + [self._known[t] for t in run.known]
        if kind == FROZEN:
            name = f"{name}-{digest(*map(_bytes_of, values))}"
        path = folder() / f"{name}.so"
        others = kind == FROZEN and all(x.numel() > _INLINED for x in values)
        for file in [path, *(self._of_other_values(path) if others else ())]:
            with suppress(*_DAMAGED):
                artefact = load(file, run, self._params, self._known)
                if file == path or not self._difference(artefact, run, call):
                    touch(file)  # what was used last is kept
                    return artefact
        if compiler := missing_compiler():
            raise NoCompiler(f"there is no C++ compiler {compiler!r} here: placement doctor")
        reads = [self._values[t] for t in run.reads]
        inputs = reads if kind == FROZEN else [*reads, *values]
        began = time.perf_counter()
        graph = graph_of(self._program, run, self._params, self._known, kind == FROZEN)
        built = build(graph, inputs, self._device.threads, kind == FROZEN)
        self.seconds += time.perf_counter() - began
        path = self._kept(built, run, reads, path)
        artefact = load(path, run, self._params, self._known)
        if wrong := self._difference(artefact, run, call):
            remove(path)
            raise Refused(f"it computes something else: {wrong}")
        return artefact

    def _of_other_values(self, path: Path) -> Iterator[Path]:
        """What was built for other parameters of the same shapes, as of another layer.

        Only what has none of their values: it packs those that it is loaded with.
        """
        if path.exists():
            return
        for other in sorted(path.parent.glob(f"{path.stem.partition('-')[0]}-*.so")):
            with suppress(*_DAMAGED):
                facts = json.loads(other.with_suffix(".json").read_text())
                if facts["bytes"] == 0 and not facts["inlined"]:
                    yield other

    def _difference(self, artefact: Artefact, run: Recipe, call: Call) -> str:
        """What it computes of the example that its operators do not; empty: it is the same."""
        reads = [self._values[t] for t in run.reads]
        with torch.inference_mode():
            outputs, expected = artefact(reads), self._interpreted(run, call)
        values = [*(self._params[p] for p in run.params), *(self._known[t] for t in run.known)]
        here = Cluster("one", (self._device,))
        tolerance = equality.Tolerance.of([*reads, *values, *expected], here)
        wrong = equality.difference(outputs, expected, tolerance)
        if not wrong and [*map(_layout, outputs)] != [*map(_layout, expected)]:
            wrong = "what it makes is laid out in another way"
        return wrong

    def _kept(self, built: Built, run: Recipe, reads: Sequence[Tensor], path: Path) -> Path:
        """Where the files of an artefact are: in the cache, or where they end with this process."""
        params = [self._params[p] for p in run.params]
        values = {"transposed": [*map(_transposed, params)], "param": params, "read": reads}
        values["known"] = [self._known[t] for t in run.known]
        places = {view_of(x): (what, i) for what, xs in values.items() for i, x in enumerate(xs)}
        if self._temporary is None:
            try:
                write(built, places, path)
                if "-" in path.stem:  # of other values, which may never come again
                    others = path.parent.glob(f"{path.stem.partition('-')[0]}-*.so")
                    used = sorted((x.stat().st_mtime, x) for x in others)
                    for _, old in [x for x in used if x[0] < self._since][:-_FROZEN_KEPT]:
                        remove(old)
                return path
            except FileError as error:
                say(f"compiled runs are not kept, and made again next time: {error}")
                self._temporary = tempfile.TemporaryDirectory(prefix="placement-")
        path = Path(self._temporary.name) / path.name
        write(built, places, path)
        return path

    def _write(self, path: Path, text: str) -> None:
        if self._temporary is None:
            with suppress(FileError):  # which ``_kept`` has said
                write_atomic(path, text)

    @cached_property
    def _values(self) -> dict[int, Tensor]:
        """What runs read where the inputs are the example's."""
        needed = {t for run in self._recipes.values() for t in run.reads}
        return values_of(self._program, needed, self._images_last)

    def _interpreted(self, run: Recipe, call: Call) -> list[Tensor]:
        """What the run makes of the example inputs, operator by operator."""
        env: list[Any] = [None] * (1 + max(t for s in self._program.steps for t in s.outputs))
        for t in run.reads:
            env[t] = self._values[t]
        for t in run.known:  # another run hands them on
            env[t] = self._known[t]
        with torch.inference_mode():
            for _ in call(env, lambda: True) or ():
                pass
        return [env[t] for t in run.makes]
