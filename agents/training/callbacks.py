"""What happens beside the updates: schedules, checks, metrics, checkpoints, limits.

Each is a stable-baselines3 callback on one ``Training``; ``callbacks`` lists them in their order.
"""

from __future__ import annotations

import io
import json
import platform
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import stable_baselines3
import torch
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback

from agents.encoder import PolicyError
from agents.trained import Net, TrainedPolicy
from agents.training.config import TrainConfig
from agents.training.tasks import Tasks
from envs.generators import Generator
from envs.sb3 import PlacementVecEnv
from placement.problem import Solution
from placement.simulator import score
from placement.tools.files import csv_text, write_arrays, write_atomic

Row = dict[str, float]
Report = Callable[[Row], bool | None]
CHECKPOINT = "checkpoint.pt"


@dataclass(eq=False)
class Training:
    """One training: what it is for, and what came of it so far.

    Attributes:
        config: with the formulation's defaults.
        tasks, held_out: what is trained on (of a generator: drawn for the checks), and what is not.
        origin: what its values depend on, as text: a checkpoint goes on only with the same.
        env, net: what acts, and where.
        out_dir: where files go, or None.
        generator: of fresh problems, or None.
        rows: the metrics, one row per update.
        stop: whether something said that it is enough.
        checked: whether there was a check since the last update.
        steps, updates: of all environments; and of the network.
        best_weights: of the best check, whose mean reward is ``best_greedy``.
        last_greedy: mean reward of the last check.
        greedy_s: float64 ``[P]`` seconds of the last check; ``held_out_reward``: its mean reward on
            what is held out.
        checks: how many there were.
        resumed: the checkpoint that the next rollout goes on from.
    """

    config: TrainConfig
    tasks: Tasks
    held_out: Tasks | None
    origin: dict[str, str]
    env: PlacementVecEnv
    net: Net
    out_dir: Path | None = None
    generator: Generator | None = None
    rows: list[Row] = field(default_factory=list)
    stop: bool = False
    checked: bool = False
    steps: int = 0
    updates: int = 0
    best_greedy: float = -np.inf
    last_greedy: float = -np.inf
    held_out_reward: float = np.nan
    checks: int = 0
    resumed: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.best_weights = deepcopy(self.net.state_dict())
        self.greedy_s: NDArray[np.float64] = np.full(len(self.tasks.problems.problems), np.inf)
        self.started = time.perf_counter()

    def speedup(self, seconds: NDArray[np.float64]) -> float:
        """Geometric mean over the problems of reference over ``seconds [P]``."""
        return float(np.exp(self.tasks.problems.speedups(seconds).mean()))

    def best(self) -> tuple[Solution, ...]:
        """The best placement ever evaluated of each problem."""
        rules, problems = self.env.rules, self.tasks.problems
        stats = {"evaluations": rules.num_evaluations}
        solutions = []
        for i, problem in enumerate(problems.problems):
            placement = problems.placements(i, rules.best_choices[i : i + 1])[0]
            value_s = float(rules.best_s[i])
            if problems.evaluator is score and np.isfinite(value_s):
                # It may be of an order, and that is no part of what is returned.
                value_s = float(score(problem, placement)[0])
            solutions.append(Solution(placement, value_s, None, stats))
        # An order may have been better than its start, and the placement alone is not.
        for i, start in enumerate(self.tasks.starts):
            if start is not None and self.tasks.start_s[i] < solutions[i].value_s:
                solutions[i] = Solution(start, float(self.tasks.start_s[i]), None, stats)
        return tuple(solutions)

    def trained(self, last: bool = False) -> TrainedPolicy:
        """The policy of the best check; or the one of now, whatever its ``last`` check said."""
        net = deepcopy(self.net).cpu()  # of whatever class it is
        if not last:
            net.load_state_dict(self.best_weights)
        row = self.rows[-1] if self.rows else {}
        card = {
            "config": asdict(self.config),
            "problems": self.tasks.described(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "stable_baselines3": stable_baselines3.__version__,
            },
            "steps": self.steps,
            "updates": self.updates,
            "seconds": time.perf_counter() - self.started,
            "evaluations": self.env.rules.num_evaluations,
            "greedy_speedup": float(np.exp(self.last_greedy if last else self.best_greedy)),
            "held_out": [] if self.held_out is None else self.held_out.described(),
            "best_speedup": float(row.get("best_speedup", np.nan)),
        }
        return TrainedPolicy(net, card, self.best())

    def write(self, policy: bool = True) -> None:
        """The best placements, and policies of the best check and of now, if there is a folder."""
        if self.out_dir is None:
            return
        if policy:
            self.trained().save(self.out_dir / "policy.safetensors")
        self.trained(last=True).save(self.out_dir / "last.safetensors")
        best = self.best()
        arrays: dict[str, Any] = {f"placement_{i}": s.placement for i, s in enumerate(best)}
        write_arrays(self.out_dir / "best.npz", value_s=[s.value_s for s in best], **arrays)


