"""The unit of which all latencies are multiples, where nothing takes time to be sent."""

from __future__ import annotations

import numpy as np

from placement.problem import Problem


def grain_s(problem: Problem) -> float:
    """Seconds of which every latency is a multiple: 0 where none above 1e-6 of all is found.

    All seconds of operators are multiples of it, whatever runs beside them, and nothing takes time
    to be sent, handed over or taken in.
    """
    off, size = ~np.eye(problem.num_devices, dtype=bool), problem.graph.tensor_bytes.max(initial=0)
    sent_s = problem.transfers_s(lambda x: x[..., off].max(axis=-1, initial=0.0))
    handed_s = problem.link_send_s + size * problem.link_send_s_per_byte + problem.link_wake_s
    handed_s = handed_s + problem.link_receive_s
    slower = problem.loaded_s > np.where(problem.supported, problem.compute_s, np.inf)
    if max(x.max(initial=0) for x in (sent_s, handed_s[off], slower)) > 0:
        return 0.0
    seconds = np.unique(problem.compute_s[np.isfinite(problem.compute_s)])
    seconds = seconds[seconds > 0]
    if not len(seconds):
        return 0.0
    least = 1e-6 * seconds[-1]
    grain = float(seconds[0])
    for value in seconds.tolist():
        while value > least:  # Euclid's algorithm
            grain, value = value, grain % value
            if grain - value < least:  # rounded down
                value = 0.0
        if grain < 1e3 * least:
            return 0.0
    whole = np.rint(seconds / grain)
    # The mean of all says more than the last remainder.
    grain = float(seconds.sum() / whole.sum())
    exact = np.abs(seconds - whole * grain).max() <= 1e-9 * seconds[-1]
    return grain if exact else 0.0
