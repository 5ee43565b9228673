"""Plans: what is written is read back; what is wrong is refused with a message that helps."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placement import capture, workloads
from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.plan import (
    Measured,
    Plan,
    PlanError,
    PlanMismatch,
    Spread,
    graph_parts,
    load_plan,
    make_plan,
    parameters_of,
    read_plan,
    schema_text,
    whole_modules,
)
from placement.planners import load
from placement.problem import Problem, Solution
from placement.profile import Profile
from placement.program import CaptureError
from placement.schedule import Schedule
from placement.simulator import list_schedule
from placement.tools.limits import Limits
from tests.modules import module_of
from tests.problems import altered, graph_of, small_problem, written

ROOT = Path(__file__).parents[1]


def chain(num_ops: int = 4, **changes: Any) -> OpGraph:
    """``op0 -> op1 -> ...``, 8 bytes between, modules ``m.a``, ``m.b`` and the root."""
    values: dict[str, Any] = {"param_bytes": [100], "param_uses": [(0, 0)], "name": "chain"}
    values |= {"op_module": ["m.a", "m.a", "m.b", *[""] * (num_ops - 3)]}
    values |= {"op_signature": [f"kind(f32[{i}])" for i in range(num_ops)]}
    values |= {"output_tensor": [num_ops - 1], "tensor_bytes": 8}
    values |= {"uses": [(i, i + 1) for i in range(num_ops - 1)]}
    return graph_of(num_ops, **values | changes)


def problem(graph: OpGraph | None = None, memory_bytes: int = 1000, **changes: Any) -> Problem:
    """Two cores; ``cpu:1`` is twice as fast; a link of 1 ms from the first to the second."""
    graph = graph or chain()
    rooms = {"memory_bytes": memory_bytes}
    cluster = Cluster("pair", (Device("cpu:0", cores=(0,), **rooms), Device("cpu:1", **rooms)))
    seconds = np.tile([2.0, 1.0], (graph.num_ops, 1))
    links = Link("cpu:0", "cpu:1", 1e-3), Link("cpu:1", "cpu:0", 1e-3, 1e9)
    facts = {"graph_fingerprint": graph.fingerprint, "provenance": {"when": "now", "repeats": 3}}
    profile = Profile(cluster.device_names, seconds, np.zeros_like(seconds), links, **facts)
    return Problem(graph, cluster, profile, **{"num_microbatches": 8, **changes})


def plan_of(p: Problem, placement: list[int], **changes: Any) -> Plan:
    return make_plan(p, Solution(np.array(placement, np.int32), 1.0), planner="by_hand", **changes)


@pytest.fixture
def plan() -> Plan:
    return plan_of(problem(), [0, 0, 1, 1])


def test_a_timeline_is_of_what_was_planned() -> None:
    """However many micro-batches the problem at hand has, and in the order of the plan."""
    p = problem()
    plan = plan_of(replace(p, num_microbatches=5, max_in_flight=1), [0, 0, 1, 1])
    line = plan.timeline(replace(p, num_microbatches=32, max_in_flight=4))
    assert line.num_microbatches == 5
    assert line.period_s == pytest.approx(plan.predicted.period_s)
    # a (4 s) and b (1 s) on the one device, c (5 s, reads b) on the other: a, b, c take 10 s.
    three = small_problem([[4, 4], [1, 1], [5, 5]], tensors=[(1, 8, [2])])
    order = Schedule(([(0, 0), (1, 0)], [(2, 0)]), 1)
    ordered = plan_of(replace(three, num_microbatches=1), [0, 0, 1], schedule=order)
    assert ordered.timeline(three, 1).latency_s == pytest.approx(10)
    assert ordered.predicted.latency_s == pytest.approx(10)


def test_a_plan_is_of_its_problem_though_the_profile_lacks_a_declared_link() -> None:
    p = problem()
    told = (Link("cpu:0", "cpu:1", 2e-3), Link("cpu:1", "cpu:0", 2e-3))
    for links in (told, told[:1] + p.profile.links[:1], (p.profile.links[0], told[0])):
        other = replace(p, cluster=replace(p.cluster, links=links))
        plan = plan_of(other, [0, 0, 1, 1])
        assert plan.cluster.build() == other.cluster
        assert plan.timeline(other).period_s == pytest.approx(plan.predicted.period_s)


@pytest.fixture
def path(plan: Plan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def edited(path: Path, *keys: Any, value: Any) -> Path:
    """The file with one value changed, as by hand."""
    data = json.loads(path.read_text())
    at = data
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return written(path, data)


def test_doubt() -> None:
    """``cpu:1`` alone needs 4 s between results; with ``op0`` elsewhere it is 3 s, 25 % less."""

    def doubt(placement: list[int], error: float = 0.0, **changes: Any) -> str:
        p = problem()
        p = altered(p, provenance=p.profile.provenance | {"error": error})
        return plan_of(p, placement, **changes).doubt

    assert doubt([0, 1, 1, 1], 0.24) == doubt([1, 1, 1, 1], 0.9) == ""
    said = doubt([0, 1, 1, 1], 0.26)
    assert "25.0% better than cpu:1 alone, and the calibration error is 26.0%" in said
    assert doubt([0, 0, 1, 1]).startswith("cpu:1 alone is predicted to do no worse")
    spread = Spread(median_s=3.0, iqr_s=0.0)
    ran = Measured(period_s=spread, n=1, when="now", machine="m")
    assert doubt([0, 1, 1, 1], 0.26, measured=ran) == ""


def test_values(plan: Plan) -> None:
    # One micro-batch alone:   cpu:0  |op0 2 s|op1 2 s|
    #                          cpu:1                   1 ms |op2 1 s|op3 1 s|
    # Pipelined: cpu:0 works all the time, 4 s per micro-batch.
    assert plan.predicted.latency_s == pytest.approx(6.001)
    assert plan.predicted.period_s == pytest.approx(4.0)
    assert plan.predicted.busy_s == pytest.approx({"cpu:0": 4.0, "cpu:1": 2.0})
    assert plan.predicted.value_s == pytest.approx(4.0)
    # In fractions 8 / 3; whole 3, three operators on cpu:1 and one on cpu:0, which is not proved.
    bounds = plan.lower_bound_s
    assert (bounds["latency"], bounds["period"]) == pytest.approx((4.0, 8 / 3))
    alone = {"device": "cpu:1", "value_s": 4.0, "latency_s": 4.0, "period_s": 4.0}
    assert plan.fallback.model_dump() == pytest.approx(alone)
    stages = [("cpu:0", "op0", "op1", 2), ("cpu:1", "op2", "op3", 2)]
    assert [(s.device, s.first, s.last, s.num_ops) for s in plan.stages] == stages
    assert plan.device_map == {"m.a": "cpu:0", "m.b": "cpu:1"}
    headroom = 1000 - plan.predicted.peak_bytes["cpu:0"]
    assert plan.limits.headroom_bytes["cpu:0"] == headroom
    assert plan.predicted.peak_bytes["cpu:0"] >= 100  # the parameter
    assert plan.provenance.profile == {"when": "now", "repeats": 3}


def test_round_trip(plan: Plan, path: Path) -> None:
    p = problem()
    again = load_plan(path)
    assert again == plan and again.schedule(p.graph) is None
    np.testing.assert_array_equal(again.placement(p.graph, p.cluster), [0, 0, 1, 1])
    assert again.cluster.build() == p.cluster
    assert again.cluster.links[0].bandwidth_bytes_per_s is None  # JSON knows no infinity
    assert again.cluster.links[1].bandwidth_bytes_per_s == 1e9


def test_what_older_files_say_of_sleeping_devices(plan: Plan, path: Path) -> None:
    data = json.loads(path.read_text())
    first = data["cluster"]["devices"][0]
    first |= {"sleep_w": None, "sleep_after_s": 0.0, "sleep_exit_s": 0.0}
    assert load_plan(written(path, data)) == plan
    first["sleep_w"] = 0.0
    with pytest.raises(PlanError, match=r"'cpu:0' has sleep_w = 0.0, but .* plan again"):
        load_plan(written(path, data))


@given(st.lists(st.integers(0, 1), min_size=4, max_size=9), st.integers(1, 9))
def test_round_trip_of_any_placement(placement: list[int], m: int) -> None:
    p = problem(chain(len(placement)), num_microbatches=m)
    plan = plan_of(p, placement)
    again = Plan.model_validate_json(plan.model_dump_json())
    assert again == plan and again.inconsistencies() == []
    assert again.placement(p.graph, p.cluster).tolist() == placement
    assert sum(s.num_ops for s in again.stages) == len(placement)
    assert all(a.device != b.device for a, b in zip(again.stages, again.stages[1:], strict=False))


def test_order_is_kept_and_checked() -> None:
    p = problem(num_microbatches=2)
    schedule = list_schedule(p, [0, 0, 1, 1], 2)
    plan = plan_of(p, [0, 0, 1, 1], schedule=schedule)
    back = plan.schedule(p.graph)
    assert [x.tolist() for x in back.order] == [x.tolist() for x in schedule.order]
    lost = plan.model_copy(update={"order": {**plan.order, "cpu:1": plan.order["cpu:1"][1:]}})
    why = "order: operator 2 ('op2') of micro-batch 0 is scheduled 0 times, expected once"
    assert lost.inconsistencies() == [why]
    swapped = {"cpu:0": plan.order["cpu:1"], "cpu:1": plan.order["cpu:0"]}
    (first, *_) = plan.model_copy(update={"order": swapped}).inconsistencies()
    assert first.startswith("order: device 0 is told to run operator 2 ('op2'), which is placed on")
    late = {**plan.order, "cpu:1": plan.order["cpu:1"][::-1]}  # what op3 reads comes behind it
    (first,) = plan.model_copy(update={"order": late}).inconsistencies()
    assert first.startswith("order: schedule deadlocks: device 1 waits at operator 3 ('op3')")
    other = {**plan.order, "cpu:1": (("op9", 0),)}
    (first,) = plan.model_copy(update={"order": other}).inconsistencies()
    assert first == "order: no operator op9 in assignment"
    # Found without a look at each: a file of some bytes must not keep the reader busy for ever.
    many = plan.model_copy(update={"num_microbatches": 2**31 - 1})
    why = "order: schedule has 8 entries, expected 4 operators x 2147483647 micro-batches"
    assert many.inconsistencies() == [why]


@pytest.mark.parametrize("objective", ["latency", "period", "energy", "max_load"])
@pytest.mark.parametrize("second_j", [0.0, 2.0])
def test_values_are_of_the_order_of_the_plan(objective: str, second_j: float) -> None:
    p = altered(problem(num_microbatches=4), {"busy_w": 3.0, "idle_w": 1.0})
    p = replace(p, objective=objective, second_j=second_j)
    # The last micro-batch first, which no list scheduler would do.
    turns = [[(op, b) for b in (3, 2, 1, 0) for op in ops] for ops in ([0, 1], [2, 3])]
    slow = Schedule(tuple(np.array(x, np.int32) for x in turns), 4)
    for schedule in (None, slow):
        plan = plan_of(p, [0, 0, 1, 1], schedule=schedule)
        assert plan.inconsistencies() == []
    # Of a single sample: no time is lost beside others, which bounds of a pipeline count.
    single, busy = Schedule(([(0, 0), (1, 0)], [(2, 0), (3, 0)]), 1), altered(p, batch_s=100.0)
    assert plan_of(busy, [0, 0, 1, 1], schedule=single).inconsistencies() == []
    cheap = {"value_s": plan.predicted.value_s / 2}
    wrong = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=cheap)})
    # Of max_load and of weighted energy the file says nothing twice: only bounds are checked.
    expected = objective in ("latency", "period") or (objective == "energy" and not second_j)
    assert any("predicted.value_s" in x for x in wrong.inconsistencies()) == expected


def test_measured_is_kept(tmp_path: Path) -> None:
    spread = Spread(median_s=1.0, iqr_s=0.1)
    measured = Measured(latency_s=spread, period_s=spread, n=5, when="today", machine="here")
    plan_of(problem(), [0] * 4, measured=measured).save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").measured == measured


def test_analytic_objective() -> None:
    # max_load with free transfers to host memory: cpu:0 has 2 x 2 s, cpu:1 has 2 x 1 s.
    p = problem(objective="max_load")
    plan = plan_of(replace(p, profile=replace(p.profile, links=())), [0, 0, 1, 1])
    assert plan.predicted.value_s == pytest.approx(4.0)
    assert plan.lower_bound_s["max_load"] == pytest.approx(8 / 3)
    assert plan.predicted.peak_bytes == {"cpu:0": 100, "cpu:1": 0}  # parameters only
    assert plan.fallback is not None and plan.fallback.device == "cpu:1"


def test_planner_parameters_are_json() -> None:
    assert parameters_of(load("local_search", seed=3))["seed"] == 3
    assert parameters_of(lambda problem: None) == {}
    assert parameters_of(Device("x", cores=(0, 1)))["cores"] == [0, 1]
    assert parameters_of(Link("a", "b"))["bandwidth_bytes_per_s"] == "inf"


def test_whole_modules_are_the_outermost() -> None:
    modules = ["a.x", "a.x", "a.y", "b.z", "b"]
    split = whole_modules(modules, ["p", "p", "q", "q", "q"])
    assert split == {"a.x": "p", "a.y": "q", "b": "q"}
    assert whole_modules(modules, ["p"] * 5) == {"": "p"}


# -- refused: another model, other devices ---------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"op_signature": [f"kind(f64[{i}])" for i in range(4)]}, "dtypes or constants"),
        ({"uses": [(0, 1), (1, 2), (0, 3)]}, "which operator uses which tensor"),
        ({"tensor_bytes": [8, 8, 8, 16]}, "tensor sizes"),
        ({"param_bytes": [101]}, "parameter sizes"),
        ({"group": [0, 1, 2, 2]}, "colocation groups"),
        ({"is_backward": [False] * 3 + [True]}, "which operators are backward"),
    ],
)
def test_mismatch_names_the_part(plan: Plan, changes: dict[str, Any], part: str) -> None:
    other = chain(**changes)
    with pytest.raises(PlanMismatch, match=part) as caught:
        plan.placement(other, problem().cluster)
    differing = [k for k, v in graph_parts(other).items() if v != plan.graph.parts[k]]
    assert len(differing) == 1, "one change, one part"
    assert "placement plan MODEL --planner best_of" in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], r"no device 'cpu:0', only \['z'\]"),
        ([Device("cpu:0", cores=(0,), threads=2, memory_bytes=1000)], "has threads 2, planned 1"),
        ([Device("cpu:0", cores=(3,), memory_bytes=1000)], r"has cores \(3,\), planned \(0,\)"),
        ([Device("cpu:0", cores=(0,), memory_bytes=900)], "memory_bytes 900, planned 1000"),
    ],
)
def test_mismatch_names_the_device(plan: Plan, devices: list[Device], message: str) -> None:
    rest = [Device("cpu:1", memory_bytes=1000)] if devices else [Device("z")]
    with pytest.raises(PlanMismatch, match=message):
        plan.placement(chain(), Cluster("other", tuple(devices + rest)))


@pytest.mark.parametrize("memory_bytes", [960, 1000, 2000])
def test_memory_is_never_quite_the_same(plan: Plan, memory_bytes: int) -> None:
    here = problem(memory_bytes=memory_bytes).cluster
    assert len(plan.placement(chain(), here)) == 4


def test_mismatch_of_size_further_devices_order_and_links(plan: Plan) -> None:
    first, second = problem().cluster.devices
    with pytest.raises(PlanMismatch, match=r"4 operators in the plan, 5 here.*not in the plan"):
        plan.placement(chain(5), problem().cluster)
    for cluster, message in (
        (Cluster("c", (first, second, Device("cpu:2"))), "device 'cpu:2' is new"),
        (Cluster("c", (second, first)), "in the order"),
        (Cluster("c", (first, second), (Link("cpu:0", "cpu:1"),)), "declared links differ"),
    ):
        with pytest.raises(PlanMismatch, match=message):
            plan.placement(chain(), cluster)


# -- refused: damaged files ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["assignment", "op1"], "tpu:9", r"assignment\['op1'\] = 'tpu:9': no such device.*cpu:1"),
        (["assignment", "op9"], "cpu:0", "5 operators, graph.num_ops = 4"),
        (["assignment", "op1"], "cpu:1", "stages do not follow from assignment"),
        (["assignment", "op1"], 1, "assignment.op1 = 1: input should be a valid string"),
        (["schema_version"], 4, "schema_version = 4, this version reads 1 and 2 and 3"),
        (["schema_version"], 2, "schema_version = 2, but with 0 phases and no pieces it is 1"),
        (
            ["phases"],
            [{"op0": "cpu:1"}],
            "schema_version = 1, but with 1 phases and no pieces it is 2",
        ),
        (["phases"], [{"op9": "cpu:1"}], r"phases\[0\]: no operator op9 in assignment"),
        (["phases"], [{"op0": "cpu:9"}], r"phases\[0\]\['op0'\] = 'cpu:9': no such device"),
        (["schema_version"], True, "schema_version = True"),
        (["planer"], {}, "unknown key 'planer'; did you mean 'planner'"),
        (["planner", "_target_"], "os.system", "'_target_' is not part of a plan"),
        (["planner", "parameters", "_target_"], "os.system", "'_target_' is not part"),
        (["predicted"], {}, "the key 'predicted.latency_s' is missing"),
        (["predicted", "latency_s"], "fast", "predicted.latency_s = 'fast': input should be"),
        (["predicted", "latency_s"], -1.0, "predicted.latency_s = -1.0: .*greater than or equal"),
        (["predicted", "busy_s"], {}, r"predicted.busy_s is about \[\], devices are"),
        (["predicted", "peak_bytes", "cpu:0"], 5000, "'cpu:0' needs 5000 bytes, its limit is 1000"),
        (["limits", "headroom_bytes", "cpu:0"], -5, r"headroom_bytes\['cpu:0'\] = -5, but 1000 l"),
        (["limits", "memory_bytes", "cpu:1"], 999, r"memory_bytes\['cpu:1'\] = 999, it has 1000"),
        (["device_map"], {"": "cpu:0"}, "device_map does not follow from assignment and"),
        (["predicted", "value_s"], 0.004, r"value_s = 0.004, but predicted.period_s = 4.0"),
        (["predicted", "latency_s"], 3.9, "predicted: latency 3.9 is below lower_bound_s.latency"),
        (["lower_bound_s", "period"], 4.5, "predicted: period 4.0 is below lower_bound_s.period"),
        (["fallback", "value_s"], 5.0, "fallback.value_s = 5.0, but fallback.period_s = 4.0"),
        (["num_microbatches"], 1.5, "num_microbatches = 1.5: input should be a valid integer"),
        (["objective"], "speed", "objective = 'speed': input should be 'period', 'latency'"),
        (["priority"], [0, 0, 1, 2], r"priority must hold each of 0\.\.3 once"),
        (["cluster", "devices", 0, "threads"], 7, "cluster.fingerprint = .*the devices listed"),
        (["cluster", "devices", 0, "threads"], 0, "cluster: device 'cpu:0': threads = 0"),
        (["cluster", "devices", 0, "name"], "cpu:1", "device names repeat"),
        (["fallback", "device"], "x", "fallback.device: no device 'x'"),
        (["graph", "name"], "\x1b[2J", "graph.name = .*should match pattern"),
        (["graph", "name"], "x" * 2000, "graph.name = 'xxx.*at most 1024"),
        (["graph", "fingerprint"], "../../x", "graph.fingerprint = '../../x'"),
    ],
)
def test_edited_by_hand(path: Path, keys: list[Any], value: Any, message: str) -> None:
    edited(path, *keys, value=value)
    with pytest.raises(PlanError, match=message) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_truncated(path: Path) -> None:
    text = path.read_text()
    for length in (0, 1, 100, len(text) // 2, len(text) - 3):
        with pytest.raises(PlanError, match=r"not valid JSON .*Make it again: placement plan"):
            load_plan(written(path, text[:length]))
    with pytest.raises(PlanError, match=r"not a plan: Python code.*mine:function"):
        load_plan(written(path.with_name("mine.py"), "import torch"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe plan", "byte 0 is not UTF-8"),
        (b"[]", "no key 'schema_version'"),
        (b"{}", "no key 'schema_version'"),
        (b'{"schema_version": NaN}', "NaN is not a number"),
        (b'{"schema_version": 1, "schema_version": 1}', "'schema_version' appears twice"),
        (b'{"assignment": {"op0": "a", "op0": "a"}}', "the key 'op0' appears twice"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"schema_version": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b'{"schema_version": 1}', "the key 'planner' is missing"),
    ],
)
def test_not_a_plan(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_plan(written(tmp_path / "x.json", content))


def test_a_plan_may_be_compressed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = written(path.with_name("plan.json.gz"), gzip.compress(path.read_bytes()))
    assert load_plan(packed) == load_plan(path)
    size = path.stat().st_size
    monkeypatch.setattr("placement.plan.reading.MOST", Limits(plan_bytes=size - 1))
    with pytest.raises(PlanError, match=rf"gz: {size} bytes, a plan has at most"):
        load_plan(packed)


def test_no_file_folder_or_too_much(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"nowhere\.json: cannot be read: No such file"):
        load_plan(path.with_name("nowhere.json"))
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        load_plan(path.parent)
    monkeypatch.setattr("placement.plan.reading.MOST", Limits(plan_bytes=100))
    with pytest.raises(PlanError, match="bytes, a plan has at most 100"):
        load_plan(path)


def test_reading_leaves_contradictions_to_the_caller(path: Path) -> None:
    edited(path, "assignment", "op1", value="tpu:9")
    assert len(read_plan(path).inconsistencies()) == 3  # the device, stages, modules


# -- refused: what cannot be written ---------------------------------------------------------


def test_placement_that_does_not_fit() -> None:
    with pytest.raises(PlanError, match=r"does not fit: device 'cpu:0' needs 1,1\d\d bytes.*1,000"):
        plan_of(problem(chain(tensor_bytes=[8, 8, 8, 1000])), [0] * 4)


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    names = ["../../x", "<script>alert(1)</script>", "[red]op[/red]", "__import__('os')"]
    graph = replace(chain(), name="../../etc/passwd", op_name=tuple(names))
    p = problem(graph)
    plan_of(p, [0, 1, 0, 1]).save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert list(again.assignment) == names
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"]
    with pytest.raises(PlanError, match="should match pattern"):
        plan_of(problem(replace(graph, op_name=("a\x1b[2J", "b", "c", "d"))), [0] * 4)


# -- this machine ----------------------------------------------------------------------------


def test_missing_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(device: Device) -> list[str]:
        base = problem()
        cluster = Cluster("c", (device, base.cluster.devices[1]))
        profile = replace(base.profile, device_names=cluster.device_names, links=())
        return plan_of(replace(base, cluster=cluster, profile=profile), [0] * 4).missing_devices()

    assert lacking(Device("cpu:0")) == []
    assert "device 'cpu:9' needs the cores [9999]" in lacking(Device("cpu:9", cores=(9999,)))[0]
    assert lacking(Device("npu", kind="npu")) == ["device 'npu' (npu) exists in the simulator only"]
    assert lacking(Device("fast", like="cpu:1", speed=2.0))[0].endswith("simulator only")
    assert lacking(Device("gpuX:y", kind="cuda"))[0].startswith("device 'gpuX:y' is not there")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert lacking(Device("cuda:0", kind="cuda")) == []
    for name in ("cuda:1", "nvidia:0"):
        why = f"device {name!r} is not there; 1 CUDA devices"
        assert lacking(Device(name, kind="cuda")) == [why]


def test_an_infinite_constant_among_the_inputs_survives_the_file(tmp_path: Path) -> None:
    masked, x = module_of(lambda m, x, fill: x.masked_fill(x > 0, fill).exp()), torch.randn(2, 4)
    graph = capture(masked, (x, -math.inf))
    plan_of(problem(graph, 2**30), [0] * graph.num_ops).save(tmp_path / "plan.json")
    with load_plan(tmp_path / "plan.json").bind(masked) as runner:
        torch.testing.assert_close(runner(x, -math.inf), masked(x, -math.inf))


def test_bind_runs_what_the_plan_says(tmp_path: Path) -> None:
    module, inputs = workloads.load("tiny_branches")
    graph = capture(module, inputs)
    here = problem(graph, 2**30, num_microbatches=2)
    turns = [i % 2 for i in range(graph.num_ops)]
    plan_of(here, turns).save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    with plan.bind(module) as runner:  # with inputs of the recorded shapes
        assert runner.placement.tolist() == turns
        torch.testing.assert_close(runner(*inputs), module(*inputs))
        for out in runner.stream([inputs] * 3):
            torch.testing.assert_close(out, module(*inputs))
    larger = torch.randn(5, 16)
    with pytest.raises(PlanMismatch, match=r"kinds, shapes, dtypes.*other_shapes=True\)$"):
        plan.bind(module, (larger,))
    with plan.bind(module, (larger,), other_shapes=True) as runner:
        assert runner.placement.tolist() == turns
        torch.testing.assert_close(runner(larger), module(larger))
    other, _ = workloads.load("tiny_mlp")
    with pytest.raises(PlanMismatch, match="operators in the plan, 6 here"):
        plan.bind(other, other_shapes=True)
    with pytest.raises(CaptureError, match=r"the plan's inputs are given: it is of 'TinyBr"):
        plan.bind(torch.nn.Bilinear(4, 4, 4))


def test_of_other_shapes_a_view_is_where_its_memory_is() -> None:
    copied = module_of(lambda m, x: x.exp().expand(3, 4).reshape(12).sin())  # of one row a copy
    graph, other = (capture(copied, torch.randn(n, 4)) for n in (1, 3))
    assert graph.op_name == other.op_name and graph.num_groups > other.num_groups
    plan = plan_of(problem(graph, 2**30), graph.group % 2)
    with plan.bind(copied, torch.ones(3, 4), other_shapes=True) as runner:
        first = other.group_op[other.group_ptr[other.group]]
        assert all(runner.placement == runner.placement[first])
        torch.testing.assert_close(runner(torch.ones(3, 4)), copied(torch.ones(3, 4)))


# -- what is published, and what it costs ----------------------------------------------------


def test_published_schema_is_the_schema() -> None:
    published = (ROOT / "docs" / "plan.schema.json").read_text()
    assert published == schema_text(), "run: placement schema > docs/plan.schema.json"


def test_package_loads_what_is_asked_for() -> None:
    code = """
import sys, placement
assert "placement.graph" not in sys.modules and "numpy" not in sys.modules
assert placement.load_plan.__module__ == "placement.plan.reading" and "capture" in dir(placement)
assert "torch" not in sys.modules
for name in placement.__all__:
    getattr(placement, name)
assert callable(placement.capture), "a submodule must not hide the function"
try:
    placement.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=100)
