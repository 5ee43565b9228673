"""Sweeps: jobs that have finished are not run again, launchers agree, many jobs are one table."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

import agents.cli.compare
import agents.cli.sweep_report
import agents.cli.train
from agents.cli import sweeps
from agents.cli.sweeps import SweepJob, aggregate, geometric_mean, read_sweep, to_table
from placement.report import table
from placement.report.row import Row
from placement.report.table import Comparison
from placement.tools.files import write_atomic

CONF = Path(__file__).parents[2] / "conf"
ENTRY = {"planners": "compare", "formulations": "train", "hyperparameters": "train"}
PLUGIN = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "submitit_slurm": "hydra_submitit_launcher",
    "ray": "hydra_ray_launcher",
    "hyperparameters": "hydra_optuna_sweeper",
}


def need(name: str) -> None:
    """Skip, visibly, where the plugin of a configuration is not installed."""
    plugin = PLUGIN.get(name)
    # hydra_plugins is a namespace that exists only if some plugin is installed.
    has_any = importlib.util.find_spec("hydra_plugins") is not None
    if plugin and not (has_any and importlib.util.find_spec(f"hydra_plugins.{plugin}")):
        pytest.skip(f"{plugin} is not installed")


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("launcher", names("launcher"))
def test_every_launcher_composes_and_instantiates(launcher: str) -> None:
    need(launcher)
    for entry in ("compare", "train"):
        with initialize_config_module("conf", version_base="1.3"):
            cfg = compose(entry, [f"launcher={launcher}"], return_hydra_config=True)
        assert cfg.hydra.runtime.choices["hydra/launcher"] == launcher
        assert "launcher" not in cfg
        built = Plugins.instance()._instantiate(cfg.hydra.launcher)  # instantiate() refuses these
        assert isinstance(built, Launcher)


@pytest.mark.parametrize("sweep", names("sweep"))
def test_every_sweep_composes_and_instantiates(sweep: str) -> None:
    need(sweep)
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose(ENTRY[sweep], [f"sweep={sweep}"], return_hydra_config=True)
        assert isinstance(Plugins.instance()._instantiate(cfg.hydra.sweeper), Sweeper)
        # The folder has no date in it: the same command continues.
        assert cfg.hydra.sweep.dir == f"runs/sweep/{sweep}"
        for key, values in cfg.hydra.sweeper.params.items():  # and every job of it composes
            if "(" not in values:
                for value in values.split(","):
                    compose(ENTRY[sweep], [f"sweep={sweep}", f"{key}={value}"])
            else:
                compose(ENTRY[sweep], [f"sweep={sweep}", f"{key}=1"])


@pytest.fixture
def run(monkeypatch, tmp_path, tmp_path_factory):
    """A sweep of predictions in a new folder; the profile is shared by the tests."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path_factory.getbasetemp() / "profiles"
    monkeypatch.setenv("PLACEMENT_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(CONF.parent))  # for processes of launchers

    def call(*words: str, module: Any = agents.cli.compare) -> int:
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        return module.main(words)

    return call


SWEEP = ("sweep=planners", "workload=tiny_mlp", "planner=heft,random_search", "seed=0,1")
SWEEP = (*SWEEP, "evaluations=20", "repeats=1", "tracker=none")


def values(folder: Path) -> dict[tuple[str, str], float]:
    """What every job of two planners and two seeds found."""
    jobs = read_sweep(folder)
    assert [job.status for job in jobs] == ["finished"] * 4
    return {
        (row.planner, job.overrides["seed"]): row.value_s
        for job in jobs
        for row in job.rows
        if not row.planner.startswith("single:")
    }


def _called(planner: str) -> str:
    """The name of an entry."""
    return planner.rpartition(":")[2]


class Work:
    """Stands for a comparison: ``ends`` says of which jobs (planner, seed) how they end."""

    def __init__(self, **ends: BaseException) -> None:
        self.ran: list[str] = []
        self.ends = ends

    def __call__(self, cfg: Any) -> float:
        job = f"{_called(cfg.planner)}_{cfg.seed}"
        self.ran.append(job)
        if job in self.ends:
            raise self.ends.pop(job)
        answer = row(_called(cfg.planner), cfg.seed, 1.0 + cfg.seed)
        folder = Path(HydraConfig.get().runtime.output_dir)
        write_atomic(folder / "compare.csv", table.to_csv(Comparison((answer,), {})))
        return answer.value_s


def test_an_interrupted_sweep_continues_with_the_same_command(run, monkeypatch, capsys):
    work = Work(random_search_1=KeyboardInterrupt())
    monkeypatch.setattr(agents.cli.compare, "_compare", work)
    assert run(*SWEEP, "hydra.sweep.dir=s") == 130
    assert [job.status for job in read_sweep("s")] == ["finished"] * 3 + ["unfinished"]
    capsys.readouterr()
    assert agents.cli.sweep_report.main(["s"]) == 0
    stdout = " ".join(capsys.readouterr().out.split())
    assert "3 of 4 jobs" in stdout and "unfinished: job 3 seed=1" in stdout
    assert run(*SWEEP, "hydra.sweep.dir=s") == 0
    assert work.ran == ["heft_0", "random_search_0", "heft_1", *["random_search_1"] * 2]
    assert capsys.readouterr().err.count("has finished before") == 3
    assert set(values(Path("s")).values()) == {1.0, 2.0}
    # How it is tracked is no other configuration; a new seed is two more jobs.
    assert run(*SWEEP, "tracker=local", "seed=0,1,2", "hydra.sweep.dir=s") == 0
    assert work.ran[5:] == ["heft_2", "random_search_2"]
    # Another configuration does not replace results.
    capsys.readouterr()
    assert run(*SWEEP, "evaluations=21", "hydra.sweep.dir=s") == 2
    assert "holds the result of another configuration" in capsys.readouterr().err


def test_how_jobs_are_run_is_no_other_configuration(run, monkeypatch):
    """Nor a setting: who is interrupted is told to add ``resume=true``."""
    ran: list[int] = []
    monkeypatch.setattr(agents.cli.train, "_train", lambda cfg: ran.append(cfg.seed) or 1.0)
    words, how = ("-m", "hydra.sweep.dir=s"), ("resume=true", "--json", "parallel=processes")
    assert run(*words, "seed=0", module=agents.cli.train) == 0
    assert run(*words, "seed=0,1", *how, module=agents.cli.train) == 0
    assert ran == [0, 1]
    more = {"resume": "true", "launcher": "joblib", "tracker.tags": "[x]"}
    jobs = finished("0", row("walk", 0, 0.5), seed="0"), finished("1", row("walk", 1, 0.5), **more)
    assert [(a.label, a.num_seeds) for a in aggregate(jobs).aggregates] == [("walk", 2)]


@pytest.mark.parametrize("file", ["p.json", "p.py"])
def test_a_changed_file_is_another_configuration(run, tmp_path, monkeypatch, file):
    """A problem, or the code of a planner."""
    work = Work()
    monkeypatch.setattr(agents.cli.compare, "_compare", work)
    words = ["sweep=planners", "workload=[p.json]", "planner=p:x,heft", "seed=0"]
    (tmp_path / file).write_text("one")
    assert run(*words, "hydra.sweep.dir=s") == run(*words, "hydra.sweep.dir=s") == 0
    (tmp_path / file).write_text("two")
    assert run(*words, "hydra.sweep.dir=s") == 2
    assert work.ran == ["x_0", "heft_0"]


def test_a_failed_job_is_named_and_run_again(run, tmp_path, monkeypatch, capsys):
    work = Work(heft_0=RuntimeError("no luck"))
    monkeypatch.setattr(agents.cli.compare, "_compare", work)
    assert run(*SWEEP, "hydra.sweep.dir=s") == 2  # in code that is not ours; the others are run
    assert "RuntimeError: no luck" in capsys.readouterr().err
    assert [job.status for job in read_sweep("s")] == ["failed"] + ["finished"] * 3
    capsys.readouterr()
    assert agents.cli.sweep_report.main(["s", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [job["error"] for job in answer["jobs"]] == ["RuntimeError: no luck", "", "", ""]
    seeds = [(a["planner"], a["num_seeds"]) for a in answer["aggregates"]]
    assert seeds == [("random_search", 2), ("heft", 1)]
    assert "failed: job 0 " in (tmp_path / "s" / "sweep.md").read_text()
    assert run(*SWEEP, "hydra.sweep.dir=s") == 0
    assert len(values(tmp_path / "s")) == 4 and work.ran[4:] == ["heft_0"]


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_launchers_find_the_same(run, tmp_path, launcher, monkeypatch):
    need(launcher)
    assert run(*SWEEP, "hydra.sweep.dir=basic") == 0
    if launcher != "ray":
        assert run(*SWEEP, f"launcher={launcher}", f"hydra.sweep.dir={launcher}") == 0
    else:
        import ray

        monkeypatch.setenv("RAY_health_check_failure_threshold", "100")  # a busy machine is alive
        more = ["launcher=ray", "hydra.launcher.ray.init.num_cpus=2", "hydra.sweep.dir=ray"]
        try:
            assert run(*SWEEP, *more) == 0
        finally:
            ray.shutdown()  # it lasts as long as this process, and other tests start their own
    assert values(tmp_path / launcher) == values(tmp_path / "basic")


def test_optuna_goes_on_from_what_it_was_told(run, tmp_path, monkeypatch):
    need("hyperparameters")
    asked: list[float] = []

    def train(cfg: Any) -> float:
        asked.append(cfg.training.learning_rate)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return abs(math.log(cfg.training.learning_rate) - math.log(1e-3))

    words = ["sweep=hyperparameters", "hydra.sweeper.n_trials=5", "workload=tiny_mlp"]
    with monkeypatch.context() as patch:
        patch.setattr(agents.cli.train, "_train", train)
        assert run(*words, "hydra.sweep.dir=a", module=agents.cli.train) == 130
        assert run(*words, "hydra.sweep.dir=a", module=agents.cli.train) == 0
        interrupted, asked[:] = asked[:2] + asked[3:], [0.0] * 3
        assert run(*words, "hydra.sweep.dir=b", module=agents.cli.train) == 0
    assert interrupted == asked[3:] and len(set(interrupted)) == 5
    best = (tmp_path / "a" / "optimization_results.yaml").read_text()
    assert best == (tmp_path / "b" / "optimization_results.yaml").read_text()


def row(planner: str, seed: int | None, value_s: float, workload: str = "net") -> Row:
    feasible = bool(np.isfinite(value_s))
    about = workload, planner, seed, "period", 3, 2, None, feasible
    return Row(*about, *[value_s] * 3, speedup=1.0 / value_s if feasible else None)


def finished(name: str, *rows: Row, **overrides: str) -> SweepJob:
    return SweepJob(name, overrides, "finished", 1.0, rows=rows)


def test_geometric_means_and_student_intervals() -> None:
    # Logarithms 0, 1, 2: mean 1, deviation 1; Student's t for 2 degrees of freedom is 4.3027.
    mean, low, high = geometric_mean([1.0, math.e, math.e**2])
    assert mean == pytest.approx(math.e)
    assert low == pytest.approx(math.exp(1 - 4.30265 / math.sqrt(3)), rel=1e-5)
    assert high == pytest.approx(math.exp(1 + 4.30265 / math.sqrt(3)), rel=1e-5)
    assert geometric_mean([3.0]) == (pytest.approx(3.0), None, None)


def test_aggregation_over_seeds_and_workloads() -> None:
    same = [row("single:cpu:0", None, 1.0), row("single:cpu:0", None, 1.0, "other")]
    same += [row("fixed", None, 0.25)] * 2  # the same cell in both jobs of a seed: counted once
    jobs = []
    for seed, walk_s, fails_s in ((0, 0.5, 0.5), (1, 1.0, np.inf)):
        rows = [row("walk", seed, walk_s), row("walk", seed, 0.125, "other")]
        rows.append(row("fails", seed, fails_s))
        jobs.append(finished(str(seed), *same, *rows, seed=str(seed), planner="whatever"))
    report = aggregate(jobs)
    by_key = {(a.planner, a.workload): a for a in report.aggregates}
    assert by_key["walk", "net"].value_s == pytest.approx(math.sqrt(0.5))
    assert by_key["walk", "net"].num_seeds == 2
    # Over workloads, a value of each seed: sqrt(0.5 * 0.125) = 0.25 and sqrt(1 * 0.125).
    over = by_key["walk", None]
    assert over.value_s == pytest.approx(math.sqrt(0.25 * math.sqrt(0.125)))
    assert over.value_low_s is not None and over.value_low_s < over.value_s
    assert by_key["fixed", "net"].num_seeds == 2 and by_key["fixed", "net"].speedup == 4.0
    assert by_key["fixed", "net"].speedup_low == by_key["fixed", "net"].speedup_high == 4.0
    assert ("fixed", None) not in by_key  # it has no answer for the other workload
    # What has no answer counts as the best single device, and is told.
    assert by_key["fails", "net"].value_s == pytest.approx(math.sqrt(0.5))
    assert by_key["fails", "net"].num_unanswered == 1
    assert any("fails, net: 1 without an answer" in note for note in to_table(report).notes)
    assert not any(a.planner.startswith("single:") for a in report.aggregates)


def test_a_workload_that_no_single_device_holds_has_no_speedup() -> None:
    """It is left out of the means: on "net" 4.0, on "split" nothing to compare with."""
    split = replace(row("walk", 0, 0.5, "split"), speedup=None)
    alone = row("single:cpu:0", None, 1.0), row("single:cpu:0", None, np.inf, "split")
    rows = *alone, row("walk", 0, 0.25), split, row("fails", 0, np.inf, "split")
    report = aggregate([finished("0", *rows, seed="0")])
    speedups = {(a.planner, a.workload): a.speedup for a in report.aggregates}
    assert speedups["walk", "net"] == speedups["walk", None] == 4.0
    assert np.isnan(speedups["walk", "split"]) and np.isnan(speedups["fails", "split"])
    assert next(line for line in to_table(report).cells if line[1] == "split")[-2] == "–"
    written = {a["workload"]: a["speedup"] for a in sweeps.to_json(report)["aggregates"]}
    assert written["split"] is None and ",nan," not in sweeps.to_csv(report)


@pytest.mark.parametrize(
    ("objectives", "head", "value"),
    [(("period",), "value ms", "500"), (("energy",), "value J", "0.500"),
     (("latency", "energy"), "value J or s", "0.500")],
)  # fmt: skip
def test_values_have_the_unit_of_their_objective(objectives, head: str, value: str) -> None:
    rows = [replace(row("walk", 0, 0.5, name), objective=name) for name in objectives]
    shown = to_table(aggregate([finished("0", *rows, seed="0")]))
    assert head in shown.header
    assert {line[2] for line in shown.cells} == {value}


def test_what_else_was_swept_is_a_setting_of_its_own() -> None:
    def job(i: int, patience: str, value_s: float) -> Any:
        settings = {"seed": "0", "evaluations": "9", "planner.walk.patience": patience}
        return finished(str(i), row("walk", 0, value_s), **settings)

    jobs = [job(0, "1", 0.5), job(1, "2", 0.25)]
    values = {a.label: a.value_s for a in aggregate(jobs).aggregates}
    assert values == {"walk patience=1": pytest.approx(0.5), "walk patience=2": pytest.approx(0.25)}


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (("'walk k=8'", "'walk k=64'"), {"walk k=8", "walk k=64"}),
        (("walk", "[walk,heft]"), {"walk", "walk planner=[walk,heft]"}),
        (("walk", "*alk"), {"walk"}),
    ],
)
def test_a_planner_with_other_options_is_another_setting(texts: Any, labels: set[str]) -> None:
    values = (0.5, 0.25)
    jobs = [finished(x, row("walk", 0, s), planner=x) for x, s in zip(texts, values, strict=True)]
    assert {a.label for a in aggregate(jobs).aggregates} == labels


def test_measured_speedups_are_reported_where_all_are_measured() -> None:
    measured = replace(row("walk", 0, 0.5), measured_speedup=1.5, num_rounds=3)
    assert aggregate([finished("0", measured, seed="0")]).aggregates[0].speedup == 1.5
    both = [finished("0", measured, row("heft", None, 0.5), seed="0")]
    assert {a.speedup for a in aggregate(both).aggregates} == {2.0}


def test_measured_speedups_beside_a_workload_that_fits_on_no_device() -> None:
    """It was measured, and has no speed-up over one device: the others keep theirs."""
    one = replace(row("walk", 0, 0.5), measured_speedup=1.5, num_rounds=3)
    split = replace(row("walk", 0, 0.5, "split"), speedup=None, num_rounds=3)
    report = aggregate([finished("0", one, split, seed="0")])
    assert report.is_measured
    assert next(a.speedup for a in report.aggregates if a.workload == "net") == 1.5


def test_jobs_of_another_command_in_the_same_folder() -> None:
    """What one of them was given and the other was not."""
    jobs = [
        finished("0", row("walk", 0, 0.5), seed="0"),
        finished("1", row("walk", 0, 0.25), seed="0", evaluations="9"),
    ]
    values = {a.setting: a.value_s for a in aggregate(jobs).aggregates}
    assert values == {"": 0.5, "evaluations=9": 0.25}


@pytest.mark.parametrize(
    ("other", "is_best"),
    [
        ({"value_s": 0.25}, False),
        ({"value_s": 0.25, "objective": "latency"}, True),  # seconds of something else
        ({"value_s": 0.25, "workload": "other"}, True),
        ({"value_s": 0.25, "num_rounds": 3, "measured_period_s": 0.1}, True),  # measured
        ({"value_s": 0.75}, True),
    ],
)
def test_the_best_of_a_sweep_is_the_best_of_what_was_asked(other, is_best, tmp_path, monkeypatch):
    mine = row("walk", 0, 0.5)
    monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(mode=sweeps.RunMode.MULTIRUN))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / sweeps.RESULT).write_text('{"status": "finished"}')
    theirs = finished("1", replace(mine, **other))
    monkeypatch.setattr(sweeps, "_read_job", lambda folder: theirs)
    assert sweeps.is_best_of_sweep(tmp_path / "0", mine) is is_best


