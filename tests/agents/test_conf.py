"""Every YAML composes and instantiates; the two Hydra commands end to end."""

import csv
import json
import logging
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object, instantiate

import agents.cli.compare
import agents.cli.train
from agents.cli.entries import EntryError, entries, planner_of, planners_of, workloads_of
from agents.cli.job import _tracker, explain
from agents.encoder import PolicyError
from agents.trained import TrainedPolicy
from agents.training import TrainConfig
from agents.training.expert import load_solutions
from placement import planners, workloads
from placement.planners import PlannerError
from placement.planners.heft import Heft
from placement.planners.random_search import RandomSearch
from placement.problem import Problem, Solution
from placement.report.gantt import PlotError
from placement.report.html import write_report
from placement.report.run_folder import measured_timelines
from placement.report.trace import read_traces
from placement.runs.compare import placement_id
from placement.runs.tracking import LocalTracker, Tracker, WandbTracker
from placement.testing import small_problems

pytestmark = pytest.mark.usefixtures("quick_profiles")
CONF = Path(__file__).parents[2] / "conf"
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in CONF.iterdir()
    if folder.is_dir() and folder.name != "__pycache__"
}


@pytest.fixture
def hydra_conf() -> Iterator[None]:
    with initialize_config_module("conf", version_base="1.3"):
        yield


@pytest.mark.usefixtures("hydra_conf")
def test_every_option_of_every_group_composes() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == {"compare", "shared", "train"}
    assert set(GROUPS) == {"cluster", "debug", "experiment", "launcher", "sweep", "tracker"}
    # The others: tests/agents/test_sweeps.py
    for group in ("cluster", "tracker"):
        for option in GROUPS[group]:
            get_object(compose("compare", [f"{group}={option}"])[group]._target_)


@pytest.mark.usefixtures("hydra_conf")
def test_every_field_of_a_training_can_be_given() -> None:
    words = ["training.learning_rate=0.5", "training.network.hidden=8", "training.gamma=0.9"]
    changed = instantiate(compose("train", words).training, _convert_="all")
    assert (changed.learning_rate, changed.network.hidden, changed.gamma) == (0.5, 8, 0.9)
    tiny = compose("train", ["experiment=released_dispatch", "debug=tiny"])
    assert (tiny.training.formulation, tiny.training.total_steps) == ("dispatch", 64)
    assert tiny.tracker._target_ == "placement.runs.tracking.Tracker"


@pytest.mark.parametrize(
    "words",
    ["--cfg job --multirun", "--resolve", "--cfg nothing", "--no-flag", "experiment=no", "nothing"],
)
def test_what_hydra_cannot_do_is_bad_input(run: Callable[..., Any], words: str) -> None:
    run("train", *words.split(), code=2)


