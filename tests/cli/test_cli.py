"""The ``placement`` command: what it prints, what it writes, and how it says no."""

import ctypes
import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numba
import numpy as np
import pytest
import torch

from placement import cli
from placement.__main__ import VERBS, main
from placement.cli import BAD_INPUT, DEFECT, NO, OK, interruptible, profiled, ways
from placement.cluster import Cluster, Device
from placement.costs.measure import cached_path
from placement.executor import Runner
from placement.importers import save
from placement.plan import Plan, load_plan
from placement.plan.parts import Measured, Spread
from placement.profile import Profile
from placement.runs.ways import difference
from placement.tools import progress
from placement.tools.files import FileError
from placement.tools.ownership import check_packages
from placement.workloads import synthetic
from tests.machine import CORES
from tests.modules import module_of
from tests.problems import chain, graph_of, random_problem, small_problem

pytestmark = pytest.mark.usefixtures("quick_profiles")
ROOT = Path(__file__).parents[2]
KEYS = ["planner", "objective", "value_s", "lower_bound_s", "seconds", "evaluations"]
KEYS += ["feasible", "assignment"]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cluster of two workers on this machine, and a made-up profile of tiny_mlp.

    Every operator takes 1 ms on ``a`` and on ``b``, transfers are free: 6 operators.
    """
    folder = tmp_path_factory.mktemp("cli")
    cluster = Cluster("two", (Device("a", cores=(CORES[0],)), Device("b", cores=(CORES[-1],))))
    lines = [f"- {{name: {d.name}, cores: {list(d.cores)}}}" for d in cluster.devices]
    (folder / "two.yaml").write_text("devices:\n" + "\n".join(lines) + "\n")
    graph = cli.capture_workload("tiny_mlp", lambda what, share: None)
    profile = Profile(
        ("a", "b"), np.full((6, 2), 1e-3), np.zeros((6, 2)), graph_fingerprint=graph.fingerprint
    )
    profile.save(folder / "profile.npz")
    return folder


@pytest.fixture(scope="session")
def plan_path(home: Path) -> Path:
    """A plan of tiny_mlp: the first half on ``a``, the second on ``b``."""
    path = home / "plan.json"
    assert main(plan_args(home, "contiguous_dp", "--out", str(path))) == OK
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SIGNS", progress.Signs(first_s=600))  # however slow the machine
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "cache"))


def plan_args(home: Path, planner: str, *more: str) -> list[str]:
    machine = ["--cluster", str(home / "two.yaml"), "--profile", str(home / "profile.npz")]
    return ["plan", "tiny_mlp", "--planner", planner, *machine, *more]


def ran(trace: Path) -> dict[str, list[list[Any]]]:
    """What each device ran, one after another, as [operator, micro-batch]."""
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    runs: dict[str, list[list[Any]]] = {}
    for e in sorted((e for e in events if "operator" in e["args"]), key=lambda e: e["ts"]):
        runs.setdefault(tracks[e["tid"]], []).append([e["name"], e["args"]["micro_batch"]])
    return runs


def changed(path: Path, to: Path, **top: Any) -> Path:
    to.write_text(json.dumps(json.loads(path.read_text()) | top))
    return to


# -- plan ------------------------------------------------------------------------------------


def test_plan_for_machines(home: Path, says: Any) -> None:
    got = says.answer(*plan_args(home, "contiguous_dp"))
    assert list(got) == KEYS
    assert got["planner"] == "contiguous_dp" and got["objective"] == "period"
    assert got["value_s"] == pytest.approx(3e-3) and got["lower_bound_s"] == pytest.approx(3e-3)
    assert got["feasible"] is True
    assert sorted(got["assignment"].values()) == ["a"] * 3 + ["b"] * 3
    assert next(iter(got["assignment"])) == "linear"


def test_plan_with_a_module_on_a_device(home: Path, says: Any) -> None:
    got = says.answer(*plan_args(home, "local_search", "--on", "linear=b", "--on", "relu=a"))
    assert got["assignment"]["linear"] == "b" and got["assignment"]["relu"] == "a"
    assert got["feasible"] is True
    for wrong, message in (("linear", "write NAME=DEVICE"), ("linear=c", "use one of ['a', 'b']")):
        assert message in says(plan_args(home, "heft", "--on", wrong), 2).err


def test_plan_for_latency(home: Path, says: Any) -> None:
    got = says.answer(*plan_args(home, "heft", "--objective", "latency"))
    assert got["value_s"] == got["lower_bound_s"] == pytest.approx(6e-3)


def test_plan_options_seed_and_budget(home: Path, says: Any) -> None:
    args = [*plan_args(home, "local_search", "--evaluations", "30", "seconds=60"), "--seed", "3"]
    first, again = says.answer(*args), says.answer(*args)
    assert 0 < first["evaluations"] <= 30
    assert first["assignment"] == again["assignment"]


def test_budget_of_a_planner_without_one(home: Path, says: Any) -> None:
    err = says(plan_args(home, "heft", "--seed", "1")).err
    assert "planner 'heft' has no seed: --seed 1 is not used" in err


def test_plan_nothing_fits(home: Path, tmp_path: Path, says: Any) -> None:
    small = tmp_path / "small.yaml"
    small.write_text("devices: [{name: a, memory_bytes: 10}, {name: b, memory_bytes: 10}]")
    args = plan_args(home, "heft", "--cluster", str(small), "--out", str(tmp_path / "plan.json"))
    out, err = says([*args, "--json"], NO)
    got = json.loads(out)
    assert list(got) == KEYS and got["feasible"] is False and got["value_s"] is None
    assert "nothing can fit in memory: the parameters take" in err and "have 20" in err
    assert not (tmp_path / "plan.json").exists()


def test_plan_writes_plan_and_trace(home: Path, tmp_path: Path, says: Any) -> None:
    out, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    args = plan_args(home, "round_robin", "--out", out, "--trace", trace, "--microbatches", "4")
    assert f"placement run {out}" in says(args).err
    plan = load_plan(out)
    assert plan.num_microbatches == 4 and plan.graph.workload == "tiny_mlp"
    assert plan.graph.input_spec == {"args": [{"shape": [2, 16], "dtype": "float32"}], "kwargs": {}}
    slices = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert sum("operator" in e["args"] for e in slices) == 4 * 6


def test_plan_of_a_problem_file(tmp_path: Path, says: Any) -> None:
    """A chain of two operators, 3 ms on an accelerator or 6 ms on a processor each."""
    node = {"supportedOnFpga": 1, "cpuLatency": 6.0, "fpgaLatency": 3.0, "isBackwardNode": 0}
    nodes = [node | {"id": i, "name": f"n{i}", "colorClass": i, "size": 1.0} for i in (7, 8)]
    file = tmp_path / "problem.json"
    edges = [{"sourceId": 7, "destId": 8, "cost": 0.5, "size": 1.0}]
    limits = {"maxSizePerFPGA": 10.0, "maxFPGAs": 1, "maxCPUs": 1}
    file.write_text(json.dumps({"nodes": nodes, "edges": edges} | limits))
    got = says.answer("plan", file, "--planner", "single_device")
    assert list(got) == KEYS and got["objective"] == "max_load"
    assert got["value_s"] == pytest.approx(6e-3)
    assert set(got["assignment"].values()) == {"acc:0"} and len(got["assignment"]) == 2
    # Its authors' latency is the analytic one; the answer names what was asked for.
    got = says.answer("plan", file, "--planner", "single_device", "--objective", "latency")
    assert got["objective"] == "latency"
    out = tmp_path / "plan.json"
    assert "max_load" in says(["plan", file, "--planner", "single_device", "--out", out]).out
    checked = says.answer("validate", out)
    assert checked["valid"] is True and "made from a problem file" in checked["notes"][0]
    assert "exists in the simulator only" in checked["notes"][1]
    assert "there is no model, unless you name" in says.error("run", out)
    heft = ["plan", file, "--planner", "heft"]
    assert "--profile is for workloads" in says.error(*heft, "--profile", "x.npz")
    file.write_text("{}")
    assert "unknown JSON format" in says.error(*heft)


def test_plan_of_public_workloads(shared: Path, says: Any) -> None:
    file = shared / "data" / "pipedream" / "alexnet.txt"
    args = ["plan", file, "--planner", "single_device", "--devices", "2", "--bandwidth", "1e9"]
    got = says.answer(*args, "--memory", str(2**40))
    assert got["feasible"] and 0 < got["lower_bound_s"] <= got["value_s"]


def test_plan_says_where_a_long_stream_takes_longer(tmp_path: Path, says: Any) -> None:
    save(synthetic.families()["towers"](1), tmp_path / "towers.json")
    words = ["plan", str(tmp_path / "towers.json"), "--planner", "heft", "--json"]
    assert "of 512 items each takes 6% longer than in one of 32" in says(words).err
    assert not says([*words, "--microbatches", "512"]).err
    save(small_problem([[0.0]]), tmp_path / "idle.json")
    assert main(["plan", str(tmp_path / "idle.json"), "--planner", "heft"]) == OK


def test_a_plan_and_its_answer_ask_for_the_bound_once(tmp_path, monkeypatch, says):
    save(synthetic.families()["towers"](1), tmp_path / "p.json")
    words = ["plan", tmp_path / "p.json", "--planner", "heft"]
    bound_s = says.answer(*words)["lower_bound_s"]
    monkeypatch.setattr("placement.plan.proved_bound_s", None)
    out = tmp_path / "plan.json"
    assert says.answer(*words, "--out", out)["lower_bound_s"] == bound_s > 0
    assert load_plan(out).lower_bound_s["period"] == bound_s


def test_an_error_in_a_planner_of_ones_own_says_where(tmp_path, monkeypatch, says):
    (tmp_path / "faulty_planner.py").write_text("def plan(problem):\n    return {}['x']\n")
    monkeypatch.chdir(tmp_path)
    save(small_problem(np.ones((3, 2)), chain(3)), tmp_path / "chain.json")
    words = ["plan", "chain.json", "--planner", "faulty_planner:plan"]
    where = f"raised in code of yours, plan ({tmp_path / 'faulty_planner.py'}:2)"
    assert f"error: KeyError: 'x'; {where}" in " ".join(says(words, BAD_INPUT).err.split())
    assert "Traceback" in says([*words, "--debug"], BAD_INPUT).err
    (tmp_path / "odd_answers.py").write_text(
        "from placement import Solution\ndef bare(problem):\n    return [0] * 3\n"
        "def listed(problem):\n    return Solution(bare(problem), 3.0)\n"
    )
    err = says([*words[:3], "odd_answers:bare"], BAD_INPUT).err
    assert "bare returned a list, not a placement.Solution(" in err
    says([*words[:3], "odd_answers:listed"])


def test_plan_says_where_no_network_decides(home: Path, says: Any) -> None:
    words = plan_args(home, "policy", "--evaluations", "50", "--json")
    assert says(words).json["network"] == "waits-period.safetensors"
    output = says([*words, "foresight=untrained"])
    assert "no network is involved for period: a search by hand-written rules" in output.err
    assert json.loads(output.out)["network"] == "none"


def test_commands_to_type_next_are_quoted(home: Path, tmp_path: Path, says: Any) -> None:
    out = tmp_path / "my plans" / "plan.json"
    assert f"; next: placement run '{out}'\n" in says(plan_args(home, "heft", "--out", out)).err


def test_plan_says_when_a_gain_is_less_than_predictions_err(tmp_path: Path, says: Any) -> None:
    problem = synthetic.families()["towers"](1)
    profile = replace(problem.profile, provenance={"error": 0.95})
    save(replace(problem, profile=profile), tmp_path / "p.json")
    plan = ["plan", str(tmp_path / "p.json"), "--json", "--planner"]
    for words in (["policy", "baseline=heft", "--evaluations", "50"], ["heft"]):
        out, err = says([*plan, *words])
        kept = f"kept one device: what {words[0]} answers, on several, is predicted .* better, and "
        assert re.search(kept + "the calibration error is 95.0%; --margin 0 takes it", err)
        single = json.loads(out)
        assert len(set(single["assignment"].values())) == 1
        # The option keeps the split, which the plan then has a warning of.
        out, err = says([*plan, *words, "--margin", "0"])
        assert "kept" not in err
        # The policy alone would have kept its baseline's.
        assert json.loads(out)["value_s"] <= single["split_value_s"] < single["value_s"]
    # A gain above the margin is taken.
    gain = 1 - single["split_value_s"] / single["value_s"]
    assert says([*plan, *words, "--margin", f"{gain - 0.01}"]).json["value_s"] < single["value_s"]
    err = says([*plan, *words, "--margin", "1"], BAD_INPUT).err
    assert "--margin 1.0 must be a share, 0 <= margin < 1" in err


def test_plan_does_not_repeat_what_a_planner_claims(tmp_path, monkeypatch, says):
    save(random_problem(3, 6, 2), tmp_path / "p.json")
    claims = """