def test_the_table_fits(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("simulated_annealing", s, 0.1 + 1e-3 * s, "tiny_branches") for s in range(3)]
    jobs = [finished(str(r.seed), r, seed=str(r.seed)) for r in rows]
    table.print_tables([to_table(aggregate(jobs))])
    out = capsys.readouterr().out
    assert "simulated_annealing" in out and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("params", "task", "number"),
    [
        ("{seed: '0,1'}", "['planner=a,b,c', x=1]", 6),
        ("{seed: '0,1'}", "[seed=0]", 1),
        ("null", "['planner=glob(*)']", 0),
        ("null", "[]", 1),
        ("[]", "1", 0),
    ],
)
def test_jobs_that_have_not_begun_are_counted(tmp_path, params, task, number):
    text = f"hydra: {{sweeper: {{params: {params}}}, overrides: {{task: {task}}}}}"
    (tmp_path / "multirun.yaml").write_text(text)
    assert sweeps.num_asked(tmp_path) == number
    (tmp_path / "0" / ".hydra").mkdir(parents=True)
    (tmp_path / "0" / ".hydra" / "hydra.yaml").write_text("hydra: {sweeper: {n_trials: 20}}")
    assert sweeps.num_asked(tmp_path) == 20
    shown = to_table(aggregate([finished("0", row("walk", 0, 0.5), seed="0")], number))
    assert shown.title.startswith(f"1 of {max(number, 1)} jobs have finished")
    assert (f"not begun: {number - 1} jobs" in shown.notes) == (number > 1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"status": "finished"}'])
def test_damaged_results_are_not_believed(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "0"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("- seed=0\n")
    (folder / sweeps.RESULT).write_text(text)
    (job,) = read_sweep(tmp_path)
    assert job.status in ("unfinished", "failed") and not job.rows


def test_a_folder_without_jobs_is_an_error(tmp_path: Path, capsys: Any) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(sweeps.SweepError):
            read_sweep(folder)
        assert agents.cli.sweep_report.main([str(folder)]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_launcher_without_its_plugin_says_what_to_install(run, capsys):
    assert run(*SWEEP, "hydra/launcher=nowhere") == 2
    assert "pip install 'device-placement-rl[sweep]'" in capsys.readouterr().err
