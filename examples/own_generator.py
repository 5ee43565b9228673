"""A generator of one's own, which is a curriculum too: graphs grow while training progresses.

placement-train 'workload=[]' training.generator=own_generator:Growing
"""

import numpy as np

from agents.encoder import NetworkConfig
from agents.training import TrainConfig, train
from envs.generators import Layered
from envs.problem_set import Sizes
from placement.problem import Problem


class Growing:
    """Layered graphs of 2 layers at first, of up to 8 at the end."""

    progress = 1.0  # training says how far it is, 0..1
    sizes: Sizes = Layered(depth=8).sizes  # of the largest

    def __call__(self, rng: np.random.Generator) -> Problem:
        return Layered(depth=2 + round(6 * self.progress))(rng)


if __name__ == "__main__":
    growing = Growing()
    policy = train(
        growing,
        config=TrainConfig(
            total_steps=8000, num_envs=8, network=NetworkConfig(hidden=32, finish_weight=0)
        ),
        callback=lambda row: print(
            f"{growing.progress:4.0%} reward {row['reward_mean']:.3f}, "
            f"unseen problems {row['greedy_speedup']:.2f}x"
        ),
    )
    policy.save("policy.safetensors")
