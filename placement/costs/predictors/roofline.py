"""Seconds from work, bytes and the peak rates of a device: nothing of the model runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from placement.cluster import Device
from placement.costs.efficiency import Peak, kind_of
from placement.costs.features import features
from placement.costs.predictors import Floats, LatencyError, Sample
from placement.graph import OpGraph


@dataclass(frozen=True)
class Roofline:
    """The roofline model (Williams et al., CACM 52(4), 2009): the static predictor.

    An operator takes ``call_s`` and the longer of its operations at the peak rate and its bytes
    at the memory's. It needs no measured model: rates are given as data, or measured once on
    this machine by a calibration of a second. Rates that are given hold for every device. Of a
    device of the library (``like: nvidia/l4``) they are the published ones, of which
    operators reach fitted shares (``placement.costs.efficiency``).

    It is what a static split works with (Wang et al., Computer Engineering and Science 42(9),
    2020: operations over peak rates; bytes and calls are ours).

    Attributes:
        flops_per_s: floating-point operations, float32 matrix products; None: as measured here.
        bytes_per_s: read and written, from memory; None too.
        call_s: to start an operator; None too.
    """

    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    call_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s", "call_s"):
            value = getattr(self, name)
            if value is not None and not (value > 0 or (name == "call_s" and value == 0)):
                raise LatencyError(f"roofline: {name} = {value} must be positive")

    def fit(self, samples: Sequence[Sample]) -> Roofline:
        """Itself: it learns nothing."""
        return self

    def predict(self, graph: OpGraph, device: Device) -> tuple[Floats, Floats]:
        """See ``placement.costs.predictors.Predictor``."""
        work = features(graph)
        seconds = np.zeros(graph.num_ops)
        moved = work.read_bytes + work.written_bytes
        kinds = np.array([kind_of(*x) for x in zip(work.kind, work.op_class, strict=True)])
        narrow = work.item_bytes <= 2.0
        for peak, of_size in zip(self._peaks(device), (narrow, ~narrow), strict=True):
            for kind in np.unique(kinds[of_size]).tolist():
                at = of_size & (kinds == kind)
                seconds[at] = peak.seconds(kind, work.flops[at], moved[at])
        return seconds, 0.7 * seconds  # two times of three within a factor of 2

    def _peaks(self, device: Device) -> tuple[Peak, Peak]:
        """What the device does with types of 2 bytes and of more: given, published, or measured.

        Raises:
            LatencyError: nothing is known of the device, and it is not on this machine.
        """
        stated = {name: rate for name, rate in vars(self).items() if rate is not None}
        if len(stated) < 3 and (device.like, device.flops_per_s) != (None, None):
            return Peak.of(device, "fp16"), Peak.of(device, "fp32")
        peak = Peak(**stated, is_reached=True) if len(stated) == 3 else calibrate(device)
        return (replace(peak, **stated),) * 2


@lru_cache(maxsize=64)
def calibrate(device: Device) -> Peak:
    """Measure the rates of a device of this machine, in about a second; once in a process.

    Raises:
        LatencyError: the device is not on this machine.
    """
    _check_here(device)
    answers: list[Any] = []

    def work() -> None:
        try:
            answers.append(_calibrate(device))
        except Exception as error:  # goes on in the thread that asked
            answers.append(error)

    thread = threading.Thread(target=work, name="placement-calibrate")  # pinned while it runs
    thread.start()
    thread.join()
    if isinstance(answers[0], Exception):
        raise answers[0]
    peak: Peak = answers[0]
    return peak


def _calibrate(device: Device) -> Peak:
    """In the calling thread, which belongs to the device afterwards."""
    import torch

    from placement.executor.backend import backend_for

    backend = backend_for(device)
    measured: list[Peak] = []

    def measure(stack: ExitStack) -> None:
        backend.enter(stack)

        def best_s(call: Callable[[], Any], times: int) -> float:
            """Least seconds of a call, over rounds of so many."""
            call()
            spans = []
            for _ in range(5):
                begin = backend.mark()
                for _ in range(times):
                    call()
                spans.append(backend.resolve_ns(backend.mark()) - backend.resolve_ns(begin))
            return max(min(spans), 1) * 1e-9 / times

        size, long = (512, 2**24) if device.kind == "cpu" else (4096, 2**28)
        a = torch.ones(size, size, device=backend.torch_device)
        x = torch.ones(long, device=backend.torch_device)
        y, one = torch.empty_like(x), torch.ones(1, device=backend.torch_device)
        product_s = best_s(lambda: torch.mm(a, a), 4)
        copy_s = best_s(lambda: y.copy_(x), 1)
        call_s = best_s(lambda: one + one, 200)
        rates = 2.0 * size**3 / product_s, 2 * 4 * long / copy_s, call_s
        measured.append(Peak(*rates, is_reached=True))

    def work() -> None:
        with ExitStack() as stack, torch.inference_mode():
            measure(stack)

    backend.begin()
    backend.run(work)
    return measured[0]


def is_here(device: Device) -> bool:
    """Whether a device is on this machine, as far as its kind and cores tell."""
    import torch

    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(device.cores)
    here = {"cpu": set(device.cores) <= cores, "cuda": torch.cuda.is_available()}
    return here.get(device.kind, False)


def _check_here(device: Device) -> None:
    if not is_here(device):
        raise LatencyError(
            f"device {device.name!r} ({device.kind}) is not on this machine, so its peak rates "
            "cannot be measured: state them in Python, Roofline(flops_per_s=..., bytes_per_s=..., "
            "call_s=...), "
            "or describe the device with 'like: <measured device>' and 'speed: <factor>', or with "
            "'like: VENDOR/MODEL' of the library"
        )
