"""An algorithm of one's own: GRPO (Shao et al. 2024), a subclass of stable-baselines3's PPO.

placement-train 'workload=[]' training.generator=envs.generators:Layered \
    training.formulation=one_shot training.repeats=8 training.algorithm=grpo:GRPO
"""

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer

from agents.training import TrainConfig, train


class Relative(DictRolloutBuffer):
    """An advantage is what a placement earns beyond the others of its problem; no values."""

    def compute_returns_and_advantage(self, last_values, dones) -> None:
        problem = self.observations["problem"].reshape(self.rewards.shape)
        for number in np.unique(problem):
            group = self.rewards[problem == number]  # one_shot: a step is an episode
            self.advantages[problem == number] = (group - group.mean()) / (group.std() + 1e-6)
        self.returns[:] = self.rewards


class GRPO(PPO):
    def __init__(self, *args, **kwargs) -> None:
        ours = {"rollout_buffer_class": Relative, "vf_coef": 0.0, "normalize_advantage": False}
        super().__init__(*args, **kwargs | ours)


if __name__ == "__main__":
    train(
        "envs.generators:Layered",
        config=TrainConfig(
            total_steps=6000, formulation="one_shot", repeats=8, num_envs=16, algorithm="grpo:GRPO"
        ),
        callback=lambda row: print(f"{row['steps']:.0f} steps: reward {row['reward_mean']:.3f}"),
    )