class _Part(BaseCallback):
    """A callback on a training."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training = training

    def _on_step(self) -> bool:
        return True


class Schedule(_Part):
    """The weight of the entropy, and what a generator is told of the progress."""

    def _on_rollout_start(self) -> None:
        training, config = self.training, self.training.config
        training.steps = self.num_timesteps
        left = max(0.0, 1.0 - self.num_timesteps / config.total_steps)
        self.model.ent_coef = between(config.last_entropy, config.entropy, left)  # type: ignore[attr-defined]
        self.tell(1.0 - left)

    def tell(self, done: float) -> None:
        """Tell a generator that has an attribute ``progress`` the share that is ``done``."""
        if hasattr(self.training.generator, "progress"):
            self.training.generator.progress = done  # type: ignore[union-attr]


class Evaluation(_Part):
    """Checks of all problems, ``num_checks`` in a training: the best one's weights are kept."""

    def _on_rollout_start(self) -> None:
        training = self.training
        due = training.checks * training.config.total_steps // training.config.num_checks
        training.checked = training.resumed is None and self.num_timesteps >= due
        if training.checked:
            self.check()

    def _on_training_end(self) -> None:
        self.training.steps = self.num_timesteps
        self.check()

    def check(self) -> None:
        """Decode greedily, or search a little; keep the weights if they are the best so far."""
        training, rules = self.training, self.training.env.rules
        training.checks += 1
        net = training.net
        if next(net.parameters()).device.type != "cpu":
            net = deepcopy(net).cpu()
        choices, training.greedy_s, used = training.tasks.answers(training.config, net)
        rules.num_evaluations += used
        rules.keep(np.arange(len(choices)), choices, training.greedy_s)
        greedy = _mean_reward(training.tasks, choices, training.greedy_s)
        if training.held_out is not None:
            choices, held_s, _ = training.held_out.answers(training.config, net)
            greedy = training.held_out_reward = _mean_reward(training.held_out, choices, held_s)
        training.last_greedy = greedy
        better = greedy > training.best_greedy
        if better:
            training.best_greedy = greedy
            training.best_weights = deepcopy(training.net.state_dict())
        training.write(policy=better)