def test_wandb_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``tracker=wandb`` or by its own variable, which a tracker that was given overrides."""

    def chosen(*words: str) -> Any:
        with initialize_config_module("conf", version_base="1.3"):
            cfg = compose("train", [*words], return_hydra_config=True)
            HydraConfig.instance().set_config(cfg)
            return _tracker(cfg)

    monkeypatch.delenv("WANDB_MODE")
    assert chosen() == LocalTracker()
    assert chosen("tracker=wandb") == WandbTracker(tags=[])
    assert chosen("tracker=wandb", "tracker.tags=[a]") == WandbTracker(tags=["a"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert chosen() == WandbTracker()
    assert chosen("tracker=local") == LocalTracker()
    assert chosen("tracker=none") == Tracker()


def test_the_learned_planner_has_a_name_like_the_others() -> None:
    assert planners.load("policy", k="4") == planners.load("agents.planner:PolicyPlanner", k=4)
    start = planners.load("policy", policy="untrained", search=False, baseline="round_robin")
    for first in (start, "policy"):
        answer = planners.load("local_search", start=first, evaluations=40)(small_problems()[0])
        assert np.isfinite(answer.value_s)
    meant = r"no planner 'polcy'; did you mean 'policy'\?.* policy,"
    with pytest.raises(PlannerError, match=meant):
        planners.load("polcy")


@pytest.mark.usefixtures("hydra_conf")
def test_clusters_and_training_instantiate(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ndevices: [{name: a}, {name: b}]\n")
    cfg = compose("train", ["cluster=file", f"cluster.path={file}"])
    assert instantiate(cfg.cluster).device_names == ("a", "b")
    assert instantiate(cfg.training, _convert_="all") == TrainConfig()
    cfg = compose("compare", ["cluster.max_cpu_devices=1"])
    assert instantiate(cfg.cluster).num_devices == 1


def test_an_entry_is_a_name_and_options() -> None:
    found = planners_of("planner", ["heft", "local_search start=heft patience=3"])
    assert found == {
        "heft": planners.load("heft"),
        "local_search": planners.load("local_search", start="heft", patience=3.0),
    }
    # Where a name occurs twice its options say which it is.
    both = ["policy k=1", "policy k=2"]
    assert list(planners_of("planner", both)) == both
    assert planner_of("baseline", "random_search seconds=2").seconds == 2.0
    for text, why in (
        ("heft k", "baseline: 'heft k': 'k' is not an option: write NAME KEY=VALUE"),
        ("heft 'k", "No closing quotation"),
        (3, "baseline: 3 must be a text, such as 'heft'"),
    ):
        with pytest.raises(ValueError, match=why):
            planner_of("baseline", text)


def test_a_pattern_is_every_name_that_it_matches() -> None:
    tiny = [n for n in workloads.names() if n.startswith("tiny_")]
    assert [x.name for x in entries("workload", "tiny_*", workloads.names())] == tiny
    some = entries("planner", ["heft", "*_dp evaluations=3"], planners.names())
    assert some[0].text == "heft" and len(some) > 3
    assert all(x.options == {"evaluations": "3"} and x.text.startswith(x.name) for x in some[1:])
    with pytest.raises(EntryError, match=r"planner=x\*: nothing matches; there are .*heft"):
        entries("planner", ["x*"], planners.names())


@pytest.fixture
def run(monkeypatch, tmp_path, tmp_path_factory, says):
    """A command in this process, in a new folder, without pictures; tests share the profiles."""
    not_drawn = Mock(side_effect=PlotError("drawing takes long"))
    for plot in ("gantt.plot_gantt", "curves.plot_curves", "pareto.plot_pareto"):
        monkeypatch.setattr(f"placement.report.{plot}", not_drawn)
    # Hydra composes every configuration twice, to look for ``hydra.mode``.
    monkeypatch.setattr("hydra._internal.hydra.Hydra.get_mode", lambda *_, **__: None)
    home = tmp_path_factory.getbasetemp() / "profiles"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACEMENT_HOME", str(home))
    monkeypatch.delenv("HYDRA_FULL_ERROR")

    def call(command: str, *words: str, code: int = 0) -> Any:
        main = {"compare": agents.cli.compare, "train": agents.cli.train}[command].main
        said = says(words, code, main)
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        return said

    return call


TINY = ("workload=tiny_mlp", "planner=[heft,local_search]", "evaluations=9", "repeats=1")
PREDICT = (*TINY, "execute=false", "tracker=none")


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "compare.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_compare_runs_what_it_plans(tmp_path, monkeypatch, capsys):
    # Two workloads, two planners, run for real: one job, one table, and everything in the folder.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "home"))
    words = ["workload=[tiny_mlp,tiny_branches]", "planner=[heft,round_robin]", "rounds=1"]
    words += ["repeats=1", "num_microbatches=4", "tracker=none", "hydra.run.dir=out"]
    assert agents.cli.compare.main(words) == 0
    assert "tiny_branches, measured" in capsys.readouterr().out
    out = tmp_path / "out"
    rows = rows_of(out)
    for workload in ("tiny_mlp", "tiny_branches"):
        mine = [r for r in rows if r["workload"] == workload]
        assert {r["planner"] for r in mine} >= {"heft", "round_robin", "single:cpu:0"}
        assert all(float(r["measured_period_s"]) > 0 for r in mine if r["feasible"] == "True")
        plan = json.loads((out / workload / "plan.json").read_text())
        assert plan["graph"]["workload"] == workload and plan["measured"]["n"] == 1
        predicted, measured = read_traces(out / workload / "trace.json")
        assert (predicted.kind, measured.kind) == ("predicted", "measured")
        # What the report shows of the best planner is this very run.
        (best,) = {str(r["placement_id"]) for r in mine if r["planner"] == plan["planner"]["name"]}
        recorded = measured_timelines(out, workload)[best]
        assert measured.period_s == pytest.approx(recorded.period_s, rel=1e-6)
        for name in ("gantt.png", "profile.npz"):
            assert (out / workload / name).stat().st_size > 0
    assert "seed: 0" in (out / ".hydra" / "config.yaml").read_text()
    assert "torch" in json.loads((out / "versions.json").read_text())
    assert (out / "compare.md").exists() and (out / "curves.png").stat().st_size > 0
    # Profiles are measured once: both are saved, and nothing else was written beside the folder.
    assert len(list((tmp_path / "home").rglob("*.npz"))) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"home", "out"}


def test_multirun(run: Callable[..., Any], tmp_path: Path) -> None:
    words = ["workload=tiny_mlp", "planner=heft,local_search", "seed=3", *PREDICT[2:]]
    run("compare", *words, "-m", "hydra.sweep.dir=sweep")  # anywhere in the line
    jobs = [
        (number, row["planner"], row["seed"])
        for number in range(2)
        for row in rows_of(tmp_path / f"sweep/{number}")
        if not row["planner"].startswith("single:")
    ]
    assert jobs == [(0, "heft", ""), (1, "local_search", "3")]  # heft has no seed


def test_an_interrupted_comparison_continues(run, tmp_path, monkeypatch):
    interrupted = Mock(side_effect=KeyboardInterrupt)
    words = (*PREDICT, "planner=[heft,random_search]")
    with monkeypatch.context() as patch:
        patch.setattr(RandomSearch, "__call__", interrupted)
        said = run("compare", *words, 'hydra.run.dir="an öut"', code=130).err
    (stderr,) = re.findall("to continue, the same command with (.*)", said)
    (again,) = shlex.split(stderr)
    assert again == f'hydra.run.dir="{tmp_path}/an öut"'
    with monkeypatch.context() as patch:
        patch.setattr(Heft, "__call__", interrupted)  # its answer is there already
        run("compare", *words, again)
    assert {"heft", "random_search"} <= {r["planner"] for r in rows_of(tmp_path / "an öut")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["planner='heft sead=3'"], "has no option 'sead'"),
        (["planner='local_search patience=soon'"], "patience = 'soon' is not of type float"),
        (["planner=hefd"], "no planner 'hefd'; did you mean 'heft'?"),
        (["planner=[hefd]"], "no planner 'hefd'; did you mean 'heft'?"),
        (["planner=no_such:Planner"], "no_such"),
        (["secondz=3"], "no setting 'secondz'; did you mean 'seconds'? (all of them: --cfg job)"),
        (["plannner=heft"], "no setting 'plannner'; did you mean 'planner'?"),
        (["planner.policy.k=3"], "written behind their name: \"planner=['policy k=3']\""),
        (["hydra.run.dir=öut"], """'hydra.run.dir="é/run"'"""),
        (["planner=[heft"], "at input '[heft'"),
        (["planner=heft,expert"], "add --multirun"),
        (["planner=[]"], "no planner: add e.g. planner=heft"),
        (["workload=tiny_mlq"], "unknown workload 'tiny_mlq'; did you mean 'tiny_mlp'?"),
        (["workload='tiny_mlp depth=3'"], "depth"),
        (["synthetic=layerd"], "synthetic: layerd is no family, nor {family: NAME, seeds: [0, 1]}"),
        (["synthetic=[{fam: random}]"], "synthetic: {'fam': 'random'} is no family"),
        (["synthetic=[{family: random, seeds: x}]"], "seeds = x: must be a whole number, or a"),
        # Before anything is measured:
        (["objective=speed"], "objective 'speed' is unknown; use one of period, latency"),
        (["max_in_flight=0"], "max_in_flight = 0 must be at least 1"),
        (["rounds=many"], "'many' of type 'str' could not be converted to Integer"),
        (["rounds=0"], "rounds = 0 must be at least 1"),
        (["seconds=-3"], "seconds = -3 must be positive; leave it out for no limit"),
        (["evaluations=0"], "evaluations = 0 must be positive; leave it out for no limit"),
        (["planner='local_search patience=-1'"], "must be at least 0"),
        (["seed=x"], "seed = x: must be a whole number"),
        (["hydra.run.dir=/dev/null/x"], "another run folder: hydra.run.dir="),
        (["cluster=file", "cluster.path=none.yaml"], "none.yaml"),
    ],
)
def test_what_a_wrong_command_says(run, words, message):
    stderr = run("compare", *PREDICT, *words, code=2).err
    assert message in stderr and stderr.startswith("placement: ")
    assert "Traceback" not in stderr


def test_a_run_folder_without_permission(run, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    try:
        (locked / "probe").touch()
    except PermissionError:
        pass
    else:
        pytest.skip("this user may write everywhere")
    err = run("compare", *PREDICT, f"hydra.run.dir={locked}/out", code=2).err
    assert f"cannot use {locked}/out: Permission denied" in err


CHAIN = """{"problem_version": 1, "model": "chain", "objective": "max_load",
 "cluster": {"name": "two", "devices": [{"name": "x"}, {"name": "y"}]},
 "operators": [{"name": "a", "compute_s": [3, 4]}, {"name": "b", "compute_s": [3, 2]}],
 "tensors": [{"producer": "a", "bytes": 8, "consumers": ["b"]}]}"""
GRAPH_TXT = """\
n1 -- Conv -- forward_compute_time=2, backward_compute_time=0, activation_size=9, parameter_size=0
n2 -- Conv -- forward_compute_time=2, backward_compute_time=0, activation_size=9, parameter_size=0
\tn1 -- n2
"""


def test_full_memory_and_files_without_a_name_are_no_defects_of_ours() -> None:
    """As in ``placement``: one line and exit code 2."""
    assert explain(MemoryError()) == "not enough memory for a problem of this size"
    assert explain(OSError("no route to host")) == "no route to host"
    assert explain(ZeroDivisionError()) is None
    full = "def write(): raise OSError(28, 'No space left on device')"  # into .hydra, while closing
    exec(full, hydra := {"__name__": "hydra.utils"})
    with pytest.raises(OSError) as raised:
        hydra["write"]()
    assert str(explain(raised.value)).startswith("cannot use the run folder: No space left")


def test_files_and_folders_among_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.json").touch()
    (tmp_path / "hf" / "Llama-3.2").mkdir(parents=True)  # of save_pretrained
    chosen = workloads_of(["tiny_mlp batch=3", "a b.json", "x.onnx", "g.txt devices=8 name=vgg",
                           "hf/Llama-3.2"])  # fmt: skip
    assert [(w.name, w.is_file, dict(w.options), w.is_default) for w in chosen] == [
        ("tiny_mlp", False, {"batch": 3}, False),
        ("a b", True, {}, False),
        ("x", True, {}, False),
        ("vgg", True, {"devices": 8}, False),
        ("Llama-3.2", False, {}, True),
    ]
    with pytest.raises(EntryError, match=r"two workloads are called 'x'.* 'y/x.json name=NAME'"):
        workloads_of(["y/x.json", "x.onnx"])


MINE = """
from torch import nn, zeros
def build():
    return nn.Linear(8, 8), (zeros(2, 8),)
