"""What happens beside the updates: schedules, checks, metrics, checkpoints, limits."""

from __future__ import annotations

import io
import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, replace
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
from envs.problem_set import Measured, choice_of
from envs.sb3 import PlacementVecEnv
from placement.problem import Solution
from placement.runs.trials import BudgetSpent
from placement.simulator import score
from placement.tools.files import csv_text, write_arrays, write_atomic

Row = dict[str, float]
Report = Callable[[Row], bool | None]
CHECKPOINT = "checkpoint.pt"


class Training(BaseCallback):
    """One training: what it is for, what came of it so far, and what happens beside the updates.

    Before every rollout: the weight of the entropy falls; ``num_checks`` times all problems are
    checked, and the weights of the best check are kept; a row of the metrics is written; after a
    check, all that the rest of the training depends on: to go on exactly, from where all episodes
    begin anew.

    Attributes:
        config: with the formulation's defaults.
        tasks, held_out: what is trained on (of a generator: drawn for the checks), and what is not.
        origin: what its values depend on, as text: a checkpoint goes on only with the same.
        env, net: what acts, and where.
        out_dir: where files go, or None.
        generator: of fresh problems, or None.
        report: told every row of the metrics; it returns False to stop.
        rows: the metrics, one row per update.
        stop: whether something said that it is enough.
        steps, updates: of all environments; and of the network.
        best_weights: of the best check, whose mean reward is ``best_greedy``.
        last_greedy: mean reward of the last check.
        best_speedup, last_speedup: how many times as fast as the references these checks were, and
            ``held_out_speedup`` the last one on what is held out.
        greedy_s: float64 ``[P]`` seconds of the last check.
        checks: how many there were.
        resumed: the checkpoint that the next rollout goes on from.
    """

    def __init__(
        self,
        config: TrainConfig,
        tasks: Tasks,
        held_out: Tasks | None,
        origin: dict[str, str],
        env: PlacementVecEnv,
        net: Net,
        out_dir: Path | None = None,
        generator: Generator | None = None,
        report: Report | None = None,
    ) -> None:
        super().__init__()
        self.config, self.tasks, self.held_out, self.origin = config, tasks, held_out, origin
        self.env, self.net, self.out_dir = env, net, out_dir
        self.generator, self.report = generator, report
        self.rows: list[Row] = []
        self.stop = False
        self.steps = self.updates = self.checks = 0
        self.best_greedy = self.last_greedy = -np.inf
        self.best_speedup = self.last_speedup = 0.0
        self.held_out_speedup = np.nan
        self.best_weights = deepcopy(net.state_dict())
        self._ended: set[int] = set()  # of side by side, with an episode over since all began
        self.greedy_s: NDArray[np.float64] = np.full(len(tasks.problems.problems), np.inf)
        self.resumed: dict[str, Any] | None = None
        self.started = self._update_began = time.perf_counter()
        self._update_s = 0.0
        self._rewards: list[float] = []  # of episodes since the last row

    def speedup(self, seconds: NDArray[np.float64]) -> float:
        """Geometric mean over the problems of reference over ``seconds [P]``."""
        return _speedup(self.tasks, seconds)

    def _learn_levels(self) -> None:
        """Where placements run, what they are worth follows what ran later: a lucky run is no best.

        It knows of episodes that a spent budget cut off, too.
        """
        rules, problems = self.env.rules, self.tasks.problems
        if not isinstance(problems.evaluator, Measured):
            return
        for i, problem in enumerate(problems.problems):
            trials, start = problems.evaluator.trials(problem), self.tasks.starts[i]
            if (fastest := trials.incumbent) is not None:
                rules.best_choices[i, : problem.graph.num_groups] = choice_of(problem, fastest)
                rules.best_s[i] = trials.levels.min()
            if start is not None:
                self.tasks.start_s[i] = trials(start[None])[0]

    def best(self) -> tuple[Solution, ...]:
        """The best placement of each problem: of all that ran, or of all that were kept.

        In the simulator ``agents.dispatch.train.GroupRelative`` keeps those of its checks alone.
        """
        self._learn_levels()
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
        cold = self.config.cold or all(start is None for start in self.tasks.starts)
        card = {
            "config": asdict(replace(self.config, cold=cold)),
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
            "greedy_speedup": self.last_speedup if last else self.best_speedup,
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

    def tell(self, done: float) -> None:
        """Tell a generator that has an attribute ``progress`` the share that is ``done``."""
        if hasattr(self.generator, "progress"):
            self.generator.progress = done  # type: ignore[union-attr]

    def _on_rollout_start(self) -> None:
        config, self.steps = self.config, self.num_timesteps
        left = max(0.0, 1.0 - self.steps / config.total_steps)
        self.model.ent_coef = between(config.last_entropy, config.entropy, left)  # type: ignore[attr-defined]
        self.tell(1.0 - left)
        state, self.resumed = self.resumed, None
        if state is None:
            due = self.steps >= self.checks * config.total_steps // config.num_checks
            if due:
                self.check()
            self.record()
            # After a checkpoint episodes begin anew: not before one has ended everywhere.
            whole = len(self._ended) >= len(self.locals.get("infos", ()))
            state = self.save() if due and whole else None
        if state is not None:
            self._ended = set()
            self._begin_again(state)
        now = time.perf_counter()
        self._update_s, self._update_began = now - self._update_began, now

    def _on_step(self) -> bool:
        over = {b: i["episode"]["r"] for b, i in enumerate(self.locals["infos"]) if "episode" in i}
        self._rewards += over.values()
        self._ended |= over.keys()
        end = max(time.perf_counter(), self._update_began + self._update_s)
        if self.config.max_seconds and end - self.started > self.config.max_seconds:
            self.stop = True
        return not self.stop

    def _on_training_end(self) -> None:
        self.steps, evaluator = self.num_timesteps, self.tasks.problems.evaluator
        if isinstance(evaluator, Measured):
            evaluator.release()
        with suppress(BudgetSpent):  # what the network answers may have run before
            self.check()
        if isinstance(evaluator, Measured):
            for problem in self.tasks.problems.problems:
                evaluator.finals(problem)
        self.record()
        self.write()

    def check(self) -> None:
        """Decode greedily, or search a little; keep the weights if they are the best so far."""
        rules, net = self.env.rules, self.net
        self.checks += 1
        if next(net.parameters()).device.type != "cpu":
            net = deepcopy(net).cpu()
        choices, self.greedy_s, used = self.tasks.answers(self.config, net)
        rules.num_evaluations += used
        rules.keep(np.arange(len(choices)), choices, self.greedy_s)
        tasks, seconds = self.tasks, self.greedy_s
        if self.held_out is not None:
            tasks = self.held_out
            choices, seconds, used = tasks.answers(self.config, net)
            rules.num_evaluations += used
            self.held_out_speedup = _speedup(tasks, seconds)
        self.last_greedy = _mean_reward(tasks, choices, seconds)
        self.last_speedup = _speedup(tasks, seconds)
        better = self.last_greedy > self.best_greedy
        if better:
            self.best_greedy, self.best_speedup = self.last_greedy, self.last_speedup
            self.best_weights = deepcopy(self.net.state_dict())
        self.write(policy=better)

    def record(self) -> None:
        """Write and report the row of now."""
        self._learn_levels()
        rules, values = self.env.rules, self.model.logger.name_to_value
        row: Row = {
            "steps": self.num_timesteps,
            "seconds": time.perf_counter() - self.started,
            "evaluations": rules.num_evaluations,
            "reward_mean": float(np.mean(self._rewards)) if self._rewards else np.nan,
            "greedy_speedup": self.speedup(self.greedy_s),
            "best_speedup": self.speedup(rules.best_s),
            "held_out_speedup": self.held_out_speedup,
            "entropy": -float(values.get("train/entropy_loss", np.nan)),
            "approx_kl": float(values.get("train/approx_kl", np.nan)),
            "clip_fraction": float(values.get("train/clip_fraction", np.nan)),
            "value_loss": float(values.get("train/value_loss", np.nan)),
            "policy_loss": float(values.get("train/policy_gradient_loss", np.nan)),
            "explained_variance": float(values.get("train/explained_variance", np.nan)),
            "learning_rate": float(values.get("train/learning_rate", np.nan)),
        }
        row |= {f"best_s_{i}": float(v) for i, v in enumerate(rules.best_s)}
        self._rewards = []
        self.rows.append(row)
        if self.out_dir is not None:
            lines = (map(str, line.values()) for line in self.rows)  # nan stays nan
            write_atomic(self.out_dir / "metrics.csv", csv_text(row, lines))
        if self.report is not None and self.report(row) is False:
            self.stop = True

    def save(self) -> dict[str, Any]:
        """The state (tensors, numbers and text), and ``checkpoint.pt`` where there is a folder."""
        generator: Any = np.random.get_state()
        kind, keys, at, has_gauss, gauss = generator
        assert kind == "MT19937"
        rules = self.env.rules
        state = {
            "format": 2,
            "origin": self.origin,
            "steps": self.model.num_timesteps,
            "updates": self.model._n_updates,  # type: ignore[attr-defined]
            "net": self.net.state_dict(),
            "optimizer": self.model.policy.optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": [torch.from_numpy(keys.astype(np.int64)), at, has_gauss, gauss],
            "env": json.dumps(self.env.episodes.state()),
            "best_s": torch.from_numpy(rules.best_s),
            "best_choices": torch.from_numpy(rules.best_choices),
            "evaluations": rules.num_evaluations,
            "rows": json.dumps(self.rows),
            "best_weights": self.best_weights,
            "greedy_s": torch.from_numpy(self.greedy_s),
            "figures": [self.best_greedy, self.checks],
            "speedups": [self.best_speedup, self.last_speedup, self.held_out_speedup],
            "seconds": time.perf_counter() - self.started,
        }
        if self.out_dir is not None:
            file = io.BytesIO()
            torch.save(state, file)
            write_atomic(self.out_dir / CHECKPOINT, file.getvalue())
        return state

    def load(self, model: BaseAlgorithm) -> bool:
        """Prepare to go on from the checkpoint of ``out_dir``; False: there is none.

        Raises:
            PolicyError: it is not readable, or of another training.
        """
        path = None if self.out_dir is None else self.out_dir / CHECKPOINT
        if path is None or not path.is_file():
            return False
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
            version = state["format"]
        except Exception as error:  # zip, pickle and torch each raise their own kinds
            raise PolicyError(
                f"{path}: not a readable checkpoint ({error}); delete it to begin anew"
            ) from error
        # The first versions kept no such thing; later ones did not say what values are of.
        begun = {"evaluator": self.origin["evaluator"]} | _completed(state.get("origin", {}))
        now = {what: json.loads(value) for what, value in self.origin.items()}
        other = [what for what in now if json.loads(begun.get(what, "{}")) != now[what]]
        if version != 2 or other:
            raise PolicyError(
                f"{path}: a checkpoint of another training (it differs in: {', '.join(other)}"
                f"{_differences(begun, self.origin)}); resume with what it began with, this "
                f"package's version too; or go on from its weights in a folder of their own "
                f"(policy={path.parent / 'policy.safetensors'}); or delete it to begin anew"
            )
        self.resumed = state
        model.num_timesteps, model._n_updates = state["steps"], state["updates"]
        self.net.load_state_dict(state["net"])
        model.policy.optimizer.load_state_dict(state["optimizer"])
        rules = self.env.rules
        rules.best_s[:], rules.best_choices[:] = state["best_s"], state["best_choices"]
        rules.num_evaluations = state["evaluations"]
        self.rows, self.best_weights = json.loads(state["rows"]), state["best_weights"]
        self.greedy_s = state["greedy_s"].numpy()
        self.best_greedy, self.checks = state["figures"]
        speedups = state.get("speedups", [np.nan] * 3)  # older ones know rewards alone
        self.best_speedup, self.last_speedup, self.held_out_speedup = speedups
        self.started = time.perf_counter() - state["seconds"]
        return True

    def _begin_again(self, state: dict[str, Any]) -> None:
        """Begin all episodes anew, after a checkpoint and after resuming from it alike."""
        env, model = self.env, self.model
        torch.set_rng_state(state["torch"])
        if state.get("cuda") and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])
        keys, at, has_gauss, gauss = state["numpy"]
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), at, has_gauss, gauss))
        env.episodes.restore(json.loads(state["env"]))
        env.rules.num_evaluations = state["evaluations"]
        model._last_obs = env.reset()  # type: ignore[assignment]  # may evaluate starts
        model._last_episode_starts = np.ones(env.num_envs, bool)  # type: ignore[attr-defined]


def between(last: float, first: float, left: float) -> float:
    """``first`` where all progress is ``left`` (1), ``last`` where none is (0)."""
    return last + (first - last) * left


def _mean_reward(tasks: Tasks, choices: NDArray[np.int32], seconds: NDArray[np.float64]) -> float:
    return float(tasks.problems.rewards(np.arange(len(seconds)), seconds, choices).mean())


def _speedup(tasks: Tasks, seconds: NDArray[np.float64]) -> float:
    return float(np.exp(tasks.problems.speedups(seconds).mean()))


def _completed(begun: dict[str, str]) -> dict[str, str]:
    """An origin; fields of the configuration that its version lacked have their defaults."""
    if "configuration" not in begun:
        return begun
    config, known = json.loads(begun["configuration"]), asdict(TrainConfig())
    with suppress(PolicyError, KeyError):  # whose network has fields of its own
        known = asdict(TrainConfig(formulation=config["formulation"]))
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
