"""The examples run, in an empty folder, as they are in the repository."""

import ast
import importlib
import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO

from agents.training import TrainConfig, train
from placement import planners
from placement.testing import small_problems
from tests.envs.test_envs import chain

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "tour.ipynb"

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("quick_profiles")]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["example"])


# A seam each; in the suite for a few updates.
OWN = ("own_encoder.py", "own_environment.py", "own_reward.py", "own_generator.py", "grpo.py")


@pytest.mark.parametrize("name", ["train_ppo.py", "cleanrl_ppo.py"])
def test_a_first_agent_learns(name, capsys, monkeypatch):
    learn = PPO.learn
    monkeypatch.setattr(PPO, "learn", lambda agent, steps: learn(agent, min(steps, 2_000)))
    run(name)
    rewards = [float(x) for x in re.findall(r"-?\d\.\d+", capsys.readouterr().out)]
    assert rewards[-1] > rewards[0] + 0.1
    if name == "train_ppo.py":  # which then plans, and says that a network chose
        answer = planners.load("policy", policy="policy.safetensors")(small_problems()[0])
        assert answer.stats["policy"] == "policy.safetensors"
        assert answer.stats["greedy_evaluations"] == 1


@pytest.mark.parametrize("name", OWN)
def test_a_seam_of_ones_own(name, capsys, monkeypatch):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 40
    monkeypatch.syspath_prepend(str(EXAMPLES))
    config = partial_of(TrainConfig, total_steps=320, num_checks=1, num_envs=8)
    monkeypatch.setattr("agents.training.TrainConfig", config)
    run(name)
    out = capsys.readouterr().out
    expected = {
        "own_encoder.py": "the file names its encoder: own_encoder:Mean",
        "own_environment.py": "devices in use, at most: 2",
        "own_reward.py": "own_reward:few_devices: ",
        "own_generator.py": "75% reward",
        "grpo.py": "320 steps: reward",
    }
    assert expected[name] in out


@pytest.mark.parametrize("formulation", ["sequential", "one_shot"])
def test_episodes_that_are_compared_solve_the_bandit(formulation, monkeypatch):
    """[1, 0] takes 2.1 s, the best device 3 s."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    config = TrainConfig(
        total_steps=512, formulation=formulation, learning_rate=1e-2, num_checks=1,
        network={"hidden": 32, "layers": 2, "finish_weight": 0.0}, algorithm="grpo:GRPO",
    )  # fmt: skip
    rows: list[Any] = []
    train([chain([[2, 1], [1, 3]], latency_s=0.1)], config=config, callback=rows.append)
    assert rows[-1]["reward_mean"] > 0.8 * np.log(3 / 2.1)


def test_advantages_of_episodes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of two: of problem 0 episodes earn 1 and 3, that of problem 1 is alone."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    space = spaces.Dict({"problem": spaces.Box(0, 9, (1,), np.int64)})
    kind = importlib.import_module("grpo").Relative
    buffer = kind(3, space, spaces.Discrete(2), "cpu", n_envs=2)
    problem = np.array([[[0], [0]], [[0], [1]], [[0], [1]]])
    starts, rewards = np.array([[1, 1], [0, 1], [1, 0]]), np.array([[0, 3], [1, 0], [0, 5]])
    for t in range(3):
        step = np.zeros((2, 1)), rewards[t], starts[t], torch.zeros(2), torch.zeros(2)
        buffer.add({"problem": problem[t]}, *step)
    buffer.compute_returns_and_advantage(torch.zeros(2), np.array([False, True]))
    # Mean 2, deviation 1; the third step of the first environment is of one that goes on.
    expected = np.array([[-1, 1], [-1, 0], [0, 0]]) / 1.01
    assert buffer.advantages == pytest.approx(expected, abs=1e-6)


@pytest.mark.usefixtures("published")
def test_a_published_method_is_trained_saved_and_plans(tmp_path, capsys):
    run = importlib.import_module("run")
    for method, planner in (("giph", "policy"), ("post", "post:GroupPlanner")):
        file = str(tmp_path / f"{method}.safetensors")
        run.main([method, "--steps", "64", "--out", file])
        assert capsys.readouterr().out.count("x over the best single device\n") == 3
        options = {"policy": file, "allow": f"{method}:formulation", "search": "false", "k": "2"}
        answer = planners.load(planner, **options)(small_problems()[0])
        assert answer.value_s <= answer.stats["baseline_value_s"]


def partial_of(kind: Any, **fixed: Any) -> Any:
    """``kind`` with these arguments, whatever else is asked for."""
    return lambda **asked: kind(**asked | fixed)


def test_torchrl() -> None:
    pytest.importorskip("torchrl")
    run("torchrl_env.py")


def run(name: str) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_tested() -> None:
    others = {"place_your_module.py", "compare_planners.py", "own_planner.py", "tour.ipynb"}
    others |= {"train_ppo.py", "cleanrl_ppo.py", "torchrl_env.py", *OWN}
    assert {p.name for p in EXAMPLES.iterdir() if p.suffix in (".py", ".ipynb")} == others


def test_place_your_module_and_own_planner(tmp_path, capsys):
    run("place_your_module.py")
    assert "16 results, equal to the plain module's" in capsys.readouterr().out
    assert (tmp_path / "plan.json").exists()
    run("own_planner.py")
    assert "rounds" in capsys.readouterr().out


def test_compare_planners(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["example", str(EXAMPLES / "branches.json")])
    run("compare_planners.py")
    out = capsys.readouterr().out
    assert "macro_search" in out and "best: " in out and max(map(len, out.splitlines())) <= 80


def test_the_notebook_shows_what_it_makes() -> None:
    """Its cells are plain Python: no kernel is needed to run them."""
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in cells:
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)
            if hasattr(value, "_repr_html_"):
                shown.append(type(value).__name__)
                assert "<table" in value._repr_html_()
    assert shown == ["OpGraph", "Solution", "Timeline", "Timeline", "Plan", "Comparison"]


def test_the_notebook_holds_no_outputs() -> None:
    text = NOTEBOOK.read_text()
    assert len(text) < 20_000
    for cell in json.loads(text)["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
