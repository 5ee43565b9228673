"""The trackers: offline W&B run folders with everything in them, and runs that always end."""

import json
import struct
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

import agents.cli.compare
from placement.report.table import Comparison
from placement.runs.tracking import NUM_POINTS, SECONDS, LocalTracker, Mirror, Tracker, WandbTracker
from tests.report.test_curves import row


def comparison(*values_s: float) -> Comparison:
    rows = (row("heft", value, seed, "net") for seed, value in enumerate(values_s))
    return Comparison(tuple(rows), {})


def records(folder: Path) -> list[Record]:
    """Everything that the finished offline run below ``folder`` holds for the server.

    Its last record may reach the disk a moment after ``finish`` has returned.
    """
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for _ in range(100):
        parsed = read_log(file.read_bytes())
        if any(r.HasField("exit") for r in parsed):
            return parsed
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


def read_log(data: bytes) -> list[Record]:
    """The whole records of a W&B log.

    The file is a LevelDB log after a header of 7 bytes: blocks of 32 KiB, in which every piece
    has a checksum (4 bytes), a length (2) and a type (1: whole, 2: first, 3: middle, 4: last).
    """
    log, parts, at = [], b"", 7
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            break
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            log.append(Record.FromString(parts))
            parts = b""
    return log


def artifacts(log: list[Record]) -> dict[str, tuple[str, list[str]]]:
    """Kind and aliases by name; W&B adds artifacts of its own (tables, the job)."""
    sent = [r.artifact for r in log if r.HasField("artifact")]
    asked = [r.request for r in log if r.HasField("request")]
    sent += [r.log_artifact.artifact for r in asked if r.HasField("log_artifact")]
    ours = ("plan", "policy", "profile", "report")
    return {a.name: (a.type, sorted(a.aliases)) for a in sent if a.type in ours}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: False)
    for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))


def test_no_tracker_writes_nothing(tmp_path: Path) -> None:
    with Tracker().run(tmp_path, {}, "compare") as mirror:
        mirror.log({"x": 1.0})
        mirror.comparison(comparison(1.0))
        mirror.image("picture", tmp_path / "none.png")
        mirror.artifact("plan-net", "plan", tmp_path / "none.json")
    assert type(mirror) is Mirror and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("offline")
def test_wandb_is_offline_by_default_and_holds_everything(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    folder.mkdir()
    (folder / "plan.json").write_text("{}")
    with WandbTracker().run(folder, {"seed": 5}, "compare", "sweep-1") as mirror:
        mirror.log({"greedy_speedup": 1.5}, step=3)
        mirror.comparison(comparison(0.5, np.inf))
        mirror.artifact("plan-net/1", "plan", folder / "plan.json", aliases=["best"])
    assert wandb.run is None  # finished
    log = records(folder)
    (run,) = [r.run for r in log if r.HasField("run")][:1]
    assert (run.job_type, run.run_group, run.display_name) == ("compare", "sweep-1", "sweep-1/0")
    assert {u.key: u.value_json for u in run.config.update}["seed"] == "5"
    assert artifacts(log) == {"plan-net-1": ("plan", ["best", "latest"])}
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert content["columns"][:3] == ["workload", "planner", "seed"]
    assert [row[:3] for row in content["data"]] == [["net", "heft", 0], ["net", "heft", 1]]
    # Best-so-far curves have seconds of planning as their own axis.
    points = [
        {i.nested_key[0] if i.nested_key else i.key: i.value_json for i in r.history.item}
        for r in log
        if r.HasField("history")
    ]
    curve = [float(p["best_so_far/heft"]) for p in points if "best_so_far/heft" in p]
    assert len(curve) == NUM_POINTS and curve == sorted(curve, reverse=True)
    assert curve[-1] == 1.0
    assert any(r.HasField("metric") and r.metric.step_metric == SECONDS for r in log)
    (exit_record,) = [r.exit for r in log if r.HasField("exit")]
    assert exit_record.exit_code == 0


@pytest.mark.usefixtures("offline")
def test_runs_of_plans_in_one_folder_are_runs_of_their_own(tmp_path: Path) -> None:
    for name in ("small", "large"):
        with WandbTracker(name=name).run(tmp_path, {}, "run") as mirror:
            mirror.log({"period_s/predicted": 1.0})
    ids = {file.name.split("-")[-1] for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}
    assert len(ids) == 2 and not (tmp_path / "wandb_run_id").exists()


@pytest.mark.usefixtures("offline")
def test_a_run_that_fails_is_finished_as_failed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), WandbTracker(mode="offline").run(tmp_path, {}, "train"):
        raise KeyboardInterrupt
    assert wandb.run is None
    assert [r.exit.exit_code for r in records(tmp_path) if r.HasField("exit")] == [1]


