"""``placement pull``: W&B is played at its API; what it hands over is not trusted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb

from placement.__main__ import main
from placement.plan import load_plan, make_plan
from placement.planners import load
from placement.tools.files import write_atomic
from tests.problems import random_problem

NAME = "team/project/plan-net:best"


@dataclass
class Entry:
    """A file of an artifact, as W&B's manifest describes it."""

    name: str
    data: bytes
    ref: str | None = None
    size: int | None = None
    lands_in: str = ""

    def __post_init__(self) -> None:
        self.size = len(self.data) if self.size is None else self.size

    def download(self, root: str) -> str:
        path = Path(root) / (self.lands_in or self.name)
        path.write_bytes(self.data)
        return str(path)


@dataclass
class Server:
    """Stands for ``wandb.Api``: one artifact."""

    type: str
    entries: list[Entry]
    asked: list[str] = field(default_factory=list)

    def __call__(self) -> Server:
        return self

    def artifact(self, name: str) -> Any:
        self.asked.append(name)
        manifest = SimpleNamespace(entries={e.name: e for e in self.entries})
        return SimpleNamespace(name=name, type=self.type, version="v3", manifest=manifest)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(kind: str, *entries: Entry) -> Server:
        server = Server(kind, list(entries))
        monkeypatch.setattr(wandb, "Api", server)
        return server

    return start


@pytest.fixture(scope="module")
def plan_data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    problem = random_problem(0, num_ops=4, num_devices=2)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    make_plan(problem, load("heft")(problem), planner="heft").save(path)
    return path.read_bytes()


def test_a_plan_is_fetched(serve: Any, plan_data: bytes, capsys: Any) -> None:
    server = serve("plan", Entry("plan.json", plan_data))
    assert main(["pull", NAME, "--json"]) == 0
    assert server.asked == [NAME]
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "path": "plan-net.json",
        "kind": "plan",
        "name": NAME,
        "version": "v3",
        "num_bytes": len(plan_data),
    }
    assert Path("plan-net.json").read_bytes() == plan_data
    assert load_plan("plan-net.json").planner.name == "heft"
    # What is there is replaced only if it is named.
    assert main(["pull", NAME]) == 2
    assert "plan-net.json exists" in capsys.readouterr().err
    assert main(["pull", NAME, "--out", "plan-net.json"]) == 0


def test_a_policy_is_fetched(serve: Any, tmp_path: Path, capsys: Any) -> None:
    trained = pytest.importorskip("agents.trained")
    from agents.encoder import NetworkConfig

    net = trained.make_net(NetworkConfig(hidden=8), "one_shot")
    trained.TrainedPolicy(net, {}).save(tmp_path / "policy.safetensors")
    data = (tmp_path / "policy.safetensors").read_bytes()
    serve("policy", Entry("policy.safetensors", data))
    assert main(["pull", "team/project/policy:latest", "--out", "p.safetensors"]) == 0
    assert trained.TrainedPolicy.load("p.safetensors").formulation == "one_shot"
    known = {"policy": json.dumps({"formulation": "one_shot"})}
    odd = [json.dumps({"__metadata__": known, "a": a}).encode() for a in (5, {"data_offsets": []})]
    heads = [len(head).to_bytes(8, "little") + head for head in odd]
    broken = (data[:-1], data + b"x", b"", b"\xff" * 100, b"PK\x03\x04" + data)
    for damaged in (*broken, *heads):
        serve("policy", Entry("policy.safetensors", damaged))
        assert main(["pull", "team/project/policy:latest", "--out", "q.safetensors"]) == 2
    assert not Path("q.safetensors").exists()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (Entry("plan.json", b'{"schema_version": 1, "__import__": "os"}'), "plan-net:best"),
        (Entry("plan.json", b"\x80\x04cos\nsystem\n"), "a pickle of Python"),
        (Entry("../../plan.json", b"{}"), "no plain name"),
        (Entry("/etc/plan.json", b"{}"), "no plain name"),
        (Entry("..\\plan.json", b"{}"), "no plain name"),
        (Entry("plan.json", b"{}", lands_in="../plan.json"), "was to be written to"),
        (Entry("plan.json", b"{}", ref="file:///etc/passwd"), "is a link to file:///etc/passwd"),
        (Entry("plan.json", b"{}", size=2**40), "1099511627776 bytes, expected"),
        (Entry("plan.json", b"{}", size=3), "2 bytes instead of 3"),
        (Entry("plan.pkl", b"{}"), "0 files .json instead of one"),
    ],
)
def test_what_is_no_plan_is_not_kept(
    serve: Any, tmp_path: Path, capsys: Any, entry: Entry, why: str
) -> None:
    serve("plan", entry)
    assert main(["pull", NAME]) == 2
    assert why in capsys.readouterr().err
    assert not list(Path().iterdir()) and {p.name for p in tmp_path.iterdir()} == {"here"}


@pytest.mark.parametrize("name", ["plan-net", "a/b:c", "a/b/../c:d/e", "https://a/b/c:d", "a/b/c"])
def test_names_that_are_none(capsys: Any, name: str) -> None:
    assert main(["pull", name]) == 2
    assert "not the name of an artifact" in capsys.readouterr().err


def test_other_kinds_of_artifacts_and_a_server_that_says_no(
    serve: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    serve("dataset", Entry("plan.json", b"{}"))
    assert main(["pull", NAME]) == 2
    assert "is a dataset; pull fetches plans and policies" in capsys.readouterr().err

    def api() -> Any:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "Api", api)
    assert main(["pull", NAME]) == 2
    assert "No API key configured.; are you logged in" in capsys.readouterr().err


def test_what_an_offline_run_keeps_is_what_pull_takes(
    serve: Any, tmp_path: Path, plan_data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifact as W&B staged it for the server, from the directory of an offline run."""
    from placement.runs.tracking import WandbTracker

    monkeypatch.setenv("WANDB_MODE", "offline")
    for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    write_atomic(tmp_path / "plan.json", plan_data)
    with WandbTracker().run(tmp_path, {}, "run") as mirror:
        mirror.artifact("plan-net", "plan", tmp_path / "plan.json", aliases=["measured"])
    staged = [p for p in (tmp_path / "WANDB_DATA_DIR").rglob("*") if p.is_file()]
    (copy,) = [p for p in staged if p.read_bytes() == plan_data]
    serve("plan", Entry("plan.json", copy.read_bytes()))
    assert main(["pull", NAME, "--out", "again.json"]) == 0
    assert Path("again.json").read_bytes() == plan_data