from placement.planners.heft import Heft
class Late(Heft): pass
def early(problem): return Heft()(problem)
"""


def test_functions_and_configurations_of_ones_own(run, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["planner=[peft,mine:early,'mine:Late look_ahead=0.5']", "hydra.run.dir=out"]
    run("compare", "workload=[mine:build]", *words, *PREDICT[2:])
    rows = rows_of(tmp_path / "out")
    assert {r["workload"] for r in rows} == {"build"} and rows[-1]["planner"] == "Late"
    swept = ["-m", "workload=mine:build", "planner=heft,mine:early", "hydra.sweep.dir=swept"]
    run("compare", *swept, *PREDICT[2:])
    assert [rows_of(tmp_path / f"swept/{i}")[-1]["planner"] for i in (0, 1)] == ["heft", "early"]


FAULTY = """
import torch
from torch import nn
from placement.planners.heft import Heft
class Late(Heft): pass
lib = {"__name__": "torch_geometric.made"}  # whose layers are code in files of no package
exec(compile("def made(a, b): return a @ b", "/tmp/made.py", "exec"), lib)
class Layer(nn.Module):
    def __init__(self, hidden): super().__init__()
    def forward(self, x, batch, waves): return lib["made"](x, torch.ones(3, 3))
def reward(outcome): return outcome.nothing
"""


def test_errors_in_code_of_ones_own_say_where(run, tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["workload=[]", "training.generator=envs.generators:Layered", "debug=tiny"]
    words += ["baseline='faulty:Late look_ahead=0.5'", "hydra.run.dir=out"]
    at = f"raised in code of yours, {{}} ({tmp_path / 'faulty.py'}:{{}})"
    for seam, error, place, shapes in (
        ("network.encoder=faulty:Layer", "RuntimeError: mat1", ("Layer.forward", 10),
         "; encoder Layer was given x float32 ["),
        ("reward=faulty:reward", "AttributeError: 'Outcome'", ("reward", 11), "; HYDRA_FULL_ERROR"),
    ):  # fmt: skip
        stderr = run("train", *words, f"training.{seam}", code=2).err
        assert f"error: {error}" in stderr and at.format(*place) + shapes in stderr
        assert "Traceback" not in stderr
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    err = run("train", *words, "training.reward=faulty:reward", code=2).err
    assert "return outcome.nothing" in err  # the line of their code
    assert "leave out cluster" in run("train", *words, "cluster=this_machine", code=2).err
    # Their planner is where trainings start: without what is wrong it runs.
    run("train", *words, "training.samples=1")
    assert rows_of(tmp_path / "out")[0]["workload"] == "sample-0"


def test_problem_files_are_workloads(run, tmp_path):
    (tmp_path / "my chain.json").write_text(CHAIN)
    (tmp_path / "graph.txt").write_text(GRAPH_TXT)
    words = ["planner=heft", "repeats=1", "rounds=1", "tracker=none"]
    # A file beside a model that is run: both in one table, and only the model is measured.
    both = "workload=[tiny_mlp,'my chain.json']"
    run("compare", both, *words, "hydra.run.dir=out")
    rows = {(r["workload"], r["planner"]): r for r in rows_of(tmp_path / "out")}
    assert float(rows["my chain", "heft"]["period_s"]) == pytest.approx(3.0)
    assert float(rows["my chain", "single:y"]["period_s"]) == pytest.approx(6.0)
    assert not rows["my chain", "heft"]["measured_period_s"]
    assert float(rows["tiny_mlp", "heft"]["measured_period_s"]) > 0
    plan = json.loads((tmp_path / "out" / "my chain" / "plan.json").read_text())
    assert plan["graph"]["workload"] is None and plan["objective"] == "period"
    # Files alone, with options.
    file = "workload='graph.txt name=two devices=2 mode=inference'"
    run("compare", file, *words, "hydra.run.dir=two")
    told = {(r["workload"], r["num_ops"], r["num_devices"]) for r in rows_of(tmp_path / "two")}
    assert told == {("two", "2", "2")}
    for wrong, message in (
        (["workload=[graph.txt,none.json]"], "none.json: cannot be read"),
        (["workload=[graph.txt,graph.txt]"], "two workloads are called"),
        (["workload='graph.txt device=2'"], "no option 'device'; did you mean 'devices'?"),
        (["workload='graph.txt devices=two'"], "of the wrong type"),
        (["workload=[3]"], "workload: 3 must be a text"),
        (["workload=[]"], "no workload: add e.g."),
    ):
        assert message in run("compare", *wrong, *words, "hydra.run.dir=wrong", code=2).err


def test_described_devices_cannot_run(run, tmp_path):
    (tmp_path / "twice.yaml").write_text(
        "name: twice\ndevices:\n- {name: slow, like: 'cpu:0'}\n"
        "- {name: fast, like: 'cpu:0', speed: 2}\nlinks:\n"
        "- {src: slow, dst: fast, latency_s: 1e-6}\n- {src: fast, dst: slow, latency_s: 1e-6}\n"
    )
    words = (*PREDICT, "cluster=file", "cluster.path=twice.yaml", "hydra.run.dir=out")
    assert "add execute=false" in run("compare", *words, "execute=true", code=2).err
    run("compare", *words)
    latency = {r["planner"]: float(r["latency_s"]) for r in rows_of(tmp_path / "out")}
    assert latency["single:slow"] == pytest.approx(2 * latency["single:fast"])


def test_train(run: Callable[..., Any], tmp_path: Path) -> None:
    words = ["workload=tiny_branches", "repeats=1", "tracker=none", "hydra.run.dir=out"]
    words += ["training.total_steps=60", "training.num_envs=2", "training.network.hidden=8"]
    still = ["training.learning_rate=0", "training.last_learning_rate=0"]
    run("train", *words, *still)
    value = {r["planner"]: float(r["value_s"]) for r in rows_of(tmp_path / "out")}
    assert value["policy"] <= value["baseline"] and value["policy"] == value["untrained"]
    before, after = (TrainedPolicy.load(f"out/{x}.safetensors") for x in ("untrained", "policy"))
    assert str(before.net.state_dict()) == str(after.net.state_dict())  # of a network that stays
    assert (tmp_path / "out" / "metrics.csv").exists()
    # The policy goes on from its file, and is a planner of a comparison like any other.
    run("train", *words, "policy=out/policy.safetensors", "hydra.run.dir=more")
    assert {"given", "policy"} < {r["planner"] for r in rows_of(tmp_path / "more")}
    again = "planner='policy policy=more/policy.safetensors k=2'"
    run("compare", *PREDICT, again, "hydra.run.dir=last")
    assert "policy" in {r["planner"] for r in rows_of(tmp_path / "last")}


def test_a_training_by_the_clock_runs_what_it_tries(run, tmp_path):
    words = ["workload=tiny_branches", "repeats=1", "tracker=none", "hydra.run.dir=out"]
    words += ["evaluator=measured", "measurements=12", "num_microbatches=4", "baseline=heft"]
    words += ["training.formulation=one_shot", "training.total_steps=400"]
    told = run("train", *words, "training.network.hidden=8").err
    (file,) = (tmp_path / "out" / "measured").glob("*.jsonl")
    rounds = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert sum(len(r["seconds"]) for r in rounds) == 12  # the budget ends the training
    assert "in 12 runs; " in told and "inf" not in told and "nothing was learned" in told
    assert len((tmp_path / "out" / "metrics.csv").read_text().splitlines()) == 3  # the end, too
    # What ran fastest is the plan.
    ran = next(r for r in rows_of(tmp_path / "out") if r["planner"] == "ran")
    plan = json.loads((tmp_path / "out" / "tiny_branches" / "plan.json").read_text())
    with np.load(tmp_path / "out" / "best.npz") as best:
        assert placement_id(best["placement_0"]) == ran["placement_id"]
    assert plan["planner"]["name"] == "ran"
    # Another training in the same folder has all its runs.
    (tmp_path / "out" / "checkpoint.pt").unlink()
    another = run("train", *words, "training.network.hidden=8", "seed=1").err
    assert "in 12 runs; " in another and "nothing was learned" in another


def test_of_a_generator_the_table_is_written_and_no_plans(run, tmp_path, monkeypatch):
    begun: list[Any] = []
    begin = Tracker.run
    monkeypatch.setattr(Tracker, "run", lambda *a: begun.append(a) or begin(*a))
    words = ["experiment=released_dispatch", "debug=tiny", "training.samples=9"]
    words += ["training.total_steps=100", "training.steps_per_env=100", "hydra.run.dir=out"]
    stdout = run("train", *words).out
    assert "tables of each of the 9 workloads: compare.md" in stdout and "sample-0" not in stdout
    # A tracker has all to repeat it.
    assert begun[0][2]["versions"]["torch"] == metadata.version("torch")
    samples = {r["workload"] for r in rows_of(tmp_path / "out")}
    assert samples == {f"sample-{i}" for i in range(9)}
    folders = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert folders == {".hydra", "cells", "problems"}
    assert write_report(tmp_path / "out").num_workloads == 9


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("variants=1", "makes the problems, as it likes: leave out variants"),
        ("objective=period", "leave out objective"),
        ("warm_start=imitation", "leave out warm_start"),
        ("workload=tiny_mlp", "leave out workload; say 'workload=[]'"),
        ("held_out=many", "'many' of type 'str' could not be converted to Float"),
        ("total_steps=9", "no setting 'total_steps'; did you mean 'training.total_steps'?"),
        ("training.totl_steps=9", "no setting 'training.totl_steps'; did you mean 'training.total"),
        ("trainng.total_steps=9", "no setting 'trainng.total_steps'; did you mean 'training.total"),
        ("training.learning_rate=fast", "learning_rate = 'fast' is not of type float"),
        ("training.total_steps=2.5", "total_steps = 2.5 is not of type int"),
        ("training.gamma=2", "gamma = 2.0 must be 0 to 1"),
        ("training.device=warp", "device = 'warp' is not here; use cpu"),
        ("training.reward=envs.rewards:log_speedups", "reward = envs.rewards:log_speedups would"),
        ("training.gamma=0.9", "gamma = 0.9 would count for nothing: agents.dispatch.train:Group"),
        ("training.network.hidden=64", "DispatchNet has no 'hidden'"),
        ("evaluator=real", "evaluator = real is unknown; use simulator or measured"),
        (
            "measurements=9",
            "measurements = 9 counts runs, and the simulator makes none: evaluator=",
        ),
        ("evaluator=measured", "sample-0 must be a model on devices of this machine"),
        ("+training.algorithm_options.episods=4", "no 'episods' (algorithm_options); did you mean"),
    ],
)
def test_what_a_wrong_training_says(run, word, message):
    begin = ["experiment=released_dispatch", "debug=tiny", "training.samples=1"]
    stderr = run("train", *begin, "hydra.run.dir=out", word, code=2).err
    assert message in stderr and "Traceback" not in stderr


def test_an_interrupted_training_says_how_it_goes_on(run, tmp_path, monkeypatch):
    monkeypatch.setattr("agents.training.train", Mock(side_effect=KeyboardInterrupt))
    words = ("workload=[]", "synthetic=[giph]", "tracker=none", "hydra.run.dir=out")
    stderr = run("train", *words, code=130).err
    wanted = f"the same command with hydra.run.dir={tmp_path / 'out'} resume=true\n"
    assert wanted in stderr and "nothing to resume" not in stderr
    # torch would say how often it used its caches, after the last word.
    assert not logging.getLogger("torch._subclasses.fake_tensor").isEnabledFor(logging.INFO)
    err = run("train", *words, "resume=true", code=130).err
    assert f"nothing to resume in {tmp_path / 'out'}: there is no" in err
    (tmp_path / "out" / "checkpoint.pt").touch()
    assert "nothing to resume" not in run("train", *words, "resume=true", code=130).err
    assert "holds a training, which this one would replace" in run("train", *words, code=2).err


def test_a_training_that_begins_anew_is_tracked_from_its_first_row(run, tmp_path, monkeypatch):
    """Who deletes a checkpoint, as messages advise, and resumes nothing: old rows count no more."""

    def trained(*_: Any, callback: Any, **__: Any) -> None:
        callback({"steps": 5.0, "greedy_speedup": 1.5, "best_speedup": 2.0})
        raise KeyboardInterrupt

    monkeypatch.setattr("agents.training.train", trained)
    words = ("workload=[]", "synthetic=[giph]", "tracker=local", "hydra.run.dir=out")
    for checkpoint in (False, False, True):  # the third goes on, and its row is known
        if checkpoint:
            (tmp_path / "out" / "checkpoint.pt").touch()
        run("train", *words, "resume=true", code=130)
        tracked = (tmp_path / "out" / "tracked.csv").read_text()
        assert tracked.count("greedy_speedup,5,1.5\n") == 1
        (tmp_path / "out" / "metrics.csv").write_text("steps\n5.0\n")


def test_what_is_refused_leaves_no_tracked_run(run, tmp_path, monkeypatch):
    refused = PolicyError("a checkpoint of another training")
    monkeypatch.setattr("agents.training.train", Mock(side_effect=refused))
    words = ("workload=[]", "tracker=wandb", "tracker.mode=offline", "hydra.run.dir=out")
    run("train", *words, "synthetic=[giph]", "resume=true", code=2)
    run("compare", *words[1:], "workload=none.json", "planner=heft", code=2)
    assert not list((tmp_path / "out").glob("wandb*"))


def test_train_on_synthetic_problems(run, tmp_path):
    words = ["workload=[]", "synthetic=[{family: giph, seeds: [0, 1]}]", "tracker=none"]
    words += ["training.total_steps=64", "training.num_envs=2", "training.network.hidden=8"]
    words += ["num_microbatches=1", "objective=max_load", "evaluations=200", "variants=1"]
    run("train", *words, "hydra.run.dir=g")
    rows = rows_of(tmp_path / "g")
    assert {r["workload"] for r in rows} == {"giph-0", "giph-1"}
    card = TrainedPolicy.load(tmp_path / "g" / "policy.safetensors").card
    assert len(card["problems"]) == 4  # and each on another machine
    # Finished: resuming changes nothing.
    again = [*words, "hydra.run.dir=g", "resume=true"]
    run("train", *again)
    values = [(r["workload"], r["planner"], r["value_s"]) for r in rows]
    assert [(r["workload"], r["planner"], r["value_s"]) for r in rows_of(tmp_path / "g")] == values
    imitate = ["warm_start=imitation", "expert=heft", "training.imitation_epochs=2"]
    one = ["training.formulation=one_shot", "training.network.encoder=dag", "hydra.run.dir=i"]
    run("train", *words, *imitate, *one)
    both = ["giph-0", "giph-0/0", "giph-1", "giph-1/0"]
    solved = load_solutions(tmp_path / "i" / "solutions.npz")
    assert sorted(key.partition(" ")[0] for key in solved) == both
    # An interrupted run that begins anew does not imitate what another expert found.
    (tmp_path / "i" / "checkpoint.pt").unlink()
    run("train", *words, *imitate, *one, "resume=true", "expert='random_search evaluations=1'")
    assert len(load_solutions(tmp_path / "i" / "solutions.npz")) == 8
    # A formulation of one's own in the working directory is found while the settings are read.
    text = "from envs.formulations import Formulation\nown = Formulation('own_steps:own', 'x:Env')"
    (tmp_path / "own_steps.py").write_text(text)
    words += ["training.formulation=own_steps:own"]
    err = run("train", *words, "warm_start=magic", "hydra.run.dir=x", code=2).err
    assert "use baseline or imitation" in err
    for seed, message in (
        ("-1", "seed = -1: must be a whole number"),
        ("x", "seed = x: a training has one"),
        ("[0,1]", "several: placement-train -m seed=0,1"),
    ):
        assert message in run("train", *words, f"seed={seed}", "hydra.run.dir=x", code=2).err


def test_a_resumed_training_begins_where_it_began(run, monkeypatch):
    """Its baseline may have a clock, so that it answers differently each time."""
    words = ["workload=[]", "synthetic=[giph]", "tracker=none", "training.total_steps=64"]
    words += ["training.network.hidden=8", "objective=latency", "seed=7", "hydra.run.dir=out"]
    words += ["baseline='random_search evaluations=5'", "evaluations=20"]
    seeds: list[int] = []
    search = RandomSearch.__call__

    def noted(self: RandomSearch, problem: Problem) -> Solution:
        seeds.append(self.seed)
        return search(self, problem)

    monkeypatch.setattr(RandomSearch, "__call__", noted)
    run("train", *words)
    assert set(seeds) == {7}  # the training's own: the baseline that it is compared with
    # As if the clock had ended it elsewhere.
    monkeypatch.setattr(
        RandomSearch, "__call__", lambda self, problem: search(replace(self, seed=3), problem)
    )
    run("train", *words, "resume=true")
