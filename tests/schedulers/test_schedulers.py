from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.__main__ import main
from placement.importers import save
from placement.plan import load_plan, make_plan
from placement.problem import Placement, Problem, Solution
from placement.schedule import Schedule
from placement.schedulers import SchedulerError, load, names
from placement.schedulers._cut import _joined, cut
from placement.schedulers.interleaved import virtual_order
from placement.schedulers.searched.work import work_of
from placement.simulator import simulate, value_of
from placement.testing import check_scheduler
from tests.problems import altered, random_placement, random_problem, small_problem, with_twins
from tests.problems import chain as edges

# Of a search, which ends as soon as everything is proved.
SECONDS = 10.0


def pipeline(
    devices, chunks=1, *, training=True, split=False, backward_s=1.0, send_s=0.0, speed=1.0, **more
) -> tuple[Problem, Placement]:
    """Pieces of one second through all devices, ``chunks`` times, and back again if training.

    With ``split`` a weight gradient of a second follows each backward piece on its device. Each
    backward piece reads a byte that its forward piece made.
    """
    forward = [d for _ in range(chunks) for d in range(devices)]
    pieces, uses = [(f"f{i}", d, False, 1.0) for i, d in enumerate(forward)], edges(len(forward))
    before = len(forward) - 1
    for i, d in reversed(list(enumerate(forward))) if training else []:
        here = len(pieces)
        uses += [(before, here)] + ([(i, here)] if i != before else [])
        pieces.append((f"b{i}", d, True, backward_s))
        before = here
        if split:
            uses.append((here, here + 1))
            pieces.append((f"w{i}", d, True, 1.0))
    op_name, place, back, work = zip(*pieces, strict=True)
    seconds = np.array(work)[:, None] / np.broadcast_to(speed, devices)
    facts = {"graph": {"op_name": op_name, "is_backward": back}, "tensor_bytes": 1, **more}
    problem = small_problem(seconds, uses, link=(send_s, 1e12), max_in_flight=2, **facts)
    return problem, np.array(place, np.int32)


def draw(problem: Problem, placement: Placement, schedule: Schedule) -> str:
    """A line per device, a character per second: letters are micro-batches, capitals backward,
    digits weight gradients."""
    schedule.check(problem.graph, problem.cluster, placement)
    timeline = simulate(problem, placement, schedule)
    cells = [["."] * round(timeline.makespan_s) for _ in range(problem.num_devices)]
    for m in range(schedule.num_microbatches):
        for op, name in enumerate(problem.graph.op_name):
            text = {"f": "abcdefgh", "b": "ABCDEFGH", "w": "12345678"}[name[0]][m]
            for at in range(round(timeline.start_s[m, op]), round(timeline.end_s[m, op])):
                cells[placement[op]][at] = text
    return "\n".join(" ".join(row) for row in cells)


# --- the timetables ----------------------------------------------------------------------


