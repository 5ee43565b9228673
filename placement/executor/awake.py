"""What the operating system is asked for while devices hand tensors to each other."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


def wait_exactly() -> None:
    """Timed waits of the calling thread end when they are due, not up to 50 us later (Linux).

    How soon a thread gets the interpreter that another one holds is such a wait. For the threads of
    devices only: where loaders had it too, both took the interpreter from each other all the time.
    """
    with suppress(OSError):  # not Linux
        Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text("1", encoding="utf-8")


def let_senders_finish() -> None:
    """Gloo's own thread waits its turn for a core (Linux), and interrupts nobody who runs there.

    Else it interrupts a thread of this process that is sending, finds the connection locked by
    it, and looks again and again for the rest of its time slice, 4 ms, in which nobody can send.
    To be called when gloo's process group is there.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended, or this process may not choose
            if (task / "comm").read_text(encoding="utf-8").startswith("gloo"):
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
