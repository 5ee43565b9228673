"""How kernels are compiled, and what they are given: ``Struct``, named arrays behind one pointer.

Kernels are cached, run without the GIL, and mostly do not count references. numba counts those
to every array that a kernel is called with, in every call that it does not inline; nothing needs
it in a kernel that neither makes an array nor returns one. Such kernels fill arrays that they are
given: ``a[:] = b``, ``a.max()``, ``a.mean()``, ``a.sort()`` and ``np.empty`` make some; ``copy``,
``largest`` and ``average`` do not.

numba passes a tuple of arrays as seven words for each, to every function that it is passed on to:
that is most of the time that compiling takes, and much of a call's. A ``Struct`` is one word.

What is compiled is kept beside the source, or in the user's folder for caches where that cannot be
written (``$NUMBA_CACHE_DIR`` is another folder), and used as long as the source is the same.
Kernels beside the source are used also by those who cannot write there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from math import prod
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, NamedTuple, ParamSpec, Self

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.options import DefaultOptions
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    lower_setattr_generic,
    models,
    register_model,
    unbox,
)
from numpy.typing import NDArray

from placement.tools.clock import loading

P = ParamSpec("P")


def _counting(on: bool) -> dict[str, Any]:
    """numba's own name for it is private: without it kernels are slower, and still right."""
    return {"_nrt": on} if hasattr(DefaultOptions, "_nrt") else {}


def _compiled(function: Any = None, *, cache: bool = True, **options: Any) -> Any:
    """As ``numba.njit``, with our cache."""
    if function is None:
        return partial(_compiled, cache=cache, **options)
    compiled = nb.njit(function, nogil=True, **options)
    # What numba asks where it has nothing for these types yet: no budget pays for what that takes.
    compiled._compile_for_args = loading()(compiled._compile_for_args)
    if cache:
        with suppress(RuntimeError):  # no source file: compiled by every process
            compiled._cache = _Cache(function)
    return compiled


_IN_TREE: Any = CompileResultCacheImpl._locator_classes[1]  # its name changes between versions


class _BesideSource(_IN_TREE):  # type: ignore[misc]
    """The folder beside the source, also where it cannot be written, which numba's own asks."""

    def ensure_cache_path(self) -> None: ...


