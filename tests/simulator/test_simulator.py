"""The simulator against timetables drawn by hand, and its kernel against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.bounds import lower_bounds
from placement.cluster import Device
from placement.problem import Problem, ProblemError
from placement.schedule import Schedule, ScheduleError
from placement.simulator import (
    beside,
    durations,
    evaluate,
    kernels,
    list_schedule,
    score,
    simulate,
    simulate_reference,
)
from placement.timeline import Timeline
from tests.problems import altered, problems, random_placement, random_problem, small_problem


@pytest.fixture(params=[simulate, simulate_reference])
def run(request):
    return request.param


def make(seconds, tensors, *, kinds="", link_s_per_byte=0.0, graph=None, **more) -> Problem:
    """``seconds [N][D]``; a tensor is (producer, bytes, consumers); every link is the same."""
    speed = 1 / link_s_per_byte if link_s_per_byte else np.inf
    link = {"latency_s": 0.0, "speed": speed, "blocking": False, "channel": None}
    link |= {"wake_s": 0.0, "send_s": 0.0, "send_s_per_byte": 0.0, "receive_s": 0.0}
    link |= {name: more.pop(name) for name in link if name in more}
    names = [chr(ord("A") + i) for i in range(len(seconds))]
    on = [{"c": "cpu", "g": "cuda"}[k] for k in kinds or "c" * len(seconds[0])]
    facts = {"graph": {"op_name": names, **(graph or {})}, "device": {"kind": on}}
    facts |= {"link": tuple(link.values()), "memory_bytes": 2**63 - 1}
    return small_problem(seconds, tensors=tensors, **facts, **more)


def rows(timeline: Timeline) -> list[tuple[int, int, int, int, float, float]]:
    """Transfers as (tensor, micro-batch, from, to, start, end)."""
    t = timeline
    sent = zip(t.transfers, t.transfer_start_s, t.transfer_end_s, strict=True)
    return [(*map(int, row), float(a), float(b)) for row, a, b in sent]


def test_chain_on_two_devices_waits_for_the_transfer(run: Any) -> None:
    # d0      AA......
    # d0->d1  ..ttt...     1 s latency + 4 bytes at 2 bytes/s
    # d1      .....BBB
    link = {"latency_s": 1, "link_s_per_byte": 0.5}
    problem = make([[2, 9], [9, 3]], [(0, 4, [1])], num_microbatches=1, **link)
    timeline = run(problem, [0, 1])
    assert timeline.start_s.tolist() == [[0, 5]]
    assert timeline.end_s.tolist() == [[2, 8]]
    assert rows(timeline) == [(0, 0, 0, 1, 2, 5)]
    assert timeline.latency_s == timeline.makespan_s == timeline.period_s == 8
    assert timeline.busy_s.tolist() == [2, 3]


def test_a_tensor_is_sent_once_per_device_however_many_use_it_there(run: Any) -> None:
    # d0      A....
    # d0->d1  .tt..
    # d1      ...BC
    problem = make([[1, 1]] * 3, [(0, 2, [1, 2])], link_s_per_byte=1, num_microbatches=1)
    timeline = run(problem, [0, 1, 1])
    assert rows(timeline) == [(0, 0, 0, 1, 1, 3)]
    assert timeline.start_s.tolist() == [[0, 3, 4]]


@pytest.mark.parametrize("channel, second", [(None, (1, 3)), ("bridge", (3, 5))])
def test_links_of_one_channel_take_turns(run, channel, second):
    # own channels                one channel
    # d0      A...                d0      A.....
    # d0->d1  .tt.                d0->d1  .tt...
    # d0->d2  .uu.                d0->d2  ...uu.
    # d1      ...B                d1      ...B..
    # d2      ...C                d2      .....C
    tensors, more = [(0, 2, [1]), (0, 2, [2])], {"channel": channel, "num_microbatches": 1}
    problem = make([[1] * 3] * 3, tensors, link_s_per_byte=1, **more)
    timeline = run(problem, [0, 1, 2])
    assert rows(timeline) == [(0, 0, 0, 1, 1, 3), (1, 0, 0, 2, *second)]
    assert timeline.start_s[0].tolist() == [0, 3, second[1]]


@pytest.mark.parametrize("blocking, start_c", [(False, 1), (True, 3)])
def test_a_blocking_link_keeps_the_sender_busy(run: Any, blocking: bool, start_c: float) -> None:
    # asynchronous                blocking
    # d0      AC..                d0      Att C   (t: the worker copies)
    # d0->d1  .tt.                d0->d1  .tt.
    # d1      ...B                d1      ...B
    link = {"link_s_per_byte": 1, "blocking": blocking}
    problem = make([[1, 1]] * 3, [(0, 2, [1])], num_microbatches=1, **link)
    assert run(problem, [0, 1, 0]).start_s.tolist() == [[0, 3, start_c]]


def test_waking_idle_receivers_keeps_the_sender_busy(run: Any) -> None:
    # A makes two tensors: one for B on d1, one for B on d1 and C on d2. D comes after A on d0.
    # d0      Aww.D   (w: waking d1, once for both tensors, and d2, from the end of A)
    # d0->d1  .tt.    (the second waits for the first)
    # d1      ...B
    # d2      ..C.
    tensors = [(0, 0, [1]), (0, 0, [1, 2])]
    problem = make([[1, 1, 1]] * 4, tensors, latency_s=1.0, wake_s=1.0, num_microbatches=1)
    assert run(problem, [0, 1, 2, 0]).start_s.tolist() == [[0, 3, 2, 3]]
    # On one device nothing is handed over.
    assert run(problem, [0, 0, 0, 0]).end_s.max() == 4


def test_a_busy_receiver_need_not_be_woken(run: Any) -> None:
    # A (d0) feeds B (d1); E keeps d1 busy until 3; D comes after A on d0.
    # d0      AD..
    # d1      EEEB
    problem = make([[1, 1], [1, 1], [1, 1], [3, 3]], [(0, 0, [1])], wake_s=1.0, num_microbatches=1)
    assert run(problem, [0, 1, 0, 1]).start_s.tolist() == [[0, 3, 1, 0]]


def test_handing_tensors_over_keeps_the_sender_busy(run: Any) -> None:
    # A makes two tensors: one for B on d1, one for B on d1 and C on d2. D comes after A on d0.
    # d0      AsssD   (s: one per tensor and receiving device, busy ones too)
    # d1      EEB
    # d2      .C
    tensors = [(0, 0, [1]), (0, 0, [1, 2])]
    seconds = [[1, 1, 1]] * 4 + [[2, 2, 2]]
    problem = make(seconds, tensors, send_s=1.0, num_microbatches=1)
    assert run(problem, [0, 1, 2, 0, 1]).start_s.tolist() == [[0, 2, 1, 4, 0]]
    # On one device nothing is handed over.
    assert run(problem, [0, 0, 0, 0, 0]).end_s.max() == 6
    # The same seconds, by the bytes: the first tensor has none, the second 4.
    tensors = [(0, 0, [1]), (0, 4, [1, 2])]
    problem = make(seconds, tensors, send_s_per_byte=0.25, num_microbatches=1)
    assert run(problem, [0, 1, 2, 0, 1]).start_s.tolist() == [[0, 2, 1, 3, 0]]


def test_taking_tensors_in_keeps_the_receiver_busy(run: Any) -> None:
    # A makes two tensors: one for B and C on d1, one for C. Each is taken in once (r), also while
    # nothing else is done there, and however long the way was.
    # d0      A
    # d1      .rBrC
    tensors = [(0, 0, [1, 2]), (0, 0, [2])]
    problem = make([[1, 1]] * 3, tensors, receive_s=1.0, num_microbatches=1)
    assert run(problem, [0, 1, 1]).end_s.tolist() == [[1, 3, 5]]
    assert run(problem, [0, 0, 0]).end_s.tolist() == [[1, 2, 3]]
    # A receiver that has most to do sets the period: no transfer hides what it takes.
    assert run(problem, [0, 1, 1], num_microbatches=4).period_s == 4


def test_a_stream_stretches_operators_by_what_a_micro_batch_costs(run: Any) -> None:
    # A (d0, 1 s) feeds B (d1, 3 s); 2 s per micro-batch stretch both by a half: 1.5 and 4.5.
    # d0      A.A..A       (one micro-batch alone is not stretched)
    # d1      .BBBBBBB
    costs = {"profile": {"batch_s": 2.0}}
    problem = make([[1, 1], [3, 3]], [(0, 0, [1])], num_microbatches=4, **costs)
    assert run(problem, [0, 1]).period_s == 4.5
    assert run(problem, [0, 0]).period_s == 6.0
    assert run(problem, [0, 1], num_microbatches=1).end_s.max() == 4.0


def test_window_bounds_the_micro_batches_in_flight(run: Any) -> None:
    # window 1                    window 2
    # d0      A.A.A.              d0      AAA.
    # d1      .B.B.B              d1      .BBB
    problem = make([[1, 1], [1, 1]], [(0, 0, [1])], num_microbatches=3, max_in_flight=1)
    assert run(problem, [0, 1]).start_s.tolist() == [[0, 1], [2, 3], [4, 5]]
    problem = replace(problem, max_in_flight=2)
    assert run(problem, [0, 1]).start_s.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert run(problem, [0, 1]).period_s == 1


def test_the_smallest_micro_batch_runs_first_then_the_highest_rank_then_by_number(run: Any) -> None:
    # upward ranks: A 1, B 1 + 5, C 5     d0  BCCCCCA
    problem = make([[1], [1], [5]], [(1, 0, [2])], num_microbatches=1)
    assert run(problem, [0, 0, 0]).start_s.tolist() == [[6, 0, 1]]
    # equal ranks                         d0  ABC
    problem = make([[1], [1], [1]], [], num_microbatches=1)
    assert run(problem, [0, 0, 0]).start_s.tolist() == [[0, 1, 2]]
    # at 1 both B of micro-batch 0 and A (higher rank) of micro-batch 1 are ready
    # d0  A0 B0 A1 B1
    problem = make([[1], [1]], [(0, 0, [1])], num_microbatches=2, max_in_flight=2)
    assert run(problem, [0, 0]).start_s.tolist() == [[0, 1], [2, 3]]


def test_a_late_transfer_does_not_stop_work_that_is_ready(run: Any) -> None:
    # d0      A.....
    # d0->d1  .tttt.
    # d1      C.D..B     D is ready at 2 only because C2 takes 2 s there
    seconds, tensors = [[1, 1], [1, 1], [9, 2], [9, 1]], [(0, 4, [1]), (2, 0, [3])]
    problem = make(seconds, tensors, link_s_per_byte=1, num_microbatches=1)
    timeline = run(problem, [0, 1, 1, 1])
    assert timeline.start_s.tolist() == [[0, 5, 0, 2]]


def test_a_schedule_is_followed(run: Any) -> None:
    # d0  A0 A1 B0 B1, and a device whose next entry is not ready waits
    problem = make([[1], [1]], [(0, 0, [1])], num_microbatches=2, max_in_flight=1)
    order = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.int32)
    timeline = run(problem, [0, 0], Schedule((order,), 2))
    assert timeline.start_s.tolist() == [[0, 2], [1, 3]]
    # d0  A0 .. A1     d1 has only B; A1 is ready at 0 but stands behind C0, which needs B0
    # d1  .. B0
    problem = make([[1, 1]] * 3, [(0, 0, [1]), (1, 0, [2])], num_microbatches=2)
    d0 = np.array([[0, 0], [2, 0], [0, 1], [2, 1]], np.int32)
    d1 = np.array([[1, 0], [1, 1]], np.int32)
    timeline = run(problem, [0, 1, 0], Schedule((d0, d1), 2))
    assert timeline.start_s.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "d0, message",
    [
        ([[2, 0], [0, 0]], r"deadlocks: device 0 waits at operator 2 \('C'\) of micro-batch 0"),
        ([[0, 0]], r"operator 2 \('C'\) of micro-batch 0 is scheduled 0 times"),
        ([[0, 0], [0, 0], [2, 0]], r"operator 0 \('A'\) of micro-batch 0 is scheduled 2 times"),
        ([[0, 0], [1, 0], [2, 0]], r"operator 1 \('B'\), which is placed on device 1"),
        ([[0, 0], [2, 5]], "outside 3 operators x 1"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(d0: list[list[int]], message: str) -> None:
    problem = make([[1, 1]] * 3, [(0, 0, [1]), (1, 0, [2])])
    schedule = Schedule((np.array(d0, np.int32), np.array([[1, 0]], np.int32)), 1)
    with pytest.raises(ScheduleError, match=message):
        simulate(problem, [0, 1, 0], schedule)


def test_a_schedule_for_other_devices_or_micro_batches_is_refused() -> None:
    problem = make([[1, 1]], [])
    with pytest.raises(ScheduleError, match="for 1 devices, problem has 2"):
        simulate(problem, [0], Schedule((np.zeros((1, 2), np.int32),), 1))
    with pytest.raises(ScheduleError, match="num_microbatches = 3, but the schedule is for 1"):
        simulate(problem, [0], Schedule(([(0, 0)], []), 1), num_microbatches=3)


@pytest.mark.parametrize(
    "rows", [[0, 0], [[0.0, 0.0]], [[0, 0, 0]], [[0, 2**32]], [[0], [0, 0]], 0]
)
def test_what_is_no_order_is_refused(rows: Any) -> None:
    why = r"has rows \(operator, micro-batch\) of whole numbers, n"
    with pytest.raises(ScheduleError, match=why):
        Schedule((rows,), 1)
    for count in (0, -1, 1.0, "1"):
        with pytest.raises(ScheduleError, match=f"num_microbatches = {count!r} must be a whole"):
            Schedule((np.zeros((1, 2), np.int32),), count)


def test_model_inputs_are_sent_to_devices_with_their_own_memory(run: Any) -> None:
    # cpu->gpu  xx.     d0 and d1 share host memory, d2 does not
    # d2        ..A
    problem = make([[1] * 3], [(-1, 4, [0])], kinds="ccg", link_s_per_byte=0.5, num_microbatches=1)
    timeline = run(problem, [2])
    assert rows(timeline) == [(0, 0, 0, 2, 0, 2)]
    assert timeline.start_s.tolist() == [[2]]
    assert timeline.latency_s == 3  # the transfer is part of it
    for cpu in (0, 1):
        timeline = run(problem, [cpu])
        assert rows(timeline) == []
        assert timeline.latency_s == 1


def test_a_transfer_matrix_replaces_the_links(run: Any) -> None:
    matrix = np.full((1, 2, 2), 7.0)  # the diagonal is ignored
    problem = make([[1, 1], [1, 1]], [(0, 4, [1])], profile={"transfer_s": matrix})
    assert run(problem, [0, 1], num_microbatches=1).latency_s == 9
    assert run(problem, [0, 0], num_microbatches=1).latency_s == 2


# A reads the input x and makes a; V is a view of a; B reads the view and makes the output b.
#
#         0    1    2    3    4
# d0      A    V    .    .        x [0, 1), a [0, 3) (its view v is being sent until 3)
# d0->d1  .    .    v    .
# d1      .    .    .    B        copy of v [2, 4), b [3, 4)
TIED = {"param_bytes": [1000], "param_uses": [(0, 0), (2, 0)]}
MEMORY = {
    "seconds": [[1, 1]] * 3,
    "tensors": [(-1, 100, [0]), (0, 10, [1]), (1, 10, [2]), (2, 7, [])],
    "link_s_per_byte": 0.1,
    "graph": {"tensor_root": [0, 1, 1, 3], "output_tensor": [3], **TIED},
    "num_microbatches": 1,
}


def test_memory_with_a_tied_parameter_a_view_and_a_copy(run: Any) -> None:
    problem = make(**MEMORY)
    timeline = run(problem, [0, 0, 1])
    assert rows(timeline) == [(2, 0, 0, 1, 2, 3)]
    assert timeline.peak_bytes.tolist() == [1000 + 100 + 10, 1000 + 10 + 7]
    # Everything on d0: the tied parameter counts once, and v costs nothing beside a.
    assert run(problem, [0, 0, 0]).peak_bytes.tolist() == [1000 + 100 + 10, 0]


def test_memory_counts_workspace_and_once_per_device_what_libraries_keep(run: Any) -> None:
    problem = make(**MEMORY, profile={"workspace_bytes": np.array([5, 500, 3])})
    assert run(problem, [0, 0, 1]).peak_bytes.tolist() == [1000 + 10 + 500, 1000 + 10 + 7 + 3]
    problem = make(**MEMORY, profile={"library_bytes": np.array([[9, 8], [5, 4], [0, 600]])})
    assert run(problem, [0, 0, 1]).peak_bytes.tolist() == [1110 + 9, 1017 + 600]
    assert run(problem, [0, 0, 0]).peak_bytes.tolist() == [1110 + 9, 0]
    evaluated = evaluate(problem, [[0, 0, 1]]).peak_bytes
    assert evaluated is None or evaluated.tolist() == [[1119, 1617]]


@pytest.mark.parametrize("outputs, peak", [([], 60), ([0], 50 + 60)])
def test_outputs_are_kept_until_their_micro_batch_finished(run, outputs, peak):
    # d0  AB     a (50 bytes) is used by nobody; b has 60 bytes
    facts = {"graph": {"output_tensor": outputs}, "num_microbatches": 1}
    problem = make([[1], [1]], [(0, 50, []), (1, 60, [])], **facts)
    assert run(problem, [0, 0]).peak_bytes.tolist() == [peak]


def test_memory_grows_with_the_micro_batches_in_flight(run: Any) -> None:
    # d0  A0 A1 A2 ..      a stays on d0 until it was sent: no links here, so until A ended;
    # d1  .. B0 B0 B1 ..   the copies wait on d1: two at a time behind a slow B
    problem = make([[1, 2], [1, 2]], [(0, 10, [1])], num_microbatches=6, max_in_flight=3)
    assert run(problem, [0, 1]).peak_bytes.tolist() == [10, 30]
    assert run(replace(problem, max_in_flight=2), [0, 1]).peak_bytes.tolist() == [10, 20]
    assert run(replace(problem, max_in_flight=1), [0, 1]).peak_bytes.tolist() == [10, 10]


@pytest.mark.parametrize("objective", ["latency", "max_load"])
def test_batches_of_what_is_no_placement(objective: Any) -> None:
    """The kernels would read outside of their arrays."""
    problem = make([[1, 2], [1, 2]], [(0, 10, [1])]).with_objective(objective)
    for wrong, message in (([[0, 2]], "'B'. is on device 2"), ([[0, -1]], "on device -1")):
        with pytest.raises(ProblemError, match=f"placement 0: operator 1 .*{message}"):
            score(problem, wrong)
    with pytest.raises(ProblemError, match=r"shape \(1, 3\), expected \(B, 2\)"):
        score(problem, [0, 1, 1])


def test_devices_slow_each_other_by_the_share_of_time_they_are_busy() -> None:
    # loads 4 and 2: d1 works half of the time of d0, d0 all the time of d1
    problem = make([[4, 9], [9, 2]], [], profile={"loaded_s": np.array([[8.0, 9], [9, 4]])})
    assert durations(problem, np.array([0, 1], np.int32), 2).tolist() == [4 + 0.5 * 4, 2 + 1 * 2]
    assert durations(problem, np.array([0, 1], np.int32), 1).tolist() == [4, 2]
    # alone on the machine nothing slows it down
    assert durations(problem, np.array([0, 0], np.int32), 2).tolist() == [4, 9]
    assert simulate(problem, [0, 1], num_microbatches=8).period_s == 6


def test_one_micro_batch_is_slower_only_beside_devices_that_run(run: Any) -> None:
    # d0  AAAAAACCC     A and B begin together: 4 + 2 and 1 + 1 s; D begins beside A: 2 + 2 s;
    # d1  BBDDDD        C when D has ended: 3 s
    alone, loaded = [[4, 9], [9, 1], [3, 9], [9, 2]], [[6, 9], [9, 2], [7, 9], [9, 4]]
    problem = make(alone, [(0, 0, [2]), (1, 0, [3])], profile={"loaded_s": np.array(loaded, float)})
    one = run(replace(problem, num_microbatches=1), [0, 1, 0, 1])
    assert one.start_s.tolist() == [[0, 0, 6, 2]]
    assert one.end_s.tolist() == [[6, 2, 9, 6]]
    assert score(replace(problem, objective="latency"), np.array([[0, 1, 0, 1]])).tolist() == [9]
    same = run(replace(problem, num_microbatches=1), [0, 0, 0, 0])  # nobody beside
    assert same.end_s.max() == 4 + 9 + 3 + 9


def test_of_three_devices_each_that_runs_counts_half(run: Any) -> None:
    # d0  AAAAA     all three begin at 0: two others run beside each, as when it was measured
    # d1  BB CCC    C begins beside A alone: 2 + 1 s
    # d2  D
    alone = [[3, 9, 9], [9, 1, 9], [9, 2, 9], [9, 9, 0.5]]
    loaded = [[5, 9, 9], [9, 2, 9], [9, 4, 9], [9, 9, 1]]
    problem = make(alone, [(1, 0, [2])], profile={"loaded_s": np.array(loaded, float)})
    one = run(replace(problem, num_microbatches=1), [0, 1, 1, 2])
    assert one.end_s.tolist() == [[5, 2, 5, 1]]


def test_a_short_run_that_ends_in_a_burst_is_not_faster_than_its_busiest_device() -> None:
    # d0  A0 A1 C0 C1     C waits for B, so d0 runs ahead with A1: the two micro-batches
    # d1  .. B0 B1        finish 1 apart although d0 needs 2 for each
    problem = make([[1, 1]] * 3, [(0, 0, [1]), (1, 0, [2])], num_microbatches=2, max_in_flight=2)
    timeline = simulate(problem, [0, 1, 0])
    assert np.diff(timeline.end_s.max(axis=1)).tolist() == [1]
    assert timeline.period_s == 2
    assert evaluate(problem, [0, 1, 0]).period_s.tolist() == [2]


def test_values_of_a_batch() -> None:
    runs = {"num_microbatches": 8, "max_in_flight": 4}
    problem = make([[1, np.inf], [1, 1]], [(0, 1, [1])], link_s_per_byte=1, **runs)
    values = evaluate(problem, [[0, 0], [0, 1], [1, 1]])
    assert values.latency_s.tolist() == [2, 3, np.inf]
    assert values.period_s.tolist() == [2, 1, np.inf]
    assert values.feasible.tolist() == [True, True, False]
    assert values.peak_bytes is None
    assert score(problem, [[0, 0], [0, 1], [1, 1]]).tolist() == [2, 1, np.inf]
    assert score(problem.with_objective("latency"), [0, 1]).tolist() == [3]


def test_one_micro_batch_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make([[1, 2], [2, 1]], [(0, 4, [1])])
    run = Mock(wraps=kernels.run_batch)
    monkeypatch.setattr(kernels, "run_batch", run)
    values = evaluate(replace(problem, num_microbatches=1), [[0, 0], [0, 1]])
    assert run.call_count == 1 and values.latency_s.tolist() == values.period_s.tolist()
    evaluate(replace(problem, num_microbatches=3), [0, 1])
    assert [call.args[1].num_batches for call in run.call_args_list] == [1, 1, 3]


def test_energy_is_work_at_busy_power_and_waiting_at_idle_power() -> None:
    # one micro-batch:  d0  AAA-BB   (d1 helps with A in 1 s, for 10 W)
    problem = make([[3, 1], [2, 9]], [(0, 1, [1])], link_s_per_byte=1, num_microbatches=1)
    watts = (Device("d0", busy_w=4, idle_w=1), Device("d1", busy_w=10, idle_w=2))
    problem = replace(problem, cluster=replace(problem.cluster, devices=watts), objective="energy")
    assert evaluate(problem, [[0, 0], [1, 0]]).energy_j.tolist() == [
        5 * 4 + 5 * 2,
        2 * 4 + 2 * 1 + 1 * 10 + 3 * 2,  # d1 until 1, the transfer until 2, d0 until 4
    ]
    assert score(problem, [[0, 0], [1, 0]]).tolist() == [30, 26]
    silent = replace(problem.cluster, devices=(watts[0], Device("d1", busy_w=10)))
    with pytest.raises(ProblemError, match=r"power of every device, unknown for \['d1'\]"):
        replace(problem, cluster=silent)
    assert evaluate(make([[3, 1]], []), [0]).energy_j is None


def test_memory_limits_make_a_placement_infeasible() -> None:
    problem = make(**MEMORY)
    tight = altered(problem, {"memory_bytes": 1109})
    values = evaluate(tight, [[0, 0, 1], [1, 1, 0]])
    assert values.peak_bytes.tolist() == [[1110, 1017], [1017, 1110]]
    assert values.feasible.tolist() == [False, False]
    assert np.isfinite(values.latency_s).all()  # what it would take, were there room
    assert score(tight, [[0, 0, 1]]).tolist() == [np.inf]


@pytest.mark.parametrize(
    "placement, message",
    [
        ([0], r"shape \(1,\), expected \(2,\)"),
        ([0, 2], r"operator 1 \('B'\) is on device 2; there are 2"),
        ([1, 0], r"operator 0 \('A'\) cannot run on 'd1'"),
    ],
)
def test_a_placement_that_is_none_is_refused(placement: list[int], message: str) -> None:
    problem = make([[1, np.inf], [1, 1]], [])
    with pytest.raises(ProblemError, match=message):
        simulate(problem, placement)


def assert_equal(a: Timeline, b: Timeline, seed: int | None = None) -> None:
    for what in ("start_s", "end_s", "transfer_start_s", "transfer_end_s"):
        x, y = getattr(a, what), getattr(b, what)
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12, err_msg=f"{what}, seed {seed}")
    assert a.transfers.tolist() == b.transfers.tolist(), seed
    assert a.peak_bytes.tolist() == b.peak_bytes.tolist(), seed


def check(problem: Problem, seed: int) -> None:
    """Kernel equals reference, run by run and as a batch, also for a given order."""
    p = random_placement(problem, seed)
    expected = simulate_reference(problem, p)
    assert_equal(simulate(problem, p), expected, seed)
    values = evaluate(problem, p)
    np.testing.assert_allclose(values.period_s[0], expected.period_s, rtol=1e-9)
    if values.peak_bytes is not None:
        assert values.peak_bytes[0].tolist() == expected.peak_bytes.tolist()
    order = list_schedule(problem, p, problem.num_microbatches)
    assert_equal(simulate(problem, p, order), simulate_reference(problem, p, order), seed)


def test_kernel_equals_reference_on_400_random_problems() -> None:
    for seed in range(400):
        some = {"grouped": seed % 2 == 0, "unsupported": seed % 3 == 0}
        check(random_problem(seed, 1 + seed % 15, **some), seed)


@pytest.mark.parametrize("ready_order", ["priority", "arrival"])
@pytest.mark.parametrize("num_devices", [65, 130])
def test_kernel_equals_reference_on_many_devices(num_devices: int, ready_order: Any) -> None:
    check(replace(random_problem(0, 150, num_devices), ready_order=ready_order), 0)


@given(problems(), st.integers(0, 100))
def test_the_list_scheduler_s_order_reproduces_its_timeline_unless_admission_held_it(problem, seed):
    # A schedule is not held back by the window: with room for all there is none.
    problem = replace(problem, max_in_flight=problem.num_microbatches)
    p = random_placement(problem, seed)
    timeline = simulate(problem, p)
    again = simulate(problem, p, list_schedule(problem, p, problem.num_microbatches))
    np.testing.assert_allclose(again.end_s, timeline.end_s, rtol=1e-9)


@given(problems(), st.integers(0, 100))
def test_timelines_obey_the_rules(problem: Problem, seed: int) -> None:
    p = random_placement(problem, seed)
    t = simulate(problem, p)
    g, tiny = problem.graph, 1e-9

    def serial(start: np.ndarray, end: np.ndarray) -> bool:
        order = np.lexsort((end, start))
        return bool((start[order][1:] >= end[order][:-1] - tiny).all())

    for d in range(problem.num_devices):
        assert serial(t.start_s[:, p == d].ravel(), t.end_s[:, p == d].ravel())
    channel = problem.link_channel[t.transfers[:, 2], t.transfers[:, 3]]
    for c in range(problem.num_channels):
        assert serial(t.transfer_start_s[channel == c], t.transfer_end_s[channel == c])
    arrival = {(x[0], x[1], x[3]): x[5] for x in rows(t)}
    assert len(arrival) == len(t.transfers)  # sent once
    for m in range(t.num_microbatches):
        for tensor, user in zip(g.use_tensor, g.use_dst, strict=True):
            src = g.tensor_src[tensor]
            ready_s = t.end_s[m, src] if src >= 0 else 0.0
            here = src < 0 or p[src] == p[user]
            at = arrival.get((int(tensor), m, int(p[user])), ready_s if here else np.inf)
            assert t.start_s[m, user] >= at - tiny
    first, last = t.start_s.min(axis=1), t.end_s.max(axis=1)
    for m in range(problem.max_in_flight, t.num_microbatches):
        assert first[m] >= np.sort(last[:m])[m - problem.max_in_flight] - tiny
    least, took = durations(problem, p, t.num_microbatches), t.end_s - t.start_s
    most = least + (problem.num_devices - 1) * beside(problem, p, t.num_microbatches)
    assert (least * (1 - 1e-7) <= took).all() and (took <= most * (1 + 1e-7)).all()


@given(problems(grouped=True, unsupported=True), st.integers(0, 100))
def test_no_placement_is_better_than_the_bounds(problem: Problem, seed: int) -> None:
    placements = [random_placement(problem, seed + k) for k in range(4)]
    values = evaluate(problem, placements)
    bounds, fits = lower_bounds(problem), values.feasible
    assert (values.latency_s[fits] >= bounds["latency"] * (1 - 1e-9)).all()
    assert (values.period_s[fits] >= bounds["period"] * (1 - 1e-9)).all()
    assert (values.energy_j[fits] >= bounds["energy"] * (1 - 1e-9)).all()
    priced = replace(problem, second_j=7.0, objective="energy")
    assert (score(priced, placements) >= lower_bounds(priced)["energy"] * (1 - 1e-9)).all()


def test_bounds_do_not_count_memory_of_operators_that_take_no_time() -> None:
    """On d0 the only operator ends when it begins; it was said to need more than there is."""
    problem = replace(random_problem(216, 1, 3), num_microbatches=8, max_in_flight=2)
    values = evaluate(problem, np.array([[0]]))
    assert values.feasible[0] and values.period_s[0] == lower_bounds(problem)["period"] == 0.0


@given(problems(), st.integers(0, 100))
def test_a_batch_is_its_placements_one_by_one(problem: Problem, seed: int) -> None:
    batch = np.array([random_placement(problem, seed + k) for k in range(5)])
    values = evaluate(problem, batch)
    for i, p in enumerate(batch):
        one = evaluate(problem, p)
        assert one.latency_s[0] == values.latency_s[i]
        assert one.period_s[0] == values.period_s[i]
        assert one.energy_j[0] == values.energy_j[i]
        if values.feasible[i]:
            m = problem.num_microbatches
            assert simulate(problem, p).energy_j / m == pytest.approx(values.energy_j[i], 1e-9)
        if one.peak_bytes is not None:
            assert one.peak_bytes[0].tolist() == values.peak_bytes[i].tolist()


@given(problems(), st.integers(0, 100))
def test_twice_the_time_for_everything_takes_twice_the_time(problem: Problem, seed: int) -> None:
    times = ("latency_s", "wake_s", "send_s", "send_s_per_byte", "receive_s")
    links = {k: lambda x, k=k: 2 * getattr(x, k) for k in times}
    links |= {"bandwidth_bytes_per_s": lambda x: x.bandwidth_bytes_per_s / 2}
    tables = {k: getattr(problem.profile, k) for k in ("compute_s", "loaded_s", "transfer_s")}
    tables = {k: None if table is None else 2 * table for k, table in tables.items()}
    slow = altered(problem, links=links, **tables)
    p = random_placement(problem, seed)
    a, b = evaluate(problem, p), evaluate(slow, p)
    np.testing.assert_allclose(b.latency_s, 2 * a.latency_s, rtol=1e-12)
    np.testing.assert_allclose(b.period_s, 2 * a.period_s, rtol=1e-12)


@given(problems(), st.integers(0, 3))
def test_one_device_takes_the_sum(problem: Problem, device: int) -> None:
    p = np.full(problem.num_ops, device % problem.num_devices)
    problem = altered(problem, {"kind": "cpu"})
    total = problem.compute_s[:, p[0]].sum()
    values = evaluate(problem, p)
    np.testing.assert_allclose([values.latency_s[0], values.period_s[0]], total, rtol=1e-9)


def test_a_wide_graph_of_thousands_of_operators() -> None:
    # More operators than one word of the ready set's upper level covers (64 * 64).
    n = 5000
    problem = make([[1.0]] * n, [(0, 0, list(range(1, n)))], num_microbatches=2)
    timeline = simulate(problem, np.zeros(n, int))
    assert timeline.start_s[0].tolist() == list(range(n))
    assert timeline.start_s[1].tolist() == list(range(n, 2 * n))
