"""Idle cores that do not fall asleep while devices hand tensors to each other."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_LATENCY_FILE = "/dev/cpu_dma_latency"  # Linux: docs.kernel.org/power/pm_qos_interface.html


def cores_stay_awake() -> bool:
    """Whether this process may keep idle cores awake: on Linux, usually root's privilege."""
    return os.access(_LATENCY_FILE, os.W_OK)


@contextmanager
def cores_awake() -> Iterator[None]:
    """Idle cores wait without sleeping meanwhile, where this process may ask for that.

    Waking a core that sleeps takes 50 to 120 microseconds on a virtual machine, as long as many
    operators, and never the same. The whole machine's cores draw more power for it, so it is
    held only while micro-batches are under way.
    """
    try:
        file = os.open(_LATENCY_FILE, os.O_WRONLY)
    except OSError:  # not Linux, or not permitted: cores sleep as they like
        yield
        return
    try:
        os.write(file, struct.pack("i", 0))
        yield
    finally:
        os.close(file)  # the request ends with it