class Metrics(_Part):
    """A row per update: ``metrics.csv`` and ``report``, which returns False to stop."""

    def __init__(self, training: Training, report: Report | None = None) -> None:
        super().__init__(training)
        self.report = report
        self.rewards: list[float] = []

    def _on_step(self) -> bool:
        self.rewards += [i["episode"]["r"] for i in self.locals["infos"] if "episode" in i]
        return True

    def _on_rollout_start(self) -> None:
        if self.training.resumed is None:
            self.record()

    def _on_training_end(self) -> None:
        self.record()

    def record(self) -> None:
        """Write and report the row of now."""
        training, rules = self.training, self.training.env.rules
        values = self.model.logger.name_to_value
        row: Row = {
            "steps": self.num_timesteps,
            "seconds": time.perf_counter() - training.started,
            "evaluations": rules.num_evaluations,
            "reward_mean": float(np.mean(self.rewards)) if self.rewards else np.nan,
            "greedy_speedup": training.speedup(training.greedy_s),
            "best_speedup": training.speedup(rules.best_s),
            "held_out_speedup": float(np.exp(training.held_out_reward)),
            "entropy": -float(values.get("train/entropy_loss", np.nan)),
            "approx_kl": float(values.get("train/approx_kl", np.nan)),
            "clip_fraction": float(values.get("train/clip_fraction", np.nan)),
            "value_loss": float(values.get("train/value_loss", np.nan)),
            "policy_loss": float(values.get("train/policy_gradient_loss", np.nan)),
            "explained_variance": float(values.get("train/explained_variance", np.nan)),
            "learning_rate": float(values.get("train/learning_rate", np.nan)),
        }
        row |= {f"best_s_{i}": float(v) for i, v in enumerate(rules.best_s)}
        self.rewards = []
        training.rows.append(row)
        if training.out_dir is not None:
            lines = (map(str, line.values()) for line in training.rows)  # nan stays nan
            write_atomic(training.out_dir / "metrics.csv", csv_text(row, lines))
        if self.report is not None and self.report(row) is False:
            training.stop = True


class Checkpoint(_Part):
    """All that the rest of the training depends on, written at every check: to go on exactly."""

    def _on_rollout_start(self) -> None:
        training = self.training
        if training.resumed is not None:
            self._begin_again(training.resumed)
            training.resumed = None
        elif training.checked:
            self._begin_again(self.save())

    def save(self) -> dict[str, Any]:
        """The state (tensors, numbers and text), and ``checkpoint.pt`` where there is a folder."""
        generator: Any = np.random.get_state()
        kind, keys, at, has_gauss, gauss = generator
        assert kind == "MT19937"
        training, rules = self.training, self.training.env.rules
        state = {
            "format": 2,
            "origin": training.origin,
            "steps": self.model.num_timesteps,
            "updates": self.model._n_updates,  # type: ignore[attr-defined]
            "net": training.net.state_dict(),
            "optimizer": self.model.policy.optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": [torch.from_numpy(keys.astype(np.int64)), at, has_gauss, gauss],
            "env": json.dumps(training.env.episodes.state()),
            "best_s": torch.from_numpy(rules.best_s),
            "best_choices": torch.from_numpy(rules.best_choices),
            "evaluations": rules.num_evaluations,
            "rows": json.dumps(training.rows),
            "best_weights": training.best_weights,
            "greedy_s": torch.from_numpy(training.greedy_s),
            "figures": [training.best_greedy, training.checks],
            "held_out": training.held_out_reward,
            "seconds": time.perf_counter() - training.started,
        }
        if training.out_dir is not None:
            file = io.BytesIO()
            torch.save(state, file)
            write_atomic(training.out_dir / CHECKPOINT, file.getvalue())
        return state

    def load(self, model: BaseAlgorithm) -> bool:
        """Prepare to go on from the checkpoint of ``out_dir``; False: there is none.

        Raises:
            PolicyError: it is not readable, or of another training.
        """
        training = self.training
        path = None if training.out_dir is None else training.out_dir / CHECKPOINT
        if path is None or not path.is_file():
            return False
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
            version = state["format"]
        except Exception as error:  # zip, pickle and torch each raise their own kinds
            raise PolicyError(
                f"{path}: not a readable checkpoint ({error}); delete it to begin anew"
            ) from error
        begun = _completed(state.get("origin", {}))  # the first versions kept no such thing
        now = {what: json.loads(value) for what, value in training.origin.items()}
        other = [what for what in now if json.loads(begun.get(what, "{}")) != now[what]]
        if version != 2 or other:
            raise PolicyError(
                f"{path}: a checkpoint of another training (it differs in: {', '.join(other)}"
                f"{_differences(begun, training.origin)}); resume with what it began with, this "
                f"package's version too; or go on from its weights in a folder of their own "
                f"(policy={path.parent / 'policy.safetensors'}); or delete it to begin anew"
            )
        training.resumed = state
        model.num_timesteps, model._n_updates = state["steps"], state["updates"]
        training.net.load_state_dict(state["net"])
        model.policy.optimizer.load_state_dict(state["optimizer"])
        rules = training.env.rules
        rules.best_s[:], rules.best_choices[:] = state["best_s"], state["best_choices"]
        rules.num_evaluations = state["evaluations"]
        training.rows, training.best_weights = json.loads(state["rows"]), state["best_weights"]
        training.greedy_s = state["greedy_s"].numpy()
        training.best_greedy, training.checks = state["figures"]
        training.held_out_reward = state["held_out"]
        training.started = time.perf_counter() - state["seconds"]
        return True

    def _begin_again(self, state: dict[str, Any]) -> None:
        """Begin all episodes anew, after a checkpoint and after resuming from it alike."""
        env, model = self.training.env, self.model
        torch.set_rng_state(state["torch"])
        if state.get("cuda") and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])
        keys, at, has_gauss, gauss = state["numpy"]
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), at, has_gauss, gauss))
        env.episodes.restore(json.loads(state["env"]))
        env.rules.num_evaluations = state["evaluations"]
        model._last_obs = env.reset()  # type: ignore[assignment]  # may evaluate starts
        model._last_episode_starts = np.ones(env.num_envs, bool)  # type: ignore[attr-defined]


