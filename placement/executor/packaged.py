"""Runs the packages of a folder in a pipeline, without the model's code.

    from run import Pipeline
    with Pipeline(".") as pipeline:
        outputs = pipeline(x)                     # a list, in the order of the module's outputs
        for outputs in pipeline.stream(items):    # each item a sequence of tensors
            ...

Each device is a thread with cores of its own, which runs its packages of one item after the other.
It needs PyTorch, of the version that made the packages, and nothing else.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import queue
import tempfile
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_AOTI: Any = torch._C._aoti
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_void_p]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3


class Package:
    """A package of AOTInductor, called through its C interface.

    PyTorch's own loader holds the interpreter's lock while a package runs; ``ctypes`` does not.
    """

    def __init__(self, path: Path, num_outputs: int, folder: str) -> None:
        with zipfile.ZipFile(path) as archive:
            (name,) = [x for x in archive.namelist() if x.endswith(".so")]
            self._library = ctypes.CDLL(archive.extract(name, folder))
        self._model, self._num_outputs = ctypes.c_void_p(), num_outputs
        if self._library.AOTInductorModelContainerCreateWithDevice(
            ctypes.byref(self._model), ctypes.c_size_t(1), b"cpu", None
        ):
            raise RuntimeError(f"{path} cannot be loaded by PyTorch {torch.__version__}")
        self._path = path

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        taken = _AOTI.unsafe_alloc_void_ptrs_from_tensors(tensors)
        inputs = (ctypes.c_void_p * len(taken))(*[_pointer(x, None) for x in taken])
        outputs = (ctypes.c_void_p * self._num_outputs)()
        if self._library.AOTInductorModelContainerRun(
            self._model,
            inputs,
            ctypes.c_size_t(len(taken)),
            outputs,
            ctypes.c_size_t(self._num_outputs),
            None,
            None,
        ):
            raise RuntimeError(f"{self._path} failed; what it says is on standard error")
        made = [_capsule(x, None, None) for x in outputs]
        tensors = _AOTI.alloc_tensors_by_stealing_from_void_ptrs(made)
        return list(tensors)


def _laid_out(form: dict[str, Any], x: Any, number: int) -> torch.Tensor:
    """An input as packages read it, which look neither at its dtype, shape nor strides."""
    found = None
    if isinstance(x, torch.Tensor):
        found = {"dtype": str(x.dtype).removeprefix("torch."), "shape": [*x.shape]}
    if found != {k: form[k] for k in ("dtype", "shape")}:
        given = f"{found['dtype']} of shape {found['shape']}" if found else type(x).__name__
        raise ValueError(
            f"input {number} is {given}, the packages are for {form['dtype']} of shape "
            f"{form['shape']}: give that, or plan and export again"
        )
    if x.device.type == "cpu" and [*x.stride()] == form["strides"]:
        return x
    return torch.empty_strided(form["shape"], form["strides"], dtype=x.dtype).copy_(x.detach())


class Pipeline:
    """The packages of ``folder``; close it, or use it as a context manager."""

    def __init__(self, where: str | Path = ".") -> None:
        folder = Path(where)
        self.plan: dict[str, Any] = json.loads((folder / "stages.json").read_text())
        self._unpacked = tempfile.TemporaryDirectory()
        self._inboxes: list[queue.SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []
        for number, device in enumerate(self.plan["devices"]):
            stages = [
                (Package(folder / s["package"], len(s["makes"]), self._unpacked.name), s)
                for s in self.plan["stages"]
                if s["device"] == number
            ]
            self._inboxes.append(queue.SimpleQueue())
            work = threading.Thread(
                target=self._work, args=(self._inboxes[-1], device, stages), daemon=True
            )
            work.start()
            self._threads.append(work)

    def _work(self, inbox: Any, device: Any, stages: Any) -> None:
        torch.get_num_threads()  # the first question takes over another thread's setting
        torch.set_num_threads(device["threads"])
        if device["cores"] and hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # another machine, or a container that forbids it
                os.sched_setaffinity(0, device["cores"])
        while (item := inbox.get()) is not None:
            values, changed = item
            for package, stage in stages:
                tensors = self._awaited(values, changed, stage["reads"])
                failed = [x for x in tensors if isinstance(x, Exception)]
                try:
                    with torch.inference_mode():
                        made = failed[:1] * len(stage["makes"]) or package(tensors)
                except Exception as error:  # raised where the outputs are awaited
                    made = [error] * len(stage["makes"])
                with changed:
                    values.update(zip(stage["makes"], made, strict=True))
                    changed.notify_all()

    @staticmethod
    def _awaited(values: dict[int, Any], changed: Any, which: Sequence[int]) -> list[Any]:
        """These values, once they are there."""
        with changed:
            changed.wait_for(lambda: all(t in values for t in which))
            return [values[t] for t in which]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        (outputs,) = self.stream([inputs])
        return outputs

    def stream(self, items: Iterable[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
        """Lists of outputs, in order; at most ``in_flight`` items are begun and not ended.

        Raises:
            ValueError: an input of another shape or dtype, or another number of inputs.
        """
        left, begun = iter(items), list[Any]()
        while True:
            for inputs in itertools.islice(left, self.plan["in_flight"] - len(begun)):
                forms = self.plan["forms"]
                if len(inputs) != len(forms):
                    raise ValueError(f"{len(inputs)} inputs, the packages are for {len(forms)}")
                laid_out = map(_laid_out, forms, inputs, itertools.count())
                values = dict(zip(self.plan["inputs"], laid_out, strict=True))
                flight = values, threading.Condition()
                for inbox in self._inboxes:
                    inbox.put(flight)
                begun.append(flight)
            if not begun:
                return
            values, changed = begun.pop(0)
            outputs = self._awaited(values, changed, self.plan["outputs"])
            for output in outputs:
                if isinstance(output, Exception):
                    raise output
            yield outputs

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()
        self._unpacked.cleanup()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