from placement.planners import load
from dataclasses import replace
def liar(problem):
    return replace(load("heft")(problem), value_s=1e-9, lower_bound_s=1e9)
"""
    (tmp_path / "claims.py").write_text(claims)
    monkeypatch.chdir(tmp_path)
    heft = says.answer("plan", "p.json", "--planner", "heft")
    out, err = says(["plan", "p.json", "--planner", "claims:liar", "--json", "--out", "o.json"])
    got = json.loads(out)
    assert got["value_s"] == heft["value_s"] and got["lower_bound_s"] == heft["lower_bound_s"]
    assert "warning: planner 'claims:liar' answered value_s = 1e-09 (simulator: " in err
    assert "lower_bound_s = 1000000000.0 (simulator: at most " in err
    assert load_plan(tmp_path / "o.json").lower_bound_s["period"] == heft["lower_bound_s"]


def test_a_log_has_a_sign_of_life_though_nothing_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SIGNS", progress.Signs(first_s=0.02, every_s=0.02))
    threads = set(threading.enumerate())
    with cli.progress() as report:
        report("planning with slow", None)
        time.sleep(0.2)  # a planner that says nothing
        report("measuring", 0.5)
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "placement: planning with slow, after 0 s" and len(lines) >= 3
    assert lines[-1] == "placement: measuring (50%), after 0 s"
    assert set(threading.enumerate()) <= threads


def test_a_bar_keeps_answers_and_names_as_they_are() -> None:
    """On a terminal: standard output is a pipe, and a name has what rich takes for markup."""
    code = (
        "import time; from placement import cli\n"
        "with cli.progress() as report:\n"
        "    report('loading x[/y] [red]\\r', 0.5); time.sleep(0.5)\n"
        "    cli.print_json({'what': 'w' * 200})"
    )
    terminal, side = os.openpty()
    command = [sys.executable, "-c", code]
    answer = subprocess.check_output(command, stderr=side, cwd=ROOT, timeout=60)
    os.close(side)
    assert json.loads(answer) == {"what": "w" * 200}
    with os.fdopen(terminal, "rb") as drawn:
        assert b"loading x[/y] [red]?" in drawn.read1()


# -- show, diff, schema ----------------------------------------------------------------------


def test_show(plan_path: Path, says: Any) -> None:
    text = says(["show", plan_path]).out
    assert "contiguous_dp" in text and "3 ms" in text and "6 ms" in text
    assert max(map(len, text.splitlines())) <= 80
    assert says.answer("show", plan_path)["planner"]["name"] == "contiguous_dp"


@pytest.mark.parametrize(
    ("period_s", "is_said"), [(5e-3, False), (6.00001e-3, False), (8e-3, True)]
)
def test_items_that_take_longer_than_a_call_are_said(plan_path, tmp_path, says, period_s, is_said):
    """Of a latency of 6 ms: what the table shows as equal to it is not called longer."""
    both = {"value_s": period_s, "period_s": period_s}
    predicted = json.loads(plan_path.read_text())["predicted"] | both
    plan = changed(plan_path, tmp_path / "long.json", predicted=predicted)
    said = "takes longer than a call" in " ".join(says(["show", plan]).err.split())
    assert said == is_said


def test_show_needs_no_torch(plan_path: Path, tmp_path: Path) -> None:
    # A module that fails when it is imported stands in torch's place, and in others'.
    for name in ("torch", "numba", "scipy", "matplotlib", "gymnasium"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('must not be imported')")
    command, places = [sys.executable, "-m", "placement", "show", str(plan_path)], (tmp_path, ROOT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert result.returncode == 0, result.stderr
    assert "contiguous_dp" in result.stdout and result.stderr == ""


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf"])
def test_a_timeout_that_is_none(plan_path: Path, says: Any, seconds: str) -> None:
    message = says.error("run", plan_path, f"--timeout={seconds}")
    assert f"--timeout {seconds}: must be positive seconds" in message


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_full_output_is_said_to_be_the_output(plan_path: Path) -> None:
    command = [sys.executable, "-m", "placement", "show", str(plan_path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    why = "cannot write standard output: No space left on device; send it elsewhere"
    assert (done.returncode, done.stderr) == (2, f"placement: error: {why}\n")


def test_diff(home: Path, plan_path: Path, says: Any) -> None:
    same = {"predicted latency": [6e-3, 6e-3], "predicted period": [3e-3, 3e-3]}
    metrics = {name: pytest.approx(values) for name, values in same.items()}
    expected = {"moved": {}, "settings": {}, "metrics_s": metrics}
    assert says.answer("diff", plan_path, plan_path) == expected
    other = home / "other.json"
    says(plan_args(home, "single_device", "--out", other))
    got = says.answer("diff", plan_path, other)
    assert sorted(map(sorted, got["moved"].values())) == [["a", "b"]] * 3
    assert got["settings"] == {"planner": ["contiguous_dp", "single_device"]}
    assert got["metrics_s"]["predicted period"] == pytest.approx([3e-3, 6e-3])
    assert "3 operators moved" in (text := says(["diff", plan_path, other]).out)
    assert "+100.0%" in text


def test_diff_of_plans_of_two_models_compares_no_operators(home, plan_path, says):
    raw = json.loads(plan_path.read_text())
    raw["graph"] |= {"name": "other", "fingerprint": "0" * 64}
    (other := home / "two.json").write_text(json.dumps(raw))
    got = says.answer("diff", plan_path, other)
    assert got["moved"] == {} and got["two_models"] and got["settings"]["model"][1] == "other"
    text = says(["diff", plan_path, other]).out
    assert "plans of two models (" in text and "%" not in text and "same device" not in text


def test_diff_of_a_plan_and_a_measured_one_shows_what_was_measured(home, plan_path, says):
    latency = Spread(median_s=4e-3, iqr_s=1e-4)
    measured = Measured(latency_s=latency, n=3, when="2026-11-28T00:00:00+00:00", machine="m")
    plan = load_plan(plan_path).model_copy(update={"measured": measured})
    plan.save(other := home / "measured.json")
    got = says.answer("diff", plan_path, other)["metrics_s"]
    assert got["measured latency"] == [None, 4e-3] and "measured period" not in got
    assert re.search(r"measured latency +- +4 ms", says(["diff", plan_path, other]).out)


def test_schema(says: Any) -> None:
    assert says(["schema"]).json["additionalProperties"] is False


# -- validate --------------------------------------------------------------------------------


def test_validate(plan_path: Path, says: Any) -> None:
    assert says.answer("validate", plan_path)["valid"] is True
    assert says(["validate", plan_path]).out.endswith("plan.json: valid\n")


def test_validate_lists_every_failure(plan_path: Path, tmp_path: Path, says: Any) -> None:
    data = json.loads(plan_path.read_text())
    data["assignment"] |= {"linear": "x", "relu": "y"}
    bad = changed(plan_path, tmp_path / "bad.json", assignment=data["assignment"])
    got = says.answer("validate", bad, code=NO)
    assert not got["valid"] and len(got["failures"]) == 4  # two devices, stages, modules
    assert got["failures"][0].startswith("assignment['linear'] = 'x': no such device")


def test_validate_against_another_model_and_cluster(plan_path, home, tmp_path, says):
    got = says.answer("validate", plan_path, "--model", "tiny_cnn", code=NO)
    assert "the model 'tiny_cnn'" in got["failures"][0]
    other = tmp_path / "other.yaml"
    other.write_text((home / "two.yaml").read_text().replace("name: b", "name: b, threads: 2"))
    got = says.answer("validate", plan_path, "--cluster", other, code=NO)
    assert got["failures"] == ["device 'b' has threads 2, planned 1"]
    out = says(["validate", plan_path, "--cluster", other], NO).out
    assert out.endswith(": not valid, 1 failure\n")


def test_validate_finds_an_order_that_deadlocks(plan_path: Path, tmp_path: Path, says: Any) -> None:
    plan = load_plan(plan_path)
    ops = {d: [op for op, on in plan.assignment.items() if on == d] for d in ("a", "b")}
    order = {d: [[op, 0] for op in names] for d, names in ops.items()}
    good = changed(plan_path, tmp_path / "good.json", order=order, num_microbatches=1)
    assert says.answer("validate", good)["failures"] == []
    order["b"].reverse()
    bad = changed(plan_path, tmp_path / "bad.json", order=order, num_microbatches=1)
    (failure,) = says.answer("validate", bad, code=NO)["failures"]
    assert "schedule deadlocks: device 1 waits at" in failure


def test_code_that_a_plan_names_is_not_run(plan_path, tmp_path, says, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.py").write_text("open('was_run', 'w')")
    graph = json.loads(plan_path.read_text())["graph"] | {"workload": "hostile:make"}
    path = changed(plan_path, tmp_path / "plan.json", graph=graph)
    (note,) = says.answer("validate", path)["notes"]
    assert note.endswith("of a model of yours: name it with --model hostile:make")
    assert "--model hostile:make" in says.error("run", path)
    assert not (tmp_path / "was_run").exists()


# -- profile and run: on real devices --------------------------------------------------------


def test_profile(home: Path, tmp_path: Path, says: Any) -> None:
    out = tmp_path / "profile.npz"
    args = ["profile", "tiny_mlp", "--cluster", home / "two.yaml", "--repeats", "1"]
    got = says.answer(*args, "--out", out)
    assert len(got["most_expensive"]) == 6 and got["most_different"] == []
    assert set(got["most_expensive"][0]["compute_s"]) == {"a", "b"}
    assert Profile.load(out).compute_s.shape == (6, 2)
    assert Profile.load(out).graph_fingerprint == got["graph_fingerprint"]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) <= set(re.findall(r"[\w-]+", capsys.readouterr().out))


def test_profile_says_how_to_plan(home, tmp_path, says, monkeypatch):
    out, devices = tmp_path / "a profile.npz", home / "two.yaml"
    args = f"profile tiny_mlp --cluster {devices} --repeats 1 --mode training".split()
    stderr = says([*args, "--out", out]).err.rpartition("next: placement ")[2]
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(stderr)) == OK
    plan = load_plan("plan.json")
    assert plan.graph.mode == "training" and [d.name for d in plan.cluster.devices] == ["a", "b"]


def test_profile_that_cannot_be_saved_is_still_shown(home, tmp_path, says, monkeypatch):
    profile = Profile.load(home / "profile.npz")
    monkeypatch.setattr("placement.costs.measure.measure", lambda *_, **__: profile)
    args = ["profile", "tiny_mlp", "--cluster", str(home / "two.yaml")]
    monkeypatch.setattr(Profile, "save", Mock(side_effect=FileError("no space left")))
    out, err = says([*args, "--out", tmp_path / "profile.npz"], 2)
    assert "all operators" in out and "6 ms" in out
    assert "error: the profile above was not saved" in err


def test_where_nothing_can_be_saved_nothing_is_measured(home, tmp_path, says, monkeypatch):
    monkeypatch.setattr("placement.costs.measure.measure", None)
    (tmp_path / "file").write_text("")
    args = ["profile", "tiny_mlp", "--cluster", str(home / "two.yaml")]
    message = says.error(*args, "--out", str(tmp_path / "file" / "profile.npz"))
    assert "a part of" in message and "PLACEMENT_HOME" not in message
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "file"))
    assert "set PLACEMENT_HOME to another folder" in says.error(*args)


def test_profile_shows_where_unlike_devices_differ(capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of(2, chain(2), 8, op_name=["x", "y"])
    cluster = Cluster("c", (Device("cpu:0"), Device("cuda:0", kind="cuda")))
    times = np.array([[4e-3, 1e-3], [3e-3, 9e-3]])
    profiled.show(graph, cluster, Profile(cluster.device_names, times, times * 0), as_json=False)
    text = capsys.readouterr().out
    y, x = (line.split() for line in text.split("differ most")[1].splitlines() if "ms" in line)
    assert (y[0], y[-1]) == ("y", "1") and (x[0], x[-1]) == ("x", "4")
    assert max(map(len, text.splitlines())) <= 80


def test_a_profile_with_an_operator_that_a_device_cannot_run(capsys: Any) -> None:
    graph = graph_of(2, chain(2), 8, op_name=["x", "y"])
    cluster = Cluster("c", (Device("cpu:0"), Device("cuda:0", kind="cuda")))
    times = np.array([[4e-3, 1e-3], [3e-3, np.inf]])
    profile = Profile(cluster.device_names, times, np.zeros((2, 2)))
    profiled.show(graph, cluster, profile, as_json=True)
    got = json.loads(capsys.readouterr().out)
    assert got["total_s"] == {"cpu:0": pytest.approx(7e-3), "cuda:0": None}
    profiled.show(graph, cluster, profile, as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["all", "operators", "7", "ms", "-"] in rows


def test_profiles_of_many_devices_fit_into_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of(1, [], 8, op_name=["block.0.linear_projection" * 3])
    cluster = Cluster("c", tuple(Device(f"cpu:{i}") for i in range(40)))
    times = np.full((1, 40), 1e-3)
    profiled.show(graph, cluster, Profile(cluster.device_names, times, times * 0), as_json=False)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 and "4 of 40 devices are shown" in text
    assert text.count("1 ms") == 2 * 4, "no figure is cut"


def test_run(plan_path: Path, tmp_path: Path, says: Any) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "measured.json"
    words = ["run", plan_path, "--against-single-device", "--batches", "4"]
    got = says.answer(*words, "--trace", trace, "--out", out)
    assert got["numerics_equal"] is True
    assert got["measured"]["latency_s"]["median_s"] > 0 and got["measured"]["n"] == 2
    assert got["single_device"]["device"] == load_plan(plan_path).fallback.device
    assert set(got["speedup_over_single_device"]) == {"latency", "period"}
    slices = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert sum("operator" in e["args"] for e in slices) == 4 * 6
    measured = load_plan(out).measured
    assert measured is not None and measured.model_dump() == got["measured"]


def test_run_says_where_one_device_is_faster(plan_path, capsys):
    def took(value_s: float) -> Measured:
        spread = Spread(median_s=value_s, iqr_s=0.0)
        return Measured(latency_s=spread, period_s=spread, n=1, when="2026-11-27", machine="here")

    plan = load_plan(plan_path)
    for plan_s, single_s in ((2.0, 1.0), (1.0, 2.0)):
        ways.show(plan, {"plan": took(plan_s), "single": took(single_s)}, as_json=False)
        faster = "alone is faster; placement optimize tiny_mlp keeps whatever is fastest"
        assert (faster in capsys.readouterr().err) == (single_s < plan_s)
    on_b = {"assignment": dict.fromkeys(plan.assignment, "b")}
    on_b |= {"fallback": plan.fallback.model_copy(update={"device": "b"})}
    itself = plan.model_copy(update=on_b)
    ways.show(itself, {"plan": took(2.0), "single": took(1.0)}, as_json=False)
    assert capsys.readouterr().err == "placement: the plan is b alone: what differs is chance\n"


def test_run_follows_the_order_of_the_plan(home: Path, tmp_path: Path, says: Any) -> None:
    # All of a micro-batch before the next, latest first: no list rule would do that.
    path, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    says(plan_args(home, "contiguous_dp", "--microbatches", "3", "--out", path))
    plan = load_plan(path)
    ops = {d: [op for op, at in plan.assignment.items() if at == d] for d in ("a", "b")}
    order = {d: [[op, m] for m in (2, 0, 1) for op in mine] for d, mine in ops.items()}
    changed(path, path, order=order)
    got = says.answer("run", path, "--trace", trace, "--against-single-device")
    assert got["numerics_equal"] is True and got["single_device"]["device"] == "a"
    for one in (got, got["single_device"]):
        assert all(one["measured"][what]["median_s"] > 0 for what in ("latency_s", "period_s"))
    assert ran(trace) == order
    assert "the plan's order is for 3 micro-batches" in says.error("run", path, "--batches", "4")


def test_what_a_model_prints_is_not_in_the_answer(home, tmp_path, says, monkeypatch):
    (tmp_path / "talkative.py").write_text(
        "from placement.workloads import load\n"
        "from placement.planners.heft import Heft\n"
        "def build():\n    print('loading')\n    return load('tiny_mlp')\n"
        "def planner(problem):\n    print('planning')\n    return Heft()(problem)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = plan_args(home, "talkative:planner", "--json")
    words[words.index("tiny_mlp")] = "talkative:build"
    out, err = says(words)
    assert json.loads(out)["feasible"] is True and "loading\n" in err and "planning\n" in err


def test_plans_on_described_devices_find_what_was_measured(tmp_path: Path) -> None:
    """The profile of devices ``like`` this machine's is the machine's: planned, then exported."""
    graph = cli.capture_workload("tiny_mlp", lambda what, share: None)
    here = Cluster.detect()
    seconds = np.full((graph.num_ops, here.num_devices), 1e-3)
    fingerprint = graph.fingerprint
    profile = Profile(here.device_names, seconds, seconds * 0, graph_fingerprint=fingerprint)
    profile.save(cached_path(graph, here))
    like, cluster = here.device_names[0], tmp_path / "twice.yaml"
    cluster.write_text(f"devices: [{{name: a, like: '{like}'}}, {{name: b, like: '{like}'}}]")
    plan, out = str(tmp_path / "plan.json"), str(tmp_path / "plan.csv")
    words = ["tiny_mlp", "--cluster", str(cluster), "--planner", "heft", "--out", plan]
    assert main(["plan", *words]) == OK
    assert main(["export", plan, "--to", "csv", "--model", "tiny_mlp", "--out", out]) == OK
    assert main(["plan", "--start", plan, "--without", "b", "--evaluations", "9"]) == OK


def test_run_refuses_wrong_results(plan_path: Path, says: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Runner, "__call__", lambda self, x: torch.zeros_like(x))
    assert "the results differ from those of the plain module" in says(["run", plan_path], NO).err


@pytest.mark.parametrize(
    ("file", "layer", "equal"),
    [("my_model_file", "nn.ReLU()", True), ("my_noisy_file", "Noise()", None)],
)
def test_run_of_the_users_own_module(home, tmp_path, says, monkeypatch, file, layer, equal):
    """From the user's file to an executed plan, with devices described by measured ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{file}.py").write_text(
        "from torch import nn, ones, rand_like\n"
        "class Noise(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x + rand_like(x)\n"
        "def make():\n"
        f"    return nn.Sequential(nn.Linear(4, 4), {layer}).eval(), ones(1, 4)\n"
    )
    cluster = str(home / "two.yaml")
    plan = ["plan", f"{file}:make", "--planner", "heft", "--cluster", cluster]
    says([*plan, "--out", "plan.json"])
    assert len(list((tmp_path / "cache").rglob("*.npz"))) == 1, "the profile is kept"
    got = says.answer("run", "plan.json", "--model", f"{file}:make", "--batches", "4")
    assert got["numerics_equal"] is equal and got["single_device"] is None