class Budget(_Part):
    """Reasons to stop: seconds, and whoever set ``training.stop``."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.update_began, self.update_s = training.started, 0.0

    def _on_rollout_start(self) -> None:
        now = time.perf_counter()
        self.update_s, self.update_began = now - self.update_began, now

    def _on_step(self) -> bool:
        training, config = self.training, self.training.config
        end = max(time.perf_counter(), self.update_began + self.update_s)
        if config.max_seconds and end - training.started > config.max_seconds:
            training.stop = True
        return not training.stop


def callbacks(
    training: Training, report: Report | None = None
) -> tuple[Schedule, Evaluation, Metrics, Checkpoint, Budget]:
    """All of them, in the order in which they act before a rollout."""
    return (
        Schedule(training),
        Evaluation(training),
        Metrics(training, report),
        Checkpoint(training),
        Budget(training),
    )


def between(last: float, first: float, left: float) -> float:
    """``first`` where all progress is ``left`` (1), ``last`` where none is (0)."""
    return last + (first - last) * left


def _mean_reward(tasks: Tasks, choices: NDArray[np.int32], seconds: NDArray[np.float64]) -> float:
    return float(tasks.problems.rewards(np.arange(len(seconds)), seconds, choices).mean())


def _completed(begun: dict[str, str]) -> dict[str, str]:
    """An origin; fields of the configuration that its version lacked have their defaults."""
    if "configuration" not in begun:
        return begun
    config, known = json.loads(begun["configuration"]), asdict(TrainConfig())
    config = {k: config.get(k, v) for k, v in known.items()}
    config["network"] = {k: config["network"].get(k, v) for k, v in known["network"].items()}
    return begun | {"configuration": json.dumps(config)}


def _differences(begun: dict[str, str], now: dict[str, str]) -> str:
    """Which fields of the configuration, and files of yours, differ: of a checkpoint, and now."""

    def fields_of(origin: dict[str, str]) -> dict[str, Any]:
        config = json.loads(origin.get("configuration", "{}"))
        inner = config.pop("network", {})
        code = json.loads(origin.get("your code", "{}"))
        files = {f"code of {name}": digest for name, digest in code.items()}
        return config | {f"network.{what}": value for what, value in inner.items()} | files

    was = fields_of(begun)
    other = [f"{k} = {was.get(k)}, now {v}" for k, v in fields_of(now).items() if was.get(k) != v]
    return f": {'; '.join(other)}" if was and other else ""
