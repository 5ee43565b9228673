"""Planning again without some devices: what is left, where it starts, what the command says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cli import BAD_INPUT, NO, OK
from placement.cluster import Cluster, Device, Link
from placement.importers import save
from placement.plan import load_plan, make_plan
from placement.planners import load
from placement.problem import Problem, Solution
from placement.replan import Kept, ReplanError, first_choices, remaining
from placement.simulator import score
from tests import problems as by_hand
from tests.problems import altered, problem_on, problems, random_placement


def chain(num_ops: int = 6, devices: str = "abc", memory: int = 1000) -> Problem:
    """Operators of one second, tensors of one byte that travel at 1000 bytes/s."""
    seconds, edges = np.ones((num_ops, len(devices))), by_hand.chain(num_ops)
    facts = {"devices": list(devices), "device": {"kind": "npu"}, "link": (0.0, 1000.0)}
    sizes = {"tensor_bytes": 1, "param_bytes": 100, "memory_bytes": memory}
    return by_hand.small_problem(seconds, edges, **facts, **sizes)


# --- what is left --------------------------------------------------------------------------------


def test_columns_and_links_of_what_is_left() -> None:
    seconds = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    matrix = np.arange(18.0).reshape(2, 3, 3)
    links = (Link("a", "b", 1.0), Link("c", "a", 2.0, channel="nic"))
    tables = {"compute_s": seconds, "loaded_s": 2 * seconds, "io_s": seconds / 2}
    tables |= {"transfer_s": matrix, "predicted": seconds > 3}
    whole = chain(2)
    cluster = replace(whole.cluster, links=links[1:])
    profile = replace(whole.profile, links=links, **tables)
    left = remaining(replace(whole, cluster=cluster, profile=profile), ["b"])
    assert left.cluster.device_names == left.profile.device_names == ("a", "c")
    assert left.cluster.links == left.profile.links == links[1:]
    assert left.compute_s.tolist() == [[1, 3], [4, 6]]
    assert left.profile.loaded_s.tolist() == [[2, 6], [8, 12]]
    assert left.profile.io_s.tolist() == [[0.5, 1.5], [2, 3]]
    assert left.profile.transfer_s[0].tolist() == [[0, 2], [6, 8]]
    assert left.profile.predicted.tolist() == [[False, False], [True, True]]


def test_what_streams_goes_with_its_device_or_with_the_last_processor() -> None:
    whole = chain(2, "abc")
    kinds = [
        replace(d, kind=k)
        for d, k in zip(whole.cluster.devices, ("cpu", "cuda", "cuda"), strict=True)
    ]
    twins = [Device(f"s/{x}", "cuda", streams=x) for x in "bc"]
    cluster = Cluster("c", (*kinds, *twins))
    streaming = replace(whole, cluster=cluster, profile=whole.profile.for_cluster(cluster))
    for without, left in ((["b"], ("a", "c", "s/c")), (["a"], ("b", "c"))):
        assert remaining(streaming, without).cluster.device_names == left


def test_somebody_must_be_left_and_who_goes_must_be_there() -> None:
    with pytest.raises(ReplanError, match="no device is left: without all of"):
        remaining(chain(), ["a", "b", "c"])
    with pytest.raises(ReplanError, match=r"no device 'x' to do without; devices are \['a', 'b'"):
        remaining(chain(), ["a", "x"])


def test_an_operator_that_ran_on_the_lost_device_only_and_parameters_that_no_longer_fit() -> None:
    seconds = np.ones((6, 3))
    seconds[2, :2] = np.inf
    with pytest.raises(ReplanError, match=r"operator 2 \('op2'\) runs only on \['c'\]"):
        remaining(altered(chain(), compute_s=seconds), ["c"])
    with pytest.raises(ReplanError, match=r"parameters take 600 bytes.*together have 500"):
        remaining(chain(memory=250), ["b"])


# --- where it starts -----------------------------------------------------------------------------


def test_one_takes_over_or_what_is_lost_is_dealt_out() -> None:
    # Stages   c c | a a | b b   without a: what was on a goes to b, to c, or to both.
    left = remaining(chain(), ["a"])  # b is 0 now, c is 1
    rows = first_choices(left, np.array([1, 1, -1, -1, 0, 0], np.int32)).tolist()
    assert [1, 1, 1, 1, 0, 0] in rows and [1, 1, 0, 0, 0, 0] in rows
    assert [1, 1, 0, 1, 0, 0] in rows or [1, 1, 1, 0, 0, 0] in rows
    assert [0] * 6 in rows  # one device alone
    # The third is the fastest at what it can run, and can run nothing else.
    seconds = np.array([[10.0, 1.0, 0.1], [10.0, 1.0, np.inf], [10.0, 1.0, np.inf]])
    rows = first_choices(by_hand.small_problem(seconds), np.array([-1, 0, 0], np.int32)).tolist()
    assert rows[0] == [1, 1, 1]


def test_branches_stay_apart() -> None:
    # Two branches, numbered in turn: even ones on a, odd ones on b, the sum of all on c.
    edges = [(i, i + 2) for i in range(6)] + [(6, 8), (7, 8)]
    left = remaining(replace(chain(9), graph=by_hand.graph_of(9, edges, 1)), ["c"])
    rows = first_choices(left, np.array([0, 1] * 4 + [-1], np.int32)).tolist()
    assert [0, 1] * 4 + [0] in rows and [0, 1] * 4 + [1] in rows


@given(problems(grouped=True, unsupported=True), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_choices_are_complete_and_possible(problem: Problem, seed: int) -> None:
    old = random_placement(problem, seed)
    names = problem.cluster.device_names
    gone = [x for i, x in enumerate(names) if seed >> i & 1]
    try:
        left = remaining(problem, gone)
    except ReplanError:
        return
    was = np.full(problem.graph.num_groups, -1, np.int32)
    number = {x: i for i, x in enumerate(left.cluster.device_names)}
    was[problem.graph.group] = [number.get(names[d], -1) for d in old]
    rows = first_choices(left, was)
    for row in rows:
        left.check_placement(row[left.graph.group])
    stay = was >= 0
    assert (rows[:, stay] == was[stay]).all(axis=1).any()  # one leaves everything else where it was


# --- the answer ----------------------------------------------------------------------------------


def planned(whole: Problem, old: Any, gone: list[str], **budget: Any) -> tuple[Problem, Solution]:
    """As ``placement plan --without ... --start``."""
    left = remaining(whole, gone)
    start = Kept(tuple(whole.cluster.device_names[d] for d in old))
    return left, load("macro_search", start=start, **budget)(left)


@pytest.mark.parametrize("objective", ["period", "latency", "max_load"])
@pytest.mark.parametrize("seed", range(3))
def test_as_good_as_every_first_placement(objective: Any, seed: int) -> None:
    whole = replace(chain(12, "abcd", memory=10**6), objective=objective)
    old = random_placement(whole, seed)
    left, answer = planned(whole, old, ["b", "d"], evaluations=60, seed=seed)
    assert left.cluster.device_names == ("a", "c")
    assert answer.value_s == pytest.approx(float(score(left, answer.placement)[0]))
    starts = first_choices(left, np.array([0, -1, 1, -1], np.int32)[old])
    assert answer.value_s <= score(left, starts).min() * (1 + 1e-12)
    again = planned(whole, old, ["b", "d"], evaluations=60, seed=seed)[1]
    assert again.placement.tolist() == answer.placement.tolist()


def test_the_known_best() -> None:
    # Six operators of a second on three devices: 2 s; on two devices: 3 s, and 1 ms to send.
    answer = planned(chain(), [0, 0, 1, 1, 2, 2], ["b"], evaluations=50)[1]
    assert answer.value_s == pytest.approx(3.0)
    alone = planned(chain(), [0, 0, 1, 1, 2, 2], ["b", "a"], evaluations=50)[1]
    assert alone.value_s == pytest.approx(6.0) and alone.placement.tolist() == [0] * 6
    stays = planned(chain(), [0, 0, 0, 1, 1, 1], ["c"], evaluations=20)[1]
    assert stays.value_s == pytest.approx(3.0) and stays.placement.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_thousand_operators() -> None:
    whole = replace(chain(1000, "abcdefgh", memory=2**40), max_in_flight=16)
    answer = planned(whole, np.repeat(np.arange(8), 125), ["c"], evaluations=200)[1]
    # 1000 operators on seven devices: 143 on the fullest.
    assert answer.value_s == pytest.approx(143.0, rel=0.01)


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A plan of six operators on three devices, and its problem."""
    whole = chain()
    save(whole, tmp_path / "problem.json")
    plan = make_plan(whole, load("contiguous_dp")(whole), planner="contiguous_dp")
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json", tmp_path / "problem.json"