def table(text: str) -> str:
    """An expected timetable without its indentation."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


TWICE = {"devices": 2, "chunks": 2}
TIMETABLES = [
    ("gpipe", {"devices": 3}, """
        a b c d . . . . A B C D
        . a b c d . . A B C D .
        . . a b c d A B C D . .
    """),
    ("one_f_one_b", {"devices": 3}, """
        a b c . . A d B . C . D
        . a b . A c B d C . D .
        . . a A b B c C d D . .
    """),
    # Group a b goes through both chunks of a device before c d; then backward and forward in turns.
    ("interleaved", TWICE, """
        a b a b c A d B c A d B . C . D C D
        . a b a A b B c A d B c C d D C D .
    """),
    # Inference through the devices twice.
    ("gpipe", TWICE | {"training": False}, """
        a b c d a b c d .
        . a b c d a b c d
    """),
    # The second visit is what backward is in training: it goes first.
    ("one_f_one_b", TWICE | {"training": False}, """
        a . a b . b c . c d . d .
        . a . a b . b c . c d . d
    """),
    ("interleaved", TWICE | {"training": False}, """
        a b a b c d c d .
        . a b a b c d c d
    """),
    # Visited once, a pipeline runs in order.
    *((name, {"devices": 3, "training": False}, """
        a b c . .
        . a b c .
        . . a b c
    """) for name in ("gpipe", "one_f_one_b", "interleaved")),
]  # fmt: skip


@pytest.mark.parametrize("case", TIMETABLES, ids=lambda case: case[0])
def test_a_drawn_timetable(case: tuple[str, dict[str, Any], str]) -> None:
    name, options, drawn = case
    problem, p = pipeline(**options)
    num_microbatches = len({*"abcdefgh"} & {*drawn})
    assert draw(problem, p, load(name)(problem, p, num_microbatches)) == table(drawn)


def test_list_order_is_the_simulators_own() -> None:
    problem, p = pipeline(2)
    schedule = load("list_order")(problem, p, 4)
    assert draw(problem, p, schedule) == table("""
        a b . A c B d C . D
        . a A b B c C d D .
    """)
    alone = simulate(problem, p, num_microbatches=4)
    np.testing.assert_allclose(simulate(problem, p, schedule).end_s, alone.end_s)


@pytest.mark.parametrize(("devices", "length"), [(2, 68), (4, 76), (8, 92)])
def test_interleaved_has_its_published_length(devices: int, length: int) -> None:
    # Warm-up and cool-down take 1 + 3 per device but the first, the middle never idles.
    problem, p = pipeline(devices, chunks=2, backward_s=3.0)
    schedule = load("interleaved")(problem, p, 8)
    timeline = simulate(problem, p, schedule).makespan_s
    assert timeline == pytest.approx(length) == 8 * 8 + 4 * (devices - 1)


def test_zero_bubble() -> None:
    # The first device needs no input gradients: its capitals are weight gradients too.
    problem, p = pipeline(3, split=True)
    assert draw(problem, p, load("zero_bubble")(problem, p, 4)) == table("""
        a b c . . A 1 d B 2 C 3 D 4
        . a b . A c B 1 d C 2 D 3 4
        . . a A b B c C 1 d D 2 3 4
    """)
    plain = simulate(problem, p, load("one_f_one_b")(problem, p, 4)).makespan_s
    assert simulate(problem, p, load("zero_bubble")(problem, p, 4)).makespan_s < plain


def test_virtual_order_runs_every_piece_once() -> None:
    order = virtual_order(1, 3, 2, 6, True)
    assert len(order) == len(set(order)) == 2 * 2 * 6
    assert [b for _, _, b in order[:5]] == [False] * 5  # 2 (3 - 1 - 1) + (2 - 1) 3


# --- the search --------------------------------------------------------------------------


def test_searched_is_never_longer_than_the_generators() -> None:
    pytest.importorskip("ortools")
    for problem, p in (
        pipeline(3, backward_s=2.0),
        pipeline(2, 2, training=False),
        pipeline(3, backward_s=2.0, send_s=0.5),
        pipeline(2, 2, backward_s=3.0, speed=(1.0, 2.0)),
    ):
        best = load("searched", seconds=SECONDS)(problem, p, 8)
        length = simulate(problem, p, best).makespan_s
        for name in ("list_order", "gpipe", "one_f_one_b"):
            other = simulate(problem, p, load(name)(problem, p, 8)).makespan_s
            assert length <= other * 1.005, name


def test_searched_hides_transfers_where_1f1b_waits() -> None:
    # With transfers of a second, 1F1B waits in every period: its micro-batches are too close.
    pytest.importorskip("ortools")
    problem, p = pipeline(3, send_s=1.0)
    scheduler = load("searched", seconds=SECONDS)
    _, answer, unit_s = scheduler.solve(problem, p, 12)
    assert float(answer.period) * unit_s == pytest.approx(2.0, rel=1e-3)
    assert answer.outcome.optimal
    searched = simulate(problem, p, scheduler(problem, p, 12)).makespan_s
    assert searched < simulate(problem, p, load("one_f_one_b")(problem, p, 12)).makespan_s


def test_searched_keeps_within_memory() -> None:
    # A byte is stored per forward piece and micro-batch. 3 devices with room for 2 of them.
    pytest.importorskip("ortools")
    for room in (8, 5, 4):
        problem, p = pipeline(3, memory_bytes=room)
        schedule = load("searched", seconds=1.0)(problem, p, 6)
        peak = simulate(problem, p, schedule).peak_bytes
        assert (peak <= room).all()
    problem, p = pipeline(3, memory_bytes=1)
    with pytest.raises(SchedulerError, match="d0 would need 2 bytes more than its 1"):
        load("searched", seconds=SECONDS)(problem, p, 6)


# --- blocks of operator graphs -----------------------------------------------------------


@given(st.integers(0, 10_000))
@settings(max_examples=60)
def test_blocks_of_any_graph_have_no_circle(seed: int) -> None:
    problem = random_problem(seed, num_devices=3)
    place = random_placement(problem, seed)
    for most in (64, 4):
        blocks = cut(problem, place, max_blocks=most)
        src, dst = blocks.label[problem.graph.edges].T
        assert (src <= dst).all()
        assert (blocks.device[blocks.label] == place).all()
        inner = src != dst
        assert (blocks.level[src[inner]] < blocks.level[dst[inner]]).all()
        work, unit_s = work_of(problem, place, blocks, 4)
        assert work.num_blocks == blocks.num_blocks and unit_s > 0


@given(st.integers(0, 10_000), st.sampled_from(["gpipe", "one_f_one_b", "list_order"]))
@settings(max_examples=60)
def test_generators_order_any_graph(seed: int, name: str) -> None:
    problem = random_problem(seed, num_devices=2)
    place = random_placement(problem, seed)
    load(name)(problem, place, 5).check(problem.graph, problem.cluster, place)


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_a_device_that_streams_shares_the_order_of_the_one_that_runs_it(seed: int) -> None:
    problem = with_twins(seed)
    place = random_placement(problem, seed)
    problem = altered(problem, {"memory_bytes": 2**40})
    for name in ("gpipe", "one_f_one_b", "list_order"):
        answer = Solution(place, 0.0, schedule=load(name)(problem, place, 3))
        answer = replace(answer, value_s=value_of(problem, answer))
        assert make_plan(problem, answer, planner="by_hand").inconsistencies() == []
    blocks = cut(problem, place)
    assert (blocks.device[blocks.label] == problem.worker[place]).all()
    work_of(problem, place, blocks, 3)


def test_zero_bubble_orders_pieces_in_several_turns_and_shared_weights() -> None:
    """Late gradients stand behind what they wait for, whatever that is."""
    problem, place = pipeline(4, chunks=2, split=True)
    load("zero_bubble")(problem, place, 8).check(problem.graph, problem.cluster, place)
    # f0 f1 f2 | b2 | b1b w1b b1a w1a acc | b0 | w2, where acc adds the gradients of two pieces.
    uses = [(0, 1), (1, 2), (2, 3), (3, 4), (3, 5), (4, 6), (4, 7), (5, 8), (7, 8), (6, 9), (3, 10)]
    backward = {"is_backward": [False] * 3 + [True] * 8}
    tied = small_problem(np.ones((11, 3)), uses, tensor_bytes=1, graph=backward)
    place = np.array([0, 1, 2, 2, 1, 1, 1, 1, 1, 0, 2], np.int32)
    load("zero_bubble")(tied, place, 4).check(tied.graph, tied.cluster, place)


def test_orders_that_buffers_forbid_are_refused() -> None:
    """a and c share a device. a reads in the next micro-batch what c, which waits for b, writes."""
    facts = {"group": [0, 1, 0], "graph": {"next_readers": {2: (0,)}}, "num_microbatches": 4}
    problem = small_problem([[1, 1], [5, 5], [1, 1]], [(0, 1), (0, 2), (1, 2)], **facts)
    case = problem, np.array([0, 1, 0], np.int32)
    names = ["gpipe", "list_order", "one_f_one_b"]
    for name in names + ["searched"] * bool(find_spec("ortools")):
        check_scheduler(load(name), [case])
    with pytest.raises(SchedulerError, match=r"the buffers .*deadlocks.*--in-flight 1"):
        load("list_order")(*case, 4)
    first, _ = load("list_order")(replace(problem, max_in_flight=1), case[1], 4).order
    assert first[:4].tolist() == [[0, 0], [2, 0], [0, 1], [2, 1]]


def test_what_several_operators_of_a_block_wait_for_is_sent_once() -> None:
    # a | b c d, which all read what a makes; a transfer takes 1 s.
    uses = [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)]
    problem = small_problem(np.ones((4, 2)), uses, tensor_bytes=1, link=(1.0,))
    place = np.array([0, 1, 1, 1], np.int32)
    work, unit_s = work_of(problem, place, cut(problem, place), 4)
    ((_, delay),) = work.blocks[1].preds
    assert delay * unit_s == pytest.approx(1.0, rel=1e-3)  # in whole units


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_joining_blocks_is_what_a_slow_loop_does(seed: int) -> None:
    """Everything is worked out again before each of its steps."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 24))
    pairs = [(u, v) for v in range(n) for u in range(v) if rng.random() < 2.5 / n]
    uses = np.array(pairs, np.int32).reshape(-1, 2)
    place, seconds = rng.integers(0, 2, n), rng.integers(1, 9, n).astype(float)
    label = np.arange(n)
    most = int(rng.integers(1, n))
    while label.max() >= most:
        num = int(label.max()) + 1
        reach = np.zeros((num, num), bool)
        reach[label[uses[:, 0]], label[uses[:, 1]]] = True
        np.fill_diagonal(reach, False)
        for b in range(num):
            reach |= reach[:, b : b + 1] & reach[b]
        between = reach.astype(int) @ reach.astype(int) > 0
        size, where = np.bincount(label, weights=seconds), np.zeros(num, int)
        where[label] = place
        apart = between | between.T | (where[:, None] != where)
        pairs = [(size[a] + size[b], a, b) for a, b in np.argwhere(np.triu(~apart, 1))]
        if not pairs:
            break
        _, a, b = min(pairs)
        label = np.unique(np.where(label == b, a, label), return_inverse=True)[1]
    assert _joined(np.arange(n), place, uses, seconds, most).tolist() == label.tolist()


