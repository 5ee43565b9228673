"""Every verb with every bad input: one line on standard error, exit code 2, nothing left behind."""

import builtins
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from placement.__main__ import VERBS, main
from placement.cli import BAD_INPUT, DEFECT, INTERRUPTED, OK
from placement.importers import save
from placement.plan import make_plan
from placement.planners.contiguous_dp import ContiguousDp
from placement.planners.heft import Heft
from placement.problem import Problem, Solution
from placement.tools.progress import Signs
from tests.problems import chain, small_problem
from tests.served import LLAMA, written

ROOT = Path(__file__).parents[2]
HOSTILE = ["../../x", "<script>alert(1)</script>", "[bold]b[/bold]", ":smile:", "é"]
HOSTILE += ["a'b\"c`d`$(e)"]

# How a verb is given the file in question; OUT is a file that must not be written.
READERS = {
    "show": ["show", "FILE"],
    "validate": ["validate", "FILE"],
    "run": ["run", "FILE", "--out", "OUT"],
    "diff": ["diff", "plan.json", "FILE"],
    "export": ["export", "FILE", "--to", "csv", "--out", "OUT"],
    "plan": ["plan", "FILE", "--planner", "heft", "--out", "OUT"],
    "import": ["import", "FILE", "--out", "OUT"],
    "profile": ["profile", "FILE", "--out", "OUT"],
    "features": ["profile", "FILE", "--features", "--out", "OUT"],
    "audit": ["audit", "FILE", "--log", "FILE"],
    "start": ["plan", "--start", "FILE", "--without", "a", "--out", "OUT"],
    "bench": ["bench", "shops", "--data", "FILE", "--planner", "heft", "--out", "OUT"],
    "schedule": ["schedule", "FILE", "--case", "a", "--micro-batches", "2"],
    "cluster": ["plan", "tiny_mlp", "--planner", "heft", "--cluster", "FILE", "--out", "OUT"],
    "measured": ["plan", "tiny_mlp", "--planner", "heft", "--profile", "FILE", "--out", "OUT"],
}
# The last three have tests of their own.
WITHOUT_A_FILE = {"schema", "doctor", "completion", "report", "dataset", "optimize"}
PIPES: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.fixture(autouse=True)
def _errors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sign of life, however slow the machine: what is refused is one line."""
    monkeypatch.setattr("placement.tools.progress.SIGNS", Signs(first_s=600))


def problem(names: list[str] | None = None, name: str = "small") -> Problem:
    """A chain on two devices that can only be simulated."""
    names = names or [f"op{i}" for i in range(6)]
    graph = {"op_name": names, "name": name}
    facts = {"devices": ["a", "b"], "device": {"kind": "npu"}, "graph": graph}
    return small_problem(np.full((len(names), 2), 1e-3), chain(len(names)), tensor_bytes=8, **facts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are wrong, each in its own way, beside ``plan.json`` and ``problem.json``."""
    home = tmp_path_factory.mktemp("hostile")
    good = problem()
    plan = make_plan(good, ContiguousDp()(good), planner="contiguous_dp")
    plan.save(home / "plan.json")
    save(good, home / "problem.json")
    text = (home / "plan.json").read_text()
    (home / "version.json").write_text(json.dumps(json.loads(text) | {"schema_version": 99}))
    (home / "latin.json").write_bytes(text.replace("op1", "op\xe9").encode("latin-1"))
    (home / "half.json").write_text(text[: len(text) // 2])
    (home / "empty.json").write_text("")
    (home / "folder.json").mkdir()
    os.mkfifo(home / "pipe.json")
    (home / "array.json").write_text("[1, 2]")
    (home / "deep.json").write_text("[" * 200_000)
    return home


def test_every_verb_is_tried() -> None:
    assert {argv[0] for argv in READERS.values()} | WITHOUT_A_FILE == set(VERBS)


WRONG = ["missing", "version", "latin", "half", "empty", "folder", "array", "deep", "pipe"]


@pytest.mark.parametrize("name", [*WRONG, "unreadable"])
@pytest.mark.parametrize("verb", READERS)
def test_bad_files(verb, name, folder, tmp_path, says, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path))
    file = folder / f"{name}.json"
    if name == "unreadable":  # also for root, who may read everything
        _forbid(monkeypatch, file)
    before = sorted(p.name for p in folder.iterdir())
    message = says.refused([_filled(word, str(file)) for word in READERS[verb]])
    assert name in message, "the file is named"
    assert sorted(p.name for p in folder.iterdir()) == before, "nothing is left behind"


MARKED = {  # what some editors begin a file with, which is no part of its text
    ("show", "FILE"): "plan.json",
    ("plan", "problem.json", "--planner", "expert", "file=FILE"): {f"op{i}": "a" for i in range(6)},
    ("plan", "llama.json", "--objective", "decode", "--context", "9", "--cluster", "FILE"): {
        "devices": [{"name": "cpu:0", "like": "amd/ryzen-7950x"}]
    },
    ("schedule", "FILE", "--case", "a", "--micro-batches", "2", "--seconds", "0.1"): {
        "cases": {"a": {"ndevs": 1, "blocks": [
            {"id": 0, "devices": [0], "time": 1, "memory": 0, "deps": []}]}}
    },
    ("plan", "FILE", "--objective", "decode", "--context", "9", "--cluster", "home.yaml"): LLAMA,
}  # fmt: skip


@pytest.mark.parametrize("argv", MARKED, ids=lambda argv: argv[0])
def test_a_byte_order_mark_is_no_mistake(argv, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problem.json").write_bytes((folder / "problem.json").read_bytes())
    written(tmp_path, LLAMA)
    (tmp_path / "model.json").rename("llama.json")
    content = MARKED[argv]
    text = (folder / content).read_text() if isinstance(content, str) else json.dumps(content)
    (tmp_path / "marked.json").write_text("\ufeff\n" + text)
    assert main([word.replace("FILE", "marked.json") for word in argv]) == OK


def _filled(word: str, file: str) -> str:
    return {"FILE": file, "OUT": "out.file"}.get(word, word)


def _forbid(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Opening ``file`` fails as it does for a user without the permission."""
    real = io.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | Path) and Path(path) == file:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(io, "open", opened)
    if not file.exists():
        real_exists, real_stat = os.path.exists, Path.stat
        monkeypatch.setattr(os.path, "exists", lambda p: p == str(file) or real_exists(p))
        plain = file.with_name("plan.json")
        monkeypatch.setattr(
            Path, "stat", lambda self, **k: real_stat(plain if self == file else self, **k)
        )


@pytest.mark.parametrize(
    "words",
    [
        "plan problem.json --planner heft --out",
        "plan problem.json --planner heft --trace",
        "import problem.json --out",
        "export plan.json --to csv --out",
        "run plan.json --out",
        "run plan.json --trace",
        "profile tiny_mlp --out",
    ],
)
@pytest.mark.parametrize("where", ["folder.json", "empty.json/x.json", "/proc/nowhere/x.json"])
def test_outputs_are_checked_before_the_work(words, where, folder, says, monkeypatch):
    monkeypatch.chdir(folder)
    for work in ("cli.plan.load_problem", "plan.load_plan", "cli.capture_workload"):
        monkeypatch.setattr(f"placement.{work}", lambda *_, **__: pytest.fail("too late"))
    if words.startswith("run"):
        monkeypatch.undo()
        monkeypatch.chdir(folder)
    assert f"cannot write {where}" in says.refused([*words.split(), where])


def test_no_permission_for_the_folder(folder: Path, says: Any, monkeypatch: Any) -> None:
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Path, "write_bytes", denied)
    argv = ["plan", "problem.json", "--planner", "heft", "--out", "x.json"]
    assert "no permission to write in ." in says.refused(argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan", "problem.json", "--planner", "magic"], "no planner 'magic'"),
        (["plan", "problem.json", "--planner", "heftt"], "did you mean 'heft'?"),
        (["plan", "tiny_mpl", "--planner", "heft"], "did you mean 'tiny_mlp'?"),
        (["plan", "problem.json", "--planner", "heft", "--objective", "x"], "--objective x"),
        (["plan", "problem.json", "--planner", "heft", "--microbatches", str(10**9)], "1,000,000"),
        (["plan", "problem.json", "--planner", "heft", "--microbatches", "0"], "must be from 1 to"),
        (["plan", "problem.json", "--planner", "heft", "--in-flight", "-1"], "--in-flight -1"),
        (["plan", "problem.json", "--planner", "local_search", "--seconds", "nan"], "--seconds"),
        (["plan", "problem.json", "--planner", "mip", "--seconds", "-1"], "--seconds -1.0"),
        (["plan", "problem.json", "--planner", "brkga", "--seed", "-1"], "--seed -1 must be at"),
        (["plan", "problem.json", "--planner", "heft", "x=1"], "has no option 'x'"),
        (["plan", "problem.json", "--planner", "heft", "x"], "option=value"),
        (["run", "plan.json", "--batches", str(10**30)], "--batches"),
        (["export", "plan.json", "--to", "nowhere", "--out", "x"], "no exporter 'nowhere'"),
        (["export", "plan.json", "--to", "csv", "--out", "plan.json"], "is in use"),
        (["profile", "tiny_mlp", "--mode", "training", "--optimizer", "Optimizer"], "no such opt"),
        (["profile", "tiny_mlp", "--mode", "training", "--optimizer", "lr_scheduler"], "no such"),
        (["profile", "tiny_mlp", "--mode", "training", "--optimizer", "LBFGS"], "LBFGS keeps"),
        (["profile", "tiny_mlp", "--mode", "training", "--optimizer", "SparseAdam"], "SparseAdam"),
        (["plan", "plan.json", "--planner", "heft"], "plan.json"),
        (["show", "problem.json"], "schema_version"),
    ],
)
def test_bad_values(argv, message, folder, tmp_path, says, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path))
    assert message in says.refused(argv)


# -- hostile names and large files ------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("names") / "plan.json"
    named = problem(HOSTILE, HOSTILE[2])
    make_plan(named, ContiguousDp()(named), planner="<b>heft</b>").save(path)
    return path


@pytest.mark.parametrize("verb", ["show", "validate", "diff", "export"])
def test_hostile_names_are_text(verb, hostile, tmp_path, says, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    more = {"diff": [str(hostile)], "export": ["--to", "csv", "--out", "o.csv"]}
    out = says([verb, hostile, *more.get(verb, [])]).out
    assert max(map(len, out.splitlines()), default=0) <= max(80, len(str(hostile)) + 20)
    assert verb != "show" or HOSTILE[2] in out, "the model's name is shown as it is"
    written = {p.name for p in tmp_path.rglob("*")}
    assert written == {"work", "o.csv"} if verb == "export" else {"work"}


def test_names_of_a_problem_file_do_not_reach_the_terminal(tmp_path: Path, says: Any) -> None:
    """They may have any characters; a terminal obeys some of them."""
    save(problem(), tmp_path / "p.json")
    record = json.loads((tmp_path / "p.json").read_text())
    record["model"] = "\x1b[31mred\x1b]0;title\x07\u202ereversed"
    (tmp_path / "p.json").write_text(json.dumps(record))
    out, err = says(["import", tmp_path / "p.json", "--out", tmp_path / "q.json"])
    assert "?[31mred?]0;title??reversed" in out
    assert not set("\x1b\x07\u202e") & set(out + err)


def test_numbers_too_large_for_anything(tmp_path: Path, says: Any, monkeypatch: Any) -> None:
    """Integers of 400 digits, and decimal ones that Python reads as infinite."""
    monkeypatch.chdir(tmp_path)
    node = {"id": 0, "cpuLatency": 1, "fpgaLatency": 1, "supportedOnFpga": 1, "isBackwardNode": 0}
    dnn = {"nodes": [node], "edges": [], "maxFPGAs": 1, "maxCPUs": 1, "maxSizePerFPGA": 1e19}
    Path("doppler.txt").write_text("1" * 5000 + "\n0,\n")
    save(problem(), "p.json")
    plan = make_plan(problem(), ContiguousDp()(problem()), planner="x", parameters={"a": 0.25})
    plan.save("plan.json")
    text = Path("plan.json").read_text()
    assert "0.25" in text
    Path("plan.json").write_text(text.replace("0.25", "1e999"))
    answer = json.loads(Path("p.json").read_text())
    answer["provenance"] = {"a": 0.25}
    Path("inf.json").write_text(json.dumps(answer).replace("0.25", "1e999"))
    for name in ("doppler.txt", "inf.json"):
        says.refused(["import", name, "--out", "out.json"])
    assert "1e999 is too large a number" in says.refused(["show", "plan.json"])
    Path("wide.json").write_text(json.dumps(dnn))  # memory beyond 64 bits is just enough memory
    assert main(["import", "wide.json", "--out", "out.json"]) == OK
    assert main(["plan", "out.json", "--planner", "heft"]) == OK


@pytest.mark.skipif(sys.platform == "win32", reason="closes file descriptors in a shell")
@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ("{} validate bad.json | true", 1),  # nobody reads it, and it is no all the same
        ("{} validate bad.json --json 2>&-", 1),
        ("{} show plan.json --json | true", 0),
        ("{} show plan.json --json 2>&- | {{ grep -q assignment && cat > seen; }}", 0),
    ],
)
def test_closed_outputs(shell: str, code: int, folder: Path, tmp_path: Path) -> None:
    text = (folder / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text)
    wrong = json.loads(text)
    wrong["device_map"] = {"": "b"}
    (tmp_path / "bad.json").write_text(json.dumps(wrong))
    command = shell.format(f"{sys.executable} -m placement")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    bash = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(bash, cwd=tmp_path, env=env, **PIPES)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_large_plan(tmp_path: Path, says: Any, monkeypatch: Any) -> None:
    """1.6 MB here; 40 MB take 25 times as long, two seconds on an idle core."""
    monkeypatch.chdir(tmp_path)
    large = problem([f"block.{i // 100}.{'x' * 150}.{i}" for i in range(8_000)])
    placement = np.arange(large.num_ops, dtype=np.int32) // 100 % 2
    make_plan(large, Solution(placement, 1.0), planner="mine").save("plan.json")
    assert os.path.getsize("plan.json") > 1.2e6
    for verb in ("show", "validate", "diff plan.json", "export --to csv --out plan.csv"):
        out = says([*verb.split(), "plan.json"]).out
        assert max(map(len, out.splitlines()), default=0) <= 80


# -- Ctrl-C -----------------------------------------------------------------------------------


def test_ctrl_c_in_a_search_leaves_nothing_and_the_profile(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    argv = ["plan", "problem.json", "--planner", "local_search", "--seconds", "60", "patience=60"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    # A line says when the search has begun.
    code = (
        "import sys; from placement.planners.local_search import LocalSearch as L\n"
        "call = L.__call__\n"
        "L.__call__ = lambda s, p: (print('begun', file=sys.stderr), call(s, p))[1]\n"
        "from placement.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *argv, "--out", str(out)]
    process = subprocess.Popen(command, cwd=folder, env=env, **PIPES)
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, err
    assert "placement: interrupted; no file is half written" in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_command_is_imported_is_quiet(tmp_path: Path) -> None:
    for name in ("slow.py", "argparse.py"):  # what `python -m placement` imports first
        (tmp_path / name).write_text("import time\nprint('x', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "interrupted.py").write_text("def main():\n    raise KeyboardInterrupt\n")
    begin = "import sys; from placement.commands import _begin; sys.exit(_begin(sys.argv[1])())"
    code, env = [sys.executable, "-c", begin], os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    modules = ("placement", "agents.cli.train", "agents.cli.compare", "agents.cli.sweep_report")
    for command in ([*code, "slow"], *([sys.executable, "-m", x] for x in modules)):
        process = subprocess.Popen(command, env=env, **PIPES)
        assert process.stdout is not None and process.stdout.readline() == "x\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == -signal.SIGINT
    done = subprocess.run([*code, "interrupted"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "placement: interrupted\n")


# -- the Hydra commands -----------------------------------------------------------------------


@pytest.fixture
def compared(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``placement-compare`` in this process; ``problem.json`` is in the folder."""
    import agents.cli.compare

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    (tmp_path / "problem.json").write_bytes((folder / "problem.json").read_bytes())

    def call(*words: str) -> int:
        more = ["planner=[heft]", "execute=false", "tracker=none", "hydra.run.dir=out"]
        return agents.cli.compare.main([*words, *more])

    return call


def test_a_comparison_for_machines(compared, monkeypatch, capsys):
    plan = Heft.__call__

    def talk(self: Heft, problem: Problem) -> Solution:
        logging.getLogger("a.library").info("generated new fonts")
        return plan(self, problem)

    monkeypatch.setattr(Heft, "__call__", talk)
    assert compared("workload=[problem.json]", "--json") == OK
    out, err = capsys.readouterr()
    assert "generated new fonts" in err
    answer = json.loads(out)
    assert answer["folder"].endswith("out")
    assert {row["planner"] for row in answer["rows"]} == {"single:a", "single:b", "heft"}
    assert answer["rows"][0]["value_s"] == pytest.approx(6e-3)


def test_names_of_problems_stay_in_the_folder(compared: Any, tmp_path: Path, capsys: Any) -> None:
    for name in ("../../evil", "/tmp/evil", "..", "a/b"):
        assert compared(f"workload='problem.json name={name}'") == BAD_INPUT
        assert "cannot name a folder of the run" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"problem.json", "out"}
    assert not list(tmp_path.rglob("*evil*"))


def test_a_defect_of_a_comparison_has_its_own_exit_code(compared: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("agents.cli.compare.make_problems", None)
    assert compared("workload=[problem.json]") == DEFECT