class _Folders(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes: ClassVar = [*CompileResultCacheImpl._locator_classes, _BesideSource]


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba's, where a kernel is also compiled again if another file changes that it stands on.

    numba asks for the kernel's own file alone. What cannot be read is compiled again; what cannot
    be written is not kept. Where the source cannot be written, kernels beside it are read.
    """

    _impl_class = _Folders

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        beside = _BesideSource(function, function.__code__.co_filename)
        self._beside_source = IndexDataCacheFile(
            cache_path=beside.get_cache_path(),
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _of_this_file(), _digest(self._py_func))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            overload = super().load_overload(sig, target_context)
            if overload is None:
                data = self._beside_source.load(self._index_key(sig, target_context.codegen()))
                overload = None if data is None else self._impl.rebuild(target_context, data)
            return overload
        except Exception:  # pickle raises anything for a file that is cut off
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """One process at a time: the name of a file is taken before the file is there."""
        with suppress(OSError), open(Path(self.cache_path) / "kernels.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().save_overload(sig, data)


@cache
def _of_this_file() -> str:
    return hashlib.sha1(Path(__file__).read_bytes()).hexdigest()


@cache
def _digest(function: Callable[..., Any]) -> str:
    """Of a kernel's code, and of what is compiled into it: kernels that it calls, constants."""
    digest = hashlib.sha1()
    codes = [function.__code__]
    for code in codes:
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
        plain = [x for x in code.co_consts if not isinstance(x, CodeType)]
        digest.update(code.co_code + repr(plain).encode())
        values = [function.__globals__.get(name) for name in code.co_names]
        modules = [vars(x) for x in values if isinstance(x, ModuleType)]
        for value in values + [x.get(name) for x in modules for name in code.co_names]:
            called = getattr(value, "py_func", getattr(value, "_defn", None))  # kernel, intrinsic
            if called is not None and called is not function:
                digest.update(_digest(called).encode())
            elif isinstance(value, np.ndarray):
                digest.update(value.tobytes())
            elif isinstance(value, bool | int | float | str | tuple | np.generic):
                digest.update(repr(value).encode())
    return digest.hexdigest()


kernel: Any = partial(_compiled, **_counting(False))
inlined: Any = partial(kernel, inline="always")
allocating: Any = partial(_compiled, **_counting(True))


def kernel_folder() -> Path | None:
    """Where kernels of this package are kept; None: nowhere."""
    path = copy._cache.cache_path
    return Path(path) if path is not None and os.access(path, os.W_OK) else None


class _Array(NamedTuple):
    """A field of a ``Struct``: ``shape`` in names of sizes, as ``"2, N+1"`` or ``"W*N"``."""

    shape: str
    dtype: Any = np.float64
    value: float | None = None

    def made(self, sizes: Mapping[str, int], filled: bool) -> NDArray[Any]:
        """Full of ``value``; without one zeros, or if it is not to be ``filled`` anything."""
        shape = [
            sum(prod(int(x) if x.isdigit() else sizes[x] for x in term) for term in length)
            for length in _lengths(self.shape)
        ]
        if self.value:
            return np.full(shape, self.value, self.dtype)
        return (np.zeros if filled or self.value == 0 else np.empty)(shape, self.dtype)


@cache
def _lengths(shape: str) -> list[list[list[str]]]:
    """Each is a sum of products."""
    lengths = shape.replace(" ", "").split(",")
    return [[term.split("*") for term in length.split("+")] for length in lengths]


array: Any = _Array


class Struct:
    """Base of what kernels are given by one pointer: a class whose annotations name the fields.

    A field is a C-contiguous array, which kernels may fill but not exchange, a number (int, float
    or bool), which kernels and Python may change, or another struct. The type that a kernel is
    compiled for is that of the fields: dtypes and dimensions.

    >>> class Walk(Struct):
    ...     place: Array = array("N", np.int32)
    ...     steps: int
    >>> walk = Walk.fresh({"N": 3}, steps=2)
    >>> walk = Walk(place=np.zeros(3, np.int32), steps=2)
    """

    _names: ClassVar[tuple[str, ...]]
    _arrays: ClassVar[dict[str, _Array]]

    def __init_subclass__(cls) -> None:
        cls._names = tuple(cls.__annotations__)
        cls._arrays = {k: v for k, v in vars(cls).items() if isinstance(v, _Array)}
        for name in cls._arrays:
            delattr(cls, name)

    @classmethod
    def fresh(cls, sizes: Mapping[str, int], filled: bool = True, **fields: Any) -> Self:
        """Arrays as they are declared, in these ``sizes``, and numbers 0, but for ``fields``.

        ``filled``: False where the kernel fills all arrays that are declared without a value.
        """
        for name in cls._names:
            if name in cls._arrays and name not in fields:
                fields[name] = cls._arrays[name].made(sizes, filled)
            elif name not in fields:
                fields[name] = {"int": 0, "float": 0.0, "bool": False}[cls.__annotations__[name]]
        return cls(**fields)

    @classmethod
    def of(cls, *sources: Any, **fields: Any) -> Self:
        """``fields``, and the others as in the first of the ``sources`` that has their name."""
        for name in set(cls._names) - set(fields):
            fields[name] = next(getattr(x, name) for x in sources if hasattr(x, name))
        return cls(**fields)

    def __init__(self, **fields: Any) -> None:
        assert fields.keys() == set(self._names), fields.keys() ^ set(self._names)
        kinds: list[Any] = []
        words: list[int] = []
        for name in self._names:
            kind, value = _described(fields[name])
            kinds.append(kind)
            words += value
        data = np.array(words, np.uint64)
        kept: dict[str, Any] = {
            k: v for k, v in fields.items() if isinstance(v, np.ndarray | Struct)
        }
        kind = _struct_type(type(self).__qualname__, self._names, tuple(kinds))
        kept |= {"_numba_type_": kind, "_data": data, "_address": data.ctypes.data}
        self.__dict__.update(kept)

    def __getattr__(self, name: str) -> Any:
        try:
            at, kind = self.__dict__["_numba_type_"].places[name]
        except KeyError:
            raise AttributeError(name) from None
        return _NUMBERS[kind](self._data[at : at + 1].view(_DTYPES[kind])[0])

    def __setattr__(self, name: str, value: Any) -> None:
        at, kind = self._numba_type_.places[name]
        self._data[at : at + 1].view(_DTYPES[kind])[0] = value

    def items(self) -> list[tuple[str, Any]]:
        """The fields by name."""
        return [(name, getattr(self, name)) for name in self._names]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), dict(self.items()))


def _rebuilt(kind: type[Struct], fields: dict[str, Any]) -> Struct:
    return kind(**fields)


_NUMBERS: dict[Any, type] = {types.int64: int, types.float64: float, types.boolean: bool}
_DTYPES = {types.int64: np.int64, types.float64: np.float64, types.boolean: np.int64}