@pytest.fixture
def replan(says: Any) -> Any:
    """What ``placement plan --start PLAN`` says."""
    return lambda plan, *more, code=OK: says(["plan", *more, "--start", plan], code)


def test_for_machines(files: tuple[Path, Path], replan: Any) -> None:
    plan, problem = files
    options = ("--evaluations", "60", "--json")
    got = replan(plan, "--without", "b", problem, *options).json
    assert list(got)[-3:] == ["feasible", "assignment", "was_value_s"]
    assert got["was_value_s"] == pytest.approx(2.0) and got["value_s"] == pytest.approx(3.0)
    assert sorted(got["assignment"].values()) == ["a"] * 3 + ["c"] * 3
    assert got["planner"] == "macro_search" and got["feasible"] is True
    # Without two at once.
    ways = ("--without", "a,b"), ("--without", "a", "--without", "b")
    same = [replan(plan, *way, problem, "--json").json["assignment"] for way in ways]
    assert same[0] == same[1] and set(same[0].values()) == {"c"}


def test_what_is_pinned_goes_there(files: tuple[Path, Path], replan: Any) -> None:
    plan, problem = files
    for gone in ((), ("--without", "b")):
        pins = ("--on", "op0=c", "--on", "op5=a", "--evaluations", "60", "--json")
        got = replan(plan, *gone, problem, *pins).json
        assert got["assignment"]["op0"] == "c" and got["assignment"]["op5"] == "a"
    every = replan(plan, problem, "--on", "op*=b", "--evaluations", "1", "--json").json
    assert set(every["assignment"].values()) == {"b"}, "though the plan has them elsewhere"


