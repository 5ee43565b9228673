"""A reward of one's own: a function of outcomes, for every environment.

placement-train 'workload=[]' 'synthetic=[layered]' training.reward=own_reward:few_devices
"""

import numpy as np

from agents.encoder import NetworkConfig
from agents.training import TrainConfig, train
from envs.generators import small_problems
from envs.rewards import Outcome, log_speedup


def few_devices(outcome: Outcome) -> np.ndarray:
    """float64 [B]: the speed-up, less a price for every device that is used."""
    used = [len(set(row[row >= 0])) for row in outcome.placements]
    return log_speedup(outcome) - 0.5 * np.array(used)


def devices_of(policy) -> float:
    """How many devices the placements of a policy use, on average."""
    return float(np.mean([len(set(policy.place(p)[0])) for p in small_problems()]))


if __name__ == "__main__":
    for reward in ("envs.rewards:log_speedup", "own_reward:few_devices"):
        policy = train(
            small_problems(),
            config=TrainConfig(
                total_steps=6000, reward=reward, network=NetworkConfig(hidden=32, finish_weight=0)
            ),
        )
        print(f"{reward}: {devices_of(policy):.2f} devices")