def _described(value: Any) -> tuple[Any, list[int]]:
    """What the type depends on, and the words that kernels read."""
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous, "kernels read arrays as they lie in memory"
        address = value.__array_interface__["data"][0]
        return (value.dtype, value.ndim), [address, *value.shape]
    if isinstance(value, Struct):
        return value._numba_type_, [value._address]
    if isinstance(value, bool | np.bool_):
        return types.boolean, [int(value)]
    if isinstance(value, int | np.integer):
        return types.int64, [int(value) % 2**64]
    return types.float64, [int(np.float64(value).view(np.uint64))]


@cache
def _struct_type(cls: str, names: tuple[str, ...], kinds: tuple[Any, ...]) -> StructType:
    members = [
        types.Array(nb.from_dtype(k[0]), k[1], "C") if isinstance(k, tuple) else k for k in kinds
    ]
    return StructType(cls, names, members)


class StructType(types.Type):  # type: ignore[misc]
    """numba's type of a ``Struct``; ``places``: the first word and the type of each field."""

    def __init__(self, cls: str, names: tuple[str, ...], members: list[types.Type]) -> None:
        self.places, at = {}, 0
        for name, member in zip(names, members, strict=True):
            self.places[name] = (at, member)
            at += 1 + (member.ndim if isinstance(member, types.Array) else 0)
        # Names of types become part of the names of functions.
        digest = hashlib.sha1(repr(self.places).encode()).hexdigest()[:12]
        super().__init__(name=f"{cls}_{digest}")


register_model(StructType)(models.OpaqueModel)


@unbox(StructType)
def _unbox_struct(kind: Any, obj: Any, c: Any) -> NativeValue:
    address = c.pyapi.object_getattr_string(obj, "_address")
    pointer = c.pyapi.long_as_voidptr(address)
    c.pyapi.decref(address)
    return NativeValue(pointer)


@infer_getattr
class _StructFields(AttributeTemplate):  # type: ignore[misc]
    key = StructType

    def generic_resolve(self, kind: StructType, name: str) -> types.Type | None:
        return kind.places[name][1] if name in kind.places else None


def _word(builder: Any, struct: Any, at: int, kind: ir.Type) -> Any:
    """Pointer to word ``at`` of a struct, as one to ``kind``."""
    words = builder.bitcast(struct, ir.IntType(64).as_pointer())
    word = builder.gep(words, [ir.Constant(ir.IntType(64), at)])
    return builder.bitcast(word, kind.as_pointer())


def _load(builder: Any, struct: Any, at: int, kind: ir.Type) -> Any:
    """A word that no kernel changes."""
    value = builder.load(_word(builder, struct, at, kind))
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


@lower_getattr_generic(StructType)
def _get_field(context: Any, builder: Any, kind: StructType, struct: Any, name: str) -> Any:
    at, member = kind.places[name]
    if not isinstance(member, types.Array):
        if isinstance(member, StructType):
            return _load(builder, struct, at, context.get_value_type(member))
        data = _word(builder, struct, at, context.get_data_type(member))
        return context.unpack_value(builder, member, data)
    array = cgutils.create_struct_proxy(member)(context, builder)
    word = ir.IntType(64)
    shape = [_load(builder, struct, at + 1 + i, word) for i in range(member.ndim)]
    item = ir.Constant(word, context.get_abi_sizeof(context.get_data_type(member.dtype)))
    size, strides = ir.Constant(word, 1), []
    for length in reversed(shape):
        strides.append(builder.mul(size, item))
        size = builder.mul(size, length)
    array.data = _load(builder, struct, at, array.data.type)
    array.nitems, array.itemsize = size, item
    array.shape = cgutils.pack_array(builder, shape, ty=word)
    array.strides = cgutils.pack_array(builder, strides[::-1], ty=word)
    array.meminfo = ir.Constant(array.meminfo.type, None)  # who calls keeps it
    array.parent = ir.Constant(array.parent.type, None)
    return array._getvalue()


@lower_setattr_generic(StructType)
def _set_field(
    context: Any, builder: Any, signature: Any, args: tuple[Any, Any], name: str
) -> None:
    (kind, value_type), (struct, value) = signature.args, args
    at, member = kind.places[name]
    cast = context.cast(builder, value, value_type, member)
    context.pack_value(
        builder, member, cast, _word(builder, struct, at, context.get_data_type(member))
    )


@inlined
def copy(to: Any, values: Any) -> None:
    """As ``to[:] = values``, of one dimension."""
    for i in range(len(to)):
        to[i] = values[i]


@inlined
def largest(values: Any, count: Any) -> Any:
    """As ``np.argmax(values[:count])``."""
    best = 0
    for i in range(1, count):
        if values[i] > values[best]:
            best = i
    return best


@inlined
def average(values: Any) -> Any:
    """As ``values.mean()``, up to rounding."""
    mean = 0.0
    for i in range(len(values)):
        mean += values[i] / len(values)
    return mean
