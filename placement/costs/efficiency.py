"""What share of peak rates operators reach, by their kind, and the peak rates of a device.

The shares are fitted to the operators of BERT and GPT-2 that the authors of NeuSight (Lee et al.,
ASPLOS 2025) measured on eleven GPUs. ``git checkout 4e82402e``, ``python -m experiments.neusight``
fit them again, and say how far they are off on a GPU that was left out. The measurements are fp32;
the shares are used for all types.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Device
from placement.costs.features import CLASSES
from placement.devices import library, nearest

Floats = NDArray[np.float64]


class RatesError(ValueError):
    """Nothing is known of what a device can do; the message says what to state."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a kind of operator.

    Attributes:
        compute: of the peak of floating-point operations, at 10 W for each TFLOP/s (fp32).
        memory: of the peak of the memory's bandwidth.
        power: exponent: devices with fewer watts for their rate cannot hold its clock.
        calls: how many times ``call_s`` it takes to start one.
    """

    compute: float
    memory: float
    power: float = 0.0
    calls: float = 1.0


FITTED = {
    "product": Efficiency(0.68, 0.80, 0.2, 4.0),
    "batched": Efficiency(0.40, 0.65, 0.3, 3.0),
    "softmax": Efficiency(1.0, 0.80),
    "norm": Efficiency(1.0, 0.60, calls=3.0),
    "embedding": Efficiency(1.0, 0.50, calls=3.0),
    "elementwise": Efficiency(1.0, 0.80, calls=2.0),
    "view": Efficiency(1.0, 1.0),
}
_ALL = Efficiency(1.0, 1.0)
_NORMS = ("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "batch_norm")
_WATTS = 10.0  # of a TFLOP/s, with which devices reach what was fitted


def kind_of(kind: str, op_class: int) -> str:
    """Which of ``FITTED`` an operator is, of a kind and class of ``placement.costs.features``."""
    name = CLASSES[op_class]
    if name in ("product", "convolution", "recurrent"):
        return "batched" if kind in ("bmm", "baddbmm", "matmul") else "product"
    if name in ("attention", "view"):
        return "batched" if name == "attention" else "view"
    if "softmax" in kind or kind in _NORMS:
        return "softmax" if "softmax" in kind else "norm"
    return "embedding" if kind in ("embedding", "index", "gather") else "elementwise"


@dataclass(frozen=True)
class Peak:
    """Of a device: operations and bytes per second, seconds per call, watts of a TFLOP/s.

    ``is_reached``: these were measured, so that operators reach all of them.
    """

    flops_per_s: float
    bytes_per_s: float
    call_s: float
    watts: float = _WATTS
    is_reached: bool = False

    @classmethod
    def of(cls, device: Device, dtype: str = "fp32") -> Peak:
        """What is stated of ``device``, or of the device of the library that it is like.

        ``speed`` is a factor of all three.

        Raises:
            RatesError: neither has it all.
        """
        known = library().get(device.like or "")
        flops, moved, call = device.flops_per_s, device.bytes_per_s, device.call_s
        if known is not None:
            flops = known.peak(dtype) if flops is None else flops
            moved = known.bytes_per_s if moved is None else moved
            call = known.call_s if call is None else call
        if flops is None or moved is None or call is None:
            near = nearest(device.like or device.model or device.name)
            raise RatesError(
                f"device {device.name!r}: its peak rates are not known: state flops_per_s, "
                "bytes_per_s and call_s in the cluster file, or like: VENDOR/MODEL, a device of "
                f"the library, e.g. {', '.join(near[:3])}"
            )
        watts = _WATTS if known is None else known.busy_w / known.peak("fp32") * 1e12
        return cls(flops * device.speed, moved * device.speed, call / device.speed, watts)

    def seconds(
        self,
        kind: str,
        flops: Floats | float,
        moved: Floats | float,
        share: Efficiency | None = None,
    ) -> Floats:
        """Of operators of a kind of ``FITTED`` with so many operations, and bytes moved."""
        share = share or (_ALL if self.is_reached else FITTED[kind])
        compute = share.compute * (self.watts / _WATTS) ** share.power
        compute = compute if self.is_reached else min(compute, 0.95)  # whatever the watts
        return share.calls * self.call_s + np.maximum(
            np.asarray(flops) / (compute * self.flops_per_s),
            np.asarray(moved) / (share.memory * self.bytes_per_s),
        )