# -- how it says no --------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"placement {verb}" in text.split("example", 1)[1] and "exit codes" in text
    assert "--json" in text


def test_errors_are_one_line(home: Path, tmp_path: Path, says: Any) -> None:
    def plan(planner: str, *more: str) -> str:
        return says.error(*plan_args(home, planner, *more))

    assert "x/y.json: no such file or folder" in says.error("plan", "x/y.json")
    assert "from_pretrained('gpt/Llama-3.1-8B')" in says.error("plan", "gpt/Llama-3.1-8B")
    assert "--repeats 0" in says.error("profile", "tiny_mlp", "--repeats", "0")
    assert "--devices is for problem files" in plan("heft", "--devices", "2")
    assert "no_such.yaml" in plan("heft", "--cluster", "no_such.yaml")
    assert "not a readable profile" in plan("heft", "--profile", str(home / "two.yaml"))
    (tmp_path / "file").write_text("")
    assert "is a file, not a folder" in plan("heft", "--out", tmp_path / "file" / "p.json")
    assert "Traceback" in says(["show", "nowhere.json", "--debug"], 2).err


def test_profile_of_another_model(home: Path, says: Any) -> None:
    args = [*plan_args(home, "heft")]
    args[1] = "tiny_cnn"
    assert "profile has 6 operators" in says.error(*args)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fly", "no verb 'fly'; verbs are optimize, "),
        ("pln x", "no verb 'pln'; did you mean 'plan'? verbs are optimize, "),
        ("--verson", "no option '--verson'; did you mean '--version'? see: placement --help"),
        ("show", "required: plan.json; see: placement show --help"),
        ("show a --seed", "no option '--seed'; see: placement show --help"),
        ("plan x --bogus y", "no option '--bogus'; see: placement plan --help"),  # not '--out'
        ("show a -x", "no option '-x'; see: placement show --help"),
        ("replan x", "there is no verb replan any more; type placement plan --without DEVICE"),
        ("features x", "any more; type placement profile MODEL --features; see"),
        ("power", "any more; type placement doctor --power; see"),
        ("plan x --planer heft", "no option '--planer'; did you mean '--planner'? see: placement"),
        ("plan x --planner heft a=1 --sed=3", "no option '--sed'; did you mean '--seed'? see: "),
        ("plan x --planner heft --seed x", "--seed: invalid int value: 'x'; see: placement plan"),
        ("dataset buld x", "no action 'buld'; did you mean 'build'? actions are build, show, load"),
    ],
)
def test_usage_errors(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and message in err
    assert err.startswith("placement: error: ") and err.count("\n") == 1


def test_a_command_alone_shows_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == ""
    assert err.startswith("usage: placement ") and "placement optimize resnet50" in err


def test_what_may_have_been_meant(home: Path, tmp_path: Path, says: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_near.py").write_text("def multi(): ...\n")
    sead = "no option 'sead'; did you mean 'seed'? its options are"
    latncy = "latncy is unknown; did you mean 'latency'? use"
    there = "'multi'; mine_near.py has a function of that name: mine_near:multi; choose"
    for words, message in (
        (plan_args(home, "local_search", "sead=3"), sead),
        (plan_args(home, "heft", "--objective", "latncy"), latncy),
        (["plan", "nosuch", "--planner", "heft"], "unknown workload 'nosuch'; choose one of"),
        (["plan", "multi", "--planner", "heft"], there),
    ):
        assert message in says.error(*words)
    for args in (["mine_near:mult", "--planner", "heft"], ["x", "--planner", "mine_near:mult"]):
        message = says.error("plan", *args)
        assert message.endswith("has no attribute 'mult'; did you mean 'multi'?")


def test_another_distribution_owns_agents(plan_path: Path, says: Any, monkeypatch: Any) -> None:
    claims = iter([("openai-agents", "agents")])
    monkeypatch.setattr("placement.tools.ownership._claims", lambda: claims)
    check_packages.cache_clear()
    assert "'openai-agents' also installs a package 'agents'" in says(["show", plan_path], 2).err


def test_interrupt_leaves_nothing(home: Path, tmp_path: Path, says: Any, monkeypatch: Any) -> None:
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("os.replace", interrupted)  # half-way through the writing
    folder = tmp_path / "out"
    folder.mkdir()
    _, err = says(plan_args(home, "heft", "--out", folder / "plan.json"), 130)
    assert "placement: interrupted" in err and "Traceback" not in err
    assert list(folder.iterdir()) == []


def test_ctrl_c_in_a_callback_of_c_comes_again(capsys: Any) -> None:
    @ctypes.CFUNCTYPE(None)
    def callback() -> None:
        signal.raise_signal(signal.SIGINT)  # no exception passes through C

    with pytest.raises(KeyboardInterrupt), interruptible():
        callback()
        time.sleep(10)
    assert "KeyboardInterrupt" not in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), interruptible():
        callback()
        raise RuntimeError("what the callback left half done")
    with pytest.raises(KeyboardInterrupt), interruptible():
        raise SystemError("a kernel returned a result") from KeyboardInterrupt()
    with interruptible():
        callback()
    time.sleep(0.1)  # what has ended goes on


def test_our_own_mistakes_are_not_hidden(plan_path: Path, says: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Plan, "inconsistencies", None)
    err = says(["show", plan_path], DEFECT).err
    assert "TypeError" in err and "Traceback" in err and "please report" in err


def test_an_operator_that_fails_is_one_line(tmp_path, says, monkeypatch):
    (tmp_path / "few_classes.py").write_text(
        "import torch\n"
        "def build():\n"
        "    target = torch.tensor([7])\n"
        "    loss = torch.nn.CrossEntropyLoss()\n"
        "    return torch.nn.Linear(4, 3), (torch.ones(1, 4), target), loss\n"
    )
    monkeypatch.chdir(tmp_path)
    message = says.error("profile", "few_classes:build", "--mode", "training", "--repeats", 1)
    assert "IndexError: Target 7 is out of bounds" in message
    assert "in operator 'cross_entropy_loss'" in message
    assert message.endswith("run on these inputs?")


@pytest.mark.parametrize(("worked_s", "expected"), [(1.2, True), (0.2, False), (None, False)])
def test_other_programs_are_told(worked_s, expected, capsys, monkeypatch):
    monkeypatch.setattr("placement.cli.os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("placement.cli.time.monotonic", iter([100.0, 102.0]).__next__)
    monkeypatch.setattr("placement.cli.others_s", iter([5.0, worked_s and 5 + worked_s]).__next__)
    with cli.says_if_busy():
        pass
    assert ("kept 0.6 of 2 cores busy" in capsys.readouterr().err) == expected


def test_warnings_are_one_line(plan_path: Path, says: Any, monkeypatch: Any) -> None:
    def warn(self: Plan) -> list[str]:
        warnings.warn("look out", stacklevel=1)
        return []

    monkeypatch.setattr(Plan, "inconsistencies", warn)
    assert says(["show", plan_path]).err == "placement: warning: look out\n"


@pytest.mark.parametrize("how", ["| true", ">&-", "| cat"])
def test_files_are_written_whatever_becomes_of_the_output(how: str, tmp_path: Path) -> None:
    """A reader that is gone, no output at all, one that cannot print a micro sign."""
    problem, out = tmp_path / "problem.json", tmp_path / "plan.json"
    save(small_problem(np.full((3, 2), 1e-5), chain(3)), problem)
    words = ["plan", str(problem), "--planner", "heft", "--out", str(out)]
    command = [sys.executable, "-m", "placement", *words]
    shell = ["bash", "-c", f"set -o pipefail; {shlex.join(command)} {how}"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(shell, env=env, capture_output=True, text=True)
    assert result.returncode == OK and "Traceback" not in result.stderr
    assert load_plan(out).planner.name == "heft"
    assert how != "| cat" or ("30 us" in result.stdout and "?" not in result.stdout)


UNREAD = {
    "plan": ["problem.json", "--planner", "heft", "--out", "a", "--trace", "b"],
    "import": ["problem.json", "--out", "a"],
    "export": ["plan.json", "--to", "csv", "--out", "a"],
    "report": ["plan.json", "--out", "a"],
    "run": ["plan.json", "--out", "a", "--trace", "b"],
    "bench": ["synthetic", "--planner", "heft", "--only", "layered", "--out", "a"],
}


@pytest.mark.parametrize("as_json", [False, True], ids=["talk", "json"])
@pytest.mark.parametrize("verb", UNREAD)
def test_files_are_written_though_nobody_reads_output_and_errors(
    verb: str, as_json: bool, plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``2>&1 | head -n 0``: the first message already meets a closed pipe."""
    save(small_problem(np.full((3, 2), 1e-5), chain(3)), tmp_path / "problem.json")
    (tmp_path / "plan.json").write_text(plan_path.read_text())
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    os.close(read)
    kept = [os.dup(1), os.dup(2)]
    streams = sys.stdout, sys.stderr
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(write, number)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
        code = main([verb, *UNREAD[verb], *["--json"] * as_json])
    finally:
        sys.stdout, sys.stderr = streams
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(write)
    assert code == OK
    expected = {name for name in UNREAD[verb] if name in ("a", "b")}
    assert all((tmp_path / name).stat().st_size > 100 for name in expected)


def test_a_pipe_that_breaks_in_the_work_is_no_success(plan_path, says, monkeypatch):
    broken = BrokenPipeError(errno.EPIPE, "Broken pipe")  # e.g. of another process
    monkeypatch.setattr(Plan, "inconsistencies", Mock(side_effect=broken))
    assert "Broken pipe" in says.error("show", plan_path)


def test_a_plan_that_cannot_be_saved_is_printed(home, tmp_path, says, monkeypatch):
    monkeypatch.setattr(Plan, "save", Mock(side_effect=FileError("no space left")))
    out, err = says(plan_args(home, "heft", "--out", tmp_path / "p.json"), BAD_INPUT)
    assert json.loads(out)["planner"]["name"] == "heft"
    assert "no space left; the plan is on standard output instead" in err


def test_a_plan_is_no_problem_and_names_of_devices_are_needed(plan_path, tmp_path, says):
    said = says.error("plan", plan_path, "--planner", "heft")
    assert "is a plan, not a problem: placement show" in said
    said = says.error("plan", "--start", plan_path, "--without", "")
    assert "--without names no device; devices are" in said
    other = changed(plan_path, tmp_path / "version.json", version="1")
    assert "did you mean 'version'" not in says.error("show", other)


def test_a_module_in_training_mode_is_told_of(tmp_path: Path, says: Any, monkeypatch: Any) -> None:
    (tmp_path / "unready.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def net(): return nn.Sequential(nn.Linear(2, 2), nn.Dropout()), (torch.ones(1, 2),)\n"
        "def ready(): m, x = net(); return m.eval(), x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "unready:net is in training mode" in says(["profile", "unready:net", "--features"]).err
    assert "training mode" not in says(["profile", "unready:ready", "--features"]).err


def test_the_plain_module_runs_with_the_threads_of_the_devices():
    """Otherwise ResNet-50 differs beyond the tolerance on any machine of several cores."""
    seen = []
    module = module_of(lambda m, x: seen.append(torch.get_num_threads()) or x + 1)

    class FakeRunner:
        cluster = Cluster("two", (Device("cpu:0", threads=2), Device("cpu:1", threads=2)))

        def __call__(self, x):
            return x + 1 + (x > 0)

    before = torch.get_num_threads()
    assert difference(FakeRunner(), module, torch.zeros(2)) == ""
    assert "not close" in difference(FakeRunner(), module, torch.ones(2))
    nothing = torch.full((2,), torch.nan)  # e.g. of a row of attention that is masked altogether
    assert difference(FakeRunner(), module, nothing) == ""
    assert seen == [2, 2, 2] and torch.get_num_threads() == before


def test_compiling_kernels_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SIGNS", progress.Signs(compiling_s=float("inf")))
    with cli.says_when_compiling():  # in a moment
        assert numba.njit(lambda x: x + 2)(1) == 3
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SIGNS", progress.Signs(compiling_s=0.0))

    with cli.says_when_compiling():
        for kernel in (lambda x: x + 1, lambda x: x - 1):
            assert numba.njit(kernel)(1) in (0, 2)
    assert numba.njit(lambda x: x)(1) == 1  # outside
    assert capsys.readouterr().err.count("placement: compiling kernels") == 1