def test_a_plan_that_can_be_replanned_again(files: tuple[Path, Path], replan: Any) -> None:
    plan, problem = files
    second, third = plan.with_name("2.json"), plan.with_name("3.json")
    budget = ("--evaluations", "40", problem)
    replan(plan, "--without", "b", *budget, "--out", second)
    last = load_plan(second)
    assert last.planner.name == "macro_search"
    assert last.planner.parameters["start"] == "contiguous_dp"
    assert last.graph == load_plan(plan).graph and set(last.assignment.values()) == {"a", "c"}
    gone = replan(second, "--without", "b", *budget, code=BAD_INPUT)
    assert "no device 'b'" in gone.err
    replan(second, "--without", "a", *budget, "--out", third)
    assert set(load_plan(third).assignment.values()) == {"c"}


@pytest.mark.parametrize(
    ("without", "more", "message"),
    [
        ("a,b,c", (), "no device is left"),
        ("z", (), "no device 'z'"),
        ("a", ("--seconds", "0"), "--seconds 0.0 must be positive"),
        ("a", ("--seed", "-1"), "--seed -1 must be at least 0"),
        ("a", ("--profile", "p.npz"), "--profile is for models"),
        ("a", ("--planner", "heft"), "--start is for a planner that searches from a placement"),
        ("a", ("--objective", "latency"), "--objective: with --start it is the plan's"),
        ("a", ("--pieces", "2"), "--pieces: with --start it is the plan's"),
        ("a", ("--on", "op0"), "--on 'op0': write NAME=DEVICE"),
        ("a", ("--on", "op0=a"), "op0=a: no such device; use one of ['b', 'c']"),
    ],
)
def test_mistakes(without, more, message, files, replan):
    plan, problem = files
    assert message in replan(plan, "--without", without, problem, *more, code=BAD_INPUT).err


