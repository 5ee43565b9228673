"""What devices do over time, of predicted and measured timelines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement.timeline import Timeline

Floats = NDArray[np.float64]


def busy_share(timeline: Timeline, num_bins: int) -> Floats:
    """float64 ``[D, num_bins]``: busy share of equal slices of the run, from its begin."""
    edges = timeline.begin_s + np.linspace(0.0, timeline.makespan_s, num_bins + 1)
    width = max(timeline.makespan_s / num_bins, 1e-300)
    return np.stack(
        [
            np.diff(_done(timeline, timeline.device_of == d, edges)) / width
            for d in range(len(timeline.device_names))
        ]
    ).clip(0.0, 1.0)


def _done(timeline: Timeline, ran: NDArray[np.bool_], edges: Floats) -> Floats:
    """Seconds that these, of ``[M, N]``, have worked until each edge, float64 ``[len(edges)]``."""
    done = np.zeros(len(edges))
    for times, sign in ((timeline.start_s, 1.0), (timeline.end_s, -1.0)):
        when = np.sort(times[ran])
        before = np.append(0.0, np.cumsum(when))
        k = np.searchsorted(when, edges)
        done += sign * (k * edges - before[k])  # sum of (edge - when) over when < edge
    return done