@pytest.mark.parametrize("logged_in", [False, True])
def test_online_only_for_who_is_logged_in_unless_told_otherwise(monkeypatch, tmp_path, logged_in):
    run = Mock()
    monkeypatch.setattr(wandb, "init", run)
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: logged_in)
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    for tracker in (WandbTracker(mode="disabled"), WandbTracker()):
        with tracker.run(tmp_path, {}, "compare"):
            pass
    monkeypatch.delenv("WANDB_MODE")
    with WandbTracker().run(tmp_path, {}, "compare"):
        pass
    asked = [call.kwargs["mode"] for call in run.call_args_list]
    assert asked == ["disabled", "dryrun", "online" if logged_in else "offline"]


def test_without_network_a_run_is_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Mock(side_effect=[wandb.errors.CommError("no route to host"), Mock()])
    monkeypatch.setattr(wandb, "init", run)
    with (
        pytest.warns(UserWarning, match="W&B is offline: no route to host; send it later: wandb"),
        WandbTracker(mode="online").run(tmp_path, {}, "compare"),
    ):
        pass
    assert [call.kwargs["mode"] for call in run.call_args_list] == ["online", "offline"]


NO_KEY = Mock(side_effect=wandb.errors.UsageError("no API key"))


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        (lambda patch: patch.setitem(sys.modules, "wandb", None), "import of wandb halted.*"),
        (lambda patch: patch.setattr(wandb, "init", NO_KEY), "no API key; or use "),
    ],
)
def test_a_tracker_that_cannot_start_is_a_warning(monkeypatch, tmp_path, lacks, why):
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: False)
    lacks(monkeypatch)
    done = False
    with (
        pytest.warns(UserWarning, match=f"not mirrored to W&B: {why}tracker=none"),
        WandbTracker().run(tmp_path, {}, "compare") as mirror,
    ):
        mirror.comparison(comparison(1.0))
        done = True
    assert done


def test_local_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    matplotlib = pytest.importorskip("matplotlib.image")
    matplotlib.imsave(tmp_path / "p.png", np.zeros((2, 3, 3)))
    for step in (1, 2):  # a run that goes on appends
        with LocalTracker().run(tmp_path, {"seed": 5}, "train") as mirror:
            mirror.log({"greedy_speedup": 1.0 + step}, step=step)
            mirror.comparison(comparison(0.5))
            mirror.image("gantt/net", tmp_path / "p.png")
            mirror.artifact("plan-net", "plan", tmp_path / "plan.json")
    lines = (tmp_path / "tracked.csv").read_text().splitlines()
    assert lines[:3] == ["name,step,value", "greedy_speedup,1,2.0", "value_s/net/heft/0,,0.5"]
    assert len(lines) == 1 + 2 * (2 + NUM_POINTS) and "greedy_speedup,2,3.0" in lines
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("greedy_speedup")] == [(1, 2.0), (2, 3.0)]
    assert len(events.Images("gantt/net")) == 2


def test_without_tensorboard_there_is_the_csv_file(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with LocalTracker().run(tmp_path, {}, "compare") as mirror:
        mirror.log({"x": 1.0})
        mirror.image("picture", tmp_path / "none.png")
    assert (tmp_path / "tracked.csv").read_text() == "name,step,value\nx,,1.0\n"
    assert {p.name for p in tmp_path.iterdir()} == {"tracked.csv"}


@pytest.mark.usefixtures("offline")
def test_a_run_that_goes_on_is_the_same_run(tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        with WandbTracker(tags=("a",), group="g").run(tmp_path, {}, "train") as mirror:
            ids.append(wandb.run.id)
            assert (wandb.run.tags, wandb.run.group) == (("a",), "g")
            mirror.table("eval/problems", ("problem", "best_s"), [("net", 0.5)])
    assert ids[0] == ids[1] == (tmp_path / "wandb_run_id").read_text()


@pytest.mark.usefixtures("offline")
def test_a_comparison_is_mirrored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "home"))
    words = ["workload=tiny_mlp", "planner=heft", "rounds=1", "repeats=1", "hydra.run.dir=out"]
    assert agents.cli.compare.main([*words, "tracker=wandb"]) == 0
    log = records(tmp_path / "out")
    plan = ("plan", ["best", "latest", "measured"])
    others = {name: (name.split("-")[0], ["latest"]) for name in ("profile-tiny_mlp", "report")}
    assert artifacts(log) == others | {"plan-tiny_mlp": plan}
    names = [p.name for p in (tmp_path / "out/wandb").glob("offline-run-*/files/media/*/*")]
    # The table, the best-so-far curves, the folder of the workload's picture, time and energy.
    parts = ["comparison", "curves", "gantt", "pareto"]
    assert sorted(name.split("_")[0] for name in names) == parts
