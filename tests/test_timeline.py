"""Metrics and traces of a timeline, and what "steady" means."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.cluster import Device, Power
from placement.timeline import Timeline, side_by_side, steady_period

# One micro-batch of A and B, B on the other device:
#
#          0 1 2 3 4 5 6 7 8
# cpu:0    A A
# link         t t t
# cuda:0             B B B
DRAWN = Timeline(
    device_names=("cpu:0", "cuda:0"),
    placement=np.array([0, 1], np.int32),
    start_s=np.array([[0.0, 5.0]]),
    end_s=np.array([[2.0, 8.0]]),
    transfers=np.array([[7, 0, 0, 1]], np.int32),
    transfer_start_s=np.array([2.0]),
    transfer_end_s=np.array([5.0]),
    power=Power.of((Device("cpu:0", busy_w=10, idle_w=1), Device("cuda:0", busy_w=100, idle_w=20))),
)


def test_metrics() -> None:
    assert DRAWN.num_microbatches == 1
    assert DRAWN.latency_s == DRAWN.makespan_s == DRAWN.period_s == 8
    assert DRAWN.busy_s.tolist() == [2, 3]
    assert DRAWN.utilisation.tolist() == [2 / 8, 3 / 8]


def test_energy_is_busy_and_idle_watts_times_seconds() -> None:
    assert DRAWN.energy_j == (10 * 2 + 1 * 6) + (100 * 3 + 20 * 5)
    unknown = Timeline(DRAWN.device_names, DRAWN.placement, DRAWN.start_s, DRAWN.end_s)
    assert unknown.energy_j is None


def test_the_transfer_of_a_model_input_belongs_to_the_latency() -> None:
    # link   x x . x x .
    # d0     . . A . . A
    begin, end = np.array([[2.0], [5.0]]), np.array([[3.0], [6.0]])
    sent = np.array([[0, 0, 0, 0], [0, 1, 0, 0]], np.int32), np.array([0.0, 3.0])
    timeline = Timeline(("d0",), np.array([0], np.int32), begin, end, *sent, np.array([2.0, 5.0]))
    assert timeline.span_s.tolist() == [3, 3]
    assert timeline.latency_s == timeline.period_s == 3
    assert (timeline.begin_s, timeline.makespan_s) == (0, 6)


def test_trace_has_a_track_per_device_and_per_link() -> None:
    trace = json.loads(json.dumps(DRAWN.to_trace(("A", "B"))))
    process, *named = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    assert (process["name"], process["args"]) == ("process_name", {"name": "predicted"})
    tracks = {e["tid"]: e["args"]["name"] for e in named}
    assert tracks == {0: "cpu:0", 1: "cuda:0", 2: "cpu:0 -> cuda:0"}
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    *ran, sent = [(e["name"], tracks[e["tid"]], e["ts"], e["dur"]) for e in events]
    assert ran == [("A", "cpu:0", 0, 2e6), ("B", "cuda:0", 5e6, 3e6)]
    assert sent == ("tensor 7", "cpu:0 -> cuda:0", 2e6, 3e6)
    assert trace["traceEvents"][4]["args"] == {"micro_batch": 0, "operator": 0}


def test_a_loader_is_a_track_and_nothing_else_changes() -> None:
    """
    Three micro-batches of A, loaded by up to two threads:

                 0 1 2 3 4 5 6
    loader       0 0 1 1 1
    loader 1         2 2
    cpu:0            0 . . 2 1     (2 and 1 in any order)
    """
    begin, loaded = np.array([[2.0], [6.0], [5.0]]), np.array([[0.0, 2.0], [2.0, 5.0], [2.0, 4.0]])
    timeline = Timeline(("cpu:0",), np.zeros(1, np.int32), begin, begin + 1, load_s=loaded)
    assert (timeline.begin_s, timeline.makespan_s, timeline.latency_s) == (2, 5, 1)
    trace = json.loads(json.dumps(timeline.to_trace()))["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert tracks == {0: "cpu:0", 1: "loader", 2: "loader 1"}
    loads = [(e["name"], tracks[e["tid"]], e["ts"], e["dur"]) for e in trace if e["ph"] == "X"][3:]
    assert loads[:2] == [("load 0", "loader", 0, 2e6), ("load 1", "loader", 2e6, 3e6)]
    assert loads[2:] == [("load 2", "loader 1", 2e6, 2e6)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=30))
def test_side_by_side_needs_as_many_lanes_as_are_busy_at_once(spans: list[tuple[int, int]]) -> None:
    spans_s = np.array([(a, a + b) for a, b in spans], float)
    lanes = side_by_side(spans_s)
    for lane in range(lanes.max() + 1):
        mine = spans_s[lanes == lane]
        mine = mine[np.lexsort((mine[:, 1], mine[:, 0]))]
        assert len(mine) and (mine[1:, 0] >= mine[:-1, 1]).all()
    inside = [((spans_s[:, 0] <= t + 0.5) & (t + 0.5 < spans_s[:, 1])).sum() for t in range(26)]
    empty = (spans_s[:, 0] == spans_s[:, 1]).any()
    assert lanes.max() + 1 == max(1, *inside) or empty


@pytest.mark.parametrize(
    "finish, period",
    [
        ([7], 7),  # one micro-batch: its latency
        ([3, 5], 2),
        ([9, 10, 12, 14, 16, 18, 20, 22], 2),  # a cold start is not steady
        # Gaps 1, 3, 1, 3, ...: two micro-batches every 4 s. The slope of the last half would
        # say (24 - 13) / 5 or so, depending on where the run happens to end.
        ([4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24], 2),
        ([4, 5, 8, 9, 12, 13, 16, 17, 20, 21], 2),
        # No pattern: the slope of the last half, from the 4th to the 8th of 8.
        ([1, 2, 3, 4, 6, 9, 9, 12], (12 - 4) / 4),
        ([12, 9, 9, 6, 4, 3, 2, 1], (12 - 4) / 4),  # in any order
    ],
)
def test_steady_period(finish: list[float], period: float) -> None:
    assert steady_period(np.array(finish, float)) == pytest.approx(period, rel=1e-12)


def test_a_period_of_phases_is_of_whole_rounds_in_the_order_of_results() -> None:
    """Nine turns of 5 and 4 s: 16 results of them are no whole rounds. A fast one overtakes."""
    turns = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0])
    seconds = np.where(np.resize(turns, 32) == 0, 4.0, 5.0)
    done = np.empty(32)
    for device in (0, 1):
        mine = np.resize(turns, 32) == device
        done[mine] = np.cumsum(seconds[mine])
    assert steady_period(done, num_phases=9) == pytest.approx(20 / 9)
    assert steady_period(done) != pytest.approx(20 / 9, rel=0.01)
    # One of five times the speed: the slow one says when results leave, every 5 s two of them.
    unlike = np.where(np.arange(32) % 2, 5.0 * (1 + np.arange(32) // 2), 1 + np.arange(32) // 2)
    assert steady_period(unlike, num_phases=2) == 2.5
    assert steady_period(unlike[:2], num_phases=2) == 4  # no whole round is left


def test_steady_period_of_many_runs_at_once_and_not_below_the_busiest_device() -> None:
    finish = np.array([[4, 5, 8, 9, 12, 13, 16, 17.0], [1, 2, 3, 4, 6, 9, 9, 12]])
    assert steady_period(finish).tolist() == [2, 2]
    assert steady_period(finish, [1, 5]).tolist() == [2, 5]
    noisy = np.cumsum(2 + 0.01 * np.random.default_rng(0).standard_normal(64))
    assert steady_period(noisy) == pytest.approx(2, rel=0.01)  # the slope