def test_the_problem_must_be_named(files: tuple[Path, Path], tmp_path: Path, replan: Any) -> None:
    said = replan(files[0], "--without", "a", code=BAD_INPUT).err
    assert "name what it is of, a problem file or package.module:function" in said
    save(chain(7), tmp_path / "other.json")
    said = replan(files[0], "--without", "a", tmp_path / "other.json", code=BAD_INPUT).err
    assert "6 operators in the plan, 7 here" in said


def test_a_file_is_read_as_it_was_planned(tmp_path: Path, replan: Any, says: Any) -> None:
    row = "node{} -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, "
    row += "activation_size=8, parameter_size=4\n"
    path = tmp_path / "graph.txt"
    path.write_text("".join(row.format(k) for k in range(6)) + "\tnode0 -- node1\n")
    read = ("--devices", "6", "--bandwidth", "1e9", "--mode", "inference")
    plan = tmp_path / "plan.json"
    says(["plan", path, *read, "--planner", "heft", "--out", plan])
    got = replan(plan, path, *read, "--without", "acc:5", "--evaluations", "9", "--json").json
    assert "acc:5" not in got["assignment"].values() and got["feasible"] is True
    said = replan(plan, path, *read[:4], code=BAD_INPUT).err
    assert "6 operators in the plan, 12 here" in said
    said = replan(plan, "tiny_mlp", "--devices", "6", code=BAD_INPUT).err
    assert "--devices: with --start it is the plan's" in said


def test_activations_that_no_longer_fit(tmp_path: Path, replan: Any) -> None:
    # Two operators: 200 bytes of parameters and three tensors of 60; three: 300 and as many.
    whole = replace(chain(memory=400), num_microbatches=4, max_in_flight=1)
    whole = replace(whole, graph=replace(whole.graph, tensor_bytes=np.full(6, 60, np.int64)))
    save(whole, tmp_path / "problem.json")
    make_plan(whole, load("contiguous_dp")(whole), planner="x").save(tmp_path / "plan.json")
    budget = ("--evaluations", "30", tmp_path / "problem.json")
    said = replan(tmp_path / "plan.json", "--without", "b,c", *budget, "--json", code=NO)
    assert "the parameters take 600 bytes" in said.err and said.json["why"] in said.err
    assert said.json["feasible"] is False
    said = replan(tmp_path / "plan.json", "--without", "b", *budget, "--json", code=NO)
    assert said.json["feasible"] is False and "fits" in said.err


def test_a_model_without_its_profile(tmp_path: Path, replan: Any, monkeypatch: Any) -> None:
    from placement.cli import capture_workload

    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "empty"))
    graph = capture_workload("tiny_mlp", lambda what, share: None)
    facts = {"graph_fingerprint": graph.fingerprint}
    whole = problem_on(graph, np.full((graph.num_ops, 2), 1e-3), devices=("a", "b"), profile=facts)
    plan = make_plan(whole, load("contiguous_dp")(whole), planner="x", workload="tiny_mlp")
    plan.save(tmp_path / "plan.json")
    said = replan(tmp_path / "plan.json", "--without", "b", code=BAD_INPUT).err
    assert "no profile of tiny_mlp with the plan's devices" in said
    whole.profile.save(tmp_path / "profile.npz")
    given_profile = ("--profile", tmp_path / "profile.npz", "--json")
    said = replan(tmp_path / "plan.json", "--without", "b", *given_profile)
    assert set(said.json["assignment"].values()) == {"a"}
