"""``placement doctor`` says what is missing, and the Tab key knows what may come next."""

import copy
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import argcomplete
import pytest

from placement import planners
from placement.__main__ import VERBS, build_parser
from placement.cli import BAD_INPUT, NO, completion, doctor
from placement.objective import Objective
from placement.tools import parallel

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {
    "version": "1.0",
    "python": "3.11.7",
    "platform": "Linux",
    "cpu": {"model": "Processor", "logical": 8, "usable": 4, "physical": 4, "sockets": 1}
    | {"quota_cores": None, "load": 0.1, "governor": "performance"},
    "memory": {"total_bytes": 2**34, "free_bytes": 2**33, "limit_bytes": None},
    "devices": ["cpu:0", "cpu:1"],
    "gpus": [],
    "cuda_build": None,
    "torch_error": None,
    "kernels_cached": True,
    "missing_compiler": None,
    "cache": {"folder": "/c", "writable": True, "free_bytes": 2**40, "num_profiles": 3},
    "required": {"numpy": "2.4"},
    "extras": {"cp": {"ortools": "9.15"}, "dev": {"pytest": None}},
    "noise": {"fast_s": 1e-3, "slow_s": 1e-3, "slow_over_fast": 1.0},
}


def changed(**parts: Any) -> dict[str, Any]:
    facts = copy.deepcopy(GOOD)
    for key, value in parts.items():
        facts[key] = facts[key] | value if isinstance(facts[key], dict) else value
    return facts


def test_nothing_to_say_of_a_good_machine() -> None:
    assert doctor.advice(GOOD) == ([], [])


PROBLEMS, HINTS = 0, 1


@pytest.mark.parametrize(
    ("facts", "which", "said"),
    [
        (changed(required={"torch": None}), PROBLEMS, "not installed: torch: pip install"),
        (changed(torch_error="OSError: cuda"), PROBLEMS, "cannot be imported: OSError: cuda"),
        (changed(cache={"writable": False}), PROBLEMS, "export PLACEMENT_HOME="),
        (changed(cache={"free_bytes": 2**29}), PROBLEMS, "512.0 MiB free in /c"),
        (changed(kernels_cached=False), HINTS, "NUMBA_CACHE_DIR"),
        (changed(missing_compiler="g++-99"), HINTS, "there is no C++ compiler 'g++-99'"),
        (changed(cpu={"quota_cores": 1.5}), HINTS, "a limit of 1.5 cores is shared by 4"),
        (changed(cpu={"usable": 1, "load": 0.0}), HINTS, "a pipeline needs two cores"),
        (changed(cpu={"load": 3.0}), HINTS, "keep 3.0 of 4 cores busy"),
        (changed(noise={"slow_over_fast": 2.0}), HINTS, "up to 2.0 times as long"),
        (changed(cpu={"governor": "powersave"}), HINTS, "governor powersave"),
        (changed(extras={"ray": {"ray": None}}), HINTS, "[ray]' into an environment of its own"),
        (changed(platform="macOS-15.1"), HINTS, "macOS-15.1 is not supported, Linux is"),
        (changed(extras={"cp": {"ortools": None}}), HINTS, "pip install 'device-placement-rl[cp]'"),
    ],
)
def test_problems_and_hints(facts: dict[str, Any], which: int, said: str) -> None:
    advice = doctor.advice(facts)
    assert len(advice[which]) == 1 and said in advice[which][0] and advice[1 - which] == []


def test_noise_is_slow_over_fast() -> None:
    assert doctor.noise([1.0] * 50)["slow_over_fast"] == 1.0
    assert doctor.noise([1.0] * 50 + [3.0] * 50)["slow_over_fast"] == 3.0


