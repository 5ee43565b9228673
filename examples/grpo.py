"""An algorithm of one's own: GRPO (Shao et al. 2024), for every formulation that builds placements.

placement-train 'workload=[]' training.generator=... training.repeats=8 training.algorithm=grpo:GRPO
"""

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer

from agents.training import TrainConfig, train


class Relative(DictRolloutBuffer):
    """An advantage is what an episode earns beyond the others of its problem; no values."""

    def compute_returns_and_advantage(self, last_values, dones) -> None:
        begins = self.episode_starts.astype(bool)  # [T, B]
        number = begins.cumsum(axis=0) * self.n_envs + np.arange(self.n_envs)  # of the episode
        ends = np.concatenate([begins[1:], dones[None].astype(bool)])
        earned = np.bincount(number.ravel(), self.rewards.ravel())
        problem, gain = np.full(len(earned), -1), 0 * earned
        problem[number[ends]] = self.observations["problem"].reshape(number.shape)[ends]
        for one in np.unique(problem[problem >= 0]):  # an episode that goes on gains nothing
            group = earned[problem == one]
            gain[problem == one] = (group - group.mean()) / (group.std() + 0.01)
        self.advantages, self.returns = gain[number].astype(np.float32), self.values


class GRPO(PPO):
    def __init__(self, *args, **kwargs) -> None:
        ours = {"rollout_buffer_class": Relative, "vf_coef": 0.0, "normalize_advantage": False}
        super().__init__(*args, **kwargs | ours)


if __name__ == "__main__":
    train(
        "envs.generators:Layered",
        config=TrainConfig(total_steps=6000, repeats=8, num_envs=16, algorithm="grpo:GRPO"),
        callback=lambda row: print(f"{row['steps']:.0f} steps: reward {row['reward_mean']:.3f}"),
    )