def test_a_long_chain_is_joined_to_few_blocks() -> None:
    problem, p = pipeline(2, chunks=60, training=False)
    # Nothing may be joined in a chain that changes devices at every step: all stay.
    for most in (200, 150, 10):
        assert cut(problem, p, max_blocks=most).num_blocks == 120
    assert cut(problem, np.zeros_like(p)).num_blocks == 1


def test_a_chain_that_changes_devices_thousands_of_times() -> None:
    """Orders are made in a moment, without tables of all pairs; a search is refused at once."""
    problem, p = pipeline(2, chunks=1500, training=False)
    assert cut(problem, p).label.tolist() == list(range(3000))
    order = load("gpipe")(problem, p, 2).order[0]
    assert order[:3].tolist() == [[0, 0], [0, 1], [2, 0]] and len(order) == 3000
    with pytest.raises(SchedulerError, match="3000 blocks remain, more than 512; use one_f_one_b"):
        load("searched")(problem, p, 4)


# --- what is refused ---------------------------------------------------------------------


def test_schedulers_are_found_by_file() -> None:
    known = ["gpipe", "interleaved", "list_order", "one_f_one_b", "searched", "zero_bubble"]
    assert names() == known
    assert load("searched", unroll="2", seconds="0.5").unroll == 2  # as from a command line
    with pytest.raises(SchedulerError, match=r"no scheduler 'gpip'; did you mean 'gpipe'\? "):
        load("gpip")
    with pytest.raises(SchedulerError, match="has no option 'k'; its options are unroll"):
        load("searched", k=2)
    with pytest.raises(SchedulerError, match=r"unroll = 'x' is not of type int \| None"):
        load("searched", unroll="x")