def test_doctor_of_this_machine(tmp_path: Path, says: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "new" / "folder"))
    monkeypatch.setattr(doctor, "NEEDED_BYTES", 0)
    text = says(["doctor"]).out
    assert "cpu:0" in text and "torch" in text and "next: placement profile" in text
    assert not (tmp_path / "new").exists(), "looking leaves no trace"
    answer = says(["doctor", "--json"]).json
    assert answer["ok"] and answer["cpu"]["usable"] >= 1 and answer["required"]["torch"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "file"))
    assert says(["doctor", "--json"], NO).json["cache"]["writable"] is False


def test_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required, extras = doctor.packages()
    names = {re.split(r"[<>=\[ ;]", line)[0] for line in project["dependencies"]}
    assert {name.lower() for name in required} == names
    assert set(extras) == set(project["optional-dependencies"]) == {*doctor.EXTRAS, "dev", "docs"}


# -- completion ------------------------------------------------------------------------------


def words(*typed: str) -> list[str]:
    *before, last = typed
    finder = argcomplete.CompletionFinder(completion.with_names(build_parser()))
    found = finder._get_completions(["placement", *before], last, "", None)
    return [word.rstrip() for word in found]


def test_what_may_come_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plan.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert {*VERBS} <= {*words("")} <= {*VERBS, "-h", "--help", "--version"}
    assert words("pro") == ["profile"]
    assert "--planner" in words("plan", "--")
    assert words("plan", "--planner", "macro") == ["macro_search"]
    assert "policy" in words("plan", "--planner", "")
    assert words("plan", "resnet5") == ["resnet50"]
    assert words("plan", "resnet50", "--objective", "l") == ["latency"]
    assert words("plan", "resnet50", "--mode", "") == ["inference", "training"]
    assert words("export", "plan.json", "--to", "v") == ["vllm"]
    assert {"bash", "fish", "zsh"} <= {*words("completion", "")}
    assert words("show", "my") == words("plan", "x", "--out", "my") == ["my_plan.json"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell: str, says: Any) -> None:
    script = says(["completion", shell]).out
    assert says(["completion", shell, "--json"]).json == {"shell": shell, "script": script}
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here to read the script")
    subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)


def test_bash_completes(tmp_path: Path, says: Any) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    command = tmp_path / "placement"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m placement "$@"\n')
    command.chmod(0o755)
    (tmp_path / "script").write_text(says(["completion", "bash"]).out)
    lines = (
        f"source {tmp_path}/script\n"
        f"COMP_LINE='{command} plan resnet50 --planner sim' COMP_TYPE=9 IFS=$'\\013'\n"
        "COMP_POINT=${#COMP_LINE}\n"
        f"_python_argcomplete {command}\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run([bash, "-c", lines], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "simulated_annealing", done.stderr


def test_warm_compiles_what_the_first_commands_use(monkeypatch, says):
    asked, real = [], parallel.parallel_map

    def load(name: str, **options: Any) -> Any:
        return lambda problem: asked.append((name, problem.objective.value, options))

    def here(call: Any, names: list[str], _: str, **more: Any) -> Any:
        return real(call, names, **more)

    monkeypatch.setattr(planners, "load", load)
    monkeypatch.setattr(parallel, "parallel_map", here)
    assert "kernels are compiled, and kept in " in says(["doctor", "--warm"]).err
    every = set(itertools.product(doctor.WARM, Objective))
    assert {(name, Objective(objective)) for name, objective, _ in asked} == every
    monkeypatch.setattr(doctor, "kept_in", lambda: None)
    assert "NUMBA_CACHE_DIR" in says(["doctor", "--warm"], BAD_INPUT).err


def test_planners_of_warm_have_its_options() -> None:
    for name, options in doctor.WARM.items():
        planners.load(name, **options)


def test_kernels_beside_the_package_serve_who_may_not_write(monkeypatch, tmp_path):
    (tmp_path / "placement" / "cli").mkdir(parents=True)
    monkeypatch.setattr(doctor.cli, "__file__", str(tmp_path / "placement" / "cli" / "__init__.py"))
    assert not doctor.has_kernels()
    (tmp_path / "placement" / "x.nbi").write_text("")
    assert doctor.has_kernels()