def test_interleaved_wants_whole_groups_and_equal_chunks_and_zero_bubble_gradients_apart() -> None:
    problem, p = pipeline(2, chunks=2)
    with pytest.raises(SchedulerError, match=r"groups of 2 micro-batches .* 3 are no multiple"):
        load("interleaved")(problem, p, 3)
    uneven = p.copy()
    uneven[[0, 1, 2, 3]] = [0, 1, 1, 1]
    with pytest.raises(SchedulerError, match="d0 has 1 and"):
        load("interleaved")(problem, uneven, 4)
    # Rounds that visit the devices in another order would wait for each other for ever.
    problem, p = pipeline(3, chunks=2)
    p = np.array([0, 1, 2, 0, 2, 1, 1, 2, 0, 2, 1, 0], np.int32)
    with pytest.raises(SchedulerError, match=r"visit the devices in one order .*deadl"):
        load("interleaved")(problem, p, 3)
    reasons = {True: r"does not separate .* all 1 backward", False: "no backward operators"}
    for training, why in reasons.items():
        with pytest.raises(SchedulerError, match=why):
            load("zero_bubble")(*pipeline(3, training=training), 4)


# --- plans -------------------------------------------------------------------------------


def test_a_plan_with_an_order(tmp_path, says):
    problem, _ = pipeline(2, chunks=2)
    source, out = str(tmp_path / "problem.json"), str(tmp_path / "plan.json")
    save(problem, source)
    verb = ["plan", source, "--planner", "contiguous_dp", "--microbatches", "4", "--out", out]
    says([*verb, "--scheduler", "gpipe"])
    plan = load_plan(out)
    order = plan.schedule(problem.graph)
    assert order is not None and order.num_microbatches == plan.num_microbatches == 4
    place = plan.placement(problem.graph, problem.cluster)
    expected = load("gpipe")(problem, place, 4)
    for ours, theirs in zip(order.order, expected.order, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert main(["validate", out]) == 0
    assert "schedulers are gpipe, " in says([*verb, "--scheduler", "gpip"], 2).err
    # What machines read is of that order too, which takes 5 s per micro-batch; the list rule 4 s.
    verb[verb.index("contiguous_dp")] = "round_robin"
    answer = says([*verb, "--scheduler", "one_f_one_b", "--json"]).json
    plan = json.loads(Path(out).read_text())
    assert answer["order"] == plan["order"]
    assert answer["value_s"] == plan["predicted"]["value_s"] == pytest.approx(5.0)
